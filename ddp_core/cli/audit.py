"""`ddp audit`: whether a run is what its record says, from a few segments of it that are trained again.

Who notes the states with which segments begin and end: `ddp_core.trainers` and `ddp_core.record`.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import comb
from pathlib import Path
from typing import Any, NamedTuple

from ddp_core.base.errors import DIFFERENT, ExitCode, UserError
from ddp_core.base.files import sha256_of
from ddp_core.base.fingerprint import fingerprint_differences
from ddp_core.base.shown import shown
from ddp_core.checkpoint import load, read_checkpoint
from ddp_core.checkpoint.manifest import manifest_at
from ddp_core.cli.repeating import Different, checked, place_of, run_in
from ddp_core.config.options import Asked
from ddp_core.distributed.children import Children
from ddp_core.record.bundles import ChangedBundle
from ddp_core.record.directory import RunDirectory, find_runs
from ddp_core.record.recorded import what_broke_it
from ddp_core.record.run_json import RecordedKept, RecordedRun
from ddp_core.record.weights import exchanged_weights
from ddp_core.trainers.noting import state_digests

AUDIT_FORMAT = "ddp-audit/1"
"""The format of what `--json` prints."""


class Report:
    """What is told while the audit goes on: in lines, or at its end in one document."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self.told: dict[str, Any] = {"format": AUDIT_FORMAT}

    def say(self, what: str, words: str, **fields: Any) -> None:
        """Tell something: `what` it is about, in words, and as fields of the document."""
        self.told |= fields
        if not self._as_json:
            print(f"{what:10} {words}", flush=True)

    def end(self, verdict: str, code: int) -> int:
        """Tell the verdict; returns the exit code."""
        if self._as_json:
            print(json.dumps({**self.told, "verdict": verdict, "passed": code == ExitCode.DONE}))
        else:
            print(verdict, flush=True)
        return code


def audit(named: Path, report: Report, **words: Any) -> int:
    """Audit a finished run or a bundle of one; returns 0 where all that was looked at is as its record says, else 1."""
    try:
        with run_in(named, report.say) as path:
            return _audit(path, report, **words)
    except ChangedBundle as changed:
        return report.end(f"different bundle: {shown(str(changed))}. Nothing was trained.", DIFFERENT)


def _audit(path: Path, report: Report, segments: int, seed: int | None, record_sha256: str | None, **where: Any) -> int:
    directory = RunDirectory(path)
    record = directory.read()
    if record["status"] != "completed":
        raise UserError(f"{path} is {record['status']}, so nothing is to be audited yet; finish it: --resume {path}")
    kept = _require_auditable(path, record)
    if (what := what_broke_it(record)) is not None:
        report.say("note", f"{what}. Its weights are not promised to come out again")
    steps, states = record["result"]["steps"], kept["states"]
    try:
        known = sha256_of(path / "run.json")
        if record_sha256 is not None and record_sha256 != known:
            raise Different(f"different record: run.json has the SHA-256 {known}, and not that which was given before")
        if states[-1]["weights_sha256"] != record["weights_sha256"]:
            raise Different("different record: the state that run.json notes last has other weights than it ends with")
        asked = checked(directory, record, place_of(record, where))
        of_run = segments_of([state["step"] for state in states])
        seed = secrets.randbits(32) if seed is None else seed
        lots = drawn(of_run, segments, seed, known)
        report.say(
            "record",
            f"{steps:,} steps, {len(states)} kept states; sha256 {known}",
            record_sha256=known,
            steps=steps,
            weights_sha256=record["weights_sha256"],
        )
        _check_end(directory, record, asked, report)
        for lot in lots:
            replay(directory, record, lot, asked)
            report.say(
                "replayed", f"segment {lot.number} of {len(of_run)}, steps {lot.start + 1} to {lot.stop}: the same"
            )
    except Different as difference:
        return report.end(shown(str(difference)), DIFFERENT)
    return _pass(report, of_run, lots, seed, steps)


