"""Who writes a checkpoint, and what a killed run still has.

If several ranks save to one path, each empties the file and writes from its start; with equal weights every byte ends
as it should, but a rank whose save has returned may find the file emptied again by another. A run ends with the same
bits from any of its checkpoints, so which one it resumed from is looked at by itself.
"""

from __future__ import annotations

import os
import random
import sys
from typing import Any

from ddp_core.checkpoint import newest_valid
from ddp_core.record.directory import RunDirectory
from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements, composed, holds, versions
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.measuring.file_watch import watch_files
from ddp_lab.claims.measuring.own_checkpoint import WAYS, WEIGHTS, kill_and_resume
from ddp_lab.claims.measuring.ranks import run_ranks
from ddp_lab.claims.measuring.shared_path import save_together
from ddp_lab.claims.measuring.training import run_command, train
from ddp_lab.records import COUNT, Figure, Part, Verdict

claim = Claim(
    id="C14",
    title="Only rank 0 writes the checkpoint; training resumes from the latest one",
    claim="After a failure training goes on from the latest checkpoint; only rank 0 may write it, since several "
    "processes that write one file damage it.",
    original="恢复训练时,可以从最新的 Checkpoint 加载权重。这里需要注意的是只允许 Rank 0 写入 Checkpoint,"
    "避免多进程同时写文件造成损坏。\n"
    "if dist.get_rank() == 0 and epoch == num_epoch - 1:",
    sources=("000", "002", "004"),
    method="A run of `digits` is killed (SIGKILL) after an arbitrary step, resumed with --resume, killed again and "
    "resumed again, on one process and on two ranks. Before each resumption the newest checkpoint that is whole is "
    "looked up. The source's own way, with torch alone: rank 0 saves the weights after each epoch, rank 1 is killed, "
    "and a new start loads the latest file; once more with the optimizer's state saved, too. In another run of `ddp "
    "train` on several ranks every process notes which files it opens for writing in the checkpoints' folder. And two "
    "processes save 4 MB to one path with torch.save at the same time, with different and with equal weights, and one "
    "process alone for comparison; the file is read back by each process as soon as its own save has returned, and "
    "once more when all have finished.",
    rule="Five parts. Torch alone: confirmed when every new start loads the latest file and its first loss is below "
    "that of training from the start, refuted when not, inconclusive where nothing was killed; whether it ends with "
    "the undisturbed run's bits is told. This project's resuming: confirmed when every resumption starts from the "
    "newest whole checkpoint and every run ends with the bits of the undisturbed one, refuted when not. Only rank 0 "
    "writes: confirmed when every rank was watched, rank 0 opened files for writing, no other rank did, and every "
    "file found afterwards is one that rank 0 opened; refuted when another rank opened one; otherwise inconclusive. "
    "Several processes, with different and with equal weights: each confirmed when at least one file was damaged "
    "after all had finished; confirmed in part when files were damaged only at the moment when a save had returned; "
    "refuted when none was; inconclusive when the process that saved alone found one damaged.",
    in_short="Confirmed where every new start goes on from the newest checkpoint; and where a file stays damaged "
    "after all have finished; in part if only at a save's return.",
    loads={
        "runs_killed_twice": (2, 6),
        "checkpoint_every": (5, 5),
        "settings": (("model.width=8", "epochs=2"), ("model.width=8", "epochs=2")),
        "steps": (44, 44),
        "watched_ranks": (2, 4),
        "files_saved_together": (16, 60),
        "epochs_of_torch_alone": (6, 6),
        "torch_alone_killed_after": ((21,), (11, 21, 37)),
    },
    history=versions(
        "2026-11-22 4db0fd30babfc0be The rule before judged the final bits only. That a run resumes from the newest "
        "checkpoint, that rank 0 alone writes, and that several writers damage a file, also with equal weights, are "
        "now parts.",
        "2026-11-25 36be668ba97a5f2d The sources' own way, torch alone, is a part of its own beside this project's "
        "resuming.",
    ),
    seconds=(40, 155),
)


