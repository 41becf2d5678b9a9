"""Scaling that others measured, each figure with its source: what it was before the rule, and what is held out.

The rule of the forecast (`forecast`) was settled beside `KNOWN`. `HELD_OUT` was found afterwards, and nothing was
fitted to it. Its rule, written down before any of it was compared with the model: publications of synchronous
data-parallel training on several nodes whose text names GPU, model, batch, nodes, network, and the speed of one GPU;
all rows on several nodes, the bad ones too, with the run on one node beside them. Left out are rows that do not say in
how many bytes the gradients travel (BERT in mixed precision), those with parameter servers, and PyTorch's second table
(buckets of 1 MB), which has no speed of one GPU without DDP. What is not said is assumed, and stands in `assumed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ddp_lab.projection.costs import Cluster
from ddp_lab.projection.hardware import GPUS, Gpu, cluster_of


@dataclass(frozen=True)
class Published:
    """Samples per second of `ranks` GPUs beside those of `base` GPUs, as printed, or both relative to the base.

    `gpu` is one GPU with its model, as the model of a step gets it. `bucket_bytes` is None where DDP chose.
    """

    what: str
    gpu: Gpu
    cluster: Cluster
    base: int
    ranks: int
    base_speed: float
    speed: float
    source: str
    assumed: str = ""
    bucket_bytes: float | None = None

    @property
    def efficiency(self) -> float:
        """The share of the base's speed that each GPU keeps."""
        return self.speed / self.ranks / (self.base_speed / self.base)

    @property
    def is_one_node(self) -> bool:
        """Whether it ran on all GPUs of one node."""
        return self.ranks == self.cluster.per_node


def _scaling(
    what: str, gpu: Gpu, cluster: Cluster, speeds: Mapping[int, float], source: str, bucket_bytes: float | None = None
) -> tuple[Published, ...]:
    """The rows of a table of speeds by number of GPUs; that of one GPU is the base."""
    alone = replace(gpu, samples_per_second=speeds[1])
    return tuple(
        Published(what, alone, cluster, 1, ranks, speeds[1], speed, source, "", bucket_bytes)
        for ranks, speed in speeds.items()
        if ranks > 1
    )


def _on_v100(name: str, parameters: int, batch: int) -> Gpu:
    """A V100 in FP32 with another model; its speed comes with the row."""
    return replace(GPUS["v100-fp32"], name=f"v100-fp32, {name}", gradient_bytes=4 * parameters, batch=batch)


def _on_p100(name: str, speed: float, parameters: int) -> Gpu:
    return replace(
        GPUS["p100-fp32"], name=f"p100-fp32, {name}", samples_per_second=speed, batch=64, gradient_bytes=4 * parameters
    )


_NVIDIA = "NVIDIA DeepLearningExamples, ResNet50 v1.5 README"
_DLPERF = (
    "Oneflow-Inc/DLPerf (2020), NVIDIADeepLearningExamples/PyTorch/resnet50v1.5/README.md: 8 V100 per node, one "
    "InfiniBand adapter of 100 Gbit/s, NGC 20.03; medians of 5 runs"
)
_GOYAL = "Goyal et al., arXiv:1706.02677 (2017): about 90 % efficiency from 8 to 256 GPUs"
_DGX1, _DGX_A100 = cluster_of(GPUS["v100-fp32"]), cluster_of(GPUS["a100-amp"])
_DLPERF_NODES = cluster_of(GPUS["v100-fp32"], network="100gbit")

KNOWN = (
    *_scaling("DGX-1 V100, FP32", GPUS["v100-fp32"], _DGX1, {1: 367, 8: 2855}, _NVIDIA),
    *_scaling("DGX-1 V100, mixed", GPUS["v100-amp"], _DGX1, {1: 1200, 8: 8322}, _NVIDIA),
    *_scaling("DGX A100, TF32", GPUS["a100-tf32"], _DGX_A100, {1: 938, 8: 7248}, _NVIDIA),
    *_scaling("DGX A100, mixed", GPUS["a100-amp"], _DGX_A100, {1: 2470, 8: 16621}, _NVIDIA),
    *_scaling(
        "V100 nodes, FP32",
        GPUS["v100-fp32"],
        _DLPERF_NODES,
        {1: 367.29, 4: 1449.48, 8: 2887.65, 16: 5716.79, 32: 10917.09},
        _DLPERF,
    ),
    *_scaling(
        "V100 nodes, mixed",
        GPUS["v100-amp"],
        _DLPERF_NODES,
        {1: 802.9, 4: 3137.44, 8: 6154.66, 16: 11991.94, 32: 22551.16},
        _DLPERF,
    ),
    # Speeds relative to those of 8 GPUs.
    Published("P100, 50 Gbit Ethernet", GPUS["p100-fp32"], cluster_of(GPUS["p100-fp32"]), 8, 256, 8, 0.9 * 256, _GOYAL),
)

