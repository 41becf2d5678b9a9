"""The claims as a page of documentation: what is claimed, how it is judged, what is behind it, what came out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp_lab.claims.framework.claim import KnownClaim
from ddp_lab.claims.framework.suite import read

_HEAD = """# Claims

Each row is a sentence of the source articles as an experiment. `ddp claims` measures all of them here, `ddp claims C06`
one of them; `--full` takes longer and is surer. A verdict (confirmed, refuted, not measurable here, inconclusive)
follows from the measurements by the rule stated with the claim; the same rule runs on a laptop and on a node with eight
GPUs.

"Beyond noise" always means the one test of `ddp_lab/claims/framework/statistics.py`: two ways of doing the same work
are timed in interleaved rounds, and the 99 % bootstrap interval of the median ratio leaves out 1.

This page is generated: `python -m ddp_lab.claims --document`.
"""


def document(claims: Sequence[KnownClaim], output: Path) -> str:
    """Markdown for these claims, with the verdicts found below `output`."""
    measured = {known.claim.id: read(output / "claims" / f"{known.claim.id}.json") for known in claims}
    lines = [_HEAD, "| id | claim | sources | verdict here |", "|---|---|---|---|"]
    for known in claims:
        claim, found = known.claim, measured[known.claim.id]
        anchor = f"#{claim.id.lower()}-{_slug(claim.title)}"
        verdict = found["verdict"] if found else "not measured"
        lines.append(f"| [{claim.id}]({anchor}) | {claim.title} | {', '.join(claim.sources)} | {verdict} |")
    lines += ["", *_machine([found for found in measured.values() if found])]
    for known in claims:
        lines += _section(known, measured[known.claim.id])
    return "\n".join(lines).rstrip() + "\n"


def _machine(found: Sequence[dict[str, Any]]) -> list[str]:
    if not found:
        return []
    environment, dates = found[0]["environment"], sorted(content["measured_at"][:10] for content in found)
    devices = environment.get("cuda", {}).get("devices") or ["no CUDA device"]
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return [
        f"Measured {when} on {environment['cores']} cores ({environment['cpu']}), {', '.join(devices)}, "
        f"torch {environment['packages']['torch']}.",
        "",
    ]


def _section(known: KnownClaim, found: dict[str, Any] | None) -> list[str]:
    claim = known.claim
    lines = [f"## {claim.id} {claim.title}", "", f"> {claim.claim}", ">"]
    lines += [f"> {line}".rstrip() for line in claim.original.splitlines()]
    lines += [f"> (source {', '.join(claim.sources)})", "", known.behind, ""]
    lines += [f"**Measured:** {claim.method}", "", f"**Rule:** {claim.rule}", ""]
    if found:
        lines += [f"**Verdict: {found['verdict']}.** {found['reason']}", ""]
        if found["figures"]:
            lines += ["| figure | value | interval |", "|---|---|---|"]
            lines += [_figure(figure) for figure in found["figures"]] + [""]
        lines += ["```bash", found["command"], "```", ""]
    else:
        lines += ["```bash", f"ddp claims {claim.id}", "```", ""]
    return lines


def _figure(figure: dict[str, Any]) -> str:
    unit = f" {figure['unit']}" if figure["unit"] else ""
    interval = "" if figure["low"] is None else f"{_number(figure['low'])} to {_number(figure['high'])}{unit}"
    return f"| {figure['name']} | {_number(figure['value'])}{unit} | {interval} |"


def _number(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _slug(title: str) -> str:
    kept = "".join(sign for sign in title.lower() if sign.isalnum() or sign in " -_")
    return kept.replace(" ", "-")
