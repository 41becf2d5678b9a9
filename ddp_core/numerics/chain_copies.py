"""Writes the part of `chain_code` that copies columns of the right matrix to the stack; and what all parts of it know.

There the numbers of a row of 16 columns (or eight) lie side by side, and rows lie one behind the other. R8 is where the
columns begin in the matrix, and R9 are the bytes from a term to the next; `copied` and `turned` make both those of the
copy.
"""

from __future__ import annotations

from ddp_core.numerics.assembler import (
    LESS,
    NOT_ZERO,
    R8,
    R9,
    R10,
    R11,
    R14,
    RAX,
    RBX,
    RCX,
    RDI,
    RDX,
    RSI,
    RSP,
    ZERO,
    Assembler,
    At,
    Label,
)

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


def copied(write: Assembler, width: int) -> None:
    """Copies the panel at R8, whose rows are whole, to the stack, where they lie one behind the other."""
    terms = Label()
    write.move(RSI, R8)
    write.move(RDX, RSP)
    write.move(RCX, GIVEN["terms"])
    write.place(terms)
    for number in range(width // REGISTER):
        write.load(number, At(RSI, offset=32 * number))
    for number in range(width // REGISTER):
        write.store(At(RDX, offset=32 * number), number)
    write.add(RSI, R9)
    write.add_number(RDX, width * FLOAT)
    write.subtract_number(RCX, 1)
    write.jump(terms, NOT_ZERO)
    write.move(R8, RSP)
    write.set(R9, width * FLOAT)


def turned(write: Assembler, width: int) -> None:
    """Copies the panel at R8, whose rows are not whole, to the stack, where they are."""
    by_words, done = Label(), Label()
    write.move(R14, GIVEN["terms"])
    write.compare_number(R9, FLOAT)
    write.jump(by_words, NOT_ZERO)
    _squares(write, width)
    write.compare_number(R14, 0)
    write.jump(done, ZERO)
    write.place(by_words)
    write.set(RBX, width)
    words(write, width)
    write.place(done)
    write.move(R8, RSP)
    write.set(R9, width * FLOAT)


def _squares(write: Assembler, width: int) -> None:
    """Copies squares of eight columns and eight terms, which lie side by side; R14 are the terms that fill none."""
    write.move(RAX, GIVEN["right_columns"])
    write.address(RBX, At(RAX, index=RAX, scale=2))
    write.move(RSI, R8)
    for group in range(width // REGISTER):
        more, done = Label(), Label()
        write.move(R11, RSI)
        write.address(RDX, At(R11, index=RBX))
        write.address(RCX, At(RSP, offset=REGISTER * FLOAT * group))
        write.move(R14, GIVEN["terms"])
        write.place(more)
        write.compare_number(R14, REGISTER)
        write.jump(done, LESS)
        columns = [
            *(At(R11), At(R11, index=RAX), At(R11, index=RAX, scale=2)),
            *(
                At(RDX),
                At(RDX, index=RAX),
                At(RDX, index=RAX, scale=2),
                At(RDX, index=RBX),
                At(RDX, index=RAX, scale=4),
            ),
        ]
        for number, column in enumerate(columns):
            write.load(number, column)
        _turn_square(write)
        for number in range(REGISTER):
            write.store(At(RCX, offset=width * FLOAT * number), REGISTER + number)
        write.add_number(R11, REGISTER * FLOAT)
        write.add_number(RDX, REGISTER * FLOAT)
        write.add_number(RCX, REGISTER * width * FLOAT)
        write.subtract_number(R14, REGISTER)
        write.jump(more)
        write.place(done)
        write.address(RSI, At(RSI, index=RAX, scale=REGISTER))


def _turn_square(write: Assembler) -> None:
    """Turns the columns in registers 0 to 7 into rows in 8 to 15: pairs of numbers, pairs of these, and halves."""
    for first in range(0, 8, 2):
        for upper in (0, 1):
            write.interleave(8 + first + upper, first, first + 1, upper)
    for half in (0, 4):
        for place in (0, 1):
            for upper in (0, 1):
                write.pair(half + 2 * place + upper, 8 + half + place, 8 + half + place + 2, upper)
    for upper in (0, 1):
        for number in range(4):
            write.join(8 + 4 * upper + number, number, 4 + number, upper)


def words(write: Assembler, width: int) -> None:
    """Copies the last R14 terms of RBX columns at R8 to the stack, number by number."""
    columns, terms = Label(), Label()
    write.move(RAX, GIVEN["terms"])
    write.subtract(RAX, R14)
    write.move(RSI, RAX)
    write.multiply(RSI, R9)
    write.add(RSI, R8)
    write.set(RDX, width * FLOAT)
    write.multiply(RDX, RAX)
    write.add(RDX, RSP)
    write.place(columns)
    write.move(RAX, RSI)
    write.move(RCX, RDX)
    write.move(R11, R14)
    write.place(terms)
    write.move(R10, At(RAX), wide=0)
    write.move(At(RCX), R10, wide=0)
    write.add(RAX, R9)
    write.add_number(RCX, width * FLOAT)
    write.subtract_number(R11, 1)
    write.jump(terms, NOT_ZERO)
    write.add(RSI, GIVEN["right_columns"])
    write.add_number(RDX, FLOAT)
    write.subtract_number(RBX, 1)
    write.jump(columns, NOT_ZERO)
