"""The claims as pages of documentation: a table, and for each claim what is behind it, how it is judged, the figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp_lab.claims.framework.claim import Claim, KnownClaim
from ddp_lab.claims.framework.suite import duration, read
from ddp_lab.records import Figure

_HEAD = """# Claims

Each row is a sentence of the source articles as an experiment, with a page of its own: what is behind it, how it is
judged, all figures. `ddp claims` measures all of them here, `ddp claims C06`
one of them; `--full` takes longer and is surer. A verdict (confirmed, confirmed in part, refuted, not measurable here,
inconclusive) follows from the measurements by the rule stated with the claim; the same rule runs on a laptop and on a
node with eight GPUs. A sentence that says several things is judged part by part.

**Fixed beforehand.** Method, rule and loads (rounds, seeds, batches, limits) are fixed before anything is measured by
them. Each rule has its date; a rule, method or load that changes is a new rule, with its date and the reason.

**Beyond noise** always means the one test of `ddp_lab/claims/framework/statistics.py`: two ways of doing the same work
are timed in interleaved rounds, and the interval of the median ratio leaves out 1. The interval goes from the k-th
smallest to the k-th largest round; the level beside it is the probability with which such an interval holds the true
median if the rounds are independent, whatever their distribution. Below 99 % no verdict rests on an interval. Among a
hundred such intervals one may be wrong by chance; a verdict that surprises is worth a second run.

**A stand-in** is what was measured where the thing that the sentence names is missing (CUDA devices, mostly). Its
figures are marked, and decide nothing about the thing.

**Raw measurements** lie in the folder [claims](claims), a JSON file beside the page of each claim. The rules can be
applied to them without measuring, and the pages made again:

```bash
ddp claims --judge-again --output docs/reference
ddp claims --document --output docs/reference
```
"""


def pages(claims: Sequence[KnownClaim], output: Path) -> dict[str, str]:
    """Markdown by file name: `claims.md`, the table of these claims, and `claims/c01.md` and so on, a page for each.

    The verdicts are those found below `output`.
    """
    measured = {known.claim.id: read(output / "claims" / f"{known.claim.id}.json") for known in claims}
    lines = [_HEAD, *_machine([found for found in measured.values() if found])]
    lines += ["| claim | what it says | verdict here | one figure |", "|---|---|---|---|"]
    for known in claims:
        claim, found = known.claim, measured[known.claim.id]
        verdict = found["verdict"] if found else "not measured"
        link = f"[{claim.id}](claims/{_page(claim)})"
        lines.append(f"| {link} | {claim.title} | {verdict} | {_headline(claim, found)} |")
    found_pages = {f"claims/{_page(known.claim)}": _whole(known, measured[known.claim.id]) for known in claims}
    return {"claims.md": "\n".join(lines) + "\n", **found_pages}


def _page(claim: Claim) -> str:
    return f"{claim.id.lower()}.md"


def _headline(claim: Claim, found: dict[str, Any] | None) -> str:
    """The claim's figure for the table: the one whose name begins as `headline` says, else the first one."""
    figures = [Figure(**figure) for figure in found["figures"]] if found else []
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
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    runs = {str((content.get("run") or {}).get("started_at")) for content in found}
    how = "in one run" if len(runs) == 1 and "None" not in runs else f"in {len(runs)} runs"
    thorough = "`--full`" if not any(content["environment"]["quick"] for content in found) else "`--quick`"
    return [
        f"Measured {when} {how} of {thorough}, {len(found)} claims, on {environment['cores']} cores "
        f"({environment['cpu']}), {', '.join(devices)}, torch {environment['packages']['torch']}.",
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
        parts = found.get("parts", [])
        lines += [f"**Verdict: {found['verdict']}.**" + ("" if parts else f" {found['reason']}"), ""]
        if found.get("measured_by_rule") != claim.digest:
            lines += ["Measured under an earlier rule, and judged again by this one.", ""]
        lines += [f"- {part['name']}: **{part['verdict']}**, {part['reason']}" for part in parts]
        lines += [""] if parts else []
        lines += _figures(found["figures"])
        lines += [f"[Raw measurements]({claim.id}.json), {_when(found)}. To measure again:", ""]
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


def _figures(figures: Sequence[dict[str, Any]]) -> list[str]:
    if not figures:
        return []
    return [
        "| figure | value | interval | level |",
        "|---|---|---|---|",
        *(_figure(Figure(**figure)) for figure in figures),
        "",
    ]


def _figure(figure: Figure) -> str:
    unit = _unit(figure)
    interval = "" if figure.low is None else f"{_number(figure.low)} to {_number(figure.high)}{unit}"
    level = "" if figure.level is None else f"{100 * figure.level:.2f} %"
    return f"| {figure.label} | {_number(figure.value)}{unit} | {interval} | {level} |"


def _unit(figure: Figure) -> str:
    return f" {figure.unit}" if figure.unit else ""


def _number(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
