"""The list that `make gpu-check` works through, in the order of worth, and how each item of it is run.

An item runs in a forked process of its own, in which CUDA was never started; what it starts are forks, too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks import gpu, gpu_files
from benchmarks.gpu_lines import COLLECTION, HEAD, LINES, NAME, append, place
from ddp_core.base.errors import ExitCode
from ddp_core.config.layout import SHARD_MODES
from tests.support.commands import ROOT, trained
from tests.support.processes import Ended, ddp, launch

LAST_LINES = 12


@dataclass(frozen=True)
class Setting:
    """What all items of a command share."""

    folder: Path
    """Where results are kept."""
    scratch: Path
    deadline: float
    """By time.monotonic, when the command must end."""
    head: Mapping[str, Any] = field(default_factory=dict)
    quick: bool = False
    """Tiny models, for a stand-in."""


class Item(Protocol):
    """Something to find out on a GPU."""

    @property
    def part(self) -> str:
        """Where it stands in the list."""

    @property
    def name(self) -> str:
        """Unlike any other's."""

    @property
    def seconds(self) -> float:
        """How long it may take."""

    @property
    def is_alone(self) -> bool:
        """Whether nothing may run beside it."""

    def run(self, setting: Setting, scratch: Path, seconds: float) -> dict[str, Any]:
        """The line that is recorded: at least its `outcome`; an empty one where all is recorded already."""


@dataclass(frozen=True)
class Run:
    """One training: words for `ddp train`, the ranks that a launcher would start (0: none), the code it ends with."""

    words: tuple[str, ...]
    ranks: int = 0
    code: int = ExitCode.DONE


LAYOUTS = {
    "single": Run(("--layout", "single")),
    "ddp x 2": Run(("--layout", "ddp", "--nproc-per-node", "2"), 2),
    "ddp x 1": Run(("--layout", "ddp", "--nproc-per-node", "1"), 1),
    "dp x 1": Run(("--layout", "dp", "--nproc-per-node", "1")),
    "dp x 2": Run(("--layout", "dp", "--nproc-per-node", "2")),
}


@dataclass(frozen=True)
class Digest:
    """The digest of a training's weights. Those of one `group` must have one digest, if its first word is `exact`."""

    part: str
    group: str
    way: str
    runs: tuple[Run, ...]
    experiment: str = "digits"
    seconds: float = 60.0
    is_alone: bool = False

    @property
    def name(self) -> str:
        """The group and the way."""
        return f"{self.group}: {self.way}"

    def run(self, setting: Setting, scratch: Path, seconds: float) -> dict[str, Any]:
        """Train one after the other, into one folder."""
        end = time.monotonic() + seconds
        for number, run in enumerate(self.runs):
            words = ["train", self.experiment, "--set", "max_steps=12", "--device", "cuda", "--output", str(scratch)]
            left = end - time.monotonic()
            ended = launch([*words, *run.words], run.ranks, scratch / f"said-{number}", left)
            if ended.code != run.code:
                return _failed(ended)
        _, record = trained(scratch)
        return {"outcome": "done", "group": self.group, "way": self.way, "digest": record["weights_sha256"]}


@dataclass(frozen=True)
class Speed:
    """Images per second of one contender of benchmarks.gpu."""

    part: str
    case: str
    traced: bool = False
    seconds: float = 90.0
    is_alone: bool = True

    @property
    def name(self) -> str:
        """That of the contender."""
        return f"trace: {self.case}" if self.traced else f"images/s: {self.case}"

    def run(self, setting: Setting, scratch: Path, seconds: float) -> dict[str, Any]:
        """Take one turn."""
        if self.case == gpu.ARTICLE:
            words, main = [str(scratch / "found.json"), "quick" if setting.quick else "whole"], _article
        else:
            more = gpu.TRACING[setting.quick] if self.traced else ()
            words, main = gpu.words_of(self.case, scratch, setting.quick, *more), ddp
        ended = launch(words, 0, scratch / "said", seconds, main, {"OMP_NUM_THREADS": "4"})
        if ended.code != ExitCode.DONE:
            return _failed(ended)
        found = json.loads((scratch / "found.json").read_text()) if main is _article else gpu.figures(scratch)
        if self.traced:
            gpu.keep_trace(scratch, setting.folder / gpu.TRACE)
        return {"outcome": "done", "case": self.case, **found}


