"""The claims as pages of documentation: a table, and a page for each with what is behind it and its figures."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ddp_core.base.errors import UserError
from ddp_lab.claims.framework.claim import Claim, KnownClaim
from ddp_lab.claims.framework.provenance import doubt
from ddp_lab.claims.framework.statistics import FAMILY_ERROR, holm
from ddp_lab.claims.framework.suite import RULE_CHANGED, duration, faults, is_stale, read, rounds_needed, told
from ddp_lab.records import Figure

_RAW = "../../../benchmarks/results/claims"
"""Where the records lie, seen from the folder of the pages."""
_HEAD = """# Claims

Each row is a sentence of the source articles as an experiment, with a page of its own: what is behind it, how it is
judged, all figures. `ddp claims` measures all of them here, `ddp claims C06` one of them; `--full` takes longer and is
surer. A verdict (confirmed, confirmed in part, refuted, not measurable here, inconclusive) follows from the
measurements by the rule stated with the claim; the same rule runs on a laptop and on a node with eight GPUs. A sentence
that says several things is judged part by part.
"""
_WORDS = """
**Fixed before this run.** Method, rule and loads (rounds, seeds, batches, limits) are fixed before anything is
measured by them. A rule, method or load that changes is a new rule, with its date and the reason. Each record says
which commit last changed its rule, when that was, and when its run began; a rule that is younger than the run, or was
not committed, stops these pages from being made. A claim whose rule has changed since it was measured keeps its old
verdict, marked so, until it is measured anew.

**Beyond noise** always means the one test of `ddp_lab/claims/framework/statistics.py`: two ways of doing the same work
are timed in interleaved rounds, and p is the exact two-sided one of the sign test of the rounds' ratios against a
limit, whatever their distribution, if the rounds are independent. The interval beside a median leaves out the limit
exactly when p is small enough; its level is the probability with which such an interval holds the true median.

{family}

**A stand-in** is what was measured where the thing that the sentence names is missing (CUDA devices, mostly). Its
figures are marked, and decide nothing about the thing.

**A figure that cannot be** (zero, not a number, beyond the bounds declared with it) stops these pages from being made.

**Raw measurements** lie in [benchmarks/results/claims](../../benchmarks/results/claims), a JSON file for each claim. To
apply the rules to them without measuring, and to make the pages again:

```bash
ddp claims --judge-again --output benchmarks/results
ddp claims --document --output benchmarks/results
```
"""
_FAMILY = (
    "**The family** of tests is every interval that bears a verdict: {rounds}. What p is small enough follows from "
    "Holm's procedure over all of them: with {error:g} % or less even one verdict rests on chance."
)


def pages(claims: Sequence[KnownClaim], output: Path) -> dict[str, str]:
    """Markdown by file name: `claims.md`, the table of these claims, and `claims/c01.md` and so on, a page for each.

    The verdicts are those found below `output`. Raises UserError, naming the claim, where a record cannot show that
    its rule was there before it, or has a figure that cannot be.
    """
    measured = {known.claim.id: read(output / "claims" / f"{known.claim.id}.json") for known in claims}
    for known in claims:
        if found := measured[known.claim.id]:
            _require_sound(known, found)
    lines = [_HEAD, *_machine([found for found in measured.values() if found])]
    lines += ["| claim | what it says | verdict here | one figure |", "|---|---|---|---|"]
    for known in claims:
        claim, found = known.claim, measured[known.claim.id]
        link = f"[{claim.id}](claims/{_page(claim)})"
        lines.append(f"| {link} | {claim.title} | {_verdict(known, found)} | {_headline(known, found)} |")
    family = _FAMILY.format(rounds=rounds_needed(), error=100 * FAMILY_ERROR)
    lines += [_WORDS.format(family=textwrap.fill(family, 120))]
    lines += _family(claims, measured)
    found_pages = {f"claims/{_page(known.claim)}": _whole(known, measured[known.claim.id]) for known in claims}
    return {"claims.md": "\n".join(lines).rstrip() + "\n", **found_pages}


def _require_sound(known: KnownClaim, found: dict[str, Any]) -> None:
    number = known.claim.id
    if reason := doubt(found):
        raise UserError(f"{number}: {reason}; commit its rule, then measure: ddp claims {number}")
    problems = [] if is_stale(known, found) else faults(found)
    if problems:
        raise UserError(f"{number}: {problems[0]}; mend what measures it, then measure: ddp claims {number}")


def _verdict(known: KnownClaim, found: dict[str, Any] | None) -> str:
    if found is None:
        return "not measured"
    return f"{told(found)} ({RULE_CHANGED})" if is_stale(known, found) else told(found)


def _family(claims: Sequence[KnownClaim], measured: dict[str, dict[str, Any] | None]) -> list[str]:
    """Every test of the claims, by ascending p, with the step of Holm's procedure that it has to keep to."""
    tests = [
        (figure, known.claim)
        for known in claims
        if (found := measured[known.claim.id]) and not is_stale(known, found)
        for figure in (Figure(**content) for content in found["figures"])
        if figure.p is not None
    ]
    if not tests:
        return []
    allowed = holm([figure.p for figure, _ in tests if figure.p is not None])
    lines = ["## The family", "", f"Holm's procedure allows p up to {allowed:.2g} here.", ""]
    lines += ["| claim | interval | against | rounds | p | beyond noise |", "|---|---|---|---|---|---|"]
    for figure, claim in sorted(tests, key=lambda test: (test[0].p, test[1].id)):
        assert figure.p is not None
        cells = (figure.label, _number(figure.against), str(figure.rounds), f"{figure.p:.2g}")
        beyond = "yes" if figure.p <= allowed else "no"
        lines.append(f"| [{claim.id}](claims/{_page(claim)}) | {' | '.join(cells)} | {beyond} |")
    return lines


