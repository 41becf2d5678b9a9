"""Runs of one experiment, put together and compared.

A family is all runs of one experiment, whatever their seeds; a group is those runs of a family that were carried out
the same way (layout, reduction, loader workers, backend).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ddp_core.base.fingerprint import fingerprint_differences
from ddp_core.cli.compare import set_apart, verdict
from ddp_core.record.figures import family_of
from ddp_lab.report.reading.runs import Run
from ddp_lab.report.values import Spread, plural, slug

_KINDS = ("single", "dp", "ddp")


@dataclass(frozen=True)
class Group:
    """Runs of one family that were carried out the same way: with different seeds, or as repetitions."""

    label: str
    runs: list[Run]

    @property
    def layout_order(self) -> tuple[int, int, str]:
        """The key to sort by: single first, then dp and ddp; small layouts before large ones."""
        layout = self.runs[0].layout
        return _KINDS.index(layout.kind), layout.shares, self.label

    @property
    def completed(self) -> list[Run]:
        """The runs that count for figures."""
        return [run for run in self.runs if run.completed]

    @property
    def unfinished(self) -> list[Run]:
        """The runs that failed, were stopped or interrupted, or still go on."""
        return [run for run in self.runs if not run.completed]

    @property
    def shares(self) -> int:
        """Ranks, or replicas of DP."""
        return self.runs[0].layout.shares

    def spread(self, name: str) -> Spread | None:
        """Return the spread of a number that the completed runs have in their results."""
        return Spread.of(run.result(name) for run in self.completed)


@dataclass(frozen=True)
class SeedVerdict:
    """Whether the runs with one seed ended with the same weights: in words and as a tone (good, bad, warn, quiet)."""

    seed: int | None
    text: str
    tone: str


@dataclass(frozen=True)
class Family:
    """One experiment with all its seeds and layouts.

    `difference` names the settings in which it differs from another family with the same experiment name.
    """

    name: str
    question: str | None
    difference: str
    anchor: str
    """A short name that no other family of the report has, for links and files."""
    groups: list[Group]
    verdicts: list[SeedVerdict]

    @property
    def title(self) -> str:
        """The name, and the difference from others of that name."""
        return f"{self.name}, {self.difference}" if self.difference else self.name

    @property
    def compared(self) -> bool:
        """Whether it was run in more than one way."""
        return len(self.groups) > 1

    @property
    def judgement(self) -> str:
        """The verdicts of its seeds in a sentence."""
        told = [item for item in self.verdicts if item.tone != "quiet"]
        return "; ".join(f"seed {item.seed}: {item.text}" for item in told)

    @property
    def runs(self) -> list[Run]:
        """All runs, in the order of the groups."""
        return [run for group in self.groups for run in group.runs]

    @property
    def verdict(self) -> SeedVerdict:
        """One verdict for all seeds: the worst of those that could be judged."""
        judged = [item for item in self.verdicts if item.tone != "quiet"]
        if not judged:
            return SeedVerdict(None, "nothing to compare yet", "quiet")
        if (broken := next((run.broken for run in self.runs if run.broken), None)) is not None:
            return SeedVerdict(None, broken.partition(" in step ")[0], "bad")
        for tone, words in (("bad", "digests differ"), ("warn", "differ, on unlike machines")):
            if any(item.tone == tone for item in judged):
                return SeedVerdict(None, words, tone)
        compared = [run for run in self.runs if run.is_reference]
        layouts = len({run.layout.label for run in compared})
        return SeedVerdict(None, f"identical on {layouts} layout{'s' if layouts > 1 else ''}", "good")

    def reference_for(self, group: Group) -> Group | None:
        """Return the single runs that `group` is compared with: same device type, if possible same reduction."""
        layout, options = group.runs[0].layout, group.runs[0].record["options"]
        found = [
            other
            for other in self.groups
            if other.runs[0].layout.kind == "single"
            and other.runs[0].layout.device == layout.device
            and other.spread("samples_per_second")
        ]
        same = [other for other in found if other.runs[0].record["options"]["reduction"] == options["reduction"]]
        return next(iter([*same, *found]), None)

    def speed_up(self, group: Group) -> Spread | None:
        """Return the throughput over the median throughput of the reference; None where one of them is unknown."""
        speed, reference = group.spread("samples_per_second"), self.reference_for(group)
        base = reference.spread("samples_per_second") if reference else None
        return speed.over(base.median) if speed and base and base.median else None

    @property
    def common_seed(self) -> int | None:
        """The seed that most groups have completed; the lowest if there are several."""
        counts = Counter(
            seed for group in self.groups for seed in {run.seed for run in group.completed} if seed is not None
        )
        return min(counts, key=lambda seed: (-counts[seed], seed)) if counts else None


def find_families(runs: Sequence[Run]) -> list[Family]:
    """Return the families by name.

    Of several families with one name, that with the most runs comes first; the others say how their settings differ
    from it.
    """
    by_key: dict[str, list[Run]] = {}
    for run in runs:
        by_key.setdefault(family_of(run.record), []).append(run)
    by_name: dict[str, list[list[Run]]] = {}
    for members in by_key.values():
        by_name.setdefault(members[0].experiment, []).append(members)
    families: list[Family] = []
    for name in sorted(by_name):
        alike = sorted(by_name[name], key=lambda members: -len(members))
        main = alike[0][0].record["experiment"]
        for members in alike:
            # The runs of a family have several seeds.
            difference = set_apart({**members[0].record["experiment"], "seed": main.get("seed")}, main)
            families.append(_family(name, members, difference, {family.anchor for family in families}))
    return families


def _anchor(title: str, taken: set[str]) -> str:
    short = slug(title)[:40]
    further = (f"{short}-{count}" for count in itertools.count(2))
    return next(name for name in itertools.chain([short], further) if name not in taken)


def _family(name: str, members: Sequence[Run], difference: str, taken: set[str]) -> Family:
    by_way: dict[str, list[Run]] = {}
    for run in members:
        by_way.setdefault(way_of(run), []).append(run)
    groups = [Group(way, runs) for way, runs in by_way.items()]
    groups.sort(key=lambda group: group.layout_order)
    question = next((run.record["question"] for run in reversed(members) if run.record["question"]), None)
    anchor = _anchor(f"{name} {difference}", taken)
    return Family(name, question, difference, anchor, groups, judge(members))


def way_of(run: Run) -> str:
    """Return how a run was carried out: its layout, and the options that differ from the usual ones."""
    options = run.record["options"]
    extra: list[str] = [options["reduction"]] if options["reduction"] != "exact" else []
    extra += [plural(options["workers"], "loader worker")] if options["workers"] else []
    extra += [options["backend"]] if options["backend"] != "auto" else []
    return " · ".join([run.layout.label, *extra])


def judge(runs: Iterable[Run]) -> list[SeedVerdict]:
    """Return what `ddp compare` says of the runs with one experiment digest; in a family each seed has one digest."""
    by_digest: dict[str, list[Run]] = {}
    for run in runs:
        by_digest.setdefault(run.record["experiment_sha256"], []).append(run)
    found = [_judge_one(same) for same in by_digest.values()]
    return sorted(found, key=lambda item: (item.seed is None, item.seed))


def _judge_one(runs: Sequence[Run]) -> SeedVerdict:
    exact = [run.record for run in runs if run.is_reference]
    text = verdict([run.record for run in runs if run.weights_problem is None]).removeprefix("digests: ")
    text += "".join(f"; left out: {run.broken}" for run in runs if run.weights_problem is not None)
    if any(run.broken for run in runs):
        tone = "bad"
    elif len(exact) < 2:
        tone = "quiet"
    elif len({record["weights_sha256"] for record in exact}) == 1:
        tone = "good"
    else:
        other = next(record for record in exact if record["weights_sha256"] != exact[0]["weights_sha256"])
        tone = "warn" if fingerprint_differences(exact[0]["fingerprint"], other["fingerprint"]) else "bad"
    return SeedVerdict(runs[0].seed, text, tone)
