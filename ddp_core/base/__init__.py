"""What every room may use: errors, files, seeds, digests, the fingerprint, and every private name of torch.

Nothing here knows of ranks, experiments or training; code that needs those belongs to a higher floor.
"""
