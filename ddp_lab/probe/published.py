"""The published digests of portable numerics: what every x86-64 CPU with AVX2 computes, to the last bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_core.base.documents import read_document
from ddp_core.base.errors import UserError

FORMAT = 1
PLACE = Path(__file__).with_name("portable-digests-2.json")
"""The file of the table; its name ends with the version of the rules."""


@dataclass(frozen=True)
class Steps:
    """A short training: the experiment's settings (`--set`), and the digest of the weights at its end."""

    settings: Sequence[str]
    weights_sha256: str


@dataclass(frozen=True)
class Published:
    """The table; docs/reference/portable-numerics.md has its format."""

    rules: int
    """Version of the rules of portable numerics (`ddp_core.numerics`) that the digests belong to."""
    torch: str
    numpy: str
    made_on: Mapping[str, str]
    operations: Mapping[str, str]
    training_steps: Mapping[str, Steps]
    runs: Mapping[str, str]
    """By experiment, the digest of the weights after a whole run with the experiment's own settings."""
    confirmed_by: Sequence[Mapping[str, Any]] = ()

    def other_torch(self, version: str) -> str | None:
        """The release of this version of torch, where it is not that of the digests; None where it is."""
        here = release(version)
        return None if here == self.torch else here

    def to_json(self) -> dict[str, Any]:
        """The table in plain JSON types."""
        steps = {
            name: {"settings": list(each.settings), "weights_sha256": each.weights_sha256}
            for name, each in self.training_steps.items()
        }
        return {
            "format": FORMAT,
            **vars(self),
            "confirmed_by": list(self.confirmed_by),
            "training_steps": steps,
        }


def release(version: str) -> str:
    """A version of torch without its build: 2.13.0 of 2.13.0+cpu. Both builds compute the same digests on a CPU."""
    return version.partition("+")[0]


def published(place: Path = PLACE) -> Published:
    """The table in a file, by default the one of this package. Raises UserError where it cannot be read."""
    try:
        table = read_document(place, dict[str, Any])
        if table.pop("format") != FORMAT:
            raise UserError(f"{place} has another format than {FORMAT}; read it with the version that it came with")
        steps = {name: Steps(**each) for name, each in table.pop("training_steps").items()}
        confirmed = tuple(table.pop("confirmed_by"))
        return Published(training_steps=steps, confirmed_by=confirmed, **table)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"the published digests, {place}, cannot be read ({error}); install the package again, or in a checkout: "
            f"git checkout ddp_lab/probe/{place.name}"
        ) from None