def _article(words: Sequence[str]) -> int:
    from ddp_core.base.fingerprint import cuda_switches

    file, size = words
    speed = gpu.article(*gpu.article_arguments(size == "quick"))
    Path(file).write_text(json.dumps({"images_per_second": speed, "switches": cuda_switches()}))
    return ExitCode.DONE


@dataclass(frozen=True)
class Files:
    """Images per second of the contenders of benchmarks.gpu_files. Each turn has a line as soon as it has ended."""

    part: str
    name: str = "from files"
    seconds: float = 240.0
    is_alone: bool = True

    def run(self, setting: Setting, scratch: Path, seconds: float) -> dict[str, Any]:
        """Take one turn of each."""
        size = gpu_files.QUICK if setting.quick else gpu_files.Size(steps=50, photos=4096)
        workers, tried = gpu_files.fastest_loader(scratch, size)
        for case, take in gpu_files.contenders(scratch, workers, size).items():
            found = {"case": case, "images_per_second": round(take(), 1)}
            line = {"item": f"{self.name}: {case}", "part": self.part, "outcome": "done", **found}
            append(setting.folder / NAME, setting.head, line)
        return {"outcome": "done", "workers": workers, "loader_by_workers": tried}


@dataclass(frozen=True)
class GpuTest:
    """A test of tests/gpu. It appends its own line (tests/gpu/conftest.py)."""

    part: str
    name: str
    seconds: float = 300.0
    is_alone: bool = False

    def run(self, setting: Setting, scratch: Path, seconds: float) -> dict[str, Any]:
        """Run pytest; a line only where that has not come to an end."""
        lines = {LINES: str(setting.folder / NAME), HEAD: json.dumps(setting.head)}
        ended = launch(["-q", "-p", "no:cacheprovider", self.name], 0, scratch / "said", seconds, _pytest, lines)
        TESTS_FAILED = 1
        return {} if ended.code in (0, TESTS_FAILED) else _failed(ended)


def _pytest(words: Sequence[str]) -> int:
    import pytest

    return int(pytest.main(list(words)))


@dataclass(frozen=True)
class Place:
    """What GPUs there are; how long CUDA takes to start in a process that has torch."""

    part: str = "place"
    name: str = "place"
    seconds: float = 60.0
    is_alone: bool = True

    def run(self, setting: Setting, scratch: Path, seconds: float) -> dict[str, Any]:
        """Start CUDA in a process that can be killed."""
        ended = launch([str(scratch / "found.json")], 0, scratch / "said", seconds, _look)
        if ended.code != ExitCode.DONE:
            return _failed(ended)
        found: dict[str, Any] = json.loads((scratch / "found.json").read_text())
        return found


def _look(words: Sequence[str]) -> int:
    import torch

    found: dict[str, Any] = {"outcome": "no device"}
    if torch.cuda.is_available():
        began = time.monotonic()
        torch.zeros(1, device="cuda")
        found = {"outcome": "done", "seconds_to_start": round(time.monotonic() - began, 2), "found": place()}
    Path(words[0]).write_text(json.dumps(found))
    return ExitCode.DONE


@dataclass(frozen=True)
class Collection:
    """The tests of tests/gpu that one or two devices can run."""

    part: str = "tests"
    name: str = COLLECTION
    seconds: float = 60.0
    is_alone: bool = False

    def run(self, setting: Setting, scratch: Path, seconds: float) -> dict[str, Any]:
        """Let pytest list them."""
        words = ["--collect-only", "-q", "-p", "no:cacheprovider", "-m", "gpu or gpu2", "tests/gpu"]
        ended = launch(words, 0, scratch / "said", seconds, _pytest)
        ids = [line for line in ended.said.splitlines() if line.startswith("tests/gpu/") and "::" in line]
        return {"outcome": "done", "tests": len(ids), "ids": ids} if ended.code == 0 and ids else _failed(ended)


