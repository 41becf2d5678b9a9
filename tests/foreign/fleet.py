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
NAMES: dict[str, dict[str, list[str]]] = json.loads((Path(__file__).parent / "names.json").read_text())
"""By library, the models that are `large` and all `rules` of optimizers; `architectures` by what they are trained for.

Large are those of 40 million parameters or more, or with large images: each is trained alone, after all others. Among
the rules of pytorch_optimizer are those of torch that it also lists.
"""

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
            yield Case(library, architecture, "images.py", settings, architecture in NAMES["large"][library])


def _architectures() -> Iterator[Case]:
    for task, architectures in NAMES["architectures"].items():
        for architecture in architectures:
            settings = (f"model.task={task}", f"data.task={task}", f"model.architecture={architecture}")
            yield Case("transformers", architecture, "transformers_tiny.py", settings)


def _optimizers() -> Iterator[Case]:
    for library, group in (("torch", "torch-optimizers"), ("pytorch_optimizer", "pytorch_optimizer")):
        for rule in NAMES["rules"][library]:
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
