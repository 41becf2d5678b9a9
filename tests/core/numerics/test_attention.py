"""Under portable numerics attention is chains and a softmax of whole rows, forward and backward, in every layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ddp_core.numerics import attention as module
from ddp_core.numerics.kernels import portable_kernels

Bits = list[Tensor]


def drawn(*shape: int, key: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng([key, *shape]).standard_normal(shape, dtype=np.float32))


def attended(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Bits:
    """The result and the gradients of all three."""
    leaves = [each.detach().requires_grad_() for each in (query, key, value)]
    result = functional.scaled_dot_product_attention(*leaves, **options)
    return [result.detach(), *torch.autograd.grad(result, leaves, (result.detach() * 3).cos())]


def by_hand(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Bits:
    """The same in float64 and in separate operations."""
    leaves = [each.detach().double().requires_grad_() for each in (query, key, value)]
    groups = query.shape[1] // key.shape[1]
    of_query, of_key, of_value = leaves[0], *(each.repeat_interleave(groups, 1) for each in leaves[1:])
    scores = of_query @ of_key.transpose(-2, -1) * options.get("scale", query.shape[-1] ** -0.5)
    mask = options.get("attn_mask")
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if options.get("is_causal"):
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    result = scores.softmax(-1).nan_to_num() @ of_value
    return [result.detach(), *torch.autograd.grad(result, leaves, (result.detach() * 3).cos())]


def _seen(queries: int, keys: int) -> Tensor:
    return drawn(queries, keys, key=7) > -0.5


SHAPES = {
    "heads of 16": ((2, 4, 19, 16), (2, 4, 19, 16)),
    "fewer keys and heads": ((2, 8, 33, 8), (2, 2, 21, 8)),
    "narrow": ((3, 3, 5, 3), (3, 3, 9, 3)),
    "one query": ((1, 2, 1, 16), (1, 2, 7, 16)),
    "several cuts": ((1, 2, 1100, 8), (1, 2, 1050, 8)),
}
OPTIONS: dict[str, Callable[[int, int], Mapping[str, Any]]] = {
    "plain": lambda *_: {},
    "causal": lambda *_: {"is_causal": True},
    "scaled": lambda *_: {"scale": 0.3},
    "mask": lambda queries, keys: {"attn_mask": drawn(queries, keys, key=7)},
    "true and false": lambda queries, keys: {"attn_mask": _seen(queries, keys)},
    "mask of samples": lambda queries, keys: {"attn_mask": drawn(1, 1, queries, keys, key=7)},
}


@pytest.fixture
def portable() -> Iterator[None]:
    with portable_kernels():
        yield


@pytest.mark.usefixtures("portable")
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_attention(shape: str, option: str) -> None:
    of_query, of_key = SHAPES[shape]
    query, key, value = drawn(*of_query), drawn(*of_key, key=1), drawn(*of_key, key=2)
    options = {**OPTIONS[option](of_query[2], of_key[2]), "enable_gqa": of_query[1] != of_key[1]}
    for ours, true in zip(attended(query, key, value, **options), by_hand(query, key, value, **options), strict=True):
        assert float((ours - true).abs().max()) <= 1e-5 * max(float(true.abs().max()), 0.01)


def test_results_lie_in_memory_as_torchs_do() -> None:
    query, key, value = (drawn(2, 19, 4, 16, key=each).transpose(1, 2) for each in range(3))
    usual = [attended(*each) for each in ((query, key, value), (query.contiguous(), key, value.contiguous()))]
    with portable_kernels():
        ours = [attended(*each) for each in ((query, key, value), (query.contiguous(), key, value.contiguous()))]
    for one, other in zip(ours, usual, strict=True):
        assert [each.stride() for each in one] == [each.stride() for each in other]
    assert attended(query, key, value)[0].equal(usual[0][0]), "torch has its own kernel again"


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows of heads": Tensor.contiguous,
    "heads of rows": lambda numbers: numbers.transpose(1, 2).contiguous().transpose(1, 2),
    "a head's numbers apart": lambda numbers: numbers.transpose(-2, -1).contiguous().transpose(-2, -1),
    "parts of larger ones": lambda numbers: torch.stack([numbers, -numbers], -1).flatten(-2)[..., ::2],
}


@pytest.mark.usefixtures("portable")
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.3}], ids=str)
def test_a_layout_changes_neither_the_way_nor_the_bits(
    options: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key, value = drawn(2, 4, 19, 16), drawn(2, 4, 23, 16, key=1), drawn(2, 4, 23, 16, key=2)
    mask = {} if "is_causal" in options else {"attn_mask": drawn(19, 23, key=3)}
    bits, calls = [], []
    true_parts = module._Asked.parts
    monkeypatch.setattr(module._Asked, "parts", lambda self: calls.append(1) or true_parts(self))
    for layout in LAYOUTS.values():
        for of_key in LAYOUTS.values():
            torch.manual_seed(5)
            calls.clear()
            masks = {name: layout(each[None, None])[0, 0] for name, each in mask.items()}
            bits.append(attended(layout(query), of_key(key), layout(value), **options, **masks))
            assert len(calls) == (0 if "dropout_p" in options else 2)
    for other in bits[1:]:
        assert all(map(torch.equal, bits[0], other))


@pytest.mark.usefixtures("portable")
def test_how_many_heads_are_computed_at_a_time_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [drawn(3, 4, 70, 8, key=each) for each in range(3)]
    whole = attended(*inputs)
    for at_once in (1, 70 * 70, 3 * 70 * 70, 5 * 70 * 70):
        monkeypatch.setattr(module, "_AT_ONCE", at_once)
        assert all(map(torch.equal, attended(*inputs), whole))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float64])
def test_short_numbers_are_raised_and_rounded_once_and_float64_is_torchs(kind: torch.dtype) -> None:
    inputs = [drawn(2, 4, 19, 16, key=each).to(kind) for each in range(3)]
    usual = attended(*inputs)
    with portable_kernels():
        ours = attended(*inputs)
        raised = functional.scaled_dot_product_attention(*(each.float() for each in inputs)).to(kind)
    assert all(map(torch.equal, ours, usual)) if kind == torch.float64 else ours[0].equal(raised)


@pytest.mark.usefixtures("portable")
def test_what_torch_refuses_is_refused() -> None:
    with pytest.raises(RuntimeError):
        functional.scaled_dot_product_attention(drawn(1, 2, 5, 16), drawn(1, 2, 5, 8), drawn(1, 2, 5, 16))
    with pytest.raises(RuntimeError):
        functional.scaled_dot_product_attention(drawn(1, 3, 5, 8), drawn(1, 2, 5, 8), drawn(1, 2, 5, 8))


@pytest.mark.usefixtures("portable")
def test_a_query_that_sees_no_key_gets_zeros() -> None:
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2] = False
    result, of_query, of_key, of_value = attended(*(drawn(1, 1, rows, 16) for rows in (5, 7, 7)), attn_mask=mask)
    assert not result[0, 0, 2].any()
    assert not of_query[0, 0, 2].any()
    assert all(each.isfinite().all() for each in (of_key, of_value))
