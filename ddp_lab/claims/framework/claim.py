"""What a claim is, how it is put to the test, and what judging it gives."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.framework.statistics import FAMILY_ERROR
from ddp_lab.records import Figure, Part, Series, Verdict

Measurements: TypeAlias = dict[str, Any]
"""Plain JSON types only: what is judged is what is stored."""


@dataclass(frozen=True)
class RuleVersion:
    """A rule as it was fixed on a day, before anything was measured by it, and why it differs from the one before.

    `digest` is what `Claim.digest` gave on that day, so a rule, a method or a load cannot change unnoticed.
    """

    date: str
    why: str
    digest: str


def versions(*told: str) -> tuple[RuleVersion, ...]:
    """The versions of a rule, each told as its date, its digest and the reason for it."""
    return tuple(RuleVersion(date, why, digest) for date, digest, why in (each.split(" ", 2) for each in told))


@dataclass(frozen=True)
class Claim:
    """A sentence of the sources, and how it is put to the test.

    `original` quotes the sources exactly; `sources` are the first three digits of their files. `loads` has by
    name what is fixed before measuring (rounds, seeds, batches, limits of the rule), for the quick and the full
    measurement. `history` has the versions of the rule, the newest last. `seconds` is what the quick and the full
    measurement take on two quiet cores, for the time that is said to be left. `in_short` is the rule in one sentence,
    for the page. `tests` is how many intervals can bear its verdict at most: its share of the family.
    """

    id: str
    title: str
    claim: str
    original: str
    sources: tuple[str, ...]
    method: str
    rule: str
    loads: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    history: Sequence[RuleVersion] = ()
    seconds: tuple[float, float] = (25.0, 120.0)
    in_short: str = ""
    tests: int = 0

    def load(self, setting: Setting) -> SimpleNamespace:
        """The loads of this setting: `claim.load(setting).rounds`."""
        return SimpleNamespace(
            **{name: full if not setting.quick else quick for name, (quick, full) in self.loads.items()}
        )

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits, others for another sentence, method, rule, load or error of the tests."""
        fixed: list[Any] = [self.claim, self.method, self.rule, {name: list(both) for name, both in self.loads.items()}]
        if self.tests:
            fixed += [self.tests, FAMILY_ERROR]
        return hashlib.sha256(json.dumps(fixed, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Judgement:
    """The verdict, why, in one sentence with its numbers, and what to show."""

    verdict: Verdict
    reason: str
    figures: Sequence[Figure] = ()
    series: Sequence[Series] = ()
    parts: Sequence[Part] = ()

    def to_json(self) -> dict[str, Any]:
        """The part of a claim's file that depends on the measurements."""
        content = asdict(self)
        for plot in content["series"]:
            plot["x"] = {name: plot["x"][name] for name in ("name", "unit", "values")}
            plot["y"] = {name: plot["y"][name] for name in ("name", "unit", "zero")}
        return content


def composed(parts: Sequence[Part], figures: Sequence[Figure] = (), series: Sequence[Series] = ()) -> Judgement:
    """The judgement of a sentence whose parts were judged each by itself.

    All confirmed: confirmed. Some confirmed: confirmed in part, whatever the others are. None confirmed: refuted where
    a part is refuted, else inconclusive where a part is, else not measurable here.
    """
    found = [part.verdict for part in parts]
    verdict: Verdict
    if all(one == "confirmed" for one in found):
        verdict = "confirmed"
    elif "confirmed" in found or "confirmed in part" in found:
        verdict = "confirmed in part"
    elif "refuted" in found:
        verdict = "refuted"
    else:
        verdict = "inconclusive" if "inconclusive" in found else "not measurable here"
    reason = "; ".join(f"{part.name}: {part.verdict} ({part.reason})" for part in parts)
    return Judgement(verdict, reason, figures, series, parts)


def holds(name: str, so: Any, reason: str, otherwise: str = "") -> Part:
    """A part that is confirmed where it is so, else refuted; `otherwise` is then the reason, where it is another."""
    return Part(name, "confirmed" if so else "refuted", reason if so else otherwise or reason)


def missing(what: str, figures: Sequence[Figure] = (), series: Sequence[Series] = ()) -> Judgement:
    """Not measurable here, for want of `what`."""
    return Judgement("not measurable here", f"needs {what}", figures, series)


@dataclass(frozen=True)
class KnownClaim:
    """A claim's file, loaded: its three parts."""

    claim: Claim
    measure: Callable[[Setting], Measurements]
    judge: Callable[[Measurements], Judgement]
    file: Path | None = None
