"""Portable numerics: the same bits on unlike CPUs.

Here stands what makes torch compute alike on every x86-64 CPU with AVX2: limits on the instruction sets of its
libraries, and kernels in the place of those that differ all the same.
"""
