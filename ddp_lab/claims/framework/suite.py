"""Find the claims' files, measure and judge each, and keep what came out where the report looks for it."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddp_core.base.documents import BadDocument, json_text, read_document
from ddp_core.base.errors import ExitCode, UserError, first_line
from ddp_core.base.files import replace_file
from ddp_lab.claims.framework.claim import Claim, Judgement, KnownClaim, Measurements
from ddp_lab.claims.framework.provenance import rule_commit
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.framework.statistics import FAMILY, FAMILY_ERROR, ROUNDS, STRICTEST, allowing, holm
from ddp_lab.records import CLAIM_FORMAT, Figure, record_text, verdict_in_words

FAILED = 1
"""Exit code where a measurement raised, or gave a figure that cannot be."""
RULE_CHANGED = "rule changed since: to be measured anew"


def known_claims(wanted: Sequence[str] = ()) -> list[KnownClaim]:
    """The claims by number, all or those wanted. Raises UserError for one that does not exist."""
    files = {path.stem[:3].upper(): path for path in sorted(Path(__file__).parents[1].glob("c[0-9][0-9]_*.py"))}
    names = [name.upper() for name in wanted] or list(files)
    for name in names:
        if name not in files:
            raise UserError(f"there is no claim {name}; there are: {', '.join(files)}")
    found = []
    for name in dict.fromkeys(names):
        module = importlib.import_module(f"ddp_lab.claims.{files[name].stem}")
        assert module.claim.id == name, name
        found.append(KnownClaim(module.claim, module.measure, module.judge, files[name]))
    return found


def measure_all(claims: Sequence[KnownClaim], setting: Setting, say: Callable[[str], None]) -> int:
    """Measure, judge and write each claim; returns the exit code, 1 where a measurement raised."""
    from ddp_core.record.environment import describe_environment

    environment = describe_environment() | {"load_before": os.getloadavg()[0]}
    run = {"started_at": _now(), "claims": [known.claim.id for known in claims]}
    say(rounds_needed())
    if environment["load_before"] > setting.cores / 2:
        say(
            f"the machine is busy (load {environment['load_before']:.1f} on {setting.cores} cores): times will be noisy"
        )
    mode = 0 if setting.quick else 1
    rules = [rule_commit(known.file) for known in claims]  # those that were loaded, whatever is committed meanwhile
    planned = [known.claim.seconds[mode] for known in claims]
    began, failed = time.monotonic(), []
    for number, known in enumerate(claims):
        spent, expected = time.monotonic() - began, sum(planned[:number])
        # How slow this machine is, relative to the one on which the planned seconds were measured.
        pace = spent / expected if expected else 1.0
        left = duration(sum(planned[number:]) * pace)
        say(f"[{number + 1:2d}/{len(claims)}] {known.claim.id} {known.claim.title}; about {left} left")
        content = measure_one(known, setting, environment, run, rules[number])
        if content["error"] is not None:
            failed.append(known.claim.id)
        say(f"        {told(content)}: {content['reason']} ({duration(content['seconds'])})")
    for path, found in _judge_together(claims, setting.output):
        before = read(path)
        write(path, found)
        if before and _verdicts(before) != _verdicts(found):
            say(f"{found['id']} by Holm's procedure: {told(found)}: {found['reason']}")
        for fault in faults(found):
            say(f"{found['id']}: {fault}")
            failed.append(found["id"])
    failed = list(dict.fromkeys(failed))
    if failed:
        say(f"claims: failed for {', '.join(failed)}; see *.error.txt in {setting.claims}")
    return FAILED if failed else ExitCode.DONE


def measure_one(
    known: KnownClaim,
    setting: Setting,
    environment: dict[str, Any],
    run: dict[str, Any] | None = None,
    rule: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Measure and judge one claim and write its file; `error` says in a line what went wrong, None if nothing did.

    `run` says when the run of this and other claims began, and which they are; `rule` which commit had the rule then.
    """
    setting.claims.mkdir(parents=True, exist_ok=True)
    trace = setting.claims / f"{known.claim.id}.error.txt"
    trace.unlink(missing_ok=True)
    began = time.monotonic()
    measurements: Measurements | None = None
    problem: str | None = None
    try:
        measurements = plain(known.measure(setting))
        judgement = known.judge(measurements)
    except Exception as error:
        trace.write_text(traceback.format_exc())
        problem = first_line(error)
        problem = problem if isinstance(error, UserError) else f"{type(error).__name__}: {problem}"
        step = "measurement" if measurements is None else "judgement"
        judgement = Judgement("inconclusive", f"the {step} failed: {problem}")
    content = describe(known.claim, judgement) | {
        "measurements": measurements,
        "measured_by_rule": known.claim.digest,
        "rule_commit": rule or rule_commit(known.file),
        "run": run,
        "allowed_p": STRICTEST,
        "error": problem,
        "command": f"ddp claims {known.claim.id} {'--quick' if setting.quick else '--full'}",
        "seconds": round(time.monotonic() - began, 2),
        "environment": environment | setting.describe(),
        "measured_at": _now(),
    }
    write(setting.claims / f"{known.claim.id}.json", content)
    return content


