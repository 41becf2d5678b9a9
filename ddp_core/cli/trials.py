"""Several trainings as one command: what is completed is not trained again, the others one after another or at once.

Each training is a `ddp train` of its own, with a run directory of its own. When this process is asked to stop, or dies,
they save and stop, and the same command goes on where they were.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ddp_core.base.beneath import read_file
from ddp_core.base.cuda_driver import gpus_here
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.files import is_file
from ddp_core.cli import training
from ddp_core.cli.prepare import load_with_settings
from ddp_core.config.options import Asked
from ddp_core.distributed.launchers import Node
from ddp_core.distributed.reports import caller_variables
from ddp_core.distributed.world import World, node_here
from ddp_core.experiment.file import LoadedExperiment
from ddp_core.experiment.request import build_splits, promise_broken_by
from ddp_core.numerics.limits import portable_refused_by, rules_of
from ddp_core.record.data import digest_data
from ddp_core.record.directory import RunDirectory, find_runs
from ddp_core.record.lock import require_unlocked

_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Trial:
    """One training of several."""

    name: str
    """What tells it from the others: `seed 3`, or the settings that are its own."""
    asked: Asked
    loaded: LoadedExperiment
    """The experiment with all settings."""

    @classmethod
    def of(cls, name: str, asked: Asked, settings: Sequence[str]) -> Trial:
        """The training that is `asked` for, with further settings. Raises UserError where they cannot be set."""
        asked = asked.model_copy(update={"settings": (*asked.settings, *settings)})
        return cls(name, asked, load_with_settings(asked.experiment, asked.settings))

    @property
    def is_new(self) -> bool:
        """Whether it shall be trained whatever there is: `--resume never` was given."""
        return "resume" in self.asked.model_fields_set and self.asked.resume == "never"

    @property
    def runs(self) -> list[tuple[RunDirectory, Mapping[str, Any]]]:
        """The runs of just this training, with the code and the data of today, the oldest first."""
        found, digest = find_runs(Path(self.asked.output)), self.loaded.experiment.digest()
        same = [(directory, record) for directory, record in found if record["experiment_sha256"] == digest]
        return [(directory, record) for directory, record in same if self._is_this(record)]

    def completed(self) -> tuple[RunDirectory, Mapping[str, Any]] | None:
        """The first completed run of just this training; None where there is none."""
        return next((pair for pair in self.runs if pair[1]["status"] == "completed"), None)

    def words(self) -> list[str]:
        """The words of `ddp` that train it, or continue the run that was begun last.

        Raises UserError where another process trains it now.
        """
        begun = [] if self.is_new else [pair for pair in self.runs if pair[1]["status"] != "completed"]
        changes: dict[str, Any] = {"resume": "never"}
        if begun:
            require_unlocked(begun[-1][0].path)
            changes = {"resume": str(begun[-1][0].path), "fork": None, "at": None}
        return ["train", *self.asked.model_copy(update=changes).to_words()]

    def _is_this(self, record: Mapping[str, Any]) -> bool:
        """Whether a run of the same experiment is what is asked for, on whatever layout where it is exact."""
        asked, layout = self.asked, record["layout"]
        began = [(record.get(name) or {}).get("given") for name in ("init_from", "forked_from")]
        reduction = record["options"]["reduction"]
        return (
            began == [asked.init_from, asked.fork]
            and reduction == self._reduction
            and (reduction == "exact" or (layout["kind"], layout.get("shard", "none")) == (asked.layout, asked.shard))
            and self._has_numerics_of(record)
            and not _has_other_code(record, self.loaded.path)
            and record["data_sha256"] == _data_of(self.loaded, asked.data_dir)
        )

    @property
    def _reduction(self) -> str:
        experiment = self.loaded.experiment
        return self.asked.reduction or ("plain" if promise_broken_by(experiment) else experiment.reduction)

    def _has_numerics_of(self, record: Mapping[str, Any]) -> bool:
        """Whether a run has computed with the numerics that it would have today.

        Where portable numerics cannot be had, an experiment that asks for them computes with native ones.
        """
        rules = rules_of(self.asked.numerics or self.loaded.experiment.numerics)
        cannot = record["layout"]["device"] == "cuda" or portable_refused_by() is not None
        wanted = {rules, None} if self.asked.numerics is None and cannot else {rules}
        return (record.get("fingerprint") or {}).get("numerics_rules") in wanted


_digests: dict[str, str | None] = {}
"""The digests of data by what they were built of: the trials of one command have few data sets, or one."""


def _data_of(loaded: LoadedExperiment, data_dir: str) -> str | None:
    """The digest of the data that the experiment has today; None where they are random. Raises UserError."""
    of = json.dumps([str(loaded.path), loaded.experiment.data.model_dump(mode="json"), data_dir])
    if of not in _digests:
        _digests[of] = digest_data(build_splits(loaded, Path(data_dir))).sha256
    return _digests[of]


def _has_other_code(record: Mapping[str, Any], file: Path) -> bool:
    """Whether the experiment's `file`, or a file beside it, is another one than in the run."""
    source = record.get("source", {"files": {}, "experiment": ""})
    kept = source["files"]
    today = {place: file.parent / place for place in kept if is_file(file.parent / place)}
    if source["experiment"] in kept:
        today[source["experiment"]] = file
    return any(hashlib.sha256(read_file(file)).hexdigest() != kept[place] for place, file in today.items())


