"""A fast checksum of a tensor that ranks can make together, each from the elements that it has, whatever the layout.

8 bytes make a number x, and a tensor's numbers a table: the n-th has the column n mod C, and the group n // (16 C). The
checksum is the sum of x (A[column] + B[group]), modulo 2**64. The A are odd and the B are even, so each factor is odd,
and any one number that changes changes the sum. It is a sum over positions: the sums of the pieces of a tensor add up
to the tensor's own. Memory is read once, as fast as it can be.

It finds faults and says where they are; it is no digest, since whoever wants to can make tensors of one checksum.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ddp_core.base.digests import bytes_of
from ddp_core.base.seeds import finalise

_COLUMNS = 1021
"""A prime number: the rows of a weight are hardly ever as long, so two that change places change the columns' sums."""
_DEPTH = 16
_GROUP = _COLUMNS * _DEPTH
_BLOCK = 4096
"""The keys of groups are made by so many."""


def position_sum(tensor: Tensor, start: int = 0) -> Tensor:
    """The checksum of a tensor: a number of int64 on its device, so that nothing waits for that.

    Elements count in the sequence in which they lie in memory. `start`: of a flat piece of a larger tensor, the number
    of its first element there; the sums of all pieces, added up, are the sum of the larger tensor.
    """
    first = start * tensor.element_size()
    content = bytes_of(_in_memory_order(tensor.detach()))
    before, after = first % 8, -(first + len(content)) % 8
    if before or after or content.storage_offset() % 8:
        content = pad(content, (before, after))
    return _sum_of(content.view(torch.int64), first // 8)


def _sum_of(numbers: Tensor, first: int) -> Tensor:
    """The sum over numbers of which the first is the `first` of its tensor."""
    if first == 0 and len(numbers) < _GROUP:
        return (numbers * _column_keys(numbers.device)[: len(numbers)]).sum()  # B[0] is 0
    head = min(-first % _GROUP, len(numbers))
    groups = (len(numbers) - head) // _GROUP
    middle = head + groups * _GROUP
    parts = [_within_a_group(numbers[:head], first), _within_a_group(numbers[middle:], first + middle)]
    if groups:
        group = (first + head) // _GROUP
        table = numbers[head:middle].view(groups, _DEPTH, _COLUMNS).sum(1)  # so memory is read once
        parts.append((table.sum(0) * _column_keys(numbers.device)[:_COLUMNS]).sum())
        parts.append((table.sum(1) * _group_keys(numbers.device, group + groups)[group:]).sum())
    return torch.stack(parts).sum()


def _within_a_group(numbers: Tensor, first: int) -> Tensor:
    group, place = divmod(first, _GROUP)
    keys = _column_keys(numbers.device)[place : place + len(numbers)]
    return (numbers * (keys + _group_keys(numbers.device, group + 1)[group])).sum()


@cache
def _column_keys(device: torch.device) -> Tensor:
    """A, for each place in a group."""
    keys = finalise(np.arange(1, _COLUMNS + 1, dtype=np.uint64)) | np.uint64(1)
    return torch.from_numpy(np.tile(keys, _DEPTH).view(np.int64)).to(device)


def _group_keys(device: torch.device, count: int) -> Tensor:
    """B, for at least so many groups."""
    return _keys_of_groups(device, -(-count // _BLOCK) * _BLOCK)[:count]


@cache
def _keys_of_groups(device: torch.device, count: int) -> Tensor:
    keys = finalise(np.arange(count, dtype=np.uint64) + np.uint64(1 << 32)) << np.uint64(1)
    keys[0] = 0
    return torch.from_numpy(keys.view(np.int64)).to(device)


def _in_memory_order(tensor: Tensor) -> Tensor:
    """The elements in one dimension, in the sequence in which they lie in memory where there are no gaps."""
    if tensor.is_contiguous():
        return tensor.reshape(-1)
    strides = tensor.stride()
    turned = tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
    return turned.reshape(-1) if turned.is_contiguous() else tensor.reshape(-1)
