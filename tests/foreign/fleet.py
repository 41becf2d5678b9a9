"""The cases of the fleet: every model, optimizer and schedule that is trained, and how each is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.foreign.experiments import updates

EXPERIMENTS = Path(__file__).parent / "experiments"
SIZES: dict[str, dict[str, tuple[int, str]]] = json.loads((Path(__file__).parent / "image_sizes.json").read_text())
"""By library and architecture: the smallest side of an image that works, and the option by which the model is told."""

GROUPS: dict[str, tuple[str, ...]] = {
    "torchvision": ("torchvision",),
    "timm": ("timm",),
    "transformers": ("transformers",),
    "torch-optimizers": (),
    "torch-schedules": (),
    "pytorch_optimizer": ("pytorch_optimizer",),
    "pytorch_optimizer-schedules": ("pytorch_optimizer",),
}
"""The groups of cases, each with the packages that it needs beside torch."""

LARGE = {
    "torchvision": (
        *("alexnet", "convnext_base", "convnext_large", "convnext_small", "efficientnet_b6", "efficientnet_b7"),
        *("efficientnet_v2_l", "efficientnet_v2_m", "inception_v3", "maxvit_t", "regnet_x_16gf", "regnet_x_32gf"),
        *("regnet_y_16gf", "regnet_y_32gf", "resnet101", "resnet152", "resnext101_32x8d", "resnext101_64x4d"),
        *("swin_b", "swin_s", "swin_v2_b", "swin_v2_s", "vgg11", "vgg11_bn", "vgg13", "vgg13_bn", "vgg16", "vgg16_bn"),
        *("vgg19", "vgg19_bn", "vit_b_16", "vit_b_32", "vit_l_16", "vit_l_32", "wide_resnet101_2", "wide_resnet50_2"),
    ),
    "timm": ("beit_base_patch16_224", "gemma4_vit_167m"),
}
"""Models of 40 million parameters or more, or with large images: each is trained alone, after all others."""

LEFT_OUT = {
    "torchvision.regnet_y_128gf": "645 million parameters: dp x 2 of it would take some 20 GB",
    "torchvision.vit_h_14": "632 million parameters: dp x 2 of it would take some 20 GB",
    "pytorch_optimizer.demo": "it sends gradients itself, so one process has no result to compare with",
    "pytorch_optimizer.distributedmuon": "it sends updates itself, so one process has no result to compare with",
}
"""Cases that are known and never trained, with the reason."""

OF_MATRICES_ALONE = (("torch", "Muon"), ("pytorch_optimizer", "spectralsphere"))
"""Optimizers that take no other parameters: libraries and rules."""
WITHOUT_A_RATE = (("pytorch_optimizer", "a2grad"),)
"""Optimizers that find their own steps."""

ARCHITECTURES: dict[str, Sequence[str]] = {
    "causal": (
        *("gpt2", "gpt_neox", "opt", "bloom", "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3"),
        "qwen3_moe",
        *("gemma", "gemma2", "gemma3_text", "phi", "phi3", "mpt", "stablelm", "starcoder2", "olmo", "olmo2", "granite"),
        *("cohere", "mamba", "rwkv", "falcon_mamba", "xglm", "biogpt", "openai-gpt", "gpt_oss", "nemotron", "smollm3"),
        *("glm", "ernie4_5", "persimmon"),
    ),
    "masked": (
        *("bert", "roberta", "distilbert", "albert", "electra", "deberta", "deberta-v2", "mpnet", "convbert", "fnet"),
        *("big_bird", "longformer", "mobilebert", "modernbert", "nystromformer", "rembert", "roformer", "squeezebert"),
        *("xlm", "yoso", "esm", "ibert", "mra"),
    ),
    "pairs": (
        *("t5", "mt5", "umt5", "bart", "mbart", "marian", "pegasus", "blenderbot", "led", "longt5", "m2m_100"),
        *("nllb-moe", "pegasus_x"),
    ),
    "images": (
        *("vit", "beit", "dinov2", "dinov2_with_registers", "vit_msn", "data2vec-vision", "ijepa", "mobilenet_v1"),
        *("mobilevit", "swiftformer", "poolformer", "textnet"),
    ),
    "sound": (
        *("wav2vec2", "hubert", "wavlm", "unispeech", "unispeech-sat", "sew", "sew-d", "data2vec-audio"),
        "wav2vec2-conformer",
    ),
}
"""Architectures of transformers, by what they are trained for."""


@dataclass(frozen=True)
class Case:
    """One model, optimizer or schedule of somebody else."""

    group: str
    name: str
    file: str
    settings: tuple[str, ...]
    is_large: bool = False

    @property
    def key(self) -> str:
        """Its name in the record: `torchvision.resnet18`."""
        return f"{self.group}.{self.name}"

    @property
    def words(self) -> list[str]:
        """What `ddp train` is asked for, but for the layout."""
        return [str(EXPERIMENTS / self.file), *(word for each in self.settings for word in ("--set", each))]


def fleet(only: Sequence[str] = ()) -> Iterator[Case]:
    """The cases whose keys begin with one of the words of `only`; all without any. The large ones come last."""
    chosen = [case for case in every_case() if not only or any(case.key.startswith(word) for word in only)]
    yield from sorted(chosen, key=lambda case: case.is_large)


@cache
def every_case() -> tuple[Case, ...]:
    """All cases, those of one group beside each other."""
    return (*_optimizers(), *_schedules(), *_architectures(), *_images())


def _images() -> Iterator[Case]:
    for library, sizes in SIZES.items():
        for architecture, (size, told) in sizes.items():
            settings = (
                *(f"model.library={library}", f"model.architecture={architecture}", f"model.told={told}"),
                *(f"model.size={size}", f"data.size={size}"),
            )
            yield Case(library, architecture, "images.py", settings, architecture in LARGE[library])


def _architectures() -> Iterator[Case]:
    for task, architectures in ARCHITECTURES.items():
        for architecture in architectures:
            settings = (f"model.task={task}", f"data.task={task}", f"model.architecture={architecture}")
            yield Case("transformers", architecture, "transformers_tiny.py", settings)


def _optimizers() -> Iterator[Case]:
    for library, group, rules in (
        ("torch", "torch-optimizers", updates.RULES_OF_TORCH),
        ("pytorch_optimizer", "pytorch_optimizer", updates.RULES_OF_PYTORCH_OPTIMIZER),
    ):
        for rule in rules:
            alone = ("model.matrices_alone=true",) if (library, rule) in OF_MATRICES_ALONE else ()
            settings = (f"optimizer.library={library}", f"optimizer.rule={rule}", *alone)
            file = "updates_without_a_rate.py" if (library, rule) in WITHOUT_A_RATE else "updates.py"
            yield Case(group, rule, file, settings)


def _schedules() -> Iterator[Case]:
    for group, curves in (
        ("torch-schedules", updates.OF_TORCH),
        ("pytorch_optimizer-schedules", updates.OF_PYTORCH_OPTIMIZER),
    ):
        for curve in curves:
            yield Case(group, curve, "updates.py", (f"schedule.curve={curve}",))
