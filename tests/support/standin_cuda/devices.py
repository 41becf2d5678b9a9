"""The functions of torch.cuda that ask the driver: they are answered from `world`."""

from __future__ import annotations

import itertools
import os
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.standin_cuda import graphs, streams
from tests.support.standin_cuda.world import NAME, WORLD, resolved


class Generator(torch._C.Generator):
    """A device's generator of random numbers; the numbers are the CPU's."""

    stand_in_device: torch.device

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.stand_in_device


class _Generators(type):
    """torch.Generator: makes a generator of the CPU or of a device, and both are instances of it."""

    def __call__(cls, device: Any = "cpu") -> Any:
        return generator_of(resolved(device)) if resolved(device).type == "cuda" else torch._C.Generator(device)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch._C.Generator)


class _AnyGenerator(metaclass=_Generators):
    pass


def generator_of(device: torch.device) -> Generator:
    made = Generator()
    made.stand_in_device = device
    return made


def replace_devices() -> None:
    """From here on torch.cuda finds the devices that are played."""
    driver: dict[str, Any] = {
        "_cuda_getDeviceCount": _device_count,
        "_cuda_init": WORLD.start_driver,
        "_cuda_getDevice": lambda: WORLD.here.device,
        "_cuda_setDevice": _set_device,
        "_cuda_exchangeDevice": _exchange_device,
        "_cuda_maybeExchangeDevice": _exchange_device,
        "_cuda_synchronize": streams.synchronize,
        "_cuda_set_sync_debug_mode": lambda mode: setattr(WORLD, "sync_debug", mode),
        "_cuda_get_sync_debug_mode": lambda: WORLD.sync_debug,
        "_cuda_getArchFlags": lambda: "sm_80 sm_90",
        "_cuda_isInBadFork": lambda: WORLD.is_bad_fork,
        "_cuda_emptyCache": lambda: None,
        "_cuda_memoryStats": _memory_stats,
        "_cuda_resetPeakMemoryStats": _reset_peak,
        "_cuda_canDeviceAccessPeer": lambda *_: True,
        "_cuda_sleep": lambda _: None,
        "_host_emptyCache": lambda: None,
        "_cuda_getCurrentRawStream": lambda index: streams.current_stream(index).cuda_stream,
        "_cuda_ipc_collect": lambda: None,
        "_nccl_version": lambda: 2 << 32 | 27 << 16,
        "_nccl_version_suffix": lambda: b"",
        "_accelerator_exchangeDevice": _exchange_device,
        "_accelerator_maybeExchangeDevice": _exchange_device,
        "_accelerator_getDeviceIndex": lambda: WORLD.here.device,
        "_accelerator_setDeviceIndex": _set_device,
        "_accelerator_getStream": streams.current_stream,
        "_accelerator_setStream": streams.set_stream,
        "_accelerator_synchronizeDevice": streams.synchronize,
    }
    for name, function in driver.items():
        setattr(torch._C, name, function)
    cuda: Any = torch.cuda
    cuda.device_count = lambda: WORLD.count
    cuda._device_count_nvml = lambda: WORLD.count
    cuda._is_in_bad_fork = lambda: WORLD.is_bad_fork
    cuda._cudart = SimpleNamespace()
    cuda._exchange_device = cuda._maybe_exchange_device = _exchange_device
    cuda._get_device_properties = _properties
    cuda.get_device_properties = lambda device=None: _properties(resolved("cuda" if device is None else device).index)
    cuda.mem_get_info = _mem_get_info
    cuda.utilization = _utilization
    cuda.default_generators = tuple(generator_of(torch.device("cuda", each)) for each in range(WORLD.count))
    for each in cuda.default_generators:
        each.manual_seed(torch.default_generator.initial_seed())
    torch.Generator = _AnyGenerator  # type: ignore[misc, assignment]
    cuda.memory.mem_get_info = _mem_get_info
    cuda.Stream, cuda.Event = streams.Stream, streams.Event
    cuda.streams.Stream, cuda.streams.Event = streams.Stream, streams.Event
    cuda.StreamContext, cuda.stream, cuda.set_stream = streams.StreamContext, streams.stream, streams.set_stream
    cuda.current_stream, cuda.default_stream = streams.current_stream, streams.default_stream
    cuda.CUDAGraph = cuda.graphs.CUDAGraph = graphs.CUDAGraph
    pools = itertools.count(1)
    cuda.graph_pool_handle = cuda.graphs.graph_pool_handle = lambda: (0, next(pools))
    cuda.is_current_stream_capturing = cuda.graphs.is_current_stream_capturing = lambda: (
        WORLD.here.recording is not None
    )
    torch.version.cuda = "13.0"
    accelerator: Any = torch.accelerator
    accelerator.is_available = lambda: True
    accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    accelerator.device_count = lambda: WORLD.count
    accelerator.current_device_index = lambda: WORLD.here.device
    accelerator.set_device_index = accelerator.set_device_idx = lambda device: _set_device(resolved(device).index)
    accelerator.current_stream = streams.current_stream
    accelerator.synchronize = streams.synchronize
    os.register_at_fork(after_in_child=WORLD.forked)
    _replace_autocast()
    _replace_profiler()


