"""Attention that replaces torch's kernel for CPUs, forward and backward.

Torch's own kernel calls MKL for each head. Here the products are chains, and between them stand a softmax of whole rows
and its gradient, as torch computes them. 1,024 queries at a time are computed, where sums over queries are cut anyway:
so memory grows with the number of keys alone.

Torch calls this kernel where there is no dropout, the mask needs no gradient, and heads have one width; else it makes
attention of other operations, whose products are chains as well. It also asks whether the numbers of a head lie side by
side in memory, on which no result may depend: `attention` lays them so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ddp_core.base.torch_internals import softmax_gradient
from ddp_core.numerics.chain_code import LONGEST
from ddp_core.numerics.chains import chained, chained_into
from ddp_core.numerics.products import OURS, Kernel

_AT_ONCE = 2**22
"""Scores that are in memory at a time, or those of `LONGEST` queries of a head, where these are more."""


def attention(
    usual: Kernel,
    keys: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`torch.nn.functional.scaled_dot_product_attention`, which chooses its kernel by shapes and dtypes alone."""
    query, key, value = (_side_by_side(each) for each in (query, key, value))
    mask = None if attn_mask is None else _side_by_side(attn_mask)
    return usual(keys, query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _side_by_side(numbers: Tensor) -> Tensor:
    is_cpu = numbers.device.type == "cpu" and numbers.layout == torch.strided
    return numbers.contiguous() if is_cpu and numbers.dim() and numbers.stride(-1) != 1 else numbers


def _result(
    usual: Kernel,
    keys: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    """What attention gives, and the logarithm of the sum of each query's exponentials.

    `query` is [samples, heads, queries, width], `key` and `value` alike with their own numbers of heads and rows.
    `usual` is torch's own kernel, here and below.
    """
    if query.dtype not in OURS:
        return usual(keys, query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
    asked = _Asked(query, key, value, is_causal, attn_mask, scale)
    # Laid out like the queries, as torch's own kernel does; a head's numbers side by side.
    result = torch.empty_like(asked.query)
    if result.stride(-1) != 1:
        result = torch.empty_like(asked.query, memory_format=torch.contiguous_format)
    logarithms = query.new_empty(query.shape[:3], dtype=torch.float32)
    for part in asked.parts():
        scores = asked.scores(part)
        weights = asked.weights(scores)
        # The greatest weight is one over the sum of the exponentials of what scores have less than the greatest.
        logarithms[part] = scores.amax(-1) - weights.amax(-1).log()
        chained_into(result[part], weights, asked.value[part[:2]])
    return result.to(query.dtype), logarithms


def _gradients(
    usual: Kernel,
    keys: Any,
    coming: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    """The gradients of queries, keys and values, for `coming`, that of the result."""
    if query.dtype not in OURS:
        forward = (query, key, value, out, logsumexp, dropout_p, is_causal)
        return usual(keys, coming, *forward, attn_mask=attn_mask, scale=scale)
    asked = _Asked(query, key, value, is_causal, attn_mask, scale)
    coming = coming.float()
    of_query, of_key, of_value = (_for_gradient(each) for each in (asked.query, asked.key, asked.value))
    for part in asked.parts():
        heads = part[:2]
        weights = asked.weights(asked.scores(part))
        of_weights = chained(coming[part], asked.value[heads].transpose(-2, -1))
        of_scores = softmax_gradient(of_weights, weights) * asked.scale
        chained_into(of_query[part], of_scores, asked.key[heads])
        for total, one, other in (
            (of_key[heads], of_scores, asked.query[part]),
            (of_value[heads], weights, coming[part]),
        ):
            if part[2].start == 0:
                chained_into(total, one.transpose(-2, -1), other)
            else:
                total += chained(one.transpose(-2, -1), other)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        of_key, of_value = (
            _for_gradient(each).copy_(total.unflatten(1, (-1, groups)).sum(2))
            for each, total in ((key, of_key), (value, of_value))
        )
    return of_query.to(query.dtype), of_key.to(query.dtype), of_value.to(query.dtype)


def _for_gradient(of: Tensor) -> Tensor:
    """Memory for a gradient, laid out as torch's own kernel does: the heads of a row side by side."""
    samples, heads, rows, width = of.shape
    return of.new_empty(samples, rows, heads, width, dtype=torch.float32).transpose(1, 2)


_Part = tuple[slice, slice, slice]
"""Some samples, some heads, some queries."""


class _Asked:
    """What attention is asked for, in float32, and its parts."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, mask: Tensor | None, scale: float | None
    ) -> None:
        groups = query.shape[1] // key.shape[1]
        if groups > 1:  # several heads of queries share keys and values
            key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
        self.query, self.key, self.value = query.float(), key.float(), value.float()
        self.is_causal = is_causal
        self.scale = query.shape[-1] ** -0.5 if scale is None else scale
        self.mask = None if mask is None else mask.float().expand(*query.shape[:3], key.shape[2])

    def parts(self) -> Iterator[_Part]:
        """All samples and heads, and of each the queries from the first on."""
        samples, heads, queries, _ = self.query.shape
        at_once = max(1, _AT_ONCE // (min(queries, LONGEST) * self.key.shape[2]))
        for_samples, for_heads = max(1, at_once // heads), min(at_once, heads)
        for sample in range(0, samples, for_samples):
            for head in range(0, heads, for_heads):
                for start in range(0, queries, LONGEST):
                    rows = slice(start, min(start + LONGEST, queries))
                    yield slice(sample, sample + for_samples), slice(head, head + for_heads), rows

    def scores(self, part: _Part) -> Tensor:
        """Products of queries and keys, times the scale, plus the mask; minus infinity for a key that is not seen."""
        scores = chained(self.query[part], self.key[part[:2]].transpose(-2, -1))
        scores *= self.scale
        if self.mask is not None:
            scores += self.mask[part]
        if self.is_causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu_(part[2].start + 1)
            scores.masked_fill_(later, -torch.inf)
        return scores

    def weights(self, scores: Tensor) -> Tensor:
        """The softmax of each query's scores; zeros where a mask leaves a query no key."""
        weights = scores.softmax(-1)
        if self.mask is not None:
            weights.masked_fill_(scores.amax(-1, keepdim=True) == -torch.inf, 0)
        return weights


ATTENTION: Mapping[str, Kernel] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": _result,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _gradients,
}
"""By the dispatcher's name of an operation, what replaces torch's kernel."""
