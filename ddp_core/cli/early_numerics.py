"""Sets the limits of portable numerics before torch is loaded, as they must be.

The experiment says which numerics it is for, but its file can only be run with torch. So the file is first read without
running it, and what it writes as `numerics=` is expected to count. Where that proves wrong, because the file computes
the value perhaps, the process starts itself anew once the request is known.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from ddp_core.base.beneath import read_file
from ddp_core.base.documents import BadDocument, read_document
from ddp_core.base.errors import UserError
from ddp_core.config.options import Asked
from ddp_core.config.records import Numerics
from ddp_core.experiment.file import find_experiment
from ddp_core.numerics.limits import LIMITS, limits_hold, portable_refused_by

_SECOND_START = "DDP_SECOND_START"
_GPU_DRIVER = Path("/dev/nvidiactl")


class _Record(TypedDict):
    experiment: dict[str, Any]


class EarlyNumerics:
    """The numerics of this process: set as expected before torch is loaded, and put right once the request is known.

    `words`: the command line without `ddp`. `is_own_process`: whether this process ends with the command; if not, its
    variables stay as they are, and it is not started anew.
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
    if settings:
        is_portable = settings[-1].strip('"') == "portable"
    elif asked.record is not None:
        is_portable = str(_recorded(Path(asked.record))).startswith("portable")
    else:
        is_portable = _is_written_portable(asked.experiment)
    return "portable" if is_portable else "native"


def _recorded(record: Path) -> object:
    """The numerics of the experiment in a run.json."""
    try:
        return read_document(record, _Record)["experiment"].get("numerics")
    except (OSError, BadDocument):
        return None  # the run itself says what is wrong with the file


def _is_written_portable(name_or_path: str) -> bool:
    """Whether the experiment's file calls `Experiment(…, numerics="portable")`."""
    try:
        tree = ast.parse(read_file(find_experiment(name_or_path)))
    except (OSError, SyntaxError, ValueError, UserError):
        return False  # the run itself says what is wrong with the file
    return any(
        any(ast.unparse(word) == "numerics='portable'" for word in node.keywords)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "Experiment"
    )