def _failed(ended: Ended) -> dict[str, Any]:
    said = [line[:300] for line in ended.said.splitlines() if line.strip()][-LAST_LINES:]
    return {"outcome": "failed", "code": ended.code, "said": said}


def trainings_and_speeds() -> list[Item]:
    """Parts a to c: digests of the plainest, images per second, all other digests."""
    digests = "a: digests"
    most = ("single", "ddp x 2", "ddp x 1", "dp x 1")
    items: list[Item] = [_digest(digests, "exact fp32", way) for way in most]
    items += [_digest(digests, "exact fp32", "single", again=True)]
    items += [_digest(digests, "plain fp32", way) for way in most]
    speeds = "b: images/s"
    items += [Speed(speeds, case) for case in (gpu.ARTICLE, *gpu.CASES)]
    items += [Speed(speeds, gpu.TRACED, traced=True), Files(speeds)]
    return [*items, *_further_digests("c: more digests")]


def _digest(part: str, group: str, way: str, *more: str, again: bool = False, experiment: str = "digits") -> Digest:
    """The training of a group (its first two words: reduction and precision) on a layout."""
    reduction, precision, *_ = group.split()
    words = ("--reduction", reduction, "--set", f"precision={precision}", *LAYOUTS[way].words, *more)
    said = " ".join([way, *more]) + (", again" if again else "")
    return Digest(part, group, said, (Run(words, LAYOUTS[way].ranks),), experiment)


def _further_digests(part: str) -> list[Item]:
    items: list[Item] = []
    for precision in ("bf16", "tf32", "fp16"):
        items += [_digest(part, f"exact {precision}", way) for way in ("single", "ddp x 2", "dp x 2")]
    items += [_digest(part, f"exact {precision}", "single", "--cuda-graph") for precision in ("fp32", "bf16")]
    items += [_digest(part, "exact fp32", "ddp x 2", "--cuda-graph")]
    items += [_digest(part, "exact fp32", "ddp x 2", "--shard", mode) for mode in SHARD_MODES]
    items += [
        _killed_and_resumed(part, "single"),
        _killed_and_resumed(part, "dp x 2"),
        _digest(part, "exact fp32", "dp x 2"),
    ]
    compiled = str(ROOT / "tests" / "support" / "experiment_files" / "compiled.py")
    items += [_digest(part, "exact fp32 compiled", way, experiment=compiled) for way in ("single", "ddp x 2")]
    return items


def _killed_and_resumed(part: str, way: str) -> Digest:
    saving = ("--reduction", "exact", "--checkpoint-every", "1", "--synchronous-save")
    killed = Run((*saving, *LAYOUTS["ddp x 2"].words, "--fault", "kill@5:0"), 2, -9)
    resumed = Run((*saving, *LAYOUTS[way].words, "--resume", "auto"), LAYOUTS[way].ranks)
    return Digest(part, "exact fp32", f"ddp x 2 killed after step 5, resumed on {way}", (killed, resumed))


def items_of_tests(ids: Sequence[str], slice_of: tuple[int, int] | None) -> list[Item]:
    """Parts d and e: the synchronising calls, then all other tests, or a slice of them alone."""
    first = [test for test in ids if "test_no_step_waits" in test]
    rest = [test for test in ids if test not in first]
    if slice_of is not None:
        number, count = slice_of
        first, rest = [], rest[number - 1 :: count]

    def is_alone(test: str) -> bool:
        """Whether it takes all of the device's memory, or times its work."""
        return "memory_pressure" in test or "parts_of_a_step" in test

    items: list[Item] = [GpuTest("d: no step waits", test) for test in first]
    return items + [GpuTest("e: tests", test, is_alone=is_alone(test)) for test in sorted(rest, key=is_alone)]
