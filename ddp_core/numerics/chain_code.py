"""The code that multiplies matrices in chains: instructions for x86-64 CPUs with AVX2, the same on all of them.

It computes, for each product of a batch and each of its elements, `c = fma(a[i, k], b[k, j], c)` from zero and in the
order of k, and then may add a row of numbers. Six rows and 16 columns of the result are in registers at a time. The
last rows and columns that fill no such tile are computed as part of a tile that begins earlier, so some elements are
computed twice, with the same bits. Columns of the right matrix are copied to the stack first, 16 at a time, where a row
of them is not whole in memory, and where so many rows of the left matrix meet them that it saves time. Of fewer than
eight columns, what is missing is filled with zeros on the stack.
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

_GIVEN = {name: At(RDI, offset=8 * place) for place, name in enumerate(SIZES)}
"""Where each of `SIZES` lies while the code runs."""

_WIDTHS = (16, REGISTER)
_TILE_ROWS = 6
_COPIED_FROM = 48
"""Rows from which whole columns are copied, too."""

_MATRICES = ("left", "right", "out")
_ON_STACK = ("left", "right", "out", "left_group", "right_group", "out_group", "added", "batches", "groups")
"""Places of the product and of the batch that are being computed, of what is added, and how many are left."""

_KEPT = (RBX, R12, R13, R14, R15)
"""Registers that a function must leave as they were."""

_HERE = {name: At(RBP, offset=-8 * (len(_KEPT) + 1 + place)) for place, name in enumerate(_ON_STACK)}

_PANEL = LONGEST * _WIDTHS[0] * FLOAT
_TILE = At(RSP, offset=_PANEL)
"""Room for a tile of eight columns, behind the copied columns."""

_ROOM = _PANEL + _TILE_ROWS * REGISTER * FLOAT + 8 * len(_ON_STACK) + 64


@cache
def chain_code() -> bytes:
    """A function in machine code: its arguments point to `SIZES`, to left, right and result, and to what is added.

    All counts must be 1 at least. The last pointer is 0, or leads to a number for each column, which lie side by side.
    """
    write = Assembler()
    write.push(RBP)
    write.move(RBP, RSP)
    for register in _KEPT:
        write.push(register)
    write.subtract_number(RSP, _ROOM)
    write.keep_bits(RSP, -64)
    for name, register in (("left_group", RSI), ("right_group", RDX), ("out_group", RCX), ("added", R8)):
        write.move(_HERE[name], register)
    next_group, next_product = Label(), Label()
    _begin(write, "groups")
    write.place(next_group)
    for name in _MATRICES:
        write.move(RAX, _HERE[f"{name}_group"])
        write.move(_HERE[name], RAX)
    _begin(write, "batches")
    write.place(next_product)
    _product(write)
    _go_on(write, "batches", "", next_product)
    _go_on(write, "groups", "_group", next_group)
    write.address(RSP, At(RBP, offset=-8 * len(_KEPT)))
    for register in reversed(_KEPT):
        write.pop(register)
    write.pop(RBP)
    write.leave()
    return write.code


def _begin(write: Assembler, counted: str) -> None:
    write.move(RAX, _GIVEN[counted])
    write.move(_HERE[counted], RAX)


def _go_on(write: Assembler, counted: str, end: str, start: Label) -> None:
    """The places of the next product or batch, and back to `start` if there is one."""
    for name in _MATRICES:
        write.move(RAX, _HERE[f"{name}{end}"])
        write.add(RAX, _GIVEN[f"{name}_{counted}"])
        write.move(_HERE[f"{name}{end}"], RAX)
    write.move(RAX, _HERE[counted])
    write.subtract_number(RAX, 1)
    write.move(_HERE[counted], RAX)
    write.jump(start, NOT_ZERO)


def _product(write: Assembler) -> None:
    """One product: 16 columns at a time, then eight, the last of which may overlap. R15 is the first column."""
    wide, narrow, fits, done, few = Label(), Label(), Label(), Label(), Label()
    write.move(RAX, _GIVEN["columns"])
    write.compare_number(RAX, REGISTER)
    write.jump(few, LESS)
    write.set(R15, 0)
    write.place(wide)
    write.address(RAX, At(R15, offset=_WIDTHS[0]))
    write.compare(RAX, _GIVEN["columns"])
    write.jump(narrow, GREATER)
    _panel(write, _WIDTHS[0])
    write.add_number(R15, _WIDTHS[0])
    write.jump(wide)
    write.place(narrow)
    write.move(RAX, _GIVEN["columns"])
    write.compare(R15, RAX)
    write.jump(done, GREATER_OR_EQUAL)
    write.subtract_number(RAX, _WIDTHS[1])
    write.compare(RAX, R15)
    write.jump(fits, GREATER_OR_EQUAL)
    write.move(R15, RAX)
    write.place(fits)
    _panel(write, _WIDTHS[1])
    write.add_number(R15, _WIDTHS[1])
    write.jump(narrow)
    write.place(few)
    _few_columns(write)
    write.place(done)


def _panel(write: Assembler, width: int) -> None:
    """`width` columns of a product, from column R15 on.

    R8 and R9 are where they begin in the right matrix and the bytes from a term to the next, R10 and R11 the row of the
    left matrix and of the result, R12 and R13 the bytes from a row and from a term of the left matrix to the next, RCX
    the rows that are left.
    """
    is_whole, ready, rows, full, few, done = Label(), Label(), Label(), Label(), Label(), Label()
    write.move(R8, R15)
    write.multiply(R8, _GIVEN["right_columns"])
    write.add(R8, _HERE["right"])
    write.move(R9, _GIVEN["right_terms"])
    write.move(RAX, _GIVEN["right_columns"])
    write.compare_number(RAX, FLOAT)
    write.jump(is_whole, ZERO)
    _turned(write, width)
    write.jump(ready)
    write.place(is_whole)
    write.move(RAX, _GIVEN["rows"])
    write.compare_number(RAX, _COPIED_FROM)
    write.jump(ready, LESS)
    _copied(write, width)
    write.place(ready)
    write.move(R10, _HERE["left"])
    write.move(RAX, _HERE["out"])
    write.address(R11, At(RAX, index=R15, scale=FLOAT))
    write.move(R12, _GIVEN["left_rows"])
    write.move(R13, _GIVEN["left_terms"])
    write.move(RCX, _GIVEN["rows"])
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
    write.multiply(RAX, _GIVEN["out_rows"])
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


def _few_columns(write: Assembler) -> None:
    """A product of fewer columns than a register has: computed with zeros in place of the others, on the stack.

    The registers are those of `_panel`.
    """
    zeros, rows, copy, copy_row, copy_column = Label(), Label(), Label(), Label(), Label()
    write.clear(0)
    write.move(RDX, RSP)
    write.move(RCX, _GIVEN["terms"])
    write.place(zeros)
    write.store(At(RDX), 0)
    write.add_number(RDX, REGISTER * FLOAT)
    write.subtract_number(RCX, 1)
    write.jump(zeros, NOT_ZERO)
    write.move(R8, _HERE["right"])
    write.move(R9, _GIVEN["right_terms"])
    write.move(R14, _GIVEN["terms"])
    write.move(RBX, _GIVEN["columns"])
    _words(write, REGISTER)
    write.move(R8, RSP)
    write.set(R9, REGISTER * FLOAT)
    write.move(R10, _HERE["left"])
    write.move(R11, _HERE["out"])
    write.move(R12, _GIVEN["left_rows"])
    write.move(R13, _GIVEN["left_terms"])
    write.move(RCX, _GIVEN["rows"])
    write.place(rows)
    for number in range(_TILE_ROWS, 0, -1):
        fewer = Label()
        write.compare_number(RCX, number)
        write.jump(fewer, LESS)
        _tile(write, number, REGISTER, is_result=False)
        write.set(R14, number)
        write.jump(copy)
        write.place(fewer)
    write.place(copy)
    write.subtract(RCX, R14)
    write.address(RSI, _TILE)
    write.place(copy_row)
    write.set(RAX, 0)
    write.move(RBX, _GIVEN["columns"])
    write.move(RDX, _HERE["added"])
    write.place(copy_column)
    plain = Label()
    write.load_one(0, At(RSI, index=RAX))
    write.compare_number(RDX, 0)
    write.jump(plain, ZERO)
    write.add_one(0, 0, At(RDX, index=RAX))
    write.place(plain)
    write.store_one(At(R11, index=RAX), 0)
    write.add_number(RAX, FLOAT)
    write.subtract_number(RBX, 1)
    write.jump(copy_column, NOT_ZERO)
    write.add_number(RSI, REGISTER * FLOAT)
    write.add(R11, _GIVEN["out_rows"])
    write.add(R10, R12)
    write.subtract_number(R14, 1)
    write.jump(copy_row, NOT_ZERO)
    write.compare_number(RCX, 0)
    write.jump(rows, NOT_ZERO)


def _tile(write: Assembler, rows: int, width: int, is_result: bool = True) -> None:
    """`rows` rows and `width` columns of a product, in registers from zero to the last term.

    They go to the result, with what is added to them, or else to the stack, without.
    """
    registers = width // REGISTER
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
    write.move(RBX, _GIVEN["terms"])
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
    if not is_result:
        for number, (total,) in enumerate(sums):
            write.store(At(RSP, offset=_PANEL + 32 * number), total)
        return
    plain = Label()
    write.move(RDX, _HERE["added"])
    write.compare_number(RDX, 0)
    write.jump(plain, ZERO)
    for number, register in enumerate(of_right):
        write.load(register, At(RDX, index=R15, scale=FLOAT, offset=32 * number))
    for each in sums:
        for total, register in zip(each, of_right, strict=True):
            write.add_vector(total, total, register)
    write.place(plain)
    write.move(RAX, R11)
    for each in sums:
        for number, total in enumerate(each):
            write.store(At(RAX, offset=32 * number), total)
        write.add(RAX, _GIVEN["out_rows"])


# The numbers of a row of 16 columns (or eight) lie side by side on the stack, and rows lie one behind the other. R8 is
# where the columns begin in the matrix, and R9 are the bytes from a term to the next; `_copied` and `_turned` make both
# those of the copy.
def _copied(write: Assembler, width: int) -> None:
    """Copies the panel at R8, whose rows are whole, to the stack, where they lie one behind the other."""
    terms = Label()
    write.move(RSI, R8)
    write.move(RDX, RSP)
    write.move(RCX, _GIVEN["terms"])
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


def _turned(write: Assembler, width: int) -> None:
    """Copies the panel at R8, whose rows are not whole, to the stack, where they are."""
    by_words, done = Label(), Label()
    write.move(R14, _GIVEN["terms"])
    write.compare_number(R9, FLOAT)
    write.jump(by_words, NOT_ZERO)
    _squares(write, width)
    write.compare_number(R14, 0)
    write.jump(done, ZERO)
    write.place(by_words)
    write.set(RBX, width)
    _words(write, width)
    write.place(done)
    write.move(R8, RSP)
    write.set(R9, width * FLOAT)


def _squares(write: Assembler, width: int) -> None:
    """Copies squares of eight columns and eight terms, which lie side by side; R14 are the terms that fill none."""
    write.move(RAX, _GIVEN["right_columns"])
    write.address(RBX, At(RAX, index=RAX, scale=2))
    write.move(RSI, R8)
    for group in range(width // REGISTER):
        more, done = Label(), Label()
        write.move(R11, RSI)
        write.address(RDX, At(R11, index=RBX))
        write.address(RCX, At(RSP, offset=REGISTER * FLOAT * group))
        write.move(R14, _GIVEN["terms"])
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


def _words(write: Assembler, width: int) -> None:
    """Copies the last R14 terms of RBX columns at R8 to the stack, number by number."""
    columns, terms = Label(), Label()
    write.move(RAX, _GIVEN["terms"])
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
    write.add(RSI, _GIVEN["right_columns"])
    write.add_number(RDX, FLOAT)
    write.subtract_number(RBX, 1)
    write.jump(columns, NOT_ZERO)
