"""The command line of `ddp diagnose`: runs the script, prints what was found, the most harmful first."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ddp_core.base.ending import said_by
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.process import make_patient
from ddp_core.distributed.children import Children
from ddp_lab.diagnose import across, checks
from ddp_lab.diagnose.differences import not_repeatable, not_restored, other_operation
from ddp_lab.diagnose.findings import Finding, by_harm
from ddp_lab.diagnose.runs import RANKS_WORD, Runner, Script, in_words
from ddp_lab.diagnose.task import Task
from ddp_lab.diagnose.trace import Run
from ddp_lab.diagnose.union import ONE_BY_ONE, TOGETHER
from ddp_lab.options import Parser

FORMAT = "ddp-diagnose/1"
_SHARE_OF_SAVE = 0.4
"""Until the first checkpoint a run may take so much of the time that is left: a second run must come as far."""
_SHARE_TO_EXPLAIN = 0.1
"""So much of the time that is left each of the two runs may take that only explain what was found."""
FOUND = 1
"""The exit code where a bug was found."""
_EPILOG = f"""what it does:
  runs the script, unchanged, on CPU, over gloo, on each number of ranks, and on one rank twice; looks at what each rank
  does in some steps; and ends it. Each run has its own copy of the folder that you are in, in a scratch folder.
examples:
  ddp diagnose -- train.py --batch-size 8
  ddp diagnose --ranks 1,2 --steps 10 -- train.py
  ddp diagnose --resume-args="--resume last.pt" -- train.py
  ddp diagnose -- spawns_its_ranks.py --gpus {RANKS_WORD}
