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
    RDX,
    RSI,
    RSP,
    ZERO,
    Assembler,
    At,
    Label,
)
from ddp_core.numerics.chain_copies import FLOAT, GIVEN, LONGEST, REGISTER, copied, turned, words

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
    write.move(RAX, GIVEN[counted])
    write.move(_HERE[counted], RAX)


def _go_on(write: Assembler, counted: str, end: str, start: Label) -> None:
    """The places of the next product or batch, and back to `start` if there is one."""
    for name in _MATRICES:
        write.move(RAX, _HERE[f"{name}{end}"])
        write.add(RAX, GIVEN[f"{name}_{counted}"])
        write.move(_HERE[f"{name}{end}"], RAX)
    write.move(RAX, _HERE[counted])
    write.subtract_number(RAX, 1)
    write.move(_HERE[counted], RAX)
    write.jump(start, NOT_ZERO)


def _product(write: Assembler) -> None:
    """One product: 16 columns at a time, then eight, the last of which may overlap. R15 is the first column."""
    wide, narrow, fits, done, few = Label(), Label(), Label(), Label(), Label()
    write.move(RAX, GIVEN["columns"])
    write.compare_number(RAX, REGISTER)
    write.jump(few, LESS)
    write.set(R15, 0)
    write.place(wide)
    write.address(RAX, At(R15, offset=_WIDTHS[0]))
    write.compare(RAX, GIVEN["columns"])
    write.jump(narrow, GREATER)
    _panel(write, _WIDTHS[0])
    write.add_number(R15, _WIDTHS[0])
    write.jump(wide)
    write.place(narrow)
    write.move(RAX, GIVEN["columns"])
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
    write.multiply(R8, GIVEN["right_columns"])
    write.add(R8, _HERE["right"])
    write.move(R9, GIVEN["right_terms"])
    write.move(RAX, GIVEN["right_columns"])
    write.compare_number(RAX, FLOAT)
    write.jump(is_whole, ZERO)
    turned(write, width)
    write.jump(ready)
    write.place(is_whole)
    write.move(RAX, GIVEN["rows"])
    write.compare_number(RAX, _COPIED_FROM)
    write.jump(ready, LESS)
    copied(write, width)
    write.place(ready)
    write.move(R10, _HERE["left"])
    write.move(RAX, _HERE["out"])
    write.address(R11, At(RAX, index=R15, scale=FLOAT))
    write.move(R12, GIVEN["left_rows"])
    write.move(R13, GIVEN["left_terms"])
    write.move(RCX, GIVEN["rows"])
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
    write.multiply(RAX, GIVEN["out_rows"])
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
    write.move(RCX, GIVEN["terms"])
    write.place(zeros)
    write.store(At(RDX), 0)
    write.add_number(RDX, REGISTER * FLOAT)
    write.subtract_number(RCX, 1)
    write.jump(zeros, NOT_ZERO)
    write.move(R8, _HERE["right"])
    write.move(R9, GIVEN["right_terms"])
    write.move(R14, GIVEN["terms"])
    write.move(RBX, GIVEN["columns"])
    words(write, REGISTER)
    write.move(R8, RSP)
    write.set(R9, REGISTER * FLOAT)
    write.move(R10, _HERE["left"])
    write.move(R11, _HERE["out"])
    write.move(R12, GIVEN["left_rows"])
    write.move(R13, GIVEN["left_terms"])
    write.move(RCX, GIVEN["rows"])
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
    write.move(RBX, GIVEN["columns"])
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
    write.add(R11, GIVEN["out_rows"])
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
    write.move(RBX, GIVEN["terms"])
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
        write.add(RAX, GIVEN["out_rows"])
