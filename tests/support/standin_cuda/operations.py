"""Every operation on tensors: what CUDA refuses is refused, what comes out is tagged, what a graph records is noted."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.standin_cuda import tags
from tests.support.standin_cuda.world import WORLD, resolved, waits

# The host reads what these leave on the device.
_WAITING = {
    *("_local_scalar_dense", "item", "nonzero", "masked_select", "equal", "is_nonzero", "bincount", "argwhere"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "allclose", "histc"),
}
# Operations without a deterministic kernel, each with the name by which aten/src/ATen/native/cuda alerts of it. Of
# those that torch.use_deterministic_algorithms documents, these are what this project may call, and a layer's backward.
_NOT_DETERMINISTIC = {
    "_adaptive_avg_pool2d_backward": "adaptive_avg_pool2d_backward_cuda",
    "grid_sampler_2d_backward": "grid_sampler_2d_backward_cuda",
    "kthvalue": "kthvalue CUDA",
    "put_": "put_",
    "histc": "_histc_cuda",
    "cumsum": "cumsum_cuda_kernel",
}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "addmv", "dot", "_int_mm", "_scaled_mm", "addbmm"}
_SELECTING = {"index", "index_put", "index_put_", "_index_put_impl_"}
# These take operands of several devices.
_BETWEEN_DEVICES = {"copy_", "_to_copy", "set_", "_foreach_copy_", *_SELECTING}


class Watch(TorchDispatchMode):
    """One for each thread, below everything else."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would load torch._dynamo with the first operation

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # A DTensor cuts itself into tensors, which come here afterwards.
        if any(kind.__module__.startswith("torch.distributed") for kind in types):
            return NotImplemented
        given = dict(kwargs or {})
        asked = given.get("device")
        if asked is not None and asked.type == "meta":
            return func(*args, **given)
        asked = resolved(asked) if asked is not None and asked.type == "cuda" else WORLD.here.factory
        if "device" in given and given["device"] is not None and given["device"].type == "cuda":
            given["device"] = tags.CPU
        pinned = bool(given.pop("pin_memory", False))
        operands = list(_tensors((args, given)))
        found = {device for each in operands if (device := tags.device_of(each)) is not None}
        if not found and asked is None:
            result = func(*args, **given)
            return tags.pin(result) if pinned else result
        WORLD.refuse_bad_fork()
        if found:
            _check(func, args, given, found)
        facts = _facts(func)
        device = asked or (next(iter(found)) if found else None)
        recording = WORLD.here.recording
        if recording is not None:
            recording.before(func, facts, args, given)
        try:
            result = _draw(func, args, given, device) if facts.draws else func(*args, **given)
        except RuntimeError as error:
            if lack := re.search("can't allocate memory: you tried to allocate ([0-9]+) bytes", str(error)):
                WORLD.refuse_memory(device.index if device else 0, int(lack[1]))
            raise
        if facts.name in ("copy_", "_foreach_copy_"):
            _queue_copies(args, given)
        if WORLD.here.factory is None or found or asked is not None:
            _tag_results(func, args, result, operands, device)
        if pinned:
            tags.pin(result)
        if recording is not None:
            recording.after(func, facts, args, given, result, device)
        WORLD.executed[facts.name] += 1
        return result


class _Facts:
    """What an operation is like, by its schema."""

    def __init__(self, func: Any) -> None:
        self.name = str(func._schema.name).partition("::")[2]
        self.space = func.namespace
        self.draws = torch.Tag.nondeterministic_seeded in func.tags
        self.written = [
            (place, argument.name)
            for place, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]


@cache
def _facts(func: Any) -> _Facts:
    return _Facts(func)


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for each in tree:
            yield from _tensors(each)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))


def _check(func: Any, args: Sequence[Any], given: Mapping[str, Any], found: set[torch.device]) -> None:
    """Raises RuntimeError where CUDA would."""
    facts = _facts(func)
    name = facts.name
    if facts.space == "aten" and name not in _BETWEEN_DEVICES:
        for row in _rows(name, args, given):
            _refuse_unlike(name, row)
    if name in _WAITING:
        waits(name)
    if name in ("copy_", "_foreach_copy_"):
        _copy_waits(args, given)
    if name in _SELECTING and any(
        index.dtype in (torch.bool, torch.uint8) or not tags.is_tagged(index) for index in args[1] if index is not None
    ):
        waits(f"{name} with a mask, or with indices on the host")
    if torch.are_deterministic_algorithms_enabled():
        _refuse_undetermined(name, args, given)


