"""Which code has computed a record, and whether the present code would compute it alike."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddp_core.record.environment import describe_code

ROOT = Path(__file__).parents[1]
COMPUTES = ("ddp_core", "ddp_lab/probe", "experiments", "tools/emulation.py")
"""What takes part in a training or a probe; a change elsewhere, such as that of a record, changes no digest."""


def code_here() -> dict[str, Any]:
    """Version and commit of this checkout; `dirty` tells whether what COMPUTES has changes that are not committed."""
    code = describe_code()
    if code["dirty"]:
        code = code | {"dirty": _git("status", "--porcelain", "--", *COMPUTES) != (0, "")}
    return code


def is_same(code: Mapping[str, Any] | None, here: Mapping[str, Any]) -> bool:
    """Whether nothing in COMPUTES differs between the `code` of a record and that of this checkout, `here`.

    False where that is not known, as without git.
    """
    if code is None or code.get("dirty") is not False or here.get("dirty") is not False:
        return False
    known = code.get("commit"), here.get("commit")
    return None not in known and _git("diff", "--quiet", *map(str, known), "--", *COMPUTES)[0] == 0


def _git(*words: str) -> tuple[int, str]:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return 127, ""
    return done.returncode, done.stdout