def _require_auditable(path: Path, record: RecordedRun) -> RecordedKept:
    """The `kept` of the record. Raises UserError for a run that cannot be audited."""
    kept, steps = record.get("kept"), record["result"]["steps"]
    if kept is None:
        if record.get("chain") is not None:
            raise UserError(f"{path} kept its steps in an older form; train it again with --keep-for-audit N")
        raise UserError(
            f"{path} kept no states, so it can only be checked whole: ddp verify {path}. To audit the next one in "
            "pieces, train it with --keep-for-audit N"
        )
    if record.get("forked_from") is not None:
        raise UserError(f"{path} branches off from another run: use ddp verify")
    if any("extended_from" in attempt for attempt in record["attempts"]):
        raise UserError(f"{path} was made longer after its end, so its steps are not of one training: use ddp verify")
    # Else a run could be forged in one long segment among many short ones.
    places, every = [state["step"] for state in kept["states"]], kept["every"]
    is_whole = len(places) == -(-steps // every)
    if not is_whole or places != [min(number * every, steps) for number in range(1, len(places) + 1)]:
        raise UserError(
            f"{path} does not note the states after each {every} steps and at its end (was it begun without "
            "--keep-for-audit?): use ddp verify"
        )
    if record["fingerprint_changed"]:
        raise UserError(
            f"{path} went on under another fingerprint than it was begun with, so no machine can repeat all of it"
        )
    if record["data_sha256"] is None:
        raise UserError(f"{path} was trained on data that are others at each read, so no segment can be repeated")
    return kept


def _check_end(directory: RunDirectory, record: Mapping[str, Any], asked: Asked, report: Report) -> None:
    """Raises Different where the final weights are others, or evaluate otherwise than the record says."""
    if (exchanged := exchanged_weights(directory.path, record)) is not None:
        raise Different(f"different file: {exchanged} holds other weights than the record says")
    figures = {name: value for name, value in record["result"].items() if name.startswith(("test_", "ema_test_"))}
    if not figures:
        return
    words = ["eval", str(directory.path), "--data-dir", asked.data_dir, "--device", asked.device, "--json"]
    with Children("ddp-audit-") as children:
        ended = children.ddp(words)
    code, said = ended.code, ended.error()
    # The experiment's own file may print lines, too.
    told = json.loads(next((line for line in ended.output.splitlines() if line.startswith('{"run": ')), "{}"))
    if code == ExitCode.NO_CHECKPOINT:
        raise Different(f"different weights: {said}")
    if code != ExitCode.DONE and told.get("identical") is not False:
        raise UserError(f"the final weights cannot be evaluated again (exit code {code}): {said}")
    if code != ExitCode.DONE:
        raise Different(f"different figures: evaluated again, {said}")
    again = told["figures"]
    if other := [name for name in {**figures, **again} if figures.get(name) != again.get(name)]:
        raise Different(
            f"different figures: evaluated again, {other[0]} is {again.get(other[0])}, and run.json says "
            f"{figures.get(other[0])}"
        )
    report.say("evaluated", "the final weights again: the same figures", figures=figures)


def _pass(report: Report, of_run: list[Segment], lots: list[Segment], seed: int, steps: int) -> int:
    total, count = len(of_run), len(lots)
    replayed = sum(lot.stop - lot.start for lot in lots)
    probabilities = {forged: passing(total, forged, count) for forged in claims(total)}
    report.say(
        "share",
        f"{replayed:,} of {steps:,} steps ({_percent(replayed / steps)}), {count} of {total} segments, seed {seed}",
        seed=seed,
        segments=total,
        drawn=[lot.number for lot in lots],
        replayed_steps=replayed,
        passing={str(forged): probability for forged, probability in probabilities.items()},
    )
    for forged, probability in probabilities.items():
        draws = needed_draws(total, forged)
        report.say(
            "proof",
            f"with {forged} of {total} segments forged it would have passed with probability {_percent(probability)}; "
            f"{draws} draw{'s' if draws > 1 else ''} bring that to 5 % or less",
        )
    return report.end("passed: what was looked at is what the record says", ExitCode.DONE)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


class Segment(NamedTuple):
    """Steps `start` + 1 to `stop`, the state before and after which is kept."""

    number: int
    """Counted from 1."""
    start: int
    stop: int


def segments_of(kept: Sequence[int]) -> list[Segment]:
    """The segments of a run that has kept the states after these steps, the last of which is its end."""
    return [Segment(number, *ends) for number, ends in enumerate(pairwise([0, *kept]), 1)]


def drawn(segments: Sequence[Segment], count: int, seed: int, record: str) -> list[Segment]:
    """So many of the segments, each set of them as likely as any other, in their sequence."""
    # They follow from the auditor's seed and the SHA-256 of the record, which tells nothing of them before the seed is
    # known.

    def lot(segment: Segment) -> bytes:
        return hashlib.sha256(f"{seed} {record} {segment.number}".encode()).digest()

    return sorted(sorted(segments, key=lot)[:count])


def passing(segments: int, forged: int, draws: int) -> float:
    """The probability that none of `draws` of the segments is a forged one: C(S - F, k) / C(S, k)."""
    return comb(segments - forged, draws) / comb(segments, draws)


def needed_draws(segments: int, forged: int) -> int:
    """The fewest draws that a run with so many forged segments passes with a probability of at most 5 %."""
    return next(draws for draws in range(1, segments + 1) if passing(segments, forged, draws) <= 0.05)


def claims(segments: int) -> list[int]:
    """The numbers of forged segments that a report tells of: one, a tenth and a half of them."""
    return sorted({1, -(-segments // 10), -(-segments // 2)})


def replay(directory: RunDirectory, record: Mapping[str, Any], segment: Segment, asked: Asked) -> None:
    """Train the segment again as `asked`, and compare the state at its end.

    Raises Different where that is another one than the run has noted, and UserError where it cannot be trained.
    """
    noted = {state["step"]: state for state in record["kept"]["states"]}
    changes: dict[str, Any] = {"keep_for_audit": None, "guard": "off", "rehearsal": "off", "max_restarts": 0}
    if segment.start:
        _require_noted(directory, noted[segment.start], segment)
        changes |= {"fork": str(directory.path), "at": segment.start, "init_from": None}
    # A state that is kept within the run is that of a run that goes on: a shorter one would evaluate there.
    if segment.stop != record["result"]["steps"]:
        changes["faults"] = (f"stop@{segment.stop}",)
    with Children("ddp-audit-") as children:
        changes["output"] = str(children.folder)
        ended = children.ddp(["train", *asked.model_copy(update=changes).to_words()])
        if ended.code not in (ExitCode.DONE, ExitCode.STOPPED):
            raise UserError(
                f"segment {segment.number} cannot be trained again (exit code {ended.code}): {ended.error()}"
            )
        again, repeated = next(find_runs(children.folder))
        digests = state_digests(load(read_checkpoint(manifest_at(again.checkpoints, segment.stop))))
    if other := [name for name, digest in digests.items() if noted[segment.stop][name] != digest]:
        unlike = fingerprint_differences(repeated["fingerprint"], record["fingerprint"])
        under = f" (under another fingerprint, which the promise does not cover: {'; '.join(unlike)})" if unlike else ""
        what = "other weights" if "weights_sha256" in other else "the same weights, but another state of the rest"
        raise Different(
            f"different segment {segment.number}: steps {segment.start + 1} to {segment.stop}, trained again, end with "
            f"{what}{under}"
        )


def _require_noted(directory: RunDirectory, noted: Mapping[str, Any], segment: Segment) -> None:
    """Raises Different where the checkpoint with which the segment begins is gone, or holds another state."""
    try:
        digests = state_digests(load(read_checkpoint(manifest_at(directory.checkpoints, segment.start))))
    except UserError as error:
        raise Different(f"different checkpoint: segment {segment.number} cannot begin, {error}") from None
    if any(noted[name] != digest for name, digest in digests.items()):
        raise Different(f"different checkpoint: that of step {segment.start} is not the one that run.json notes")
