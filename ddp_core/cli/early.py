"""What `ddp train` does before it loads torch, which takes seconds: it refuses early, and sets the limits of numerics.

A directory or a port that is in use is refused. The limits of portable numerics must be set before torch is loaded,
though only torch lets the experiment be run. Until then its file is read, but not run: what it writes as `numerics=` is
expected to count. Where that proves wrong, for a file that computes the value perhaps, the process starts itself anew
once the request is known.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ddp_core.base.errors import UserError
from ddp_core.config.options import Asked
from ddp_core.config.records import Numerics
from ddp_core.distributed.addresses import address_served, require_port
from ddp_core.distributed.world import World
from ddp_core.experiment.file import find_experiment
from ddp_core.numerics.limits import LIMITS, limits_hold, portable_refused_by
from ddp_core.record.lock import require_unlocked

_SECOND_START = "DDP_SECOND_START"
_GPU_DRIVER = Path("/dev/nvidiactl")


class EarlyNumerics:
    """This process's numerics: expected before torch is loaded, and mended once the request is known.

    `words` are those of the command. A process that goes on after it (`is_own_process` is False) keeps its variables as
    they are, and is not started anew.
    """

    def __init__(self, words: Sequence[str], is_own_process: bool) -> None:
        # The variable is not for the workers, which may have to be started anew themselves.
        self._is_second = os.environ.pop(_SECOND_START, None) is not None
        self._words, self._is_own = words, is_own_process
        self._before = dict(os.environ)
        self._has_set_limits = False

    def expect(self, asked: Asked) -> None:
        """Set the limits where the request is expected to be for portable numerics."""
        is_decided = self._is_second or "torch" in sys.modules
        if self._is_own and not is_decided and expected_numerics(asked) == "portable":
            os.environ.update(LIMITS)
            self._has_set_limits = True

    def can_hold(self, numerics: Numerics) -> bool:
        """Whether this process computes with these numerics, or may be started anew so that it does."""
        return self._holds(numerics) or (self._is_own and not self._is_second)

    def _holds(self, numerics: Numerics) -> bool:
        return limits_hold() if numerics == "portable" else not self._has_set_limits

    def start_anew_unless(self, numerics: Numerics) -> None:
        """Start this process anew, and do not return, where it does not compute with these numerics but can."""
        if not self._holds(numerics) and self.can_hold(numerics):
            limits = LIMITS if numerics == "portable" else {}
            sys.stdout.flush()
            sys.stderr.flush()
            words = [sys.executable, "-m", "ddp_core", *self._words]
            os.execve(sys.executable, words, {**self._before, **limits, _SECOND_START: "1"})


def expected_numerics(asked: Asked) -> Numerics:
    """The numerics of the request, as far as can be told without loading torch."""
    has_gpu = asked.device == "cuda" or (asked.device == "auto" and _GPU_DRIVER.exists())
    if has_gpu or portable_refused_by() is not None:
        return "native"
    if asked.numerics is not None:
        return asked.numerics
    pairs = [setting.partition("=") for setting in asked.settings]
    settings = [value.strip() for name, _, value in pairs if name.strip() == "numerics"]
    if settings:
        is_portable = settings[-1] in ("portable", '"portable"')
    elif asked.record is not None:
        is_portable = _recorded(Path(asked.record)) == "portable"
    else:
        is_portable = _is_written_portable(asked.experiment)
    return "portable" if is_portable else "native"


def _recorded(record: Path) -> object:
    try:
        return json.loads(record.read_bytes())["experiment"].get("numerics")
    except (OSError, ValueError, LookupError, AttributeError):
        return None  # the run itself says what is wrong with the file


def _is_written_portable(name_or_path: str) -> bool:
    """Whether the experiment's file calls `Experiment(…, numerics="portable")`."""
    try:
        tree = ast.parse(find_experiment(name_or_path).read_bytes())
    except (OSError, SyntaxError, ValueError, UserError):
        return False  # the run itself says what is wrong with the file
    return any(
        isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] == "Experiment"
        and any(
            each.arg == "numerics" and isinstance(each.value, ast.Constant) and each.value.value == "portable"
            for each in node.keywords
        )
        for node in ast.walk(tree)
    )


def require_free(asked: Asked, world: World) -> None:
    """Refuse a request whose run directory or port another process has.

    What is free now may be taken a moment later: the run itself asks again, and keeps both.

    Raises UserError (2) where another run works in the directory to resume, and (4) where rank 0's port is in use.
    """
    if world.serves_store and asked.layout == "ddp":
        assert world.store_port is not None
        address = address_served(str(world.store_host))
        require_port(address, world.store_port, world.port_name, "give the ranks another one")
    elif not World.is_set() and asked.resume not in ("auto", "never") and asked.nnodes.high == 1:
        # A worker of a launcher outside, or one of several nodes, may find the directory in use by its own launch.
        require_unlocked(Path(asked.resume))
