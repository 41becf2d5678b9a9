"""Starts a script, unchanged, on a number of ranks, in a copy of the folder that it is started in; reads its trace."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.distributed.children import Children
from ddp_core.distributed.world import World, free_port, without_launch
from ddp_lab.diagnose.silence import Silence
from ddp_lab.diagnose.trace import Run, read_run
from ddp_lab.diagnose.variables import BATCHES, FOLDER, GIVEN, ROOTS, STEPS, UNTIL, ended_file

RANKS_WORD = "{ranks}"
"""Stands in the script's arguments for the number of ranks: then the script starts them itself."""
_BOOTSTRAP = Path(__file__).parent / "bootstrap"
_LEFT_OUT = {"__pycache__", "venv", "node_modules"}
"""Folders that are not copied, beside those whose names begin with a dot."""
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_", "NODE_RANK", "SLURM_", "OMPI_", "PMI_")
"""How the variables begin that another launcher may have left in the shell."""
_LARGEST_COPIED = 50 << 20
_MOST_BYTES = 2 << 30
_MOST_FILES = 20_000
_PEERS_SECONDS = 10.0
"""After one rank has failed, the others have so long to end by themselves."""
_POLL_SECONDS = 0.05
_TAIL_LINES = 200


class NoStep(UserError):
    """On this number of ranks the script has made no optimizer step; `fault` names the finding, where it is one."""

    def __init__(self, message: str, fault: str) -> None:
        super().__init__(message)
        self.fault = fault


@dataclass(frozen=True)
class Script:
    """What is to be diagnosed: a file, its arguments, and the folder of which each run gets a copy."""

    file: Path
    arguments: tuple[str, ...]
    folder: Path
    below: Path = Path()
    """Where in that folder it is started."""


