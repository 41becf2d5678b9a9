"""Which of torch's operations are known to have the same bits on every x86-64 CPU with AVX2, and how that is known."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Literal

Status = Literal["proved", "by definition", "unknown"]

PROVED = Path(__file__).parent / "proved.txt"
"""The operations that the published digests are made of, a name per line: `python -m tools.portable_operations`."""

NAME = re.compile(r"[a-z_]\w*::[\w.]+")
NOT_OURS = ("autograd::", "torch::", "profiler::", "c10d::", "record_function::")
"""What a trace names beside operations that compute, and the collectives, whose sums the reduction orders."""

_COMPILED = "Torch-Compiled Region"

BY_DEFINITION = frozenset(
    f"aten::{name}{end}"
    for name in (
        # Other views of the same numbers, and new places for them.
        *("alias", "as_strided", "view", "view_as", "reshape", "_reshape_alias", "_unsafe_view", "flatten"),
        *("unflatten", "expand", "expand_as", "squeeze", "unsqueeze", "transpose", "swapaxes", "t", "permute"),
        *("movedim", "adjoint", "numpy_T", "select", "slice", "narrow", "split", "split_with_sizes", "chunk"),
        *("tensor_split", "unbind", "unsafe_split", "unsafe_chunk", "unfold", "diagonal", "broadcast_to"),
        *("broadcast_tensors", "meshgrid", "detach", "clone", "contiguous", "copy", "to", "_to_copy", "type_as"),
        *("lift_fresh", "resolve_conj", "resolve_neg", "result_type", "empty", "empty_like", "empty_strided"),
        *("new_empty", "new_empty_strided", "zeros", "zeros_like", "new_zeros", "zero", "ones", "ones_like"),
        *("new_ones", "full", "full_like", "new_full", "fill", "eye", "scalar_tensor", "set", "resize", "item"),
        *("_local_scalar_dense", "is_nonzero", "equal"),
        # What is there already, in another order, or a part of it.
        *("cat", "concat", "stack", "hstack", "vstack", "dstack", "column_stack", "flip", "fliplr", "flipud"),
        *("roll", "rot90", "repeat", "tile", "repeat_interleave", "index_select", "index_copy", "index_fill"),
        *("gather", "take", "take_along_dim", "masked_fill", "masked_select", "masked_scatter", "where", "nonzero"),
        *("tril", "triu", "tril_indices", "triu_indices", "diag", "diag_embed", "select_scatter", "slice_scatter"),
        *("constant_pad_nd", "pad", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "one_hot", "embedding"),
        *("select_backward", "slice_backward", "diagonal_backward", "unfold_backward", "sort", "argsort", "topk"),
        *("unique", "searchsorted", "reshape_as", "scatter", "value_selecting_reduction_backward"),
        *("_chunk_cat", "split_copy", "split_with_sizes_copy"),
        # True or false, and whole numbers.
        *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor", "logical_not", "isnan"),
        *("isneginf", "isposinf", "isinf", "isfinite", "isin", "__and__", "bitwise_and", "bitwise_or", "bitwise_xor"),
        *("bitwise_not", "any", "all", "argmax", "argmin", "count_nonzero", "bincount", "bucketize"),
        # One of the numbers, or its sign; each of these is exact.
        *("max", "min", "amax", "amin", "maximum", "minimum", "clamp", "clamp_min", "clamp_max", "relu", "abs"),
        *("neg", "sign", "floor", "ceil", "round", "trunc", "threshold", "threshold_backward", "hardtanh", "relu6"),
    )
    for end in ("", "_")
) | {
    # FSDP's own names for what puts sharded parameters and their gradients in the places from which they are sent.
    *("fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy", "fsdp::chunk_cat", "fsdp::copy_")
}
"""Operations that only move or compare numbers, or have exact results, and their forms in place."""

_ALIASES = {"aten::multiply": "aten::mul", "aten::divide": "aten::div"}
"""Other names of operations that compute the same."""


@cache
def proved() -> frozenset[str]:
    """The names in `PROVED`."""
    return frozenset(PROVED.read_text(encoding="utf-8").split())


def status_of(name: str) -> Status:
    """What is known of an operation; `name` is the dispatcher's, without its overload: `aten::mm`.

    An operation in place (`aten::silu_`) computes what the other form does, by the same code.
    """
    if {name, name.removesuffix("_"), _ALIASES.get(name, name)} & proved():
        return "proved"
    return "by definition" if name in BY_DEFINITION else "unknown"


def unknown_among(names: Iterable[str]) -> list[str]:
    """The operations in a trace of which nothing is known, sorted; `torch.compile` for code that it has written."""
    unknown = set()
    for name in names:
        if name.startswith(_COMPILED):
            unknown.add("torch.compile")
        elif NAME.fullmatch(name) and not name.startswith(NOT_OURS) and status_of(name) == "unknown":
            unknown.add(name)
    return sorted(unknown)
