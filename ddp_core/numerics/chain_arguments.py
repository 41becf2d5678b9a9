"""What the code that multiplies matrices is given, and the measures that its parts share."""

from __future__ import annotations

from ddp_core.numerics.assembler import RDI, At

LONGEST = 1024
"""Terms that a product may have, for which the copy of 16 columns has room on the stack."""

REGISTER = 8
"""float32 numbers in a register."""

FLOAT = 4
"""Bytes of a float32 number."""

SIZES = (
    *("left_rows", "left_terms", "left_batches", "left_groups"),
    *("right_terms", "right_columns", "right_batches", "right_groups"),
    *("out_rows", "out_batches", "out_groups"),
    *("rows", "terms", "columns", "batches", "groups"),
)
"""What the code is given, beside the places of the matrices: a pointer to these int64 numbers.

First the bytes from one row, term, column, product of a batch, and batch to the next; last how many there are of each.
Columns of `out` lie side by side.
"""

GIVEN = {name: At(RDI, offset=8 * place) for place, name in enumerate(SIZES)}
"""Where each of `SIZES` lies while the code runs."""
