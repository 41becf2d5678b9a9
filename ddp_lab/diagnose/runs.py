"""Starts a script, unchanged, on a number of ranks, in a copy of the folder that it is started in; reads its trace."""

from __future__ import annotations

import json
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
from tempfile import mkdtemp
from typing import Any

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.distributed.children import Children
from ddp_core.distributed.world import World, free_port, without_launch
from ddp_lab.diagnose.silence import Silence
from ddp_lab.diagnose.task import VARIABLE, Task, ended_file
from ddp_lab.diagnose.trace import Run, read_run

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
_POLL_SECONDS = 0.05


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
        self.deadline = deadline

    def folder(self) -> Path:
        """A new copy of the script's folder, without hidden folders. Raises UserError (4) where it is too large."""
        target, copied = Path(mkdtemp("-folder", dir=self._scratch)), [0, 0]

        def copy(file: str, into: str) -> None:
            status, free = Path(file).stat(), shutil.disk_usage(self._scratch).free
            is_large = status.st_size > _LARGEST_COPIED
            kept = self._scratch / f"large-{status.st_dev}-{status.st_ino}" if is_large else Path(into)
            if not kept.exists():
                copied[:] = copied[0] + 1, copied[1] + status.st_size * (not is_large)
                if copied[0] > _MOST_FILES or copied[1] > _MOST_BYTES or 2 * status.st_size > free:
                    raise UserError(
                        f"each run gets a copy of {self._script.folder}, and {file} is too much for it: "
                        f"{self._scratch.parent} has {free >> 20} MiB free, and files of up to "
                        f"{_LARGEST_COPIED >> 20} MiB may be {_MOST_FILES} and have {_MOST_BYTES >> 30} GiB; start "
                        "`ddp diagnose` in a folder with the script alone, and give it absolute paths of all else",
                        ExitCode.RESOURCES,
                    )
                shutil.copy2(file, kept)
            if is_large:
                kept.chmod(0o444)
                Path(into).symlink_to(kept)

        how: dict[str, Any] = {"ignore": _left_out, "ignore_dangling_symlinks": True, "dirs_exist_ok": True}
        return Path(shutil.copytree(self._script.folder, target, copy_function=copy, **how))

    def run(
        self,
        ranks: int,
        task: Task,
        folder: Path | None = None,
        more: Sequence[str] = (),
        seconds: float | None = None,
        needs_step: bool = True,
    ) -> Run:
        """The trace of `ranks` ranks at a task. If it `needs_step`, raises UserError where no rank has made one.

        All of it takes `seconds` at most, where they are given; else as long as there is time. `folder` is that of an
        earlier run that is to be continued, with `more` arguments.
        """
        work = folder or self.folder()
        traces = Path(mkdtemp("-traces", dir=self._scratch))
        file = self._script.file
        if file.is_relative_to(self._script.folder):
            file = work / file.relative_to(self._script.folder)
        words = [word.replace(RANKS_WORD, str(ranks)) for word in (*self._script.arguments, *more)]
        port, roots = free_port(), (str(work), str(file.parent))
        task = task._replace(traces=str(traces), batches=task.batches or str(traces), roots=roots)
        everywhere = {
            **{name: value for name, value in without_launch(os.environ).items() if not name.startswith(_LAUNCHERS)},
            VARIABLE: json.dumps(task._asdict()),
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
            places = [World(rank, ranks, rank, ranks, **here).to_environment() for rank in range(ranks)]
        processes: list[subprocess.Popen[bytes]] = []
        logs = [traces / f"{rank}.log" for rank in range(len(places))]
        try:
            for own, log in zip(places, logs, strict=True):
                with log.open("wb") as out:
                    how: dict[str, Any] = {"cwd": work / self._script.below, "stdout": out, "stderr": subprocess.STDOUT}
                    words_of_all = [sys.executable, str(file), *words]
                    processes.append(self._children.start(words_of_all, env={**everywhere, **own}, **how))
            deadline = self.deadline if seconds is None else time.monotonic() + seconds
            silence = Silence([process.pid for process in processes], traces, (work, file.parent))
            fault, why = self._wait(processes, logs, deadline, silence)
        finally:
            for process in processes:
                self._children.end(process)
        run = read_run(traces)
        run.fault = fault
        if not run.ranks:
            why = why or f"it came to its end without one (it prints: {_last_line(logs[0])})"
            run.problem = f"no optimizer step was seen: {why}{_without_gpus(why)}"
            if needs_step:
                raise UserError(f"on {in_words(ranks)} {run.problem}")
        elif why or run.world != ranks:
            why = why or f"steps of {run.world} ranks were seen, where {ranks} were asked for"
            run.problem = f"after {min(len(rank.steps) for rank in run.ranks)} steps: {why}"
        return run

    def _wait(
        self, processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path], deadline: float, silence: Silence
    ) -> tuple[str, str]:
        """Wait until all have ended, or why they do not: the finding, where it may be one, and a sentence."""
        while True:
            codes = [process.poll() for process in processes]
            for rank, (process, code) in enumerate(zip(processes, codes, strict=True)):
                # A signal after the script's last line is none of its faults: torch may abort while the interpreter
                # ends, if the script has not destroyed its process group.
                if code and not (code < 0 and ended_file(logs[rank].parent, process.pid).exists()):
                    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
                    words = f"rank {rank} {how}: {_last_line(logs[rank])}"
                    return "" if _without_gpus(words) else "fails-on-more-ranks", words
            if None not in codes:
                return "", ""
            if time.monotonic() > deadline:
                waiting = " and ".join(str(rank) for rank, code in enumerate(codes) if code is None)
                return "", f"rank {waiting} had not ended when the time was up (more of it: --seconds)"
            if where := silence.where():
                return "hangs", f"no rank does anything any more: {where}"
            time.sleep(_POLL_SECONDS)


def _left_out(folder: str, names: Sequence[str]) -> set[str]:
    """Hidden folders, caches, links to a folder around them, and what is neither file nor folder."""

    def is_left_out(path: Path) -> bool:
        if path.is_file():
            return False
        is_around = Path(folder).is_relative_to(path.resolve())
        return path.name.startswith(".") or path.name in _LEFT_OUT or not path.is_dir() or is_around

    return {name for name in names if is_left_out(Path(folder, name))}


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it has printed nothing")


def _without_gpus(why: str) -> str:
    """What to do about a script whose last words are about GPUs, which it does not find."""
    if re.search(r"cuda|gpu|nccl", why, re.IGNORECASE) is None:
        return ""
    return "; it runs on a CPU here, over gloo: give it the arguments that it has for that"


def in_words(count: int) -> str:
    """The number of ranks, as `2 ranks`."""
    return f"{count} rank" + "s" * (count != 1)
