"""Scaling that others measured, beside what this model predicts for the same hardware, and what the model misses.

The model knows of communication alone. What else a real run loses (an input pipeline that the GPUs of a node share,
stragglers, the part of a GPU that NCCL takes) is all in the gap between it and a published run. That gap, taken from a
run on one node, is carried over to more nodes; runs on several nodes then say how far such a forecast is off.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from ddp_lab.projection.hardware import GPUS, LINKS, NETWORKS, Gpu
from ddp_lab.projection.nccl import choose
from ddp_lab.projection.step import step

_NVIDIA = "NVIDIA DeepLearningExamples, ResNet50 v1.5 README"
_DLPERF = (
    "Oneflow-Inc/DLPerf, NVIDIADeepLearningExamples/PyTorch/resnet50v1.5/README.md: 8 V100 per node, one InfiniBand "
    "adapter of 100 Gbit/s, NGC 20.03; medians of 5 runs"
)
_GOYAL = "Goyal et al., arXiv:1706.02677: about 90 % efficiency from 8 to 256 GPUs"


@dataclass(frozen=True)
class Published:
    """Samples per second of `ranks` GPUs beside those of `base` GPUs, as printed; `gpu` is a key of GPUS."""

    what: str
    gpu: str
    link: str
    network: str
    per_node: int
    base: int
    ranks: int
    base_speed: float
    speed: float
    source: str

    @property
    def efficiency(self) -> float:
        """The share of the base's speed that each GPU keeps."""
        return self.speed / self.ranks / (self.base_speed / self.base)

    @property
    def one_gpu(self) -> Gpu:
        """The GPU with the speed that it has alone in this publication."""
        speed = self.base_speed if self.base == 1 else GPUS[self.gpu].samples_per_second
        return replace(GPUS[self.gpu], samples_per_second=speed)


def _dlperf(what: str, gpu: str, base_speed: float, speeds: dict[int, float]) -> tuple[Published, ...]:
    return tuple(
        Published(what, gpu, "nvlink-v100", "100gbit", 8, 1, ranks, base_speed, speed, _DLPERF)
        for ranks, speed in speeds.items()
    )


RESULTS = (
    Published("DGX-1 V100, FP32", "v100-fp32", "nvlink-v100", "400gbit", 8, 1, 8, 367, 2855, _NVIDIA),
    Published("DGX-1 V100, mixed", "v100-amp", "nvlink-v100", "400gbit", 8, 1, 8, 1200, 8322, _NVIDIA),
    Published("DGX A100, TF32", "a100-tf32", "nvlink-a100", "1600gbit", 8, 1, 8, 938, 7248, _NVIDIA),
    Published("DGX A100, mixed", "a100-amp", "nvlink-a100", "1600gbit", 8, 1, 8, 2470, 16621, _NVIDIA),
    *_dlperf("V100 nodes, FP32", "v100-fp32", 367.29, {4: 1449.48, 8: 2887.65, 16: 5716.79, 32: 10917.09}),
    *_dlperf("V100 nodes, mixed", "v100-amp", 802.9, {4: 3137.44, 8: 6154.66, 16: 11991.94, 32: 22551.16}),
    # Speeds relative to those of 8 GPUs.
    Published("P100, 50 Gbit Ethernet", "p100-fp32", "pcie3", "50gbit", 8, 8, 256, 8, 0.9 * 256, _GOYAL),
)
IN_WORDS = "Li et al., VLDB 2020 (arXiv:2006.15704): near-linear scalability using 256 GPUs, said in words"


def compare() -> list[dict[str, Any]]:
    """Each published efficiency, the model's, and the forecast from the same publication's run on one node, if any."""
    rows = []
    for result in RESULTS:
        modelled = _modelled(result)
        whole_node = next((other for other in RESULTS if _same(other, result) and other.ranks == other.per_node), None)
        forecast = None
        if whole_node is not None and result.ranks > result.per_node:
            forecast = modelled * whole_node.efficiency / _modelled(whole_node)
        rows.append(
            asdict(result)
            | {
                "published": result.efficiency,
                "modelled": modelled,
                "error": modelled / result.efficiency - 1,
                "forecast": forecast,
                "forecast_error": None if forecast is None else forecast / result.efficiency - 1,
            }
        )
    return rows


def forecast_errors() -> tuple[list[float], int]:
    """How far forecasts from one node were off on published runs of several, and the most GPUs among these runs."""
    rows = [row for row in compare() if row["forecast_error"] is not None]
    return [row["forecast_error"] for row in rows], max(row["ranks"] for row in rows)


def beside(gpu: Gpu, ranks: int) -> Published | None:
    """A publication that has this GPU, as fast alone as here within 1 %, and this number of GPUs."""
    return next((result for result in _of(gpu) if result.ranks == ranks), None)


def whole_node(gpu: Gpu) -> Published | None:
    """A publication that has this GPU, as fast alone as here within 1 %, with all GPUs of one node."""
    return next((result for result in _of(gpu) if result.ranks == result.per_node), None)


def gap(result: Published) -> float:
    """What is left of the model's efficiency in the published run: 1 where the model misses nothing."""
    return result.efficiency / _modelled(result)


def _of(gpu: Gpu) -> list[Published]:
    return [
        result
        for result in RESULTS
        if result.gpu == gpu.name
        and (result.one_gpu.gradient_bytes, result.one_gpu.batch) == (gpu.gradient_bytes, gpu.batch)
        and abs(result.one_gpu.samples_per_second / gpu.samples_per_second - 1) < 0.01
    ]


def _same(one: Published, other: Published) -> bool:
    return (one.what, one.source) == (other.what, other.source)


def _modelled(result: Published) -> float:
    return _efficiency(result, result.ranks) / _efficiency(result, result.base)


def _efficiency(result: Published, ranks: int) -> float:
    gpu, inside, between = result.one_gpu, LINKS[result.link], NETWORKS[result.network]

    def all_reduce(size: float) -> float:
        return choose(size, ranks, result.per_node, inside, between).seconds

    return step(gpu.batch / gpu.samples_per_second, gpu.gradient_bytes, all_reduce, ranks).efficiency