def _rows(name: str, args: Sequence[Any], given: Mapping[str, Any]) -> Iterable[list[Tensor]]:
    """The operands that meet: of an operation on lists, those at one place."""
    if not name.startswith(("_foreach", "_fused")):
        return [list(_tensors((args, given)))]
    lists = [each for each in args if isinstance(each, list | tuple) and each and isinstance(each[0], Tensor)]
    return [list(row) for row in zip(*lists, strict=False)]


def _refuse_unlike(name: str, operands: list[Tensor]) -> None:
    devices = [tags.device_of(each) or tags.CPU for each in operands if each.dim() or tags.is_tagged(each)]
    if len(set(devices)) > 1:
        first, *_ = devices
        other = next(each for each in devices if each != first)
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {first} and {other}! "
            f"(when checking the arguments of {name})"
        )


def _copy_waits(args: Sequence[Any], given: Mapping[str, Any]) -> None:
    ours, theirs, non_blocking = _copied(args, given)
    for to, source in zip(ours, theirs, strict=False):
        between_host_and_device(tags.device_of(to), tags.device_of(source), source, non_blocking)


def _copied(args: Sequence[Any], given: Mapping[str, Any]) -> tuple[Sequence[Tensor], Sequence[Tensor], bool]:
    """Destinations and sources of a copy, and whether the host goes on meanwhile."""
    ours, theirs = (each if isinstance(each, list | tuple) else [each] for each in args[:2])
    return ours, theirs, bool(args[2]) if len(args) > 2 else bool(given.get("non_blocking", False))


def _queue_copies(args: Sequence[Any], given: Mapping[str, Any]) -> None:
    ours, theirs, non_blocking = _copied(args, given)
    for to, source in zip(ours, theirs, strict=False):
        if non_blocking and tags.is_tagged(source) and not tags.is_tagged(to):
            WORLD.queue_copy(to)


def between_host_and_device(
    to: torch.device | None, source: torch.device | None, what: Tensor, non_blocking: bool
) -> None:
    """Say that the host waits where such a copy makes it wait."""
    if (to is None) == (source is None):
        return
    # While a graph is recorded, the host's side must be pinned, too.
    if to is not None and WORLD.later:
        WORLD.deliver()  # a copy to the device comes after it in any case
    if not non_blocking or (WORLD.here.recording is not None and to is not None and not tags.is_pinned(what)):
        waits("a copy between host and device")


def _refuse_undetermined(name: str, args: Sequence[Any], given: Mapping[str, Any]) -> None:
    alert = _NOT_DETERMINISTIC.get(name)
    if name in ("cumsum", "histc") and not args[0].is_floating_point():
        alert = None
    if name == "put_" and (given.get("accumulate") or (len(args) > 3 and args[3])):
        alert = None
    if name == "bincount" and (len(args) > 1 and args[1] is not None):
        alert = "_bincount_cuda"
    if alert is not None:
        message = (
            f"{alert} does not have a deterministic implementation, but you set "
            "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this operation, or you "
            "can use the 'warn_only=True' option, if that's acceptable for your application."
        )
        if not torch.is_deterministic_algorithms_warn_only_enabled():
            raise RuntimeError(message)
    if name in _PRODUCTS and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
        raise RuntimeError(
            "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or "
            "`at::Context::setDeterministicAlgorithms(true)`, but this operation is not deterministic because it uses "
            "CuBLAS and you have CUDA >= 10.2. Set CUBLAS_WORKSPACE_CONFIG=:4096:8 or :16:8."
        )


def _draw(func: Any, args: Sequence[Any], given: Mapping[str, Any], device: torch.device | None) -> Any:
    """Draw from the device's generator: what asks for none would draw from the CPU's."""
    if given.get("generator") is not None or device is None:
        return func(*args, **given)
    ours, default = torch.cuda.default_generators[device.index], torch.default_generator
    with WORLD.lock:
        before = default.get_state()
        default.set_state(ours.get_state())
        try:
            return func(*args, **given)
        finally:
            ours.set_state(default.get_state())
            default.set_state(before)


def _tag_results(
    func: Any, args: Sequence[Any], result: Any, operands: list[Tensor], device: torch.device | None
) -> None:
    """New memory belongs to the device; of an operation on lists, each piece to that of its operand."""
    if isinstance(result, list) and args and isinstance(args[0], list | tuple) and len(args[0]) == len(result):
        for piece, operand in zip(result, args[0], strict=True):
            if isinstance(operand, Tensor):
                _tag_new(piece, operands, tags.device_of(operand))
        return
    for piece in _tensors(result):
        _tag_new(piece, operands, device)


def _tag_new(piece: Tensor, operands: list[Tensor], device: torch.device | None) -> None:
    memory = tags.memory_of(piece)
    if memory is None or tags.of_memory(memory) is not None:
        return
    if not any(tags.memory_of(operand) is memory for operand in operands):
        tags.tag_memory(memory, device)
