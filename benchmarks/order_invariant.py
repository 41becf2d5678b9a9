"""Sums that do not depend on the order of the additions, beside the ordered sum: bytes and time over two ranks.

    python -m benchmarks.order_invariant [--worlds 2] [--rounds 15] [--quick] [--json PATH]

11 million float32 (a ResNet-18) in pieces of 1 million, as DDP's buckets are, summed element by element over the ranks.
The ways take turns, in an order that rotates; the slowest rank counts, figures are medians. Bytes are those that an
all-reduce of a ring sends per rank, 2(W-1)/W of what it is given; the ordered sum sends as many of its own.

`all_reduce`: gloo's float32 sum, whose order of additions depends on the number of ranks and on the pieces' borders.
`ordered`: this project's sum, in one fixed order: bits as of that order, on every layout that keeps the micro-batches.
`long accumulator`: each float32 exactly, as ten digits of 32 bits in int64 (Kulisch), summed with integer all_reduce
and rounded once. Integer addition is associative, so neither order nor number of ranks matters; the result is the exact
sum, correctly rounded. 80 bytes per element.
`fixed point`: each float32 as one int64, in units of 2^-60 of the piece's largest (which an all_reduce of the maximum
finds), rounded before the sum: any order gives the same bits, which do depend on the pieces, and elements far below the
largest lose bits. 8 bytes per element. (The idea of Demmel and Nguyen's pre-rounding, with one bin.)

The last two are this project's own few lines of torch, to see what the idea costs on CPU; they are no verdict on
`det-train`, which runs on CUDA alone, nor on any other package. Where the package `bitrep` is installed, its own
`SumF32` is timed on as many elements as a second allows: it has one accumulator for one sum, called from Python.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.record import record
from benchmarks.reduction import ELEMENTS, on_ranks, time_sum
from benchmarks.turns import rotated
from ddp_core.reduction import OrderedSum

PIECE = 1_000_000
BLOCK = 16_384
DIGITS, RADIX = 10, 32
# The lowest bit of a float32: of its smallest subnormal number.
LOWEST = -149
BYTES = {"all_reduce": 4, "ordered": 4, "long accumulator": 8 * DIGITS, "fixed point": 8}


def accumulate(values: Tensor) -> Tensor:
    """Each float32 [n] exactly as int64 [DIGITS, n]: digit k counts in 2^(32 k - 149). Infinities and NaN are refused.

    The significand of 24 bits lies in one digit or in two. Digits carry a sign, and 2^31 of them may be added up.
    """
    if not torch.isfinite(values).all():
        raise ValueError("infinities and NaN have no place in a long accumulator")
    exponent = torch.frexp(values).exponent
    # value = whole * 2^(exponent - 24). A subnormal number has no bits below 2^-149, so its shift may be held at zero.
    place = (exponent.to(torch.int64) - 24 - LOWEST).clamp_(min=0)
    whole = torch.ldexp(values.double(), -(place + LOWEST).to(torch.int32)).to(torch.int64)
    digit, shift = place // RADIX, place % RADIX
    size = whole.abs() << shift
    sign = whole.sign()
    digits = torch.zeros(DIGITS, values.numel(), dtype=torch.int64)
    digits.scatter_(0, digit[None], ((size & (2**RADIX - 1)) * sign)[None])
    digits.scatter_(0, digit[None] + 1, ((size >> RADIX) * sign)[None])
    return digits


def rounded(digits: Tensor) -> Tensor:
    """The float32 nearest to the exact sum that the digits [DIGITS, n] hold (ties to even); changes `digits`.

    After the carries, the leading digits go into one integer whose last bit says whether anything lies below it; that
    integer is rounded once. Sums that are subnormal in float32 are exact.
    """
    for digit in range(DIGITS - 1):
        carry = digits[digit] >> RADIX
        digits[digit] -= carry << RADIX
        digits[digit + 1] += carry
    negative = digits[-1] < 0
    # Two's complement over all digits makes the sizes of negative sums.
    carry = negative.to(torch.int64)
    for digit in range(DIGITS - 1):
        flipped = torch.where(negative, (2**RADIX - 1) - digits[digit], digits[digit]) + carry
        carry = flipped >> RADIX
        digits[digit] = flipped & (2**RADIX - 1)
    digits[-1] = torch.where(negative, ~digits[-1], digits[-1]) + carry
    places = torch.arange(DIGITS)[:, None]
    top = torch.where(digits != 0, places, 0).amax(0)
    leading, second = digits.gather(0, top[None])[0], digits.gather(0, (top - 1).clamp(min=0)[None])[0]
    second = torch.where(top > 0, second, 0)
    below = ((digits != 0) & (places < top - 1)).any(0)
    # 62 bits at most, the last of them sticky, so that one rounding to 24 bits is the right one.
    bits = ((leading << 30) | (second >> 2) | ((second & 3) != 0) | below).to(torch.int64)
    length = torch.frexp(bits.double()).exponent.to(torch.int64)
    length -= (bits < (1 << (length - 1).clamp(min=0))).to(torch.int64)  # bits.double() may have been rounded up
    unit = RADIX * top + LOWEST - 30
    cut = torch.maximum(length - 24, LOWEST - unit).clamp(min=0)
    kept, rest, half = bits >> cut, bits & ((1 << cut) - 1), (1 << cut) >> 1
    up = (rest > half) | ((rest == half) & (cut > 0) & ((kept & 1) == 1))
    value = torch.ldexp((kept + up).double(), (cut + unit).to(torch.int32)).to(torch.float32)
    return torch.where(negative, -value, value)


def long_accumulator(part: Tensor) -> None:
    """Sum `part` over the ranks, in place, exactly and rounded once."""
    # In blocks whose digits a cache holds: several times as fast as the whole piece at once.
    digits = torch.cat([accumulate(block).view(-1) for block in part.split(BLOCK)])
    dist.all_reduce(digits)
    for block, own in zip(part.split(BLOCK), digits.split(DIGITS * BLOCK), strict=True):
        block.copy_(rounded(own.view(DIGITS, -1)))


def fixed_point(part: Tensor) -> None:
    """Sum `part` over the ranks, in place, in units of 2^-60 of the largest element."""
    largest = part.abs().amax()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    room = 60 - math.ceil(math.log2(dist.get_world_size()))
    scale = 2.0 ** (room - math.frexp(float(largest))[1])
    whole = part.double().mul_(scale).round_().to(torch.int64)
    dist.all_reduce(whole)
    part.copy_(whole.double().div_(scale))


def time_sums(rank: int, world_size: int, rounds: int, elements: int) -> dict[str, list[float]]:
    """Seconds of the slowest rank per round of each way, in turns that rotate."""
    ordered_sum = OrderedSum(dist.group.WORLD)
    torch.manual_seed(rank)
    flat = torch.randn(elements)
    ways: dict[str, Callable[[Tensor], Any]] = {
        "all_reduce": dist.all_reduce,
        "ordered": lambda part: ordered_sum([part], part, world_size),
        "long accumulator": long_accumulator,
        "fixed point": fixed_point,
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(-1, rounds):
        for way in rotated(ways, turn):
            taken = time_sum(ways[way], flat, PIECE)
            if turn >= 0:
                seconds[way].append(taken)
    return seconds


def time_bitrep(seconds: float = 1.0) -> dict[str, Any] | None:
    """Seconds and bytes of a sum of two summands in the package `bitrep`; None where it is not there."""
    if importlib.util.find_spec("bitrep") is None:
        return None
    from importlib.metadata import version

    import bitrep

    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        for value in torch.randn(1000).tolist():
            accumulator = bitrep.SumF32()
            accumulator.add(value)
            accumulator.add(-value)
            accumulator.value()
        done += 1000
    each = (time.perf_counter() - start) / done
    return {
        "version": version("bitrep"),
        "elements": done,
        "seconds_per_element": each,
        "bytes_per_element": len(bitrep.SumF32().to_bytes()),
    }


def measure(worlds: list[int], rounds: int, elements: int) -> dict[str, Any]:
    """All figures, printed as they come."""
    print(f"{elements:,} float32 in pieces of {PIECE:,}, medians of {rounds} rounds in turns")
    print(f"{'ranks':>5} {'':18}{'MB sent per rank':>17}{'ms':>10}{'of all_reduce':>15}")
    rows = []
    for world_size in worlds:
        seconds = on_ranks(time_sums, world_size, rounds, elements)
        base = seconds["all_reduce"]
        for way, values in seconds.items():
            sent = 2 * (world_size - 1) / world_size * BYTES[way] * elements
            ratio = statistics.median(one / other for one, other in zip(values, base, strict=True))
            rows.append(
                {"world_size": world_size, "way": way, "bytes_per_rank": sent, "ratio": ratio, "seconds": values}
            )
            milliseconds = 1e3 * statistics.median(values)
            print(f"{world_size:5} {way:18}{sent / 1e6:17.0f}{milliseconds:10.1f}{ratio:15.2f}", flush=True)
    package = time_bitrep()
    if package is None:
        print("bitrep: not installed: pip install bitrep")
    else:
        whole = package["seconds_per_element"] * elements
        print(
            f"bitrep {package['version']}, SumF32 from Python: {1e6 * package['seconds_per_element']:.2f} us and "
            f"{package['bytes_per_element']} bytes per element of two summands; {whole:.0f} s for all elements"
        )
    return {"elements": elements, "piece": PIECE, "sums": rows, "bitrep": package}


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="a round of few elements; recorded with --json only")
    parser.add_argument("--json", type=Path, help="where to record the results (default: benchmarks/results)")
    arguments = parser.parse_args()
    rounds, elements = (1, 100_000) if arguments.quick else (arguments.rounds, ELEMENTS)
    results = measure(arguments.worlds, rounds, elements)
    if arguments.json or not arguments.quick:
        command = f"python -m benchmarks.order_invariant --worlds {' '.join(map(str, arguments.worlds))}"
        print(f"recorded in {record('order_invariant', command, results, arguments.json, rounds)}")


if __name__ == "__main__":
    main()
