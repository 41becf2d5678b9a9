"""What tensors, their memory and the functions that make them say and do about devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.support.standin_cuda import tags
from tests.support.standin_cuda.operations import between_host_and_device
from tests.support.standin_cuda.world import WORLD, resolved, waits

_FACTORIES = (
    *("empty", "zeros", "ones", "full", "arange", "linspace", "logspace", "eye", "rand", "randn", "randint"),
    *("randperm", "empty_strided", "normal", "range", "tril_indices", "triu_indices", "scalar_tensor", "hann_window"),
)
_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")
_NEW = ("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")
_FROM_DATA = ("tensor", "as_tensor", "asarray")
_DRAWING = ("rand", "randn", "randint", "randperm", "normal")
_plain_device: Any = torch._C.TensorBase.device
_plain_to: Any = torch._C.TensorBase.to


def replace_tensors() -> None:
    """From here on tensors know the devices that are played."""
    for name in _FACTORIES:
        setattr(torch, name, _factory(getattr(torch, name), name in _DRAWING))
    for name in _FROM_DATA:
        setattr(torch, name, _from_data(getattr(torch, name)))
    for name in _LIKE:
        setattr(torch, name, _like(getattr(torch, name)))
    for name in _NEW:
        setattr(Tensor, name, _like(getattr(Tensor, name)))
    changed: Any = Tensor
    changed.device = property(_device)
    changed.is_cuda = property(tags.is_tagged)
    changed.is_cpu = property(lambda tensor: _device(tensor).type == "cpu")
    changed.get_device = lambda tensor: -1 if (found := tags.device_of(tensor)) is None else found.index
    changed.to, changed.cpu, changed.cuda = _to, _to_cpu, _to_cuda
    changed.pin_memory, changed.is_pinned = _pin_memory, lambda tensor, device=None: tags.is_pinned(tensor)
    changed.record_stream = _record_stream
    changed.tolist, changed.numpy = _tolist(Tensor.tolist), _numpy(Tensor.numpy)
    changed.share_memory_ = _unless_on_cuda(Tensor.share_memory_)
    changed.__deepcopy__ = _deepcopy(Tensor.__deepcopy__)
    torch.from_dlpack = _from_dlpack(torch.from_dlpack)
    memory: Any = torch.UntypedStorage
    memory.device = property(lambda own: tags.of_memory(own) or tags.CPU)
    memory.is_cuda = property(lambda own: tags.of_memory(own) is not None)
    memory.clone = _memory_clone
    memory.cuda, memory.cpu = _memory_to_cuda, _memory_to_cpu
    torch._C._group_tensors_by_device_and_dtype = _grouped  # type: ignore[assignment]


def _device(tensor: Tensor) -> torch.device:
    found: torch.device = tags.device_of(tensor) or _plain_device.__get__(tensor)
    return found


def _is_cuda(device: Any) -> bool:
    return device is not None and not isinstance(device, bool) and resolved(device).type == "cuda"


def _in_fake() -> bool:
    """Whether torch only asks what an operation would give."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def _on(device: torch.device, tensor: Tensor) -> Tensor:
    torch.cuda._lazy_init()
    return tags.tag(tensor, device)


def _factory(original: Callable[..., Tensor], draws: bool) -> Callable[..., Tensor]:
    @wraps(original)
    def make(*arguments: Any, **named: Any) -> Tensor:
        device = named.get("device")
        if not _is_cuda(device) or _in_fake():
            return original(*arguments, **named)
        torch.cuda._lazy_init()
        device = resolved(device)
        if draws and named.get("generator") is None:
            named["generator"] = torch.cuda.default_generators[device.index]
        before, WORLD.here.factory = WORLD.here.factory, device
        try:
            return _on(device, original(*arguments, **{**named, "device": "cpu"}))
        finally:
            WORLD.here.factory = before

    return make


def _from_data(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original)
    def make(data: Any, *arguments: Any, **named: Any) -> Tensor:
        device = named.pop("device", None)
        if isinstance(data, Tensor) and tags.is_tagged(data) and device is None:
            device = data.device
        if isinstance(data, Tensor) and original.__name__ != "tensor":
            return data.to(device=device or data.device, dtype=named.get("dtype"))
        made = original(data, *arguments, **named, **({} if _is_cuda(device) else {"device": device}))
        if not _is_cuda(device):
            return made
        torch.cuda._lazy_init()
        waits("a tensor made from the host's values")
        needs_grad = made.requires_grad
        return _moved(made.detach(), resolved(device), None, True, None).requires_grad_(needs_grad)

    return make


def _like(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original)
    def make(tensor: Tensor, *arguments: Any, **named: Any) -> Tensor:
        if _in_fake():
            return original(tensor, *arguments, **named)
        asked = named.pop("device", None)
        device = tensor.device if asked is None else resolved(asked)
        if device.type == "cuda":
            torch.cuda._lazy_init()
        made = original(tensor, *arguments, **named, **({"device": device} if device.type == "meta" else {}))
        return made if device.type == "meta" else tags.tag(made, device)

    return make