class Runner:
    """Starts the script on some ranks, as `children` in folders of theirs, until `deadline` (of time.monotonic)."""

    def __init__(self, script: Script, children: Children, deadline: float) -> None:
        self._script = script
        self._children, self._scratch = children, children.folder
        self._deadline = deadline
        self._copies = 0
        self._runs = 0
        self._large: dict[Path, Path] = {}
        """By file that is too large for a copy in each run, the one copy that all runs read."""

    def folder(self) -> Path:
        """A new copy of the script's folder, without hidden folders. Raises UserError (4) where it is too large."""
        self._copies += 1
        target = self._scratch / f"folder-{self._copies}"
        copied = [0, 0]

        def copy(file: str, into: str) -> None:
            size = Path(file).stat().st_size
            if size > _LARGEST_COPIED:
                Path(into).symlink_to(self._one_copy(Path(file).resolve()))
                return
            copied[:] = copied[0] + 1, copied[1] + size
            if copied[0] > _MOST_FILES or copied[1] > _MOST_BYTES:
                raise UserError(
                    f"{self._script.folder} holds more than {_MOST_FILES} files or {_MOST_BYTES >> 30} GiB, and each "
                    "run gets a copy of the folder that it is started in: start `ddp diagnose` in one with the script "
                    "alone",
                    ExitCode.RESOURCES,
                )
            shutil.copy2(file, into)

        shutil.copytree(
            self._script.folder, target, ignore=_left_out, copy_function=copy, ignore_dangling_symlinks=True
        )
        return target

    def _one_copy(self, file: Path) -> Path:
        """The one copy of a large file, which is for reading alone. Raises UserError (4) where the disk has no room."""
        if (copy := self._large.get(file)) is not None:
            return copy
        size, free = file.stat().st_size, shutil.disk_usage(self._scratch).free
        if 2 * size > free:
            raise UserError(
                f"{file} has {size >> 20} MiB, and {self._scratch.parent} only {free >> 20} MiB free for a copy of it: "
                "move it out of the folder that the script is started in, and give the script its absolute path",
                ExitCode.RESOURCES,
            )
        copy = self._large[file] = self._scratch / f"large-{len(self._large)}"
        shutil.copy2(file, copy)
        copy.chmod(0o444)
        return copy

    def run(
        self,
        ranks: int,
        steps: int,
        until: str = "",
        folder: Path | None = None,
        more: Sequence[str] = (),
        seconds: float | None = None,
        given: str | None = None,
        batches: Path | None = None,
    ) -> Run:
        """The trace of `ranks` ranks over `steps` optimizer steps, and on to a second `epoch` or until it has `saved`.

        All of it takes `seconds` at most, where they are given; else as long as there is time. `folder` is that of an
        earlier run that is to be continued, with `more` arguments. Where it is said how batches are `given` (`union`),
        ranks leave theirs beside their traces, or one process finds them in the folder `batches`. Raises UserError
        where no rank has made a step.
        """
        work = folder or self.folder()
        self._runs += 1
        traces = self._scratch / f"trace-{self._runs}"
        traces.mkdir()
        file = self._script.file
        if file.is_relative_to(self._script.folder):
            file = work / file.relative_to(self._script.folder)
        words = [word.replace(RANKS_WORD, str(ranks)) for word in (*self._script.arguments, *more)]
        port = free_port()
        everywhere = {
            **{name: value for name, value in without_launch(os.environ).items() if not name.startswith(_LAUNCHERS)},
            **{FOLDER: str(traces), ROOTS: os.pathsep.join((str(work), str(file.parent)))},
            **{STEPS: str(steps), UNTIL: until},
            **{BATCHES: "" if given is None else str(batches or traces), GIVEN: given or ""},
            **{"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            # Compiled code calls no hooks; and what it computes is not what is asked for here.
            **{"TORCHDYNAMO_DISABLE": "1", "ACCELERATE_USE_CPU": "true", "TORCH_CPP_LOG_LEVEL": "ERROR"},
            "PYTHONPATH": os.pathsep.join([str(_BOOTSTRAP), *filter(None, [os.environ.get("PYTHONPATH")])]),
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TMPDIR": str(self._scratch)},
        }
        # What torchrun would tell each rank.
        places: list[dict[str, str]] = [{}]
        if not any(RANKS_WORD in word for word in self._script.arguments):
            here: dict[str, Any] = {"store_host": "127.0.0.1", "store_port": port, "launch_id": "ddp-diagnose"}
            worlds = [World(rank, ranks, rank, ranks, **here) for rank in range(ranks)]
            places = [each.to_environment() for each in worlds]
        processes: list[subprocess.Popen[bytes]] = []
        logs = [traces / f"{rank}.log" for rank in range(len(places))]
        try:
            for own, log in zip(places, logs, strict=True):
                with log.open("wb") as out:
                    how: dict[str, Any] = {"cwd": work / self._script.below, "stdout": out, "stderr": subprocess.STDOUT}
                    words_of_all = [sys.executable, str(file), *words]
                    processes.append(self._children.start(words_of_all, env={**everywhere, **own}, **how))
            deadline = self._deadline if seconds is None else time.monotonic() + seconds
            silence = Silence([process.pid for process in processes], traces, (work, file.parent))
            fault, problem = self._wait(processes, logs, traces, deadline, silence)
        finally:
            for process in processes:
                self._children.end(process)
        run = read_run(traces, problem)
        run.fault = fault
        if not run.ranks:
            why = problem or f"it came to its end without one (it prints: {_last_line(logs[0])})"
            raise NoStep(f"on {in_words(ranks)} no optimizer step was seen: {why}{_without_gpus(why)}", fault)
        if run.world != ranks:
            run.problem = run.problem or f"steps of {run.world} ranks were seen, where {ranks} were asked for"
        return run

    @property
    def seconds_left(self) -> float:
        """The time that is left for all further runs together."""
        return max(0.0, self._deadline - time.monotonic())

    def _wait(
        self,
        processes: Sequence[subprocess.Popen[bytes]],
        logs: Sequence[Path],
        traces: Path,
        deadline: float,
        silence: Silence,
    ) -> tuple[str, str]:
        """Wait for all to end; where one failed, or not all have ended in time: the finding, if it is one, and why."""
        failed = -1
        while any(process.poll() is None for process in processes):
            if failed < 0:
                failed = _first_failed(processes, traces)
                if failed >= 0:
                    deadline = min(deadline, time.monotonic() + _PEERS_SECONDS)
            if time.monotonic() > deadline:
                break
            if failed < 0 and (where := silence.where()):
                return "hangs", f"no rank does anything any more: {where}"
            time.sleep(_POLL_SECONDS)
        if failed < 0:
            failed = _first_failed(processes, traces)
        if failed >= 0:
            code = processes[failed].returncode
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            words = f"rank {failed} {how}: {_last_line(logs[failed])}"
            return "" if _without_gpus(words) else "fails-on-more-ranks", words
        if any(process.returncode is None for process in processes):
            waiting = [str(rank) for rank, process in enumerate(processes) if process.returncode is None]
            return "", f"rank {' and '.join(waiting)} had not ended when the time was up (more of it: --seconds)"
        return "", ""


def _first_failed(processes: Sequence[subprocess.Popen[bytes]], traces: Path) -> int:
    """The first rank that has failed; -1 where none has.

    A signal after the script's last line is none of its faults: torch may abort while the interpreter ends, if a script
    leaves its process group to that.
    """
    for rank, process in enumerate(processes):
        code = process.returncode
        if code and not (code < 0 and ended_file(traces, process.pid).exists()):
            return rank
    return -1


def _left_out(folder: str, names: Sequence[str]) -> set[str]:
    """Hidden folders, caches, links to a folder around them, and what is neither file nor folder."""
    here = {name: Path(folder, name) for name in names}
    return {
        name
        for name, path in here.items()
        if not path.is_file()
        and (
            name.startswith(".")
            or name in _LEFT_OUT
            or not path.is_dir()
            or Path(folder).is_relative_to(path.resolve())
        )
    }


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines()[-_TAIL_LINES:] if line.strip()]
    return lines[-1].strip() if lines else "it has printed nothing"


def _without_gpus(why: str) -> str:
    """What to do about a script whose last words are about GPUs, which it does not find."""
    if re.search(r"cuda|gpu|nccl", why, re.IGNORECASE) is None:
        return ""
    return "; it runs on a CPU here, over gloo: give it the arguments that it has for that"


def in_words(count: int) -> str:
    """The number of ranks, as `2 ranks`."""
    return f"{count} rank" + "s" * (count != 1)