def measure(setting: Setting) -> Measurements:
    """Digests of the undisturbed and the resumed runs, who wrote, and how many files were damaged."""
    load, device = claim.load(setting), setting.device_type(2)
    options = ("--checkpoint-every", str(load.checkpoint_every))
    whole = train(setting, "C14", "digits", settings=load.settings, options=options, device=device)
    generator = random.Random(14)
    cases = []
    for number in range(load.runs_killed_twice):
        layout = ("single", "ddp")[number % 2]
        steps = sorted(generator.sample(range(load.checkpoint_every + 1, load.steps), 2))
        setting.say(f"{layout}, killed after steps {steps[0]} and {steps[1]}")
        cases.append(_killed_and_resumed(setting, layout, steps, device))
    return {
        "undisturbed": whole.record["weights_sha256"],
        "cases": cases,
        "torch_alone": [
            case for step in load.torch_alone_killed_after for case in kill_and_resume(load.epochs_of_torch_alone, step)
        ],
        "written": _written(setting, load.watched_ranks),
        "shared_path": run_ranks(save_together, 2, load.files_saved_together)[0],
    }


def _killed_and_resumed(setting: Setting, layout: str, steps: list[int], device: str) -> dict[str, Any]:
    """One run that is killed at two steps and resumed with --resume each time."""
    load, count = claim.load(setting), 2 if layout == "ddp" else 1
    # The second kill hits the other rank, where there are two.
    faults = [word for number, step in enumerate(steps) for word in ("--fault", f"kill@{step}:{number % count}")]
    options = ["--checkpoint-every", str(load.checkpoint_every), *faults]
    options += ["--max-restarts", "0"] if layout == "ddp" else []
    run = train(setting, "C14", "digits", layout, count, load.settings, options, device, must_succeed=False)
    exit_code, newest = run.exit_code, []
    for _ in steps:
        checkpoint = newest_valid(run.path / "checkpoints")
        newest.append(checkpoint.step if checkpoint else None)
        words = [sys.executable, "-m", "ddp_core", "train", "digits", "--layout", layout, "--device", device]
        words += ["--nproc-per-node", str(count)] if layout == "ddp" else []
        words += ["--resume", str(run.path), "--output", str(setting.runs("C14")), *options]
        words += [word for assignment in load.settings for word in ("--set", assignment)]
        exit_code, _ = run_command(words, 120)
    record = RunDirectory(run.path).read()
    return {
        "layout": layout,
        "killed_after": steps,
        "newest": newest,
        "resumed_at": [line["step"] for line in run.metrics("resume")],
        "exit_code": exit_code,
        "weights_sha256": record["weights_sha256"] if record["status"] == "completed" else None,
    }


def _written(setting: Setting, count: int) -> dict[str, Any]:
    """Which ranks of a run were watched, what each opened for writing, and which files were there afterwards."""
    load = claim.load(setting)
    setting.say(f"ddp, {count} ranks, watched")
    options = ("--checkpoint-every", str(load.checkpoint_every))
    with watch_files("checkpoints") as watch:
        path = os.pathsep.join(filter(None, [watch.search_path, os.environ.get("PYTHONPATH", "")]))
        run = train(
            *(setting, "C14", "digits", "ddp", count, load.settings, options, setting.device_type(count)),
            environment={"PYTHONPATH": path},
        )
        opened = watch.opened()
    return {
        "ranks": count,
        "opened": {str(rank): sorted(set(names)) for rank, names in opened.items()},
        "files": sorted(path.name for path in (run.path / "checkpoints").iterdir() if not path.is_symlink()),
    }


def judge(measurements: Measurements) -> Judgement:
    """Apply the rule of the claim."""
    found = [
        _judge_torch_alone(measurements["torch_alone"]),
        _judge_resumed(measurements["cases"], measurements["undisturbed"]),
        _judge_written(measurements["written"]),
        *(_judge_shared(measurements["shared_path"], way) for way in ("different", "equal")),
    ]
    return composed([part for part, _ in found], [figure for _, figures in found for figure in figures])


