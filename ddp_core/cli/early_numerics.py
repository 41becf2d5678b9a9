"""Sets the limits of portable numerics before torch is loaded, as they must be.

The experiment says which numerics it is for, but its file can only be run with torch. So the file's text is first
searched for that. Where what is found proves wrong, because the file computes the value perhaps, the process starts
itself anew once the request is known.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from ddp_core.base.beneath import read_file
from ddp_core.base.errors import UserError
from ddp_core.config.options import Asked
from ddp_core.config.records import Numerics
from ddp_core.experiment.file import find_experiment
from ddp_core.numerics.limits import LIMITS, limits_hold, portable_refused_by

_SECOND_START = "DDP_SECOND_START"
_GPU_DRIVER = Path("/dev/nvidiactl")
_PORTABLE = re.compile(rb"""^[^#\n]*\bnumerics["']?\s*[=:]\s*["']portable""", re.MULTILINE)
"""How an experiment's file, or a run.json, says so."""


class EarlyNumerics:
    """The numerics of this process: set as expected before torch is loaded, and put right once the request is known.

    Where the process does not end with the command, its variables stay as they are, and it is not started anew.
    """

    def __init__(self, words: Sequence[str], is_own_process: bool) -> None:
        # Workers must not inherit the variable: they may have to be started anew themselves.
        self._is_second = os.environ.pop(_SECOND_START, None) is not None
        self._words, self._is_own = words, is_own_process
        self._before = dict(os.environ)
        self._has_set_limits = False

    def expect(self, asked: Asked) -> None:
        """Set the limits, if the request will be for portable numerics as far as can be told."""
        is_decided = self._is_second or "torch" in sys.modules
        if self._is_own and not is_decided and expected_numerics(asked) != "native":
            os.environ.update(LIMITS)
            self._has_set_limits = True

    def can_hold(self, numerics: Numerics) -> bool:
        """Whether this process computes with these numerics, or may be started anew so that it does."""
        return self._holds(numerics) or (self._is_own and not self._is_second)

    def _holds(self, numerics: Numerics) -> bool:
        return limits_hold() if numerics != "native" else not self._has_set_limits

    def start_anew_unless(self, numerics: Numerics) -> None:
        """Start this process anew, and do not return, where it does not compute with these numerics but can."""
        if not self._holds(numerics) and self.can_hold(numerics):
            limits = LIMITS if numerics != "native" else {}
            sys.stdout.flush()
            sys.stderr.flush()
            words = [sys.executable, "-m", "ddp_core", *self._words]
            os.execve(sys.executable, words, {**self._before, **limits, _SECOND_START: "1"})


def expected_numerics(asked: Asked) -> Numerics:
    """The numerics that the request will have, as far as can be told without loading torch."""
    has_gpu = asked.device == "cuda" or (asked.device == "auto" and _GPU_DRIVER.exists())
    if has_gpu or portable_refused_by() is not None:
        return "native"
    if asked.numerics is not None:
        return asked.numerics
    pairs = [setting.partition("=") for setting in asked.settings]
    settings = [value.strip() for name, _, value in pairs if name.strip() == "numerics"]
    is_portable = settings[-1].strip('"') == "portable" if settings else _is_written_portable(asked)
    return "portable" if is_portable else "native"


def _is_written_portable(asked: Asked) -> bool:
    """Whether the run.json to train again, or else the experiment's file, has `numerics="portable"` in it."""
    try:
        file = find_experiment(asked.experiment) if asked.record is None else Path(asked.record)
        return _PORTABLE.search(read_file(file)) is not None
    except (OSError, UserError):
        return False  # the run itself says what is wrong with the file