def _page(claim: Claim) -> str:
    return f"{claim.id.lower()}.md"


def _headline(known: KnownClaim, found: dict[str, Any] | None) -> str:
    """The claim's figure for the table: the one whose name begins as `headline` says, else the first one."""
    claim = known.claim
    figures = [Figure(**figure) for figure in found["figures"]] if found and not is_stale(known, found) else []
    wanted = [figure for figure in figures if figure.name.startswith(claim.headline)] if claim.headline else figures
    if not wanted:
        return ""
    figure = wanted[0]
    interval = "" if figure.low is None else f" ({_number(figure.low)} to {_number(figure.high)})"
    return f"{figure.label}: {_number(figure.value)}{_unit(figure)}{interval}"


def _machine(found: Sequence[dict[str, Any]]) -> list[str]:
    if not found:
        return []
    environment, dates = found[0]["environment"], sorted(content["measured_at"][:10] for content in found)
    devices = environment.get("cuda", {}).get("devices") or ["no CUDA device"]
    cpus = sorted({str(content["environment"]["cpu"]) for content in found})
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    runs = {str((content.get("run") or {}).get("started_at")) for content in found}
    how = "in one run" if len(runs) == 1 and "None" not in runs else f"in {len(runs)} runs"
    thorough = "`--full`" if not any(content["environment"]["quick"] for content in found) else "`--quick`"
    return [
        f"Measured {when} {how} of {thorough}, {len(found)} claims, on {environment['cores']} cores "
        f"({', '.join(cpus)}), {', '.join(devices)}, torch {environment['packages']['torch']}.",
        "",
    ]


def _whole(known: KnownClaim, found: dict[str, Any] | None) -> str:
    claim = known.claim
    lines = [f"# {claim.id} {claim.title}", "", f"> {claim.claim}", ">"]
    lines += [f"> {line}".rstrip() for line in claim.original.splitlines()]
    lines += [f"> (source {', '.join(claim.sources)})", "", known.behind, ""]
    lines += [f"**Measured:** {claim.method}", ""]
    if claim.loads:
        lines += [f"**Loads:** {'; '.join(_load(name, *both) for name, both in claim.loads.items())}.", ""]
    since = f" (of {claim.history[-1].date})" if claim.history else ""
    lines += [f"**Rule{since}:** {claim.rule}", ""]
    lines += [f"- {version.date}: {version.why}" for version in claim.history]
    lines += [""] if claim.history else []
    if found:
        parts, stale = found.get("parts", []), is_stale(known, found)
        lines += [f"**Verdict: {_verdict(known, found)}.**" + ("" if parts else f" {found['reason']}"), ""]
        lines += [f"- {part['name']}: **{part['verdict']}**, {part['reason']}" for part in parts]
        lines += [""] if parts else []
        # What an old rule counts as possible, the record does not say.
        lines += ["The figures of the old rule are in the record.", ""] if stale else _figures(found["figures"])
        rule = found["rule_commit"]
        lines += [
            f"The rule{' of that verdict' if stale else ''} was last changed in commit {rule['commit'][:12]} at "
            f"{_moment(rule['committed_at'])}; the run began at {_moment(found['run']['started_at'])}.",
            "",
        ]
        lines += [f"[Raw measurements]({_RAW}/{claim.id}.json), {_when(found)}. To measure again:", ""]
        lines += ["```bash", found["command"], "```", ""]
    else:
        lines += ["```bash", f"ddp claims {claim.id}", "```", ""]
    lines += ["[All claims](../claims.md), with what their words mean."]
    return "\n".join(lines) + "\n"


def _load(name: str, quick: Any, full: Any) -> str:
    other = "" if quick == full else f" (quick: {_listed(quick)})"
    return f"{name.replace('_', ' ')}: {_listed(full)}{other}"


def _listed(load: Any, between: str = ", ") -> str:
    """A list with commas, and a list in it, such as a layout and its number of processes, with spaces."""
    return between.join(_listed(item, " ") for item in load) if isinstance(load, list | tuple) else str(load)


def _when(found: dict[str, Any]) -> str:
    return f"measured in {duration(found['seconds'])} at {found['measured_at'][11:16]} UTC"


def _moment(text: str) -> str:
    return f"{datetime.fromisoformat(text).astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def _figures(figures: Sequence[dict[str, Any]]) -> list[str]:
    if not figures:
        return []
    return [
        "| figure | value | interval | level | p |",
        "|---|---|---|---|---|",
        *(_figure(Figure(**figure)) for figure in figures),
        "",
    ]


def _figure(figure: Figure) -> str:
    unit = _unit(figure)
    interval = "" if figure.low is None else f"{_number(figure.low)} to {_number(figure.high)}{unit}"
    level = "" if figure.level is None else f"{100 * figure.level:.2f} %"
    p = "" if figure.p is None else f"{figure.p:.2g} against {_number(figure.against)}"
    return f"| {figure.label} | {_number(figure.value)}{unit} | {interval} | {level} | {p} |"


def _unit(figure: Figure) -> str:
    return f" {figure.unit}" if figure.unit else ""


def _number(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
