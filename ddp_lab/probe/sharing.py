"""The record of a machine that `ddp probe --share` prints, for somebody to send back, and what is read of it."""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ddp_core.base.fingerprint import cpu_model
from ddp_core.record.environment import describe_code
from ddp_lab.probe.published import Published

FORMAT = 1
COMMAND = "ddp probe --share"

_TOLD = ("avx2", "fma", "avx512f", "avx512_vnni", "avx_vnni", "amx_tile")
"""What libraries choose their code by, as Linux names it."""


def machine_here(cpus: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """The CPU as libraries see it, and the system; no name of the host, no path, no user."""
    lines = cpus.read_text(encoding="utf-8", errors="replace").splitlines() if cpus.exists() else []
    said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = set(said.get("flags", "").split())
    return {
        "cpu": cpu_model(),
        "family": _number(said.get("cpu family")),
        "model": _number(said.get("model")),
        "vendor": said.get("vendor_id"),
        "cache": said.get("cache size"),
        "is_virtual": "hypervisor" in flags,
        "has": [name for name in _TOLD if name in flags],
        "system": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}".strip(", "),
        "python": platform.python_version(),
    }


def _number(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"\d+", text) else None


def outcome(table: Published, different: Sequence[str], found: Mapping[tuple[str, str], Mapping[str, str]]) -> Any:
    """What a machine computed beside a table: how many digests agree, which do not, and a digest of all of them."""
    published = len(table.operations) + len(table.training_steps)
    lines = [f"{kind}\0{name}\0{each.get('digest', '')}\n" for (kind, name), each in sorted(found.items())]
    return {
        "rules": table.rules,
        "published": published,
        "reproduced": published - len(different),
        "different": list(different),
        "digests_sha256": hashlib.sha256("".join(lines).encode()).hexdigest(),
    }


def record_of(versions: Mapping[str, str], outcomes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The whole record, in plain JSON types."""
    return {
        "format": FORMAT,
        "command": COMMAND,
        "date": datetime.now(UTC).date().isoformat(),
        "code": describe_code(),
        "machine": machine_here(),
        "versions": dict(versions),
        "outcomes": list(outcomes),
    }