def _judge_torch_alone(cases: list[dict[str, Any]]) -> tuple[Part, list[Figure]]:
    """The sources' own way; they save the weights only."""
    name, figures = "training goes on from the latest checkpoint, torch alone", []
    for way in WAYS:
        same = [case["weights_sha256"] == case["undisturbed"] for case in cases if case["way"] == way]
        title, bounds = f"runs with the undisturbed run's bits, {way} saved", (0, len(same))
        figures.append(Figure(title, sum(same), f"of {len(same)}", part=name, bounds=bounds))
    own = [case for case in cases if case["way"] == WEIGHTS]
    for case in own:
        title = f"killed after step {case['killed_after']}: loss of the first step"
        figures.append(Figure(title, case["first_loss"], part=name))
        figures.append(Figure(f"{title} resumed", case["resumed_loss"], part=name))
    if not own or not all(case["killed"] for case in own):
        return Part(name, "inconclusive", "no rank was killed"), figures
    good = [case["resumed_at"] == case["newest"] and case["resumed_loss"] < case["first_loss"] for case in own]
    text = f"{sum(good)} of {len(own)} new starts loaded the latest weights and went on from their loss"
    return holds(name, all(good), f"{text}; {figures[0].value} ended with the same bits"), figures


def _judge_resumed(cases: list[dict[str, Any]], undisturbed: str) -> tuple[Part, list[Figure]]:
    name = "training goes on from the latest checkpoint, this project"
    same = [case["weights_sha256"] == undisturbed for case in cases]
    latest = [case["resumed_at"] == case["newest"] and None not in case["newest"] for case in cases]
    figures = [
        Figure("runs killed twice and resumed", len(cases), part=name),
        Figure("of them resumed from the newest whole checkpoint each time", sum(latest), part=name, bounds=COUNT),
        Figure("of them with the undisturbed run's bits", sum(same), part=name, bounds=COUNT),
    ]
    bad = []
    for case, *good in zip(cases, same, latest, strict=True):
        which = f"{case['layout']}, killed after steps {' and '.join(map(str, case['killed_after']))}"
        figures.append(Figure(f"{which}: resumed at", " and ".join(map(str, case["resumed_at"])), part=name))
        bad += [] if all(good) else [f"{which}, exit {case['exit_code']}"]
    text = f"{len(cases)} runs killed twice resumed from the newest whole checkpoint and ended with the same bits"
    otherwise = f"other weights, or another checkpoint: {'; '.join(bad) or 'no run'}"
    return holds(name, cases and not bad, text, otherwise), figures


def _judge_written(written: dict[str, Any]) -> tuple[Part, list[Figure]]:
    name, opened = "only rank 0 writes", written["opened"]
    others = {rank: names for rank, names in opened.items() if rank != "0" and names}
    rank_0 = opened.get("0", [])
    # A file is written under a temporary name, .NAME.<12 hexadecimal digits>.tmp, and then renamed.
    unexplained = [
        file for file in written["files"] if not any(each == file or each.startswith(f".{file}.") for each in rank_0)
    ]
    figures = [
        Figure("ranks watched", len(opened), f"of {written['ranks']}", part=name),
        Figure("files opened for writing by rank 0", len(rank_0), part=name),
        Figure("files opened for writing by other ranks", sum(map(len, others.values())), part=name, bounds=COUNT),
        Figure("files there that rank 0 was not seen to open", len(unexplained), part=name, bounds=COUNT),
    ]
    if others:
        return Part(name, "refuted", f"rank {', '.join(others)} opened files for writing, too"), figures
    if len(opened) < written["ranks"] or not rank_0 or unexplained:
        return Part(name, "inconclusive", "not every rank, or not every file, was seen"), figures
    text = f"rank 0 opened {len(rank_0)} files for writing, the other {written['ranks'] - 1} ranks none"
    return Part(name, "confirmed", text), figures


def _judge_shared(shared: dict[str, dict[str, int]], way: str) -> tuple[Part, list[Figure]]:
    name, counts = f"two processes with {way} weights damage one file", shared[way]
    alone = shared["alone"]["at_return"] + shared["alone"]["at_end"]
    rounds, limits = f"of {counts['rounds']}", (0, counts["rounds"])
    returned, end = counts["at_return"], counts["at_end"]
    figures = [
        Figure("files damaged after both had finished", end, rounds, part=name, bounds=limits),
        Figure("files damaged when a save had returned", returned, rounds, part=name, bounds=limits),
        Figure("files damaged when one process saved alone", alone, rounds, part=name, bounds=COUNT),
    ]
    text = f"{returned} {rounds} damaged when one save had returned, {end} once both had finished"
    verdict: Verdict = "confirmed" if end else "confirmed in part" if returned else "refuted"
    if alone:
        verdict, text = "inconclusive", f"{text}; but files that one process saved alone were damaged, too"
    return Part(name, verdict, text), figures