exit code: 0 no bug found, 1 bugs, 2 it cannot be run so, or makes no optimizer step
"""


def build_parser() -> argparse.ArgumentParser:
    """The options of `ddp diagnose`."""
    parser = Parser(
        prog="ddp diagnose",
        usage="ddp diagnose [OPTIONS] -- SCRIPT [ARGUMENTS]",
        description="Say what makes the result of a PyTorch training script depend on the number of ranks.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--steps",
        type=_count,
        default=5,
        metavar="N",
        help="optimizer steps to look at; more where a second epoch is near (default: 5)",
    )
    parser.add_argument(
        "--ranks", type=_counts, default=(1, 2, 3), metavar="N,N,...", help="numbers of ranks (default: 1,2,3)"
    )
    parser.add_argument(
        "--resume-args",
        metavar="WORDS",
        help="arguments by which the script goes on from its own checkpoint: then it is stopped after its first "
        "torch.save, however late that comes, and resumed, too",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help="the folder of which each run gets a copy, around the one that you are in (default: that one)",
    )
    parser.add_argument(
        "--seconds", type=_count, default=600, metavar="N", help="end all runs after so many seconds (default: 600)"
    )
    # From the first word that is no option on, all belongs to the script, also without a -- before it.
    parser.add_argument("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings as JSON")
    return parser


@said_by("ddp")
def main(arguments: Sequence[str] | None = None) -> int:
    """Diagnose a script; returns the exit code."""
    make_patient()
    words = list(sys.argv[1:] if arguments is None else arguments)
    own, after = (words[: (at := words.index("--"))], words[at + 1 :]) if "--" in words else (words, [])
    options = build_parser().parse_args(own)
    if not (script_words := [*options.script, *after]):
        raise UserError("no script is given; write it and its arguments last: ddp diagnose -- train.py --epochs 3")
    here, folder = Path.cwd(), (options.folder or Path()).resolve()
    if not here.is_relative_to(folder):
        raise UserError(f"--folder {options.folder} does not hold the folder that you are in: name one around {here}")
    script = Script(Path(script_words[0]).resolve(), tuple(script_words[1:]), folder, here.relative_to(folder))
    if not script.file.is_file():
        raise UserError(f"{script_words[0]}: no such file")
    began = time.monotonic()
    with Children("ddp-diagnose-") as children:
        runner = Runner(script, children, began + options.seconds)
        found, notes = _diagnose(runner, options)
    verdict = _verdict(found, options.ranks, notes)
    told = {
        **{"format": FORMAT, "script": script_words[0], "arguments": script_words[1:], "verdict": verdict},
        **{"ranks": list(options.ranks), "seconds": round(time.monotonic() - began, 1), "notes": notes},
        "findings": [each.told() for each in found],
    }
    if options.json:
        try:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(told, indent=1) + "\n")
        except OSError as error:
            raise UserError(f"cannot write {options.json}: {error.strerror}", ExitCode.RESOURCES) from None
    for line in _lines(found, notes):
        print(line)
    print(f"verdict: {verdict}")
    return FOUND if any(each.kind.is_bug for each in found) else ExitCode.DONE


def _diagnose(runner: Runner, options: argparse.Namespace) -> tuple[list[Finding], list[str]]:
    """All findings by harm, and what could not be looked at."""
    found: list[Finding] = []
    notes: list[str] = []
    runs: dict[int, Run] = {}
    looks: dict[str, Callable[[], list[Finding]]] = {}
    for ranks in sorted(set(options.ranks)):
        print(f"running {in_words(ranks)} …", flush=True)
        run = runner.run(ranks, Task(options.steps, until="epoch"), needs_step=False)
        # What fails on one rank, too, is no fault of the layout.
        if run.fault == "hangs" or (run.fault and 1 in runs and not runs[1].problem):
            found.append(Finding(run.fault, run.problem, ranks))
        elif run.problem:
            notes.append(f"on {in_words(ranks)} {run.problem}")
        if run.ranks:
            runs[ranks] = run
        if run.ranks and ranks > 1:
            if not run.is_connected:
                raise UserError(
                    f"on {in_words(ranks)} the script makes no process group, so each rank trains for itself: is it "
                    "one for several processes? (of one that starts its own ranks, write the number as {ranks})"
                )
            found += checks.of_run(run)
    if not runs and not found:
        raise UserError(notes[0])
    repeatable = True
    if 1 in runs:
        print("running 1 rank again …", flush=True)
        differing = list(not_repeatable(runs[1], runner.run(1, Task(options.steps))))
        if differing:
            # What differs is found in any case, and what is looked at next needs its time.
            seconds = max(0.0, runner.deadline - time.monotonic()) * _SHARE_TO_EXPLAIN
            with suppress(UserError):
                noted = [runner.run(1, Task(options.steps, operations=True), seconds=seconds) for _ in range(2)]
                operation = other_operation(*noted)
                differing = [replace(each, evidence=each.evidence + operation) for each in differing]
        found += differing
        repeatable = not differing
        for ranks, run in runs.items():
            if ranks > 1:
                found += across.with_ranks(runs[1], run)
    if not any(each.kind.is_bug for each in found):
        looks["the gradient was not compared"] = lambda: _gradient(runner, runs, options.steps)
    if options.resume_args is not None and runs:
        looks["the resume was not looked at"] = lambda: _after_resume(runner, max(runs), options, repeatable)
    for what, look in looks.items():
        try:
            found += look()
        except UserError as error:
            notes.append(f"{what}: {error}")
    return by_harm(found), notes


def _gradient(runner: Runner, runs: dict[int, Run], steps: int) -> list[Finding]:
    """What the steps of the most ranks have otherwise than those of one process with their samples.

    Raises UserError where that cannot be proved.
    """
    ranks = max(runs)
    if ranks == 1 or 1 not in runs or runs[ranks].is_sharded or runs[ranks].problem:
        return []
    print(f"running {in_words(ranks)}, and one process with their samples …", flush=True)
    run = runner.run(ranks, Task(steps, given=""))
    forwards = [len(each.ranks[0].steps[0].of("forward")) for each in (runs[1], runs[ranks])]
    given = ONE_BY_ONE if forwards[0] == ranks * forwards[1] else TOGETHER
    given = "" if across.has_samples_of(runs[1], run) else given
    one = runner.run(1, Task(steps, given=given, batches=str(run.folder)))
    draws = any(forward["draws"] for step in next(runs[ranks].by_step()) for forward in step.of("forward"))
    return [across.with_one_process(one, run, draws)]


def _after_resume(runner: Runner, ranks: int, options: argparse.Namespace, repeatable: bool) -> list[Finding]:
    """Stop the script after a checkpoint, go on in its folder, twice, and compare with a run that has not stopped.

    Raises UserError where that cannot be done.
    """
    if not repeatable:
        raise UserError("two runs without a stop differ already")
    print(f"running {in_words(ranks)} until a checkpoint, from it to another and on, and without a stop …", flush=True)
    folder, until_saved = runner.folder(), Task(options.steps, until="saved")
    seconds = max(0.0, runner.deadline - time.monotonic()) * _SHARE_OF_SAVE
    stopped = runner.run(ranks, until_saved, folder, seconds=seconds)
    if not stopped.has_saved:
        raise UserError(
            f"{len(stopped.ranks[0].steps)} steps, in {seconds:.0f} seconds at most, without a torch.save; give more "
            "time (--seconds), or the script arguments with which it saves sooner"
        )
    words = shlex.split(options.resume_args)
    again = runner.run(ranks, until_saved, folder, words, seconds)
    stops = [stopped, again]
    resumed = runner.run(ranks, Task(options.steps), folder, words) if again.has_saved else None
    straight = runner.run(ranks, Task(sum(len(each.ranks[0].steps) for each in stops) + options.steps))
    found = list(not_restored(straight, [stopped], again))
    if not found and resumed is not None:
        found = list(not_restored(straight, stops, resumed))
    return found


def _lines(found: Sequence[Finding], notes: Sequence[str]) -> list[str]:
    lines = [""]
    for each in found:
        told = each.told()
        lines.append(f"{'BUG' if each.kind.is_bug else 'by design'}: {told['title']} ({each.name})")
        lines.append(f"  seen on {in_words(each.ranks)}: {each.evidence}")
        if each.site:
            lines.append(f"  where: {each.site}")
        lines += [f"  mend: {told['mend']}", f"  more: {told['link']}", ""]
    if notes:
        lines += [*(f"note: {note}" for note in notes), ""]
    return lines


def _verdict(found: Sequence[Finding], ranks: Sequence[int], notes: Sequence[str]) -> str:
    bugs = [each for each in found if each.kind.is_bug]
    if bugs:
        more = f", and {len(bugs) - 1} more" if len(bugs) > 1 else ""
        return f"{bugs[0].name}{more}: mend this first, then look again"
    said = f" ({len(found)} by design)" if found else ""
    unseen = "; not all was seen, as the notes say" if notes else ""
    counts = sorted(set(ranks))
    listed = in_words(counts[0]) if len(counts) == 1 else f"{', '.join(map(str, counts))} ranks"
    return f"no bug found on {listed}{said}{unseen}"


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text[:9]) <= 100_000:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 to 100000")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(","))
