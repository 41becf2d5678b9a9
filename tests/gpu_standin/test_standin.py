"""What the stand-in for CUDA says, refuses and plays: as CUDA does, as far as its docstring says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.gpu_standin.playing import on_devices

WAITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda tensor: tensor.sum().item(),
    "bool": lambda tensor: bool(tensor.sum() > 0),
    "cpu": lambda tensor: tensor.cpu(),
    "tolist": lambda tensor: tensor.tolist(),
    "nonzero": lambda tensor: tensor.nonzero(),
    "mask": lambda tensor: tensor[tensor > 0],
    "equal": lambda tensor: torch.equal(tensor, tensor.clone()),
    "upload": lambda _: torch.ones(3).cuda(),
    "tensor": lambda tensor: torch.tensor([1.0], device=tensor.device),
    "copy_": lambda tensor: torch.zeros(4).copy_(tensor),
}
GOES_ON: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda tensor: tensor.sum() * 2 + 1,
    "download beside": lambda tensor: tensor.to("cpu", non_blocking=True),
    "upload beside": lambda tensor: tensor.copy_(torch.ones(4).pin_memory(), non_blocking=True),
    "between devices": lambda tensor: tensor.to("cuda:1"),
    "fill": lambda tensor: torch.full((), 3.0, device=tensor.device),
    "indices": lambda tensor: tensor[torch.zeros(2, dtype=torch.int64, device=tensor.device)],
}


def _waits() -> dict[str, str]:
    tensor = torch.ones(4, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    said = {}
    for name, call in {**WAITS, **GOES_ON}.items():
        try:
            call(tensor)
            said[name] = ""
        except RuntimeError as error:
            said[name] = str(error)
    return said


def test_what_waits_for_the_device_raises_where_waiting_is_an_error() -> None:
    said = on_devices(2, _waits)
    assert all(said[name].startswith("called a synchronizing CUDA operation") for name in WAITS), said
    assert not any(said[name] for name in GOES_ON), said


def _devices() -> None:
    first, second = torch.randn(4, device="cuda"), torch.zeros(4, device="cuda:1")
    for meeting in (lambda: first + second, lambda: first * torch.ones(4), lambda: torch.cat([first, second])):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            meeting()
    assert (first * torch.tensor(2.0)).is_cuda, "a number of the host may meet a device's tensor"
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        first.numpy()
    with pytest.raises(torch.AcceleratorError, match="invalid device ordinal"):
        first.to("cuda:2")
    seen: list[torch.device] = []
    thread = threading.Thread(target=lambda: seen.append((second[1:].data + 1).device))
    thread.start()
    thread.join()
    assert seen == [second.device]


def test_tensors_know_their_device_and_unlike_devices_do_not_meet() -> None:
    on_devices(2, _devices)


def _copies() -> None:
    numbers, event = torch.arange(3.0, device="cuda"), torch.cuda.Event()
    first = numbers.to("cpu", non_blocking=True)
    event.record()
    second = torch.zeros(3).pin_memory().copy_(numbers, non_blocking=True)
    assert first.isnan().all(), "nobody has waited for it"
    event.synchronize()
    assert first.tolist() == [0.0, 1.0, 2.0]
    assert second.isnan().all(), "it was queued after the event"
    torch.cuda.synchronize()
    assert second.tolist() == [0.0, 1.0, 2.0]


def test_a_copy_to_the_host_is_there_once_somebody_has_waited_for_it() -> None:
    on_devices(1, _copies)