def _to(tensor: Tensor, *arguments: Any, **named: Any) -> Tensor:
    if tags.memory_of(tensor) is None or type(tensor).__module__.startswith("torch.distributed"):
        unchanged: Tensor = _plain_to(tensor, *arguments, **named)
        return unchanged
    other = arguments[0] if arguments else named.pop("other", None)
    if isinstance(other, Tensor):
        arguments = (other.device, other.dtype, *arguments[1:])
    copy = bool(named.pop("copy", False))
    if len(arguments) > 3 and not isinstance(arguments[3], torch.memory_format):
        copy, arguments = bool(arguments[3]), arguments[:3]
    elif len(arguments) > 2 and isinstance(arguments[0], torch.dtype):
        copy, arguments = bool(arguments[2]), arguments[:2]
    if arguments and isinstance(arguments[0], int):
        arguments = (torch.device("cuda", arguments[0]), *arguments[1:])
    device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*arguments, **named)
    kinds = {} if memory_format is None else {"memory_format": memory_format}
    target = tensor.device if device is None else resolved(device)
    if target.type not in ("cpu", "cuda") or tensor.device.type not in ("cpu", "cuda"):
        made = _plain_to(tensor, target if target.type != "cuda" else "cpu", **kinds)
        return tags.tag(made, target)
    if target == tensor.device:
        here: Tensor = _plain_to(tensor, dtype or tensor.dtype, copy=copy, **kinds)
        return here
    if target.type == "cuda":
        torch.cuda._lazy_init()
    if tensor.requires_grad and torch.is_grad_enabled():
        move: Any = _Move.apply
        moved: Tensor = move(tensor, target, non_blocking, memory_format)
        return moved if dtype is None else moved.to(dtype)
    return _moved(tensor, target, dtype, non_blocking, memory_format)


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, target: torch.device, non_blocking: bool, memory_format: Any) -> Tensor:
        ctx.source = tensor.device
        return _moved(tensor, target, None, non_blocking, memory_format)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].to(ctx.source), None, None, None


def _moved(
    tensor: Tensor, target: torch.device, dtype: torch.dtype | None, non_blocking: bool, memory_format: Any
) -> Tensor:
    source = tags.device_of(tensor)
    between_host_and_device(target if target.type == "cuda" else None, source, tensor, non_blocking)
    kinds = {"memory_format": memory_format or torch.preserve_format}
    made = torch.ops.aten._to_copy.default(tensor.detach(), dtype=dtype or tensor.dtype, **kinds)
    if source is not None and target.type == "cpu" and non_blocking:
        WORLD.queue_copy(tags.pin(made))
    return tags.tag(made, target)


def _to_cpu(tensor: Tensor, memory_format: Any = None) -> Tensor:
    return _to(tensor, "cpu", memory_format=memory_format)


def _to_cuda(tensor: Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = None) -> Tensor:
    return _to(tensor, resolved("cuda" if device is None else device), None, non_blocking, memory_format=memory_format)


def _pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
    if tags.is_tagged(tensor):
        raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")
    torch.cuda._lazy_init()
    return tensor if tags.is_pinned(tensor) else tags.pin(tensor.clone())


def _record_stream(tensor: Tensor, stream: Any) -> None:
    from tests.support.standin_cuda.streams import Stream

    if not tags.is_tagged(tensor):
        raise NotImplementedError("Could not run 'aten::record_stream' with arguments from the 'CPU' backend.")
    assert isinstance(stream, Stream), stream


def _tolist(original: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    return lambda tensor: original(tensor.cpu())


def _numpy(original: Callable[..., Any]) -> Callable[..., Any]:
    def numpy(tensor: Tensor, *, force: bool = False) -> Any:
        if force:
            return original(tensor.detach().cpu().resolve_conj().resolve_neg())
        if tags.is_tagged(tensor):
            raise TypeError(
                f"can't convert {tensor.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to "
                "host memory first."
            )
        return original(tensor)

    return numpy


def _unless_on_cuda(original: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor if tags.is_tagged(tensor) else original(tensor)


def _deepcopy(original: Callable[[Tensor, Any], Tensor]) -> Callable[[Tensor, Any], Tensor]:
    def deepcopy(tensor: Tensor, memo: Any) -> Tensor:
        made = original(tensor, memo)
        device = tags.device_of(tensor)
        if made is not tensor and device is not None:
            tags.tag(made, device)
        return made

    return deepcopy


def _from_dlpack(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def from_dlpack(data: Any, **named: Any) -> Tensor:
        made = original(data, **named)
        if isinstance(data, Tensor) and (device := tags.device_of(data)) is not None:
            tags.tag_memory(made.untyped_storage(), device, size=0)  # the memory is counted once
        return made

    return from_dlpack


def _memory_clone(memory: Any) -> Any:
    copied = torch.UntypedStorage(memory.nbytes())
    with _disable_current_modes():
        copied.copy_(memory)
    tags.tag_memory(copied, tags.of_memory(memory))
    return copied


def _memory_to_cuda(memory: Any, device: Any = None, non_blocking: bool = False) -> Any:
    torch.cuda._lazy_init()
    target = resolved("cuda" if device is None else device)
    if tags.of_memory(memory) == target:
        return memory
    copied = _memory_clone(memory)
    tags.tag_memory(copied, target)
    return copied


def _memory_to_cpu(memory: Any) -> Any:
    if tags.of_memory(memory) is None:
        return memory
    copied = _memory_clone(memory)
    tags.tag_memory(copied, None)
    return copied


def _grouped(lists: Any, with_indices: bool = False) -> dict[Any, Any]:
    """As torch's, which looks at the first list that is not empty."""
    groups: dict[Any, Any] = {}
    first = next(each for each in lists if each)
    for place, tensor in enumerate(first):
        key = (None, None) if tensor is None else (tensor.device, tensor.dtype)
        group, places = groups.setdefault(key, ([[] for _ in lists], []))
        for column, source in zip(group, lists, strict=True):
            if source:
                column.append(source[place])
        places.append(place)
    return {key: (group, places if with_indices else []) for key, (group, places) in groups.items()}
