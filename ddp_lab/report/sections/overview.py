"""The overview: tiles with the counts, and the table of what ran where."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ddp_core.record.own_figures import in_words, own_figures
from ddp_lab.report import values
from ddp_lab.report.reading.claims import Findings
from ddp_lab.report.reading.families import Family, digest_letters, way_of
from ddp_lab.report.reading.runs import Inventory, Run
from ddp_lab.report.sections.environments import environment_anchor
from ddp_lab.report.sections.experiments import own_cell
from ddp_lab.report.sections.runs import run_anchor
from ddp_lab.report.values import TONES, Cell, Column, Spread, Table, figure, measured, moment, number, plural, text


class Tile(NamedTuple):
    """One count in large figures, with words above and below it; the tone is good, bad or none."""

    heading: str
    figures: str
    words: str
    tone: str = ""


def tiles(inventory: Inventory, families: Sequence[Family], findings: Findings) -> list[Tile]:
    """Return a tile each for runs, digests, claims and faults, where there are any."""
    statuses = Counter(run.status for run in inventory.runs)
    statuses.update(["unreadable"] * len(inventory.broken))
    words = " · ".join(f"{count} {status}" for status, count in statuses.items()) or "none yet"
    found = [Tile("Runs", str(statuses.total()), words)]
    judged = [family for family in families if family.verdict.tone != "quiet"]
    if judged:
        good = sum(1 for family in judged if family.verdict.tone == "good")
        verb = "ends" if good == 1 else "end"
        words = f"of {plural(len(judged), 'experiment')} compared {verb} with the same weights on every layout"
        found.append(Tile("Digests", str(good), words, "good" if good == len(judged) else "bad"))
    if findings.claims:
        verdicts = Counter(claim.verdict for claim in findings.claims)
        words = " · ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
        found.append(Tile("Claims", str(len(findings.claims)), words))
    if faults := [fault for drill in findings.drills for fault in drill.faults]:
        recovered = sum(1 for fault in faults if fault.outcome == "recovered")
        tone = "good" if recovered == len(faults) else "bad"
        found.append(Tile("Faults", f"{recovered}/{len(faults)}", "of the drilled faults recovered", tone))
    return found


def runs_table(inventory: Inventory, environments: Mapping[str, Sequence[Run]]) -> Table:
    """Return a row for each run, the newest first, and one for each directory that cannot be read as a run."""
    has_own = any(own_figures([run.record["result"]]) for run in inventory.runs)
    columns = [
        Column("experiment"),
        Column("layout"),
        Column("seed", True),
        Column("status"),
        Column("weights", hint="the same letter: the same weights, to the bit"),
        *([Column("figure", True, "accuracy, or the first of the experiment's own figures")] if has_own else []),
        Column("loss", True),
        Column("samples/s", True),
        Column("steps", True),
        Column("seconds", True),
        Column("started (UTC)"),
        Column("env", hint="environment"),
    ]
    letters = digest_letters(inventory.runs)
    place = {run.path: letter for letter, runs in environments.items() for run in runs}
    rows = [_run_row(run, letters, place[run.path], has_own) for run in reversed(inventory.runs)]
    for broken in inventory.broken:
        head, _, tail = broken.name.rpartition("/")
        label = re.sub(r"-\d{8}T\d{6}Z-.*", "", tail)
        row = [text(head), text(label, link=run_anchor(broken)), figure(None), text("unreadable", "bad")]
        rows.append([*row, *[text(None)] * (len(columns) - len(row))])
    return Table(columns, rows)


def _run_row(run: Run, letters: Mapping[str, str], environment: str, has_own: bool) -> list[Cell]:
    loss = run.result("test_loss")
    loss = run.result("train_loss") if loss is None else loss
    digest = run.record["weights_sha256"] or ""
    letter = letters.get(digest)
    shown = f"{letter} · {digest[:8]}" if letter else digest[:8] or values.ABSENT
    return [
        text(run.experiment),
        text(way_of(run), link=run_anchor(run)),
        figure(run.seed, str(run.seed)),
        text(run.ended, TONES[run.status]),
        Cell(shown, letter or digest[:8] or None, "code", note=run.broken or ""),
        *([_own(run)] if has_own else []),
        figure(loss, number(loss, 4)),
        replace(_timed(run, "samples_per_second"), note="busy machine" if run.disturbance else ""),
        figure(run.last_step, f"{run.last_step:,}" if run.last_step is not None else None),
        _timed(run, "seconds"),
        Cell(moment(run.record["started_at"])[5:], run.record["started_at"]),
        text(environment, link=environment_anchor(environment)),
    ]


def _own(run: Run) -> Cell:
    """The first figure of the held-out samples, with its name."""
    name = next(iter(own_figures([run.record["result"]])), None)
    if name is None:
        return figure(None)
    return replace(own_cell(name, Spread.of([run.result(name)])), note=in_words(name))


def _timed(run: Run, name: str) -> Cell:
    return figure(run.result(name), measured(Spread.of([run.result(name)])))
