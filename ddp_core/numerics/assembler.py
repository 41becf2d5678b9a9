"""Instructions of x86-64 as bytes: the few that a product of matrices needs.

The encodings are those of Intel's "Software Developer's Manual", volume 2. Registers are numbers: 0 to 15 are both the
64-bit ones in the order of `RAX` and following, and the vector registers ymm0 to ymm15 of AVX2.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8, R9, R10, R11, R12, R13, R14, R15 = range(16)

ALWAYS, ZERO, NOT_ZERO, LESS, GREATER_OR_EQUAL, GREATER = 0xEB, 0x4, 0x5, 0xC, 0xD, 0xF
"""What a jump depends on: the last sum, difference or comparison, of signed numbers."""


@dataclass(frozen=True)
class At:
    """A place in memory: the address in `base`, plus `index` times `scale` (1, 2, 4 or 8), plus `offset` bytes."""

    base: int
    index: int | None = None
    scale: int = 1
    offset: int = 0


class Label:
    """A place in the code that jumps lead to."""

    def __init__(self) -> None:
        self.place: int | None = None
        self.jumps: list[int] = []
        """Places in the code where a jump's distance is filled in once the label has a place."""


class Assembler:
    """Writes instructions one after the other; `code` has their bytes, which may lie anywhere in memory."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    @property
    def code(self) -> bytes:
        """The instructions so far."""
        return bytes(self._bytes)

    def push(self, register: int) -> None:
        """Put a register on the stack."""
        self._bytes += bytes([0x40 | register >> 3, 0x50 | register & 7])

    def pop(self, register: int) -> None:
        """Take a register from the stack."""
        self._bytes += bytes([0x40 | register >> 3, 0x58 | register & 7])

    def move(self, target: int | At, source: int | At, wide: int = 8) -> None:
        """target = source, 64 bits, or 32 with `wide` 0, of which one at most is in memory."""
        if isinstance(source, At):
            self._whole(0x8B, target, source, wide)
        else:
            self._whole(0x89, source, target, wide)

    def set(self, register: int, number: int) -> None:
        """register = a number of 31 bits."""
        self._whole(0xC7, 0, register)
        self._bytes += struct.pack("<i", number)

    def address(self, register: int, place: At) -> None:
        """register = the address of a place."""
        self._whole(0x8D, register, place)

    def add(self, register: int, other: int | At) -> None:
        """register += other."""
        self._whole(0x03, register, other)

    def subtract(self, register: int, other: int | At) -> None:
        """register -= other."""
        self._whole(0x2B, register, other)

    def multiply(self, register: int, other: int | At) -> None:
        """register *= other."""
        self._whole(0x0F, register, other, then=0xAF)

    def compare(self, register: int, other: int | At) -> None:
        """What a jump then depends on: register - other."""
        self._whole(0x3B, register, other)

    def add_number(self, register: int, number: int) -> None:
        """register += a number of 31 bits."""
        self._of_number(0, register, number)

    def subtract_number(self, register: int, number: int) -> None:
        """register -= a number of 31 bits."""
        self._of_number(5, register, number)

    def keep_bits(self, register: int, number: int) -> None:
        """register &= a number of 31 bits and their sign."""
        self._of_number(4, register, number)

    def compare_number(self, register: int, number: int) -> None:
        """What a jump then depends on: register - number."""
        self._of_number(7, register, number)

    def place(self, label: Label) -> None:
        """Jumps to `label` lead here."""
        label.place = len(self._bytes)
        for place in label.jumps:
            self._bytes[place : place + 4] = struct.pack("<i", label.place - place - 4)

    def jump(self, label: Label, when: int = ALWAYS) -> None:
        """Go on at `label`, if the condition holds."""
        self._bytes += b"\xe9" if when == ALWAYS else bytes([0x0F, 0x80 | when])
        place = len(self._bytes)
        if label.place is None:
            label.jumps.append(place)
        self._bytes += struct.pack("<i", (label.place or 0) - place - 4)

    def leave(self) -> None:
        """Return to the caller, the upper halves of vector registers cleared, as other code expects."""
        self._bytes += b"\xc5\xf8\x77\xc3"

    def clear(self, vector: int) -> None:
        """vector = zeros (vxorps)."""
        self._vector(0x57, vector, vector, vector, table=1, prefix=0)

    def load(self, vector: int, place: At) -> None:
        """vector = eight float32 numbers from memory (vmovups)."""
        self._vector(0x10, vector, 0, place, table=1, prefix=0)

    def store(self, place: At, vector: int) -> None:
        """Eight float32 numbers to memory (vmovups)."""
        self._vector(0x11, vector, 0, place, table=1, prefix=0)

    def repeat(self, vector: int, place: At) -> None:
        """vector = eight times one float32 number from memory (vbroadcastss)."""
        self._vector(0x18, vector, 0, place, table=2, prefix=1)

    def fuse(self, total: int, left: int, right: int | At) -> None:
        """total = left * right + total, rounded once (vfmadd231ps)."""
        self._vector(0xB8, total, left, right, table=2, prefix=1)

    def add_vector(self, total: int, left: int, right: int | At) -> None:
        """total = left + right (vaddps)."""
        self._vector(0x58, total, left, right, table=1, prefix=0)

    def load_one(self, vector: int, place: At) -> None:
        """vector = one float32 number from memory, and zeros (vmovss)."""
        self._vector(0x10, vector, 0, place, table=1, prefix=2, length=0)

    def store_one(self, place: At, vector: int) -> None:
        """The first float32 number to memory (vmovss)."""
        self._vector(0x11, vector, 0, place, table=1, prefix=2, length=0)

    def add_one(self, total: int, left: int, right: At) -> None:
        """total = left, with a number from memory added to its first (vaddss)."""
        self._vector(0x58, total, left, right, table=1, prefix=2, length=0)

    def interleave(self, vector: int, left: int, right: int, upper: int) -> None:
        """vector = left and right in turns, of each four their lower or upper two numbers (vunpcklps, vunpckhps)."""
        self._vector(0x14 | upper, vector, left, right, table=1, prefix=0)

    def pair(self, vector: int, left: int, right: int, upper: int) -> None:
        """vector = of each four numbers the lower or upper two of left, then those of right (vshufps)."""
        self._vector(0xC6, vector, left, right, table=1, prefix=0)
        self._bytes.append(0xEE if upper else 0x44)

    def join(self, vector: int, left: int, right: int, upper: int) -> None:
        """vector = the lower or upper four numbers of left, then those of right (vperm2f128)."""
        self._vector(0x06, vector, left, right, table=3, prefix=1)
        self._bytes.append(0x31 if upper else 0x20)

    def _of_number(self, operation: int, register: int, number: int) -> None:
        self._whole(0x81, operation, register)
        self._bytes += struct.pack("<i", number)

    def _whole(self, code: int, register: int | At, other: int | At, wide: int = 8, then: int | None = None) -> None:
        """An instruction of general registers: REX prefix, code, operands."""
        assert isinstance(register, int)
        extended, operands = _operands(register, other)
        self._bytes += bytes([0x40 | wide | extended, code, *([] if then is None else [then])]) + operands

    def _vector(
        self, code: int, register: int, second: int, other: int | At, table: int, prefix: int, length: int = 4
    ) -> None:
        """An instruction of 256-bit vectors: VEX prefix of three bytes, in which register bits are inverted.

        `length` is 0 for instructions of one number.
        """
        extended, operands = _operands(register, other)
        second_and_more = (~second & 15) << 3 | length | prefix
        self._bytes += bytes([0xC4, (~extended & 7) << 5 | table, second_and_more, code]) + operands


def _operands(register: int, other: int | At) -> tuple[int, bytes]:
    """The upper bits of the registers as in a REX prefix (4: `register`, 2: index, 1: base), and the bytes ModRM on."""
    upper, lower = (register >> 3) << 2, (register & 7) << 3
    if isinstance(other, int):
        return upper | other >> 3, bytes([0xC0 | lower | other & 7])
    upper |= other.base >> 3
    is_short = -128 <= other.offset < 128
    mode, offset = (0x40, struct.pack("<b", other.offset)) if is_short else (0x80, struct.pack("<i", other.offset))
    if other.index is None and other.base & 7 != RSP:
        return upper, bytes([mode | lower | other.base & 7]) + offset
    index = RSP if other.index is None else other.index  # 4 in the index's place means none
    scale = (1, 2, 4, 8).index(other.scale)
    return upper | (index >> 3) << 1, bytes([mode | lower | 4, scale << 6 | (index & 7) << 3 | other.base & 7]) + offset
