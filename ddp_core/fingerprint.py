"""Fingerprints compared: what bit-identity is conditional on, recorded by `determinism.fingerprint`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Where two fingerprints part, as 'name: here A, there B'; empty where the promise holds."""
    names = sorted(set(ours) | set(theirs))
    return [
        f"{name}: here {ours.get(name)}, there {theirs.get(name)}"
        for name in names
        if ours.get(name) != theirs.get(name)
    ]
