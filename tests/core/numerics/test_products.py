"""Portable products are chains of fused multiply-adds, whatever their shape, layout or number of threads.

What such a chain is by definition is said here in numpy, without torch.

Tests numerics/assembler.py and numerics/chain_code.py, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from ddp_core.numerics import chains
from ddp_core.numerics.chains import chained, chained_into
from ddp_core.numerics.kernels import portable_kernels
from tests.support.wording import refusing

Array = NDArray[Any]

_LONGEST_CHAIN = 1024


def fused(a: Any, b: Any, c: Any) -> Array:
    """a * b + c in float32, rounded once, as a fused multiply-add rounds it.

    In float64 the product is exact and the sum is not. So the sum is rounded to odd: where it was not exact, to the
    neighbour whose last bit is 1. Rounding that to float32 gives what rounding the exact sum gives (S. Boldo,
    G. Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
    """
    product = np.multiply(a, b, dtype=np.float64)
    addend = np.asarray(c, np.float64)
    total = np.asarray(product + addend)
    back = total - product
    lost = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    is_cut = (lost != 0) & np.isfinite(lost) & (bits % 2 == 0)
    outwards = np.where((lost > 0) == (total > 0), 1, -1)
    return np.asarray((bits + is_cut * outwards).view(np.float64).astype(np.float32))


def product_in_chains(left: Array, right: Array) -> Array:
    """A product of float32 matrices, or of batches of them: per element one chain in the order of k.

    A chain is of fused multiply-adds, and has at most 1,024 terms; longer sums are cut there, and the pieces added in
    their order.
    """
    pieces = []
    for start in range(0, left.shape[-1], _LONGEST_CHAIN):
        chain = np.zeros((*left.shape[:-1], right.shape[-1]), np.float32)
        for k in range(start, min(start + _LONGEST_CHAIN, left.shape[-1])):
            chain = fused(left[..., k, None], right[..., k, None, :], chain)
        pieces.append(chain)
    return np.asarray(sum(pieces[1:], pieces[0]))


@pytest.fixture(autouse=True)
def portable() -> Iterator[None]:
    with portable_kernels():
        yield


def drawn(*shape: int, key: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng([key, *shape]).standard_normal(shape, dtype=np.float32))


def gapped(matrix: Tensor) -> Tensor:
    """The same numbers as every second of each row, and every third row, of a larger matrix."""
    larger = matrix.new_zeros(matrix.shape[0] * 3, matrix.shape[1] * 2)
    larger[::3, ::2] = matrix
    return larger[::3, ::2]


def shifted(matrix: Tensor) -> Tensor:
    """The same numbers, beginning where no register does."""
    flat = matrix.new_zeros(matrix.numel() + 1)
    flat[1:] = matrix.flatten()
    return flat[1:].view(matrix.shape)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": Tensor.contiguous,
    "columns": lambda matrix: matrix.T.contiguous().T,
    "gapped": gapped,
    "gapped columns": lambda matrix: gapped(matrix.T).T,
    "shifted": shifted,
}
SHAPES = [
    *[(64, 160, 128), (8, 2100, 64), (200, 1025, 8), (8, 3, 50_000), (1030, 1, 1030)],
    *[(1, 1, 1), (1, 70, 1), (1, 70, 33), (70, 33, 1), (5, 9, 7), (6, 16, 16), (7, 1025, 9), (13, 1024, 23)],
]


def same_bits(ours: Tensor, truth: Array) -> bool:
    return ours.is_contiguous() and ours.detach().numpy().tobytes() == truth.tobytes()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_a_chain_in_every_layout(shape: tuple[int, int, int]) -> None:
    rows, terms, columns = shape
    left, right = drawn(rows, terms), drawn(terms, columns, key=1)
    truth = product_in_chains(left.numpy(), right.numpy())
    for one in LAYOUTS.values():
        for other in LAYOUTS.values():
            assert same_bits(one(left) @ other(right), truth)


@pytest.mark.parametrize("rows", [*range(1, 15), 50])
def test_each_number_of_rows_and_columns_fills_its_tiles(rows: int) -> None:
    """Nothing but the product is written: what lies before, between and after its rows is kept."""
    for columns in range(1, 42):
        left, right = drawn(3, rows, 5), drawn(3, 5, columns, key=1)
        room = torch.full((3, rows + 2, columns + 9), 7.0)
        chained_into(room[:, 1:-1, 4 : 4 + columns], left, right)
        expected = torch.full_like(room, 7.0)
        expected[:, 1:-1, 4 : 4 + columns] = torch.from_numpy(product_in_chains(left.numpy(), right.numpy()))
        assert torch.equal(room, expected)


def test_rows_of_a_large_product_at_a_time_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    for rows, terms, columns in ((64, 160, 128), (8, 2100, 64), (333, 77, 9)):
        left, right = drawn(rows, terms), drawn(terms, columns, key=1)
        whole = chained(left, right)
        monkeypatch.setattr(chains, "_ALONE_UP_TO", 0)
        monkeypatch.setattr(chains, "_ROWS", 50)
        assert all(torch.equal(chained(layout(left), right), whole) for layout in LAYOUTS.values())
        monkeypatch.undo()


def test_batches_may_overlap_or_be_one_matrix() -> None:
    left, right = drawn(9, 40), drawn(40, 24, key=1)
    windows = left.flatten().as_strided((5, 7, 40), (40, 20, 1))
    truth = product_in_chains(windows.numpy(), np.broadcast_to(right.numpy(), (5, 40, 24)))
    assert same_bits(torch.bmm(windows, right.expand(5, 40, 24)), truth)


@pytest.mark.parametrize("columns", [1, 5, 10, 40])
def test_a_row_is_added_by_the_same_call(columns: int) -> None:
    for rows in (1, 4, 7, 13):
        left, right, row = drawn(rows, 11), drawn(columns, 11, key=1), drawn(columns, key=2)
        truth = product_in_chains(left.numpy(), right.numpy().T) + row.numpy()
        assert same_bits(functional.linear(left, right, row), truth)
        every_second = torch.stack([row, row], 1).flatten()[::2]
        assert same_bits(torch.addmm(every_second, left, right.T), truth)


def test_nothing_to_multiply() -> None:
    assert torch.equal(torch.mm(torch.ones(3, 0), torch.ones(0, 9)), torch.zeros(3, 9))
    assert torch.mm(torch.ones(0, 4), torch.ones(4, 9)).shape == (0, 9)
    assert torch.bmm(torch.ones(0, 3, 4), torch.ones(0, 4, 9)).shape == (0, 3, 9)


def test_numbers_that_are_none_and_infinite_stay_where_they_are() -> None:
    left, right = drawn(13, 30), drawn(30, 19, key=1)
    left[4, 7], right[2, 18] = torch.nan, torch.inf
    ours, usual = left @ right, (left.double() @ right.double()).float()
    assert torch.equal(ours.isnan(), usual.isnan())
    assert torch.equal(ours.isfinite(), usual.isfinite())


def test_a_system_that_runs_no_written_code_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """`mprotect` refuses a length that reaches beyond memory, as it would refuse to let the code run."""
    true_code = chains.chain_code()
    monkeypatch.setattr(chains.mmap, "PROT_EXEC", 1 << 20)
    chains._code.cache_clear()
    try:
        with refusing():
            chained(drawn(9, 9), drawn(9, 9))
    finally:
        monkeypatch.undo()
        chains._code.cache_clear()
    assert len(true_code) < 8192


def test_what_is_added_comes_last() -> None:
    left, right, added = drawn(64, 160), drawn(160, 128, key=1), drawn(128, key=2)
    product = left @ right
    assert torch.equal(torch.addmm(added, left, right), product + added)
    assert torch.equal(torch.addmm(added, left, right, beta=0.3, alpha=0.7), product * 0.7 + added * 0.3)
    assert torch.equal(torch.addmm(added * torch.nan, left, right, beta=0), product)
    total = drawn(64, 128, key=3)
    expected = total * 2 + product
    assert torch.equal(torch.addmm(total, left, right, beta=2, out=torch.empty(3)), expected)
    assert total.addmm_(left, right, beta=2) is total
    assert torch.equal(total, expected)
    scales, totals = torch.tensor([1.0, 2.0, -4.0])[:, None, None], drawn(3, 64, 128, key=4)
    each, batches = product * scales, (left.expand(3, -1, -1), right * scales)
    assert torch.equal(torch.bmm(*batches, out=torch.empty(3, 64, 128)), each)
    assert torch.equal(torch.baddbmm(totals, *batches), each + totals)
    assert torch.equal(totals.clone().baddbmm_(*batches, alpha=0.5), each * 0.5 + totals)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [4, 64])
def test_short_numbers_are_raised_and_rounded_once(kind: torch.dtype, rows: int) -> None:
    left, right, added = drawn(rows, 160).to(kind), drawn(160, 128, key=1).to(kind), drawn(128, key=2).to(kind)
    product = left.float() @ right.float()
    assert torch.equal(left @ right, product.to(kind))
    assert torch.equal(torch.mm(left, right, out=left.new_empty(rows, 128)), product.to(kind))
    with_added = torch.addmm(added.float(), left.float(), right.float()).to(kind)
    assert torch.equal(torch.addmm(added, left, right), with_added)
    assert torch.equal(added.expand(rows, 128).clone().addmm_(left, right), with_added)
    assert torch.equal(torch.addmm(added, left, right, out=left.new_empty(0)), with_added)


@pytest.mark.parametrize("kind", [torch.float64, torch.int64, torch.complex128])
def test_other_numbers_are_not_cut_to_float32(kind: torch.dtype) -> None:
    numbers = torch.arange(2**24, 2**24 + 36).view(6, 6).to(kind)
    assert np.array_equal((numbers @ numbers).numpy(), numbers.numpy() @ numbers.numpy())


def test_what_torch_refuses_is_refused() -> None:
    left, right = drawn(64, 160), drawn(160, 128)
    for wrong in (
        lambda: left @ left,
        lambda: torch.mm(left, right.double()),
        lambda: torch.mm(left, right, out=torch.empty(64, 128, dtype=torch.float64)),
        lambda: torch.addmm(drawn(5), left, right),
        lambda: torch.zeros(5, 5).addmm_(left, right),
        lambda: torch.bmm(left[None], right[None].expand(2, -1, -1)),
        lambda: torch.mm(left[None], right[None]),
        lambda: torch.bmm(left, right),
    ):
        with pytest.raises(RuntimeError):
            wrong()