_PYTORCH = (
    "PyTorch, benchmarks/distributed/ddp/README.md, example output (PyTorch 1.4, 2020), "
    "github.com/pytorch/pytorch/tree/main/benchmarks/distributed/ddp: DGX machines with 8 V100 and 4 InfiniBand "
    "adapters of 100 Gbit/s, batch 32; p50, one GPU without DDP"
)
_DLPERF_EXAMPLES = (
    "Oneflow-Inc/DLPerf (2020), PyTorch/resnet50v1.5/README.md, github.com/Oneflow-Inc/DLPerf: the nodes of its other "
    "pages, pytorch/examples with PyTorch 1.6, batch 128, 8 or 48 loading processes, DataLoader or DALI; medians of 5 "
    "runs"
)
_DLPERF_BERT = (
    "Oneflow-Inc/DLPerf (2020), NVIDIADeepLearningExamples/PyTorch/BERT/README.md, FP32, "
    "github.com/Oneflow-Inc/DLPerf: its nodes, BERT-Base of 128 tokens; apex sends all gradients in one piece "
    "(message_size of 250,000,000 in NVIDIA's run_pretraining.py, read in copies)"
)
_HOROVOD = (
    "Horovod, docs/benchmarks.rst, github.com/horovod/horovod: 128 servers of 4 Pascal GPUs, RoCE of 25 Gbit/s, 90 % "
    "and 68 % efficiency on 512 GPUs; speed of one P100, batch 64, synthetic data: TensorFlow, "
    "docs_src/performance/benchmarks.md (2017), github.com/tensorflow/tensorflow"
)
_LI = (
    "Li et al., VLDB 2020, arXiv:2006.15704, section 5.3, as a review quotes it (the paper itself was not at hand): "
    "ResNet-50 over NCCL, 100 % more time per iteration on 256 GPUs: 256 x 50 % = 128"
)
_BERT_BASE = 110_106_428
"""Of BERT-Base with both heads of the pre-training and 30,522 words."""
_ONE_PIECE = 4.0 * 250_000_000


def _per_gpu(what: str, gpu: Gpu, speeds: Mapping[int, float]) -> tuple[Published, ...]:
    """PyTorch's own table, which prints the samples per second of each GPU."""
    return _scaling(what, gpu, _DGX1, {ranks: ranks * speed for ranks, speed in speeds.items()}, _PYTORCH)


def _horovod(what: str, gpu: Gpu, efficiency: float) -> Published:
    nodes = cluster_of(gpu, 4, "pcie3", "25gbit")
    assumed = "P100, PCIe inside a server, DDP's buckets"
    return Published(what, gpu, nodes, 1, 512, 1, efficiency * 512, _HOROVOD, assumed)


HELD_OUT = (
    *_per_gpu("DDP, ResNet-50", _on_v100("resnet50", 25_557_032, 32), {1: 329, 8: 307, 16: 306}),
    *_per_gpu("DDP, ResNet-101", _on_v100("resnet101", 44_549_160, 32), {1: 197, 8: 179, 16: 178}),
    *_per_gpu("DDP, ResNeXt-50", _on_v100("resnext50_32x4d", 25_028_904, 32), {1: 220, 8: 204, 16: 203}),
    *_per_gpu("DDP, ResNeXt-101", _on_v100("resnext101_32x8d", 88_791_336, 32), {1: 77, 8: 71, 16: 71}),
    *_scaling(
        "examples, DataLoader, 8",
        GPUS["v100-fp32"],
        _DLPERF_NODES,
        {1: 306.35, 8: 1070.37, 16: 2093.53, 32: 4119.84},
        _DLPERF_EXAMPLES,
    ),
    *_scaling(
        "examples, DataLoader, 48",
        GPUS["v100-fp32"],
        _DLPERF_NODES,
        {1: 348.62, 8: 2632.93, 16: 5115.4, 32: 10021.29},
        _DLPERF_EXAMPLES,
    ),
    *_scaling(
        "examples, DALI, 8",
        GPUS["v100-fp32"],
        _DLPERF_NODES,
        {1: 354.44, 8: 2244.24, 16: 4372.33, 32: 8816.7},
        _DLPERF_EXAMPLES,
    ),
    *_scaling(
        "examples, DALI, 48",
        GPUS["v100-fp32"],
        _DLPERF_NODES,
        {1: 350.66, 8: 2707.42, 16: 5193.09, 32: 10032.72},
        _DLPERF_EXAMPLES,
    ),
    *_scaling(
        "BERT-Base, batch 32",
        _on_v100("bert-base", _BERT_BASE, 32),
        _DLPERF_NODES,
        {1: 119.6, 8: 921.32, 16: 1499.4, 32: 2885.81},
        _DLPERF_BERT,
        _ONE_PIECE,
    ),
    *_scaling(
        "BERT-Base, batch 48",
        _on_v100("bert-base", _BERT_BASE, 48),
        _DLPERF_NODES,
        {1: 121.94, 8: 928.01, 16: 1584.32, 32: 3039.3},
        _DLPERF_BERT,
        _ONE_PIECE,
    ),
    # Speeds relative to those of one GPU from here on.
    _horovod("Horovod, Inception V3", _on_p100("inception_v3", 142, 23_834_568), 0.90),
    _horovod("Horovod, VGG-16", _on_p100("vgg16", 154, 138_357_544), 0.68),
    Published(
        what="Li et al., ResNet-50",
        gpu=GPUS["v100-fp32"],
        cluster=_DLPERF_NODES,
        base=1,
        ranks=256,
        base_speed=1,
        speed=128,
        source=_LI,
        assumed="V100 in FP32, batch 128, nodes of 8 with 100 Gbit/s",
    ),
)
