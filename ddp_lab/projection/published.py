"""Scaling that others measured, beside what this model predicts for the same hardware."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddp_lab.projection.costs import all_reduce_seconds
from ddp_lab.projection.hardware import GPUS, LINKS, NETWORKS
from ddp_lab.projection.step import step

_NVIDIA = "NVIDIA DeepLearningExamples, ResNet50 v1.5 README"


@dataclass(frozen=True)
class Published:
    """Speed-up of `ranks` GPUs over `base` GPUs, as printed."""

    what: str
    gpu: str
    link: str
    network: str
    per_node: int
    base: int
    ranks: int
    speed_up: float
    source: str


RESULTS = (
    Published("DGX-1 V100, FP32", "v100-fp32", "nvlink-v100", "400gbit", 8, 1, 8, 2855 / 367, _NVIDIA),
    Published("DGX-1 V100, mixed", "v100-amp", "nvlink-v100", "400gbit", 8, 1, 8, 8322 / 1200, _NVIDIA),
    Published("DGX A100, TF32", "a100-tf32", "nvlink-a100", "1600gbit", 8, 1, 8, 7248 / 938, _NVIDIA),
    Published("DGX A100, mixed", "a100-amp", "nvlink-a100", "1600gbit", 8, 1, 8, 16621 / 2470, _NVIDIA),
    Published(
        *("256 P100, 50 Gbit Ethernet", "p100-fp32", "pcie3", "50gbit", 8, 8, 256, 0.9 * 32),
        "Goyal et al., arXiv:1706.02677: about 90 % efficiency from 8 to 256 GPUs",
    ),
)
IN_WORDS = "Li et al., VLDB 2020 (arXiv:2006.15704): near-linear scalability using 256 GPUs, said in words"


def compare() -> list[dict[str, Any]]:
    """Each published speed-up, the model's (better of ring and tree), and the model's error."""
    rows = []
    for result in RESULTS:
        modelled = result.ranks / result.base * _efficiency(result, result.ranks) / _efficiency(result, result.base)
        rows.append(
            {
                "what": result.what,
                "base": result.base,
                "ranks": result.ranks,
                "published": result.speed_up,
                "modelled": modelled,
                "error": modelled / result.speed_up - 1,
                "source": result.source,
            }
        )
    return rows


def _efficiency(result: Published, ranks: int) -> float:
    gpu, inside, between = GPUS[result.gpu], LINKS[result.link], NETWORKS[result.network]

    def all_reduce(size: float) -> float:
        return min(
            all_reduce_seconds(algorithm, size, ranks, result.per_node, inside, between)
            for algorithm in ("ring", "tree")
        )

    return step(gpu.batch / gpu.samples_per_second, gpu.gradient_bytes, all_reduce, ranks).efficiency
