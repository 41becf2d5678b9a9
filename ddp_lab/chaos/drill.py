"""A drill is data: what is trained, on how many nodes, what goes wrong when. Read from YAML, planned with a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ddp_core.base.errors import UserError
from ddp_core.base.extras import require

DRILLS = Path(__file__).parent / "drills"
RENDEZVOUS = "rendezvous"
EVERYTHING = "cluster"

Kind = Literal["kill", "stop", "pause", "partition", "slow", "throttle", "disk-full", "oom", "down"]
Range = int | float | tuple[float, float]

# How long each fault lasts. A dead node stays away long enough for the others to go on without it.
_SECONDS: dict[str, float] = {"kill": 10, "pause": 20, "partition": 25, "slow": 8, "throttle": 8}


class FaultSpec(BaseModel):
    """One fault of a drill.

    fault: what happens. node: which node it hits: `random` (chosen by the seed), `rank-0` (the one that holds rank 0
    when the fault is due), `node-2`, or `rendezvous`; `down` and `disk-full` hit the whole cluster. at_step or
    at_seconds: when, as a number, or as [low, high] for a random moment in between. seconds: how long it lasts, or how
    long a dead node stays away. rate: of a slow link, in kbit/s. share: of one core, for a throttled node.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    fault: Kind
    node: str = "random"
    at_step: Range | None = None
    at_seconds: Range | None = None
    seconds: Annotated[float, Field(ge=0)] | None = None
    rate: Annotated[int, Field(gt=0)] = 2000
    share: Annotated[float, Field(gt=0.01)] = 0.2

    @model_validator(mode="after")
    def _checked(self) -> FaultSpec:
        if (self.at_step is None) == (self.at_seconds is None):
            raise ValueError("give at_step or at_seconds, one of them")
        when = self.at_step if self.at_step is not None else self.at_seconds
        if isinstance(when, tuple) and not 0 <= when[0] <= when[1]:
            raise ValueError("a range of times is [low, high]")
        named = self.node.startswith("node-") and self.node.removeprefix("node-").isdigit()
        if not named and self.node not in ("random", "rank-0", RENDEZVOUS):
            raise ValueError(f"node: {self.node} is none of random, rank-0, node-N, rendezvous")
        if self.node == RENDEZVOUS and self.fault not in ("kill", "stop", "pause"):
            raise ValueError(f"{self.fault} cannot be done to the rendezvous")
        return self

    @property
    def duration(self) -> float:
        """Seconds that the fault lasts, or that a dead node stays away."""
        if self.seconds is not None:
            return self.seconds
        return 1 if self.node == RENDEZVOUS else _SECONDS.get(self.fault, 1)


class Drill(BaseModel):
    """A run and its faults, in order; each waits until the one before is over."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = "drill"
    about: str = ""
    experiment: str = "digits"
    settings: tuple[str, ...] = ()
    """What `--set` takes; the undisturbed run gets these settings, too."""
    nodes: Annotated[int, Field(ge=2)] = 3
    nproc_per_node: Annotated[int, Field(ge=1)] = 1
    checkpoint_every: Annotated[int, Field(ge=1)] = 20
    timeout: Annotated[float, Field(gt=0)] = 10
    paced: bool = True
    """Whether each step takes 0.05 s longer, so that the run outlasts its faults on any machine."""
    recovery: Literal["restart", "live"] = "restart"
    """What `--recovery` is told; with `live` a lost node must cost no step."""
    options: tuple[str, ...] = ()
    """Further options of `ddp train`."""
    faults: tuple[FaultSpec, ...]
    """A drill that breaks nothing by itself says so, with an empty list."""

    def train_options(self) -> tuple[str, ...]:
        """What `ddp train` is told beyond experiment, layout and rendezvous."""
        settings = [word for setting in self.settings for word in ("--set", setting)]
        return (
            *settings,
            *("--reduction", "exact", "--log-every", "1"),
            *("--max-restarts", "50", "--recovery", self.recovery),
            *("--nnodes", f"1:{self.nodes}", "--timeout", f"{self.timeout:g}"),
            *("--checkpoint-every", str(self.checkpoint_every)),
            *(("--fault", "pace@1") if self.paced else ()),
            *self.options,
        )

    def has(self, kind: str) -> bool:
        """Whether the drill has a fault of this kind."""
        return any(fault.fault == kind for fault in self.faults)


@dataclass(frozen=True)
class Planned:
    """A fault with its random choices made: `node` is a name, or `rank-0`, which is looked up when the fault is due."""

    kind: str
    node: str
    duration: float
    rate: int
    share: float
    at_step: int | None = None
    at_seconds: float | None = None


def plan(drill: Drill, seed: int) -> list[Planned]:
    """Make the random choices: the same seed gives the same nodes and times."""
    dice = random.Random(seed)
    planned = []
    for fault in drill.faults:
        node = fault.node
        if fault.fault in ("down", "disk-full"):
            node = EVERYTHING
        elif node == "random":
            node = f"node-{dice.randint(1, drill.nodes)}"
        step = None if fault.at_step is None else round(_draw(dice, fault.at_step))
        seconds = None if fault.at_seconds is None else round(_draw(dice, fault.at_seconds), 3)
        planned.append(Planned(fault.fault, node, fault.duration, fault.rate, fault.share, step, seconds))
    return planned


def _draw(dice: random.Random, when: Range) -> float:
    return dice.uniform(*when) if isinstance(when, tuple) else when


def load(name_or_path: str) -> Drill:
    """The drill of that name in drills/, or in that file. Raises UserError."""
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        path = DRILLS / f"{name_or_path}.yaml"
        if not path.exists():
            near = get_close_matches(name_or_path, names(), n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names())}"
            raise UserError(f"no drill {name_or_path} ({hint}), and a file of your own ends in .yaml")
    require("a drill, which is YAML,", "yaml")
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UserError(f"cannot read the drill {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: a drill is a mapping with `faults`, a list")
    return parse(content | {"name": content.get("name", path.stem)}, str(path))


def parse(content: dict[str, object], place: str = "drill") -> Drill:
    """The drill that a mapping describes. Raises UserError naming field and mistake."""
    try:
        drill = Drill.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"][:3]) or "drill"
        raise UserError(f"{place}: {where}: {first['msg'].removeprefix('Value error, ')}") from None
    for fault in drill.faults:
        if fault.node.startswith("node-") and int(fault.node.removeprefix("node-")) > drill.nodes:
            raise UserError(f"{place}: {fault.fault} of {fault.node}, but there are {drill.nodes} nodes")
    return drill


def names() -> Sequence[str]:
    """The drills that come with the project."""
    return sorted(path.stem for path in DRILLS.glob("*.yaml"))