def _device_count() -> int:
    # Asking the driver starts it. torch can ask NVML instead.
    WORLD.has_driver = True
    return WORLD.count


def _set_device(index: int) -> None:
    if index >= 0:
        WORLD.here.device = resolved(torch.device("cuda", index)).index


def _exchange_device(index: int) -> int:
    before = WORLD.here.device
    _set_device(index)
    return before


def _properties(index: int) -> Any:
    resolved(torch.device("cuda", index))
    return SimpleNamespace(
        name=NAME,
        major=9,
        minor=0,
        total_memory=WORLD.bytes_each,
        multi_processor_count=1,
        uuid=f"00000000-0000-0000-0000-{index:012d}",
        pci_bus_id=index,
        pci_device_id=0,
        pci_domain_id=0,
    )


def _memory_stats(index: int) -> dict[str, Any]:
    memory = WORLD.memory[index]
    kinds = {"current": memory.now, "peak": memory.peak, "allocated": memory.peak, "freed": 0}
    names = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")
    return {name: {"all": kinds, "small_pool": kinds, "large_pool": kinds} for name in names} | {"num_ooms": 0}


def _reset_peak(index: int) -> None:
    WORLD.memory[index].peak = WORLD.memory[index].now


def _mem_get_info(device: Any = None) -> tuple[int, int]:
    torch.cuda._lazy_init()
    memory = WORLD.memory[resolved("cuda" if device is None else device).index]
    return WORLD.bytes_each - memory.now, WORLD.bytes_each


def _utilization(device: Any = None) -> int:
    resolved("cuda" if device is None else device)
    return 0


def _replace_autocast() -> None:
    """Autocast for CUDA rounds what autocast for the CPU would: the tensors are the CPU's."""
    for name in ("set_autocast_enabled", "set_autocast_dtype"):
        setattr(torch, name, _for_both(getattr(torch, name)))


def _for_both(setter: Any) -> Any:
    def both(kind: Any, value: Any = None) -> None:
        if value is None:  # an older form, without the kind
            kind, value = "cuda", kind
        setter(kind, value)
        if kind == "cuda":
            setter("cpu", value)

    return both


def _replace_profiler() -> None:
    """The profiler's part for CUDA is C++ that is not here: what is asked of it is left out."""
    profile: Any = torch.profiler.profile
    begin = profile.__init__

    def begin_on_cpu(self: Any, *, activities: Any = None, **named: Any) -> None:
        kinds = [each for each in activities or [] if each != torch.profiler.ProfilerActivity.CUDA]
        begin(self, activities=kinds or [torch.profiler.ProfilerActivity.CPU], **named)

    profile.__init__ = begin_on_cpu
