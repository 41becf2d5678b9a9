"""The code that multiplies matrices in chains: instructions for x86-64 CPUs with AVX2, the same on all of them.

It computes, for each product of a batch and each of its elements, `c = fma(a[i, k], b[k, j], c)` from zero and in the
order of k. Six rows and 16 columns of the result are in registers at a time. The last rows and columns that fill no
such tile are computed as part of a tile that begins earlier, so some elements are computed twice, with the same bits.
Where a row of the right matrix is not whole in memory, 16 columns of it at a time are copied to the stack first.
"""

from __future__ import annotations

from functools import cache
from itertools import count

from ddp_core.numerics.assembler import (
    GREATER,
    GREATER_OR_EQUAL,
    LESS,
    NOT_ZERO,
    R8,
    R9,
    R10,
    R11,
    R12,
    R13,
    R14,
    R15,
    RAX,
    RBP,
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
"""Terms that a product may have here, for which the copy of 16 columns has room on the stack."""

NARROWEST = 8
"""Columns that a product must have here: those of one register."""

WIDTHS = (16, NARROWEST)
_TILE_ROWS = 6
_FLOAT = 4
"""Bytes of a float32 number."""

ARGUMENTS = (
    *("left", "left_rows", "left_terms", "left_batches"),
    *("right", "right_terms", "right_columns", "right_batches"),
    *("out", "out_rows", "out_batches"),
    *("rows", "terms", "columns", "batches"),
)
"""What the code is given, a pointer to int64 numbers.

These are addresses, bytes from one row, term, column or product to the next, and how many there are of each. Columns of
`out` lie side by side.
"""

_IN_MEMORY = {name: At(RDI, offset=8 * place) for place, name in enumerate(ARGUMENTS)}
_LEFT, _RIGHT, _OUT, _BATCHES = (At(RBP, offset=-8 * place) for place in range(6, 10))
"""Of the product that is being computed, and how many are left: below the five registers that are kept."""

_ROOM = LONGEST * WIDTHS[0] * _FLOAT + 128


@cache
def chain_code() -> bytes:
    """A function in machine code that takes one pointer, to the `ARGUMENTS`; all counts must be 1 at least."""
    write = Assembler()
    kept = (RBX, R12, R13, R14, R15)
    write.push(RBP)
    write.move(RBP, RSP)
    for register in kept:
        write.push(register)
    write.subtract_number(RSP, _ROOM)
    write.keep_bits(RSP, -64)
    for name, place in (("left", _LEFT), ("right", _RIGHT), ("out", _OUT), ("batches", _BATCHES)):
        write.move(RAX, _IN_MEMORY[name])
        write.move(place, RAX)
    next_product = Label()
    write.place(next_product)
    _product(write)
    for name, place in (("left", _LEFT), ("right", _RIGHT), ("out", _OUT)):
        write.move(RAX, place)
        write.add(RAX, _IN_MEMORY[f"{name}_batches"])
        write.move(place, RAX)
    write.move(RAX, _BATCHES)
    write.subtract_number(RAX, 1)
    write.move(_BATCHES, RAX)
    write.jump(next_product, NOT_ZERO)
    write.address(RSP, At(RBP, offset=-8 * len(kept)))
    for register in reversed(kept):
        write.pop(register)
    write.pop(RBP)
    write.leave()
    return write.code


def _product(write: Assembler) -> None:
    """One product: 16 columns at a time, then eight, the last of which may overlap. R15 is the first column."""
    wide, narrow, fits, done = Label(), Label(), Label(), Label()
    write.set(R15, 0)
    write.place(wide)
    write.address(RAX, At(R15, offset=WIDTHS[0]))
    write.compare(RAX, _IN_MEMORY["columns"])
    write.jump(narrow, GREATER)
    _panel(write, WIDTHS[0])
    write.add_number(R15, WIDTHS[0])
    write.jump(wide)
    write.place(narrow)
    write.move(RAX, _IN_MEMORY["columns"])
    write.compare(R15, RAX)
    write.jump(done, GREATER_OR_EQUAL)
    write.subtract_number(RAX, WIDTHS[1])
    write.compare(RAX, R15)
    write.jump(fits, GREATER_OR_EQUAL)
    write.move(R15, RAX)
    write.place(fits)
    _panel(write, WIDTHS[1])
    write.add_number(R15, WIDTHS[1])
    write.jump(narrow)
    write.place(done)


def _panel(write: Assembler, width: int) -> None:
    """`width` columns of a product, from column R15 on.

    R8 and R9 are where they begin in the right matrix and the bytes from a term to the next, R10 and R11 the row of the
    left matrix and of the result, R12 and R13 the bytes from a row and from a term of the left matrix to the next, RCX
    the rows that are left.
    """
    is_whole, rows, full, few, done = Label(), Label(), Label(), Label(), Label()
    write.move(R8, R15)
    write.multiply(R8, _IN_MEMORY["right_columns"])
    write.add(R8, _RIGHT)
    write.move(R9, _IN_MEMORY["right_terms"])
    write.move(RAX, _IN_MEMORY["right_columns"])
    write.compare_number(RAX, _FLOAT)
    write.jump(is_whole, ZERO)
    _copied(write, width)
    write.place(is_whole)
    write.move(R10, _LEFT)
    write.move(RAX, _OUT)
    write.address(R11, At(RAX, index=R15, scale=_FLOAT))
    write.move(R12, _IN_MEMORY["left_rows"])
    write.move(R13, _IN_MEMORY["left_terms"])
    write.move(RCX, _IN_MEMORY["rows"])
    write.compare_number(RCX, _TILE_ROWS)
    write.jump(few, LESS)
    write.place(rows)
    _tile(write, _TILE_ROWS, width)
    write.subtract_number(RCX, _TILE_ROWS)
    write.jump(done, ZERO)
    # The next tile begins a whole tile further, or so much earlier that it ends with the last row.
    write.set(RAX, _TILE_ROWS)
    write.compare(RCX, RAX)
    write.jump(full, GREATER_OR_EQUAL)
    write.move(RAX, RCX)
    write.set(RCX, _TILE_ROWS)
    write.place(full)
    write.move(RDX, RAX)
    write.multiply(RDX, R12)
    write.add(R10, RDX)
    write.multiply(RAX, _IN_MEMORY["out_rows"])
    write.add(R11, RAX)
    write.jump(rows)
    write.place(few)
    for number in range(_TILE_ROWS - 1, 0, -1):
        fewer = Label()
        write.compare_number(RCX, number)
        write.jump(fewer, NOT_ZERO)
        _tile(write, number, width)
        write.jump(done)
        write.place(fewer)
    write.place(done)


def _copied(write: Assembler, width: int) -> None:
    """Copies the panel at R8 to the stack, where the rows of all its terms are whole."""
    columns, terms = Label(), Label()
    write.move(RSI, R8)
    write.move(RDX, RSP)
    write.set(RBX, width)
    write.place(columns)
    write.move(RAX, RSI)
    write.move(RCX, RDX)
    write.move(R14, _IN_MEMORY["terms"])
    write.place(terms)
    write.move_word(R10, At(RAX))
    write.move_word(At(RCX), R10)
    write.add(RAX, R9)
    write.add_number(RCX, width * _FLOAT)
    write.subtract_number(R14, 1)
    write.jump(terms, NOT_ZERO)
    write.add(RSI, _IN_MEMORY["right_columns"])
    write.add_number(RDX, _FLOAT)
    write.subtract_number(RBX, 1)
    write.jump(columns, NOT_ZERO)
    write.move(R8, RSP)
    write.set(R9, width * _FLOAT)


def _tile(write: Assembler, rows: int, width: int) -> None:
    """`rows` rows and `width` columns of a product, in registers from zero to the last term, and then into memory."""
    registers = width // 8
    free = count()
    sums = [[next(free) for _ in range(registers)] for _ in range(rows)]
    of_right = [next(free) for _ in range(registers)]
    of_left = next(free)
    for each in sums:
        for total in each:
            write.clear(total)
    write.move(RAX, R10)  # the first three rows; the others are reached from the fourth
    if rows > 3:
        write.address(RDX, At(R12, index=R12, scale=2))
        write.add(RDX, R10)
    write.move(RSI, R8)
    write.move(RBX, _IN_MEMORY["terms"])
    terms = Label()
    write.place(terms)
    for number, register in enumerate(of_right):
        write.load(register, At(RSI, offset=32 * number))
    for row, each in enumerate(sums):
        base, further = (RDX, row - 3) if row >= 3 else (RAX, row)
        write.repeat(of_left, At(base, index=R12 if further else None, scale=max(further, 1)))
        for total, register in zip(each, of_right, strict=True):
            write.fuse(total, of_left, register)
    write.add(RSI, R9)
    write.add(RAX, R13)
    if rows > 3:
        write.add(RDX, R13)
    write.subtract_number(RBX, 1)
    write.jump(terms, NOT_ZERO)
    write.move(RAX, R11)
    for each in sums:
        for number, total in enumerate(each):
            write.store(At(RAX, offset=32 * number), total)
        write.add(RAX, _IN_MEMORY["out_rows"])
