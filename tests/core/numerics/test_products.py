"""Under rules 2 large products are chains of fused multiply-adds, whatever their layout, dtype or number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ddp_core.numerics import products
from ddp_core.numerics.kernels import portable_kernels
from ddp_core.numerics.products import CHAINED_FROM, is_chained
from ddp_lab.probe.definition.arithmetic import product_in_chains
from tests.support.processes import ask


@pytest.fixture(autouse=True)
def portable() -> Iterator[None]:
    with portable_kernels(2):
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
SHAPES = [(64, 160, 128), (8, 2100, 64), (200, 1025, 8), (8, 3, 50_000), (1030, 1, 1030)]


def same_bits(ours: Tensor, truth: np.ndarray[Any, Any]) -> bool:
    return ours.is_contiguous() and ours.detach().numpy().tobytes() == truth.tobytes()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_large_product_is_a_chain_in_every_layout(shape: tuple[int, int, int]) -> None:
    rows, terms, columns = shape
    left, right = drawn(rows, terms), drawn(terms, columns, key=1)
    truth = product_in_chains(left.numpy(), right.numpy())
    for one in LAYOUTS.values():
        for other in LAYOUTS.values():
            assert same_bits(one(left) @ other(right), truth)


@pytest.mark.parametrize("threads", [2, 3, 4])
def test_the_number_of_threads_does_not_matter(threads: int) -> None:
    left, right = drawn(96, 1100), drawn(1100, 80, key=1)
    truth = product_in_chains(left.numpy(), right.numpy())
    torch.set_num_threads(threads)
    try:
        assert same_bits(left @ right, truth)
    finally:
        torch.set_num_threads(1)


def test_the_rule_looks_at_the_shape_alone() -> None:
    assert is_chained(8, CHAINED_FROM // 64, 8)
    assert not is_chained(8, CHAINED_FROM // 64 - 1, 8)
    assert not is_chained(7, CHAINED_FROM, 8)
    assert not is_chained(CHAINED_FROM, 8, 1)


@pytest.mark.parametrize(
    ("shape", "chains"), [((8, 16_384, 8), 16), ((8, 16_383, 8), 0), ((7, 4096, 64), 0), ((1, 2048, 1024), 0)], ids=str
)
def test_a_layout_never_changes_which_way_a_product_goes(
    shape: tuple[int, int, int], chains: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0
    true_piece = products._piece

    def counted(left: Tensor, right: Tensor) -> Tensor:
        nonlocal made
        made += 1
        return true_piece(left, right)

    monkeypatch.setattr(products, "_piece", counted)
    rows, terms, columns = shape
    left, right, bias = drawn(rows, terms), drawn(terms, columns, key=1), drawn(columns, key=2)
    calls: list[Callable[[Tensor, Tensor], object]] = [
        torch.mm,
        lambda one, other: torch.mm(one, other, out=torch.empty(0)),
        lambda one, other: torch.addmm(bias, one, other),
        lambda one, other: torch.zeros(rows, columns).addmm_(one, other),
        lambda one, other: torch.addmm(bias, one, other, out=torch.empty(rows, columns)),
        lambda one, other: torch.bmm(one[None], other[None]),
        lambda one, other: torch.baddbmm(bias, one[None], other[None]),
        lambda one, other: functional.linear(one, other.T, bias),
        lambda one, other: torch.mm(one.bfloat16(), other.bfloat16()),
    ]
    for call in calls:
        for layout in LAYOUTS.values():
            for other in LAYOUTS.values():
                made = 0
                call(layout(left), other(right))
                assert made == chains


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


def test_batches_are_products_of_their_matrices() -> None:
    left, right, added = drawn(3, 64, 160), drawn(3, 160, 128, key=1), drawn(3, 64, 128, key=2)
    each = torch.stack([one @ other for one, other in zip(left, right, strict=True)])
    assert torch.equal(torch.bmm(left, right), each)
    assert torch.equal(torch.bmm(left, right, out=torch.empty(3, 64, 128)), each)
    assert torch.equal(torch.baddbmm(added, left, right), each + added)
    assert torch.equal(added.clone().baddbmm_(left, right, alpha=0.5), each * 0.5 + added)


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


def test_gradients_are_chains_too() -> None:
    inputs, weight = drawn(64, 160).requires_grad_(), drawn(128, 160, key=1).requires_grad_()
    coming = drawn(64, 128, key=2)
    functional.linear(inputs, weight).backward(coming)
    assert inputs.grad is not None
    assert weight.grad is not None
    assert np.array_equal(inputs.grad.numpy(), product_in_chains(coming.numpy(), weight.detach().numpy()))
    assert np.array_equal(weight.grad.numpy(), product_in_chains(coming.numpy().T, inputs.detach().numpy()))


def test_other_numbers_are_torchs() -> None:
    left, right = drawn(64, 160).double(), drawn(160, 128, key=1).double()
    assert (left @ right).numpy().tobytes() == ask(_product, left.numpy(), right.numpy())
    whole = torch.arange(64 * 160).view(64, 160)
    assert np.array_equal((whole @ whole.T).numpy(), whole.numpy() @ whole.numpy().T)
    assert torch.allclose(torch.complex(left, left) @ torch.complex(right, right), left @ right * 2j)


def _product(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> bytes:
    return (torch.from_numpy(left) @ torch.from_numpy(right)).numpy().tobytes()


def test_what_torch_refuses_is_refused() -> None:
    left, right = drawn(64, 160), drawn(160, 128)
    for wrong in (
        lambda: left @ left,
        lambda: torch.mm(left, right.double()),
        lambda: torch.mm(left, right, out=torch.empty(64, 128, dtype=torch.float64)),
        lambda: torch.addmm(drawn(5), left, right),
        lambda: torch.zeros(5, 5).addmm_(left, right),
        lambda: torch.bmm(left[None], right[None].expand(2, -1, -1)),
    ):
        with pytest.raises(RuntimeError):
            wrong()
