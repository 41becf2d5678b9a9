"""Start `ddp train` in a process of its own, for the commands that train."""

from __future__ import annotations

import subprocess
import sys

from ddp_core.base.errors import UserError
from ddp_core.config.options import Asked


def train(asked: Asked) -> None:
    """Run `ddp train` to its end. Raises UserError where it fails and no fault was asked for."""
    words = ["train", *asked.to_words()]
    code, errors = run_ddp(words)
    if code != 0 and not asked.faults:
        lines = errors.strip().splitlines()
        raise UserError(f"`ddp {' '.join(words)}` ended with {code}: {lines[-1] if lines else 'no message'}", code)


def run_ddp(words: list[str]) -> tuple[int, str]:
    """The exit code of a `ddp` command, and what it wrote to standard error."""
    done = subprocess.run([sys.executable, "-m", "ddp_core", *words], capture_output=True, text=True, check=False)
    return done.returncode, done.stderr
