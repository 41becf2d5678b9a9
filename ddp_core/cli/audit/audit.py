"""The audit of a run: its whole chain is read, a few segments are trained again, and what that proves is told."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ddp_core.base.errors import DIFFERENT, ExitCode, UserError
from ddp_core.base.shown import shown
from ddp_core.cli.audit.draw import Segment, claims, drawn, needed_draws, passing, segments_of
from ddp_core.cli.audit.replay import replay
from ddp_core.cli.audit.whole_chain import WholeChain, check_begin, check_chain
from ddp_core.cli.prepare import load_with_settings
from ddp_core.cli.repeating import Different, checked, place_of
from ddp_core.config.layout import LayoutKind, ShardMode
from ddp_core.config.options import Asked
from ddp_core.distributed.children import Children
from ddp_core.experiment.request import build_splits
from ddp_core.observe.chain import CHAIN, compare_chains
from ddp_core.record.bundles import ChangedBundle, unpack_bundle
from ddp_core.record.directory import RunDirectory
from ddp_core.record.environment import package_differences
from ddp_core.record.guarded import what_broke_it
from ddp_core.record.signing import BadSignature, require_signed
from ddp_core.record.weights import exchanged_weights

AUDIT_FORMAT = "ddp-audit/1"
"""Of what `--json` prints."""


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


def audit(named: Path, signer: Path | None, report: Report, **words: Any) -> int:
    """Audit a run directory or a bundle as `audit_run` does; with `signer`, only if one of that file has signed it."""
    if not named.is_file():
        return _audit_signed(named, signer, report, **words)
    with TemporaryDirectory(prefix="ddp-bundle-") as folder:
        try:
            unpacked = unpack_bundle(named, Path(folder))
        except ChangedBundle as changed:
            return report.end(f"different bundle: {changed}. Nothing was trained.", DIFFERENT)
        report.say("bundle", f"{unpacked.files} files, each as MANIFEST says")
        report.say("packages", package_differences(unpacked.pins, unpacked.record["environment"]))
        report.say("code", "this runs the code in the bundle")
        return _audit_signed(Path(folder), signer, report, **words)


def _audit_signed(path: Path, signer: Path | None, report: Report, **words: Any) -> int:
    if signer is not None:
        try:
            who = require_signed(path, RunDirectory(path).read(), signer)
        except BadSignature as error:
            return report.end(f"different signer: {error}. Nothing was trained.", DIFFERENT)
        report.say("signed", f"by {who}, over the head of the chain and the weights", signer=who)
    return audit_run(path, report=report, **words)


def audit_run(
    path: Path,
    segments: int,
    seed: int | None,
    head: str | None,
    report: Report,
    layout: LayoutKind | None = None,
    device: str | None = None,
    nproc_per_node: int | None = None,
    shard: ShardMode | None = None,
    data_dir: str | None = None,
) -> int:
    """Audit the finished run at `path`; returns 0 where all that was looked at is what its chain says, else 1.

    `segments`: how many are trained again. `seed`: of the draw; None for one that is drawn now. `head`: that of the
    chain, as the auditor was given it before. Raises UserError for a run that cannot be audited.
    """
    directory = RunDirectory(path)
    record = directory.read()
    if record["status"] != "completed":
        raise UserError(f"{path} is {record['status']}, so nothing is to be audited yet; finish it: --resume {path}")
    if (what := what_broke_it(record)) is not None:
        report.say("note", f"{what}. Its weights are not promised to come out again")
    if record["fingerprint_changed"]:
        raise UserError(
            f"{path} went on under another fingerprint than it was begun with, so no machine can repeat all of it"
        )
    try:
        begin = check_begin(path, record)
        if record["data_sha256"] is None:
            raise UserError(f"{path} was trained on data that are others at each read, so no segment can be repeated")
        where = place_of(record, layout, device, nproc_per_node) | ({"shard": shard} if shard is not None else {})
        asked = checked(directory, record, where, data_dir)
        told = record.get("chain")
        known = None if told is None else told["head"]
        if head is not None and head != known:
            raise Different(f"different chain: its head is {known}, and not {head}, which was given before")
        steps = record["result"]["steps"]
        of_run = segments_of(begin["every"], steps)
        seed = secrets.randbits(32) if seed is None else seed
        lots = drawn(of_run, segments, seed, str(known))
        chain = _check_whole(directory, record, asked, lots, report)
        _check_end(directory, record, chain, asked, report)
        for lot in lots:
            replay(directory, record, chain, lot, asked)
            report.say(
                "replayed", f"segment {lot.number} of {len(of_run)}, steps {lot.start + 1} to {lot.stop}: the same"
            )
    except Different as difference:
        return report.end(shown(str(difference)), DIFFERENT)
    return _pass(report, of_run, lots, seed, steps)


def _check_whole(
    directory: RunDirectory, record: Mapping[str, Any], asked: Asked, lots: list[Segment], report: Report
) -> WholeChain:
    loaded = load_with_settings(asked.experiment, (), Path(asked.record or ""))
    samples = len(build_splits(loaded, Path(asked.data_dir)).train)
    wanted = {step for lot in lots for step in range(lot.start + 1, lot.stop + 1)}
    chain = check_chain(directory, record, samples, wanted)
    report.say(
        "chain",
        f"{record['result']['steps']:,} steps, each line with its head, samples and rates as they must be; head "
        f"{chain.head}",
        head=chain.head,
        steps=record["result"]["steps"],
        weights_sha256=record["weights_sha256"],
    )
    return chain


def _check_end(
    directory: RunDirectory, record: Mapping[str, Any], chain: WholeChain, asked: Asked, report: Report
) -> None:
    """Raises Different where the final weights are others, or evaluate otherwise than the chain says."""
    if (exchanged := exchanged_weights(directory.path, record)) is not None:
        raise Different(f"different file: {exchanged} holds other weights than the record says")
    if chain.figures is None or chain.evaluated != record["result"]["steps"]:
        return
    words = ["eval", str(directory.path), "--data-dir", asked.data_dir, "--device", asked.device, "--json"]
    with Children("ddp-audit-") as children:
        ended = children.ddp(words)
    code, output, said = ended.code, ended.output, ended.error()
    if code == ExitCode.NO_CHECKPOINT:
        raise Different(f"different weights: {said}")
    if code != ExitCode.DONE and not (output and json.loads(output)["identical"] is False):
        raise UserError(f"the final weights cannot be evaluated again (exit code {code}): {said}")
    if code != ExitCode.DONE:
        raise Different(f"different figures: evaluated again, {said}")
    report.say("evaluated", "the final weights again: the same figures", figures=dict(chain.figures))


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
    return report.end("passed: what was looked at is what the chain says", ExitCode.DONE)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def compare_runs(path: Path, other: Path, report: Report) -> int:
    """Say at which step two runs part, from their chains alone; returns 0 where they do not."""
    for each in (path, other):
        if not (each / CHAIN).is_file():
            raise UserError(f"{each} has no chain ({CHAIN}); train with --keep-for-audit N")
    causes, parting, alike = compare_chains(path / CHAIN, other / CHAIN)
    for cause in causes:
        report.say("unlike", cause)
    report.told |= {"unlike": causes, "alike_steps": alike}
    if parting is None:
        return report.end(f"identical: {alike:,} steps, line by line", ExitCode.DONE)
    report.told |= {"step": parting.step, "what": parting.what}
    return report.end(f"different from step {parting.step} on: {parting.what}", DIFFERENT)
