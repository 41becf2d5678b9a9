"""A SLURM of several nodes on this machine, for tests: runs command lines of the documentation, and follows jobs."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.house.pages import blocks
from tests.support.commands import ROOT, Ended, ran, trained, wait_until

PAGE = ROOT / "docs" / "how-to" / "run-on-slurm.md"
COMMANDS = {line for block in blocks(PAGE.read_text()) if block.kind == "console" for line in block.lines}
SECONDS = 180
"""After so long a command or a job is taken to hang."""

_SLURM_UP = Path(__file__).with_name("slurm-up")
EXPERIMENT = Path(__file__).with_name("slow_at_first.py")
TINY = f"{EXPERIMENT} --device cpu"
"""What stands for `digits` in the documentation's commands."""
_ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY"}


@dataclass(frozen=True)
class Slurm:
    """A cluster that runs; `environ` is the environment in which SLURM's commands find it."""

    environ: dict[str, str]

    def call(self, line: str, job: str = "JOB", more: str = "", **variables: str) -> Ended:
        """Run a line of the documentation, with this job, `more` words and these environment variables, to its end.

        Raises AssertionError where the documentation has no such line, and subprocess.TimeoutExpired after SECONDS.
        """
        assert line in COMMANDS, f"{PAGE.name} has no `{line}`"
        words = re.sub(r"\bdigits\b", TINY, re.sub(r"\bJOB\b", job, line))
        return self.shell(f"{words} {more}", **variables)

    def shell(self, line: str, **variables: str) -> Ended:
        """Run a line of shell to its end. Raises subprocess.TimeoutExpired after SECONDS."""
        done = ran("bash", "-c", line, env=self.environ | variables, timeout=SECONDS)
        return Ended(done.returncode, done.stdout, done.stderr)

    def submit(self, line: str, folder: Path, options: str = "", more: str = "", meet: str = "") -> Job:
        """Submit a line of the documentation that has sbatch, with further `options`, and with `more` words.

        The job's output is below `folder`. Its steps are slow until `Job.hurry` is called, or the job starts again.
        `meet`: what stands for HOST:29400.
        """
        assert line in COMMANDS, f"{PAGE.name} has no `{line}`"
        words = line.replace("sbatch ", f"sbatch --parsable --output {folder}/said-%j {options} ", 1)
        words = words.replace("HOST:29400", meet)
        hurry = folder / "hurry"
        submitted = self.shell(
            f"{words.replace('digits', TINY)} {more}", OUTPUT=str(folder / "outputs"), SLOW_UNTIL=str(hurry)
        )
        assert submitted.code == 0, submitted.errors
        return Job(self, submitted.output.strip(), folder / "outputs", hurry)

    def power(self, switch: str, node: str) -> None:
        """Pull the node's plug (`--off`), or start it again (`--on`)."""
        subprocess.run([_SLURM_UP, switch, node], env=self.environ, check=True, timeout=SECONDS, capture_output=True)


@dataclass
class Job:
    """A job of the cluster, or one task of an array, named ARRAY_TASK."""

    slurm: Slurm
    id: str
    outputs: Path
    _hurry: Path

    @property
    def facts(self) -> dict[str, str]:
        """What SLURM knows of the job now: JobState, Restarts, ExitCode and more."""
        return dict(re.findall(r"(\w+)=(\S*)", self.slurm.shell(f"scontrol show job --oneliner {self.id}").output))

    @functools.cached_property
    def _log(self) -> Path:
        return Path(self.facts["StdOut"])

    @property
    def said(self) -> str:
        """What the job has written until now."""
        return self._log.read_text() if self._log.exists() else ""

    def wait_for(self, pattern: str) -> None:
        """Wait until the job has said this. Raises AssertionError after SECONDS."""
        self._wait_until(lambda: re.search(pattern, self.said) is not None, f"says {pattern!r}")

    def start_again(self) -> None:
        """Wait until the job is back in SLURM's queue, and let it start at once, and not after two minutes."""
        self._wait_for_state("PENDING")
        # In the second in which a node has ended a job, it refuses to start it.
        ended = self.slurm.shell(f"scontrol update jobid={self.id} starttime=now+2")
        assert ended.code == 0, ended.errors

    def hurry(self) -> None:
        """Let the steps be as quick as they can be."""
        self._hurry.touch()

    def end(self) -> dict[str, str]:
        """Wait for the job's end, and return SLURM's facts. Raises AssertionError after SECONDS."""
        self._wait_for_state(*_ENDED)
        return self.facts

    def _wait_for_state(self, *states: str) -> None:
        self._wait_until(lambda: self.facts["JobState"] in states, f"is {' or '.join(states)}")

    def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        try:
            wait_until(condition, SECONDS, f"job {self.id} {what}", pause=0.2)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.facts}\n{self.said}") from None

    @property
    def record(self) -> dict[str, Any]:
        """The record of the job's one run."""
        return trained(self.outputs / self.id)[1]


@contextlib.contextmanager
def started(folder: Path, nodes: int) -> Iterator[Slurm]:
    """A cluster of `nodes` nodes with two cores each, whose files are below `folder`; it ends with the block.

    Skips the test, with the reason, where this machine cannot hold a cluster.
    """
    environ = os.environ | {
        "SLURM_UP_DIR": str(folder / "slurm"),
        "SLURM_CONF": str(folder / "slurm" / "slurm.conf"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }

    up = functools.partial(ran, _SLURM_UP, env=environ, timeout=SECONDS)
    if (checked := up("--check")).returncode:
        pytest.skip(checked.stderr.strip().rpartition("\n")[2])
    try:
        began = up(str(nodes))
        assert began.returncode == 0, began.stderr
        yield Slurm(environ)
    finally:
        up("--stop")