def judge_again(claims: Sequence[KnownClaim], output: Path, say: Callable[[str], None]) -> int:
    """Apply the rules to the measurements that are stored. Raises UserError where there are none.

    What was measured by another rule than today's stays as it is: no rule judges what was measured before it.
    """
    for known in claims:
        path = output / "claims" / f"{known.claim.id}.json"
        content = read(path)
        if content is None:
            raise UserError(f"{path} is missing or unreadable; measure first: ddp claims {known.claim.id}")
        if is_stale(known, content):
            say(f"{known.claim.id} {content['verdict']}: {RULE_CHANGED}")
    for path, found in _judge_together(claims, output):
        write(path, found | {"error": None})
        say(f"{found['id']} {told(found)}: {found['reason']}")
    return ExitCode.DONE


def _judge_together(claims: Sequence[KnownClaim], output: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The claims' files as judged by the p that Holm's procedure allows for all of them together."""
    stored = []
    for known in claims:
        path = output / "claims" / f"{known.claim.id}.json"
        content = read(path)
        if content and not is_stale(known, content) and content.get("measurements") is not None:
            stored.append((path, known, content))
    # Which tests are made, and their p, do not depend on what is allowed.
    first = [known.judge(content["measurements"]) for _, known, content in stored if not content["error"]]
    allowed = holm([figure.p for judgement in first for figure in judgement.figures if figure.p is not None])
    found = []
    with allowing(allowed):
        for path, known, content in stored:
            judged = {} if content["error"] else describe(known.claim, known.judge(content["measurements"]))
            found.append((path, content | judged | {"allowed_p": allowed}))
    return found


def _verdicts(content: dict[str, Any]) -> list[str]:
    return [content["verdict"], *(part["verdict"] for part in content["parts"])]


def told(content: dict[str, Any]) -> str:
    """The verdict of a claim's file in words."""
    return verdict_in_words(content["verdict"], content["claim"], content["environment"])


def is_stale(known: KnownClaim, content: dict[str, Any]) -> bool:
    """Whether the claim's rule, method or loads have changed since it was measured."""
    return bool(content.get("measured_by_rule") != known.claim.digest)


def faults(content: dict[str, Any]) -> list[str]:
    """The figures of a claim's file that cannot be."""
    return [fault for figure in content["figures"] if (fault := Figure(**figure).fault)]


def rounds_needed() -> str:
    """What the tests ask for, computed before anything is measured."""
    all_agree, two_do_not = ROUNDS
    return (
        f"at most {FAMILY} intervals bear verdicts; with {100 * FAMILY_ERROR:g} % for all of them the strictest p is "
        f"{STRICTEST:.2g}, which takes {all_agree} rounds that agree, or {two_do_not} of which two do not"
    )


def describe(claim: Claim, judgement: Judgement) -> dict[str, Any]:
    """The part of a claim's file that follows from the claim and its judgement."""
    fixed = {name: value for name, value in asdict(claim).items() if name not in ("seconds", "in_short", "tests")}
    fixed["rule_digest"] = claim.digest
    content: dict[str, Any] = plain({"format": CLAIM_FORMAT} | fixed | judgement.to_json())
    return content


def plain(content: Any) -> Any:
    """The content as it will be read back: JSON types only, numbers finite or None. Raises TypeError for others."""
    return json.loads(json_text(content))


def read(path: Path) -> dict[str, Any] | None:
    """A claim's file, None where there is none that can be read."""
    try:
        return read_document(path, dict[str, Any], CLAIM_FORMAT)
    except (OSError, BadDocument):
        return None


def write(path: Path, content: dict[str, Any]) -> None:
    """Replace a claim's file. Raises UserError (4) where that cannot be done."""
    write_text(path, record_text(content) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a file in one move, never half, making its folder. Raises UserError (4) where that cannot be done."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}", ExitCode.RESOURCES) from None


def duration(seconds: float) -> str:
    """Seconds as people write them: 12 s, 3 min 20 s."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"


def say(text: str) -> None:
    """Print a text at once, as one line."""
    print(re.sub(r"\s*\n\s*", " ", text), file=sys.stdout, flush=True)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
