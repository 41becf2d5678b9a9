"""Portable numerics: the same bits on unlike CPUs.

Here is what makes torch compute alike on every x86-64 CPU with AVX2: limits on the instruction sets of its libraries,
and replacements for the kernels that differ all the same.
"""