def require_one_machine(option: str, asked: Asked) -> None:
    """Raises UserError where more than this machine has a part in it: each of its processes would train everything."""
    if asked.nnodes.high > 1:
        raise UserError(
            f"{option} trains on this machine alone: start each training by itself on its {asked.nnodes} nodes"
        )
    node: Node | None = node_here()
    if World.is_set() or node is not None:
        raise UserError(
            f"{option} starts trainings on this machine, but this process is one of a launcher's: let the launcher "
            "start each training by itself, as an array of jobs for example"
        )


def train_all(trials: Sequence[Trial], at_once: int | None = None) -> int:
    """Train those that are not completed; returns 0, or the exit code of the first that failed.

    `at_once`: how many at a time; where it is None, as many as this machine has GPUs for, and one on the CPU. Raises
    UserError where they cannot be told apart.
    """
    waiting, ended = [], dict[str, int]()
    for trial in trials:
        found = None if trial.is_new else trial.completed()
        if found is None:
            waiting.append(trial)
        else:
            print(f"{trial.name}: completed, {found[0].path}", flush=True)
    if not waiting:
        return ExitCode.DONE
    shares = _shares(waiting[0].asked, at_once)
    with TemporaryDirectory(prefix="ddp-trials-") as scratch, _Children() as children:
        free = list(range(len(shares)))
        while (waiting and not children.is_asked_to_stop) or children.running:
            while waiting and free and not children.is_asked_to_stop:
                trial, share = waiting.pop(0), free.pop(0)
                print(f"{trial.name}: training …", flush=True)
                variables = {**caller_variables(Path(scratch) / str(len(waiting))), **shares[share]}
                process = training.start_ddp(trial.words(), variables, is_quiet=len(shares) > 1)
                children.add(trial.name, process, share)
            for name, code, share in children.ended():
                free.append(share)
                ended[name] = code
                print(f"{name}: {'done' if code == 0 else f'ended with {code}'}", flush=True)
                if code == ExitCode.BAD_INPUT and len(ended) == 1:
                    waiting.clear()  # a mistake in the first is most likely one in all of them
            time.sleep(_POLL_SECONDS)
        if children.is_asked_to_stop:
            return ExitCode.STOPPED
    return next((code if code > 0 else int(ExitCode.INTERNAL) for code in ended.values() if code != 0), ExitCode.DONE)


def _shares(asked: Asked, at_once: int | None) -> list[dict[str, str]]:
    """The variables of each training that may run at a time: which GPUs it sees."""
    visible = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    gpus = [] if asked.device == "cpu" else (visible or [str(number) for number in range(gpus_here())])
    each = asked.nproc_per_node or (1 if asked.layout == "single" else len(gpus)) or 1
    if len(gpus) < each:
        return [{} for _ in range(at_once or 1)]
    count = min(at_once or len(gpus), len(gpus) // each)
    return [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[place * each : (place + 1) * each])} for place in range(count)]


class _Children:
    """The trainings that run now; what asks this process to stop is passed on to them, within the block."""

    def __init__(self) -> None:
        self.running: dict[str, tuple[subprocess.Popen[bytes], int]] = {}
        self.is_asked_to_stop = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Children:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        for process, _share in self.running.values():
            process.terminate()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _pass_on(self, number: int, _: object) -> None:
        self.is_asked_to_stop = True
        for process, _share in self.running.values():
            process.send_signal(signal.SIGTERM)

    def add(self, name: str, process: subprocess.Popen[bytes], share: int) -> None:
        """Take a training that has just been started."""
        self.running[name] = (process, share)
        if self.is_asked_to_stop:
            process.send_signal(signal.SIGTERM)  # asked while it was being started

    def ended(self) -> Iterator[tuple[str, int, int]]:
        """Name, exit code and share of the trainings that have ended since."""
        for name, (process, share) in list(self.running.items()):
            if (code := process.poll()) is not None:
                del self.running[name]
                yield name, code, share
