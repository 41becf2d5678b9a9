"""GPUs and links, each number with its source. Bandwidths are per direction, in bytes per second."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_lab.projection.costs import Cluster, Link

_NCCL_LATENCY = "NCCL src/graph/tuning.cc, hwLat, ring, simple protocol"
_NCCL_BANDWIDTH = "NCCL src/graph/topo.h, SM{}_NVLINK_BW per link"
_NVIDIA_RESNET = "NVIDIA DeepLearningExamples, PyTorch ResNet50 v1.5 README, training performance (container 21.03)"

NVLINK_LATENCY, NETWORK_LATENCY = 3.4e-6, 14e-6

LINKS = {
    "nvlink-p100": Link(
        "nvlink-p100", NVLINK_LATENCY, 4 * 18.0e9, f"4 links; {_NCCL_BANDWIDTH.format(60)}; {_NCCL_LATENCY}"
    ),
    "nvlink-v100": Link(
        "nvlink-v100", NVLINK_LATENCY, 6 * 20.0e9, f"6 links; {_NCCL_BANDWIDTH.format(70)}; {_NCCL_LATENCY}"
    ),
    "nvlink-a100": Link(
        "nvlink-a100", NVLINK_LATENCY, 12 * 20.0e9, f"12 links; {_NCCL_BANDWIDTH.format(80)}; {_NCCL_LATENCY}"
    ),
    "nvlink-h100": Link(
        "nvlink-h100", NVLINK_LATENCY, 18 * 20.6e9, f"18 links; {_NCCL_BANDWIDTH.format(90)}; {_NCCL_LATENCY}"
    ),
    "pcie3": Link("pcie3", 5.7e-6, 12.0e9, "NCCL src/graph/topo.h, PCI_BW (Gen3 x16); tuning.cc, hwLat", "pcie"),
}
"""Links inside a node."""

NETWORKS = {
    f"{gigabits}gbit": Link(
        *(f"{gigabits}gbit", NETWORK_LATENCY, gigabits * 1e9 / 8, f"line rate of {gigabits} Gbit/s; {_NCCL_LATENCY}"),
        medium="network",
    )
    for gigabits in (1, 10, 25, 50, 100, 200, 400, 800, 1600)
}
"""Links between nodes: all adapters of a node together (a DGX A100 has 8 of 200 Gbit/s)."""


@dataclass(frozen=True)
class Gpu:
    """How fast one GPU alone trains a model, with `batch` samples per step, and the bytes of the model's gradients.

    `link` and `network` are keys of LINKS and NETWORKS: what the GPU comes with in the machine of the source.
    """

    name: str
    samples_per_second: float
    batch: int
    gradient_bytes: float
    capability: int
    link: str
    network: str
    source: str


RESNET50_BYTES = 4 * 25_557_032
"""torchvision's resnet50 has 25,557,032 parameters; gradients travel in float32."""

_DGX1, _DGX_A100 = (70, "nvlink-v100", "400gbit"), (80, "nvlink-a100", "1600gbit")

GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("v100-fp32", 367, 128, RESNET50_BYTES, *_DGX1, f"{_NVIDIA_RESNET}, DGX-1 16 GB, FP32"),
        Gpu("v100-amp", 1200, 256, RESNET50_BYTES, *_DGX1, f"{_NVIDIA_RESNET}, DGX-1 16 GB, mixed precision"),
        Gpu("a100-tf32", 938, 256, RESNET50_BYTES, *_DGX_A100, f"{_NVIDIA_RESNET}, DGX A100 80 GB, TF32"),
        Gpu("a100-amp", 2470, 256, RESNET50_BYTES, *_DGX_A100, f"{_NVIDIA_RESNET}, DGX A100 80 GB, mixed precision"),
        Gpu(
            *("p100-fp32", 1_281_167 * 90 / (29 * 3600) / 8, 32, RESNET50_BYTES, 60, "nvlink-p100", "50gbit"),
            "Goyal et al., arXiv:1706.02677, batch 32 per GPU; 90 epochs in 29 hours on 8 P100: "
            "developer.nvidia.com/facebook-trains-imagenet-1-hour",
        ),
    )
}
"""ResNet-50 on ImageNet. Batches are those of NVIDIA's scripts (128 where 16 GB in FP32 hold no more)."""


def cluster_of(gpu: Gpu, per_node: int = 8, link: str | None = None, network: str | None = None) -> Cluster:
    """Nodes of this GPU with the named links; None: those of the GPU's source."""
    return Cluster(per_node, LINKS[link or gpu.link], NETWORKS[network or gpu.network], gpu.capability)
