"""What makes a result come out the same again: keyed random numbers, deterministic kernels, digests, fingerprints.

Nothing here knows of ranks, files or training; code that needs those belongs to a higher floor.
"""
