"""What makes a number come out the same again: keyed random numbers, deterministic kernels, digests, fingerprints.

Nothing here knows of ranks, files or training; what needs those belongs upstairs.
"""
