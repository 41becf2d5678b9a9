"""The claims as a page of documentation: each with its sentence, its verdict, what decided it and its rule in short."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp_core.base.errors import UserError
from ddp_lab.claims.framework.claim import KnownClaim
from ddp_lab.claims.framework.provenance import doubt
from ddp_lab.claims.framework.statistics import FAMILY, FAMILY_ERROR
from ddp_lab.claims.framework.suite import RULE_CHANGED, faults, is_stale, read, told

_RECORDS = "../../benchmarks/results/claims"
"""Where the records lie, seen from the folder of the page."""
_SHOWN = 2
"""The most parts of a claim that are shown with what decided them."""
_HEAD = f"""# Claims

Look up what articles say about DP and DDP, and whether it held when it was measured. {{machine}}

```bash
make claims          # measure all here, about fifteen minutes on two cores
ddp claims C05       # one of them
ddp claims --full    # more rounds, sizes and seeds
```

The sources are five articles in Chinese: 000 [数据并行（DP、DDP）](https://zhuanlan.zhihu.com/p/1898824683173962973);
001 从零构建 PyTorch DDP, of [AIInfra](https://github.com/Infrasys-AI/AIInfra);
002 DDP分布式多GPU并行跑pytorch深度学习模型; 003 浅谈PyTorch中的DP和DDP; 004 on [how DDP
works](https://avoid.overfit.cn/post/11d9f5d9b4fc4cd49cf1b8f97f09252f), by Trinanjan Mitra.

A sentence that says several things is judged part by part: confirmed if all parts are, in part if some are; if none is,
one refuted part refutes it. For each claim this page prints at most two parts with the figures that decided them, and
lists the others by verdict; a figure such as 1.6 (1.51 to 1.67) is a median with its confidence interval. The command
of each claim links to its record: the original words, method, sizes, the whole rule, all figures, and the raw
measurements. *On CPU* marks sentences that speak of GPUs; all was measured on CPUs. `dp` is this project's own layout,
with threads; sentences about `nn.DataParallel` need GPUs. `make report` draws what you have measured.

- **Rule first.** A record names the commit of its rule and the start of its run. If a rule was committed after its
  run began, or not at all, this page cannot be made. A verdict by a rule that has changed since is marked.
- **Beyond noise.** Ways of doing the same work are timed in turns, and compared by an exact sign test. Holm's
  correction over at most {FAMILY} tests keeps the chance that one of them errs at {100 * FAMILY_ERROR:g} %.

{{summary}}

Judge the published measurements again, and make this page:

```bash
ddp claims --judge-again --output benchmarks/results
ddp claims --document --output benchmarks/results
```

[Add a claim](../../CONTRIBUTING.md#add-a-claim).
"""


def page(claims: Sequence[KnownClaim], output: Path) -> str:
    """The page of these claims in Markdown, with the verdicts found below `output`.

    Raises UserError, naming the claim, where a record cannot show that its rule was there before it, or has a figure
    that cannot be.
    """
    measured = {known.claim.id: read(output / "claims" / f"{known.claim.id}.json") for known in claims}
    for known in claims:
        if found := measured[known.claim.id]:
            _require_sound(known, found)
    summary = [
        f"| {claim.id} | {claim.title} | {told(found) if (found := measured[claim.id]) else 'not measured'} |"
        for claim in (known.claim for known in claims)
    ]
    machine = _machine([found for found in measured.values() if found])
    parts = [_HEAD.format(machine=machine, summary="\n".join(["| claim | | verdict |", "|---|---|---|", *summary]))]
    return "\n".join([*parts, *("\n".join(_of(known, measured[known.claim.id])) for known in claims)])


def _require_sound(known: KnownClaim, found: dict[str, Any]) -> None:
    number = known.claim.id
    if reason := doubt(found):
        raise UserError(f"{number}: {reason}; commit its rule, then measure: ddp claims {number}")
    problems = [] if is_stale(known, found) else faults(found)
    if problems:
        raise UserError(f"{number}: {problems[0]}; mend what measures it, then measure: ddp claims {number}")


def _machine(found: Sequence[dict[str, Any]]) -> str:
    if not found:
        return "Nothing has been measured yet."
    environment, dates = found[0]["environment"], sorted(content["measured_at"][:10] for content in found)
    devices = environment.get("cuda", {}).get("devices") or ["no CUDA device"]
    cpus = sorted({str(content["environment"]["cpu"]) for content in found})
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    how = "`--quick`" if any(content["environment"]["quick"] for content in found) else "`--full`"
    return (
        f"Measured {when} with {how} on {environment['cores']} cores of {' or '.join(cpus)}, {', '.join(devices)}, "
        f"torch {environment['packages']['torch']}."
    )


def _of(known: KnownClaim, found: dict[str, Any] | None) -> list[str]:
    claim = known.claim
    lines = [f"## {claim.id} {claim.title}", "", f"> {claim.claim} (source {', '.join(claim.sources)})", ""]
    verdict = told(found) if found else "not measured"
    verdict = verdict[0].upper() + verdict[1:] + (f" ({RULE_CHANGED})" if found and is_stale(known, found) else "")
    parts = found["parts"] if found else []
    reason = f": {_clause(found['reason'])}" if found and not parts else ""
    lines += [f"**{verdict}**{reason}.", "", *_parts(parts)]
    record = f" [`{found['command']}`]({_RECORDS}/{claim.id}.json)" if found else f" `ddp claims {claim.id}`"
    return [*lines, f"Rule: {claim.in_short}{record}", ""]


def _parts(parts: Sequence[dict[str, Any]]) -> list[str]:
    """Some parts with what decided them, of each verdict one where that is possible, and the names of the others."""
    of_each = {part["verdict"]: part for part in reversed(parts)}.values()
    chosen = [*of_each, *(part for part in parts if part not in of_each)][:_SHOWN]
    others: dict[str, list[str]] = {}
    for part in parts:
        if part not in chosen:
            others.setdefault(part["verdict"], []).append(part["name"])
    shown = [f"- {part['name']}: **{part['verdict']}**, {_clause(part['reason'])}" for part in parts if part in chosen]
    also = [f"- also **{verdict}**: {'; '.join(names)}" for verdict, names in others.items()]
    return [*shown, *also, *([""] if parts else [])]


def _clause(reason: str) -> str:
    return reason.partition("; ")[0]
