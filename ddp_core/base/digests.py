"""Digests of what goes into training and of what comes out: samples, weights, buffers, the optimizer's state."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

_COLUMNS = 1021
"""A prime number: the rows of a weight are hardly ever as long, so two that change places change the columns' sums."""
_DEPTH = 16
_NUMBERS = (bool, int, float, complex)


def weights_digest(state: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over a state dict, the `weights_sha256` of run.json.

    For each entry in sorted key order: the UTF-8 name, NUL, the dtype's name, NUL, the shape as decimal numbers
    joined by commas, NUL, then the raw little-endian bytes.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(f"{name}\0".encode())
        for part in _tensor_bytes(state[name]):
            digest.update(part)
    return digest.hexdigest()


def optimizer_digest(state: Mapping[str, Any]) -> str:
    """SHA-256 over what an optimizer's state dict has in `state`: momenta, second moments, step counts.

    Without `state`, as of some that wrap another optimizer, it is over the whole dict. Each entry is named `<number of
    the parameter>.<name>`, and digested as `weights_digest` says. What lies in a dict or a list is named by its key,
    too. Numbers and lists of numbers are tensors, a text is the tensor of its UTF-8 bytes.
    """
    whole = state.get("state", state)
    named = ((f"{key:06d}" if isinstance(key, int) else str(key), value) for key, value in whole.items())
    return weights_digest({name: tensor for start, value in named for name, tensor in _leaves(start, value)})


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Everything in a state but None, as tensors with their names."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}", inner)
    elif isinstance(value, (Tensor, *_NUMBERS)):
        yield name, torch.as_tensor(value)
    elif isinstance(value, list | tuple):
        if all(isinstance(each, _NUMBERS) for each in value):
            yield name, torch.as_tensor(value)
        else:
            for index, inner in enumerate(value):
                yield from _leaves(f"{name}.{index}", inner)
    elif value is not None:
        yield name, torch.tensor(list(str(value).encode()), dtype=torch.uint8)


def named_tensors(tree: Mapping[Any, Any]) -> Iterator[tuple[str, Tensor]]:
    """Everything in dicts, lists and tuples as tensors with dotted names, as `optimizer_digest` has it."""
    for key, value in tree.items():
        yield from _leaves(str(key), value)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have one shape, one dtype and the same bytes: as a number, NaN equals nothing."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(bytes_of(one), bytes_of(other))


def bytes_of(tensor: Tensor) -> Tensor:
    """The tensor's content, dense, as uint8, on its device: its own memory where that lies in order, else a copy."""
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    flat = dense.detach().resolve_conj().resolve_neg().reshape(-1)
    # A tensor of fewer than two elements is contiguous with any stride, such as the 0 of an expanded gradient; bytes
    # can be seen with a stride of 1 only.
    in_order = flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)
    return in_order.view(torch.uint8)


def checksum(tensor: Tensor) -> str:
    """Tells two tensors of one shape and dtype apart: no digest, but several times faster, and made on their device."""
    # 8 bytes make a number, and the numbers a table, in which every 16 rows are added up first. The sums of what is
    # left in its rows and in its columns differ after any one change, and after several, unless these make up for each
    # other.
    return digest_of_sums([sums(tensor)])


def sums(tensor: Tensor) -> Tensor:
    """What `checksum` is made of: a tensor of int64 on the tensor's device, so that nothing waits for that."""
    content = bytes_of(tensor)
    if len(content) % 8 or content.storage_offset() % 8:
        content = pad(content, (0, -len(content) % 8))
    numbers = content.view(torch.int64)
    rows = len(numbers) // _COLUMNS
    if not rows:
        return numbers.clone()
    depth = _DEPTH if rows >= _DEPTH else 1
    end = rows // depth * depth * _COLUMNS
    table = numbers[:end].view(-1, depth, _COLUMNS).sum(1)  # so memory is read once
    return torch.cat([table.sum(0), table.sum(1), numbers[end:]])


def digest_of_sums(parts: Sequence[Tensor]) -> str:
    """The checksum of tensors, one after the other, from their `sums`."""
    content = torch.cat(list(parts)).cpu().numpy().tobytes() if parts else b""
    return hashlib.sha256(content).hexdigest()[:16]


def fast_digest(tensors: Iterable[tuple[str, Tensor]]) -> bytes:
    """SHA-256 over the names of tensors and the `sums` of them all: tells two such lists apart as `checksum` does."""
    names, parts = [], [torch.empty(0, dtype=torch.int64)]
    for name, tensor in tensors:
        names.append((name, tensor.dtype, tensor.shape))
        parts.append(sums(tensor).cpu())
    digest = hashlib.sha256(repr(names).encode())
    digest.update(torch.cat(parts).numpy().tobytes())
    return digest.digest()


def first_difference(gather: Callable[[Any], list[Any]], tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """What ranks that should have the same tensors do not have alike: the first of them, and the ranks, in words.

    None where all is alike. A collective: `gather` returns every rank's value, by rank, on every rank. It sends a
    checksum of each tensor; compare their `fast_digest` first.
    """
    everyones = [dict(theirs) for theirs in gather([(name, checksum(tensor)) for name, tensor in tensors])]
    for name in dict.fromkeys(name for theirs in everyones for name in theirs):
        values = [theirs.get(name) for theirs in everyones]
        usual, count = Counter(values).most_common(1)[0]
        if count < len(values):
            others = [rank for rank, value in enumerate(values) if value != usual] if len(values) > 2 else [0, 1]
            return f"{name} is not the same on all ranks (differs: {', '.join(map(str, others))} of {len(values)})"
    return None


def tree_digest(tree: Any) -> str:
    """SHA-256 over a tree of dicts, lists and tuples with tensors, arrays, images, numbers and strings in it.

    Tensors and arrays count with dtype, shape and bytes. Any other object counts with its type's name and its
    attributes.
    """
    digest = hashlib.sha256()
    for part in _tree_bytes(tree):
        digest.update(part)
    return digest.hexdigest()


def _tree_bytes(tree: Any) -> Iterator[Any]:
    kind = type(tree).__name__
    if isinstance(tree, Tensor):
        yield b"tensor\0"
        yield from _tensor_bytes(tree)
    elif isinstance(tree, bytes | bytearray | str | bool | int | float | complex | None):
        content = bytes(tree) if isinstance(tree, bytes | bytearray) else repr(tree).encode(errors="backslashreplace")
        yield f"{kind}\0{len(content)}\0".encode()
        yield content
    elif isinstance(tree, Mapping):
        yield f"mapping\0{len(tree)}\0".encode()
        for key, value in tree.items():
            yield from _tree_bytes(key)
            yield from _tree_bytes(value)
    elif isinstance(tree, list | tuple):
        yield f"sequence\0{len(tree)}\0".encode()
        for value in tree:
            yield from _tree_bytes(value)
    elif hasattr(tree, "__array_interface__"):
        # NumPy's arrays and scalars, and PIL's images.
        array = np.ascontiguousarray(tree)
        yield f"array\0{array.dtype}\0{array.shape}\0".encode()
        yield from [array.tobytes()] if not array.dtype.hasobject else _tree_bytes(array.tolist())
    else:
        yield f"{type(tree).__module__}.{type(tree).__qualname__}\0".encode()
        yield from _tree_bytes(getattr(tree, "__dict__", {}))


def _tensor_bytes(tensor: Tensor) -> Iterator[Any]:
    tensor = tensor.detach().cpu()
    shape = ",".join(str(size) for size in tensor.shape)
    yield f"{str(tensor.dtype).removeprefix('torch.')}\0{shape}\0".encode()
    yield bytes_of(tensor).numpy()
