"""What the death of one process means for the others.

Under DDP every rank waits for every other in each step's all-reduce, so all fail. An elastic launcher starts all of
them again from the latest checkpoint: the run recovers; the processes do not survive.
"""

from __future__ import annotations

from typing import Any

from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements, composed, holds, versions
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.framework.statistics import median_interval
from ddp_lab.claims.measuring.killed import train_and_kill
from ddp_lab.claims.measuring.training import TrainedRun, train
from ddp_lab.records import COUNT, Figure, Part

claim = Claim(
    id="C18",
    title="In DDP one process failing does not affect the others",
    claim="In DDP the processes are rather independent; one that fails does not affect the others, so fault tolerance "
    "is rather good.",
    original="各进程相对独立,某个进程出错不会影响其他进程,容错性较好。",
    sources=("003",),
    method="Rank 1 of 2 is killed (SIGKILL) after a step: in several programs that have torch's DDP alone, each "
    "process started by hand, so that no launcher ends the other; in several `ddp train` with --max-restarts 0; and "
    "in several with elastic restart. Looked at: whether the other rank finishes its work; the seconds from the kill "
    "until training goes on, the steps that are trained again, and the final weights against an undisturbed run's.",
    rule="Two parts: torch's DDP alone, and this project's runs with --max-restarts 0. Each is confirmed when in every "
    "run the other rank finishes all steps although one was killed, refuted when in one it does not, and inconclusive "
    "where a kill did not happen. What an elastic restart mends "
    "is told in figures of its own and does not count: the processes that it starts are new ones.",
    in_short="Confirmed where in every run the other rank finishes all steps although one was killed.",
    loads={
        "killed_after_without_restart": ((29, 47), (11, 29, 38, 47, 55)),
        "killed_after_with_restart": ((29, 29), (29, 29, 29, 29, 29, 29, 29, 29)),
        "checkpoint_every": (10, 10),
        "settings": (("model.width=8", "epochs=3"), ("model.width=8", "epochs=3")),
        "steps": (66, 66),
        "killed_after_alone": ((29, 47), (11, 29, 38, 47, 55)),
        "seconds_allowed_alone": (60, 60),
    },
    history=versions(
        "2026-11-22 8e993060a3ce6aed The rule before judged a single kill. Now several are judged, at different steps.",
        "2026-11-25 f59637140a76ea46 The sentence is judged where it speaks, of torch's DDP alone, and this project's "
        "runs are a part beside it. The translation said that a failing process affects the others little; the source "
        "says that it does not.",
    ),
    seconds=(45, 160),
)


TORCH, OURS = "torch's DDP alone", "this project's runs, without recovery (`--max-restarts 0`)"


def measure(setting: Setting) -> Measurements:
    """How each run ended, and what recovery took."""
    load, whole = claim.load(setting), _train(setting)

    def killed(step: int, *options: str) -> dict[str, Any]:
        return _outcome(_train(setting, "--fault", f"kill@{step}:1", *options), step)

    alone = [
        {"killed_after": step} | train_and_kill(load.steps, step, load.seconds_allowed_alone)
        for step in load.killed_after_alone
    ]
    return {
        "undisturbed": whole.record["weights_sha256"],
        "steps": load.steps,
        "alone": alone,
        "without_restart": [killed(step, "--max-restarts", "0") for step in load.killed_after_without_restart],
        "with_restart": [killed(step, "--recovery", "restart") for step in load.killed_after_with_restart],
    }


def _train(setting: Setting, *options: str) -> TrainedRun:
    load, device = claim.load(setting), setting.device_type(2)
    options = ("--checkpoint-every", str(load.checkpoint_every), "--log-every", "1", *options)
    return train(setting, "C18", "digits", "ddp", 2, load.settings, options, device, must_succeed=False)


def _outcome(run: TrainedRun, killed_after: int) -> dict[str, Any]:
    marks = list(run.path.glob(".fault-kill@*"))
    killed_at = marks[0].stat().st_mtime if marks else None
    again = [line for line in run.metrics("resume") if killed_at is not None and line["time"] >= killed_at - 1e-3]
    steps = [line for line in run.metrics("step") if again and line["time"] >= again[0]["time"]]
    recovered = killed_at is not None and bool(steps)
    return {
        "killed_after": killed_after,
        "exit_code": run.exit_code,
        "status": run.record["status"],
        "message": run.record.get("message"),
        "weights_sha256": run.record["weights_sha256"],
        "killed": killed_at is not None,
        "last_step": max((line["step"] for line in run.metrics("step")), default=0),
        "seconds_lost": round(steps[0]["time"] - killed_at, 3) if recovered and killed_at is not None else None,
        "steps_lost": killed_after - again[0]["step"] if again else None,
    }


def judge(measurements: Measurements) -> Judgement:
    """Apply the rule of the claim."""
    steps, figures, parts = measurements["steps"], [], []
    for name, runs in ((TORCH, measurements["alone"]), (OURS, measurements["without_restart"])):
        survived = sum(run["exit_code"] == 0 and run["last_step"] == steps for run in runs)
        last = [f"{run['last_step']} (killed after {run['killed_after']})" for run in runs]
        figures += [
            Figure("runs that went on", survived, f"of {len(runs)}", part=name, bounds=(0, len(runs))),
            Figure("exit codes", ", ".join(str(run["exit_code"]) for run in runs), part=name),
            Figure("last step of the surviving rank", "; ".join(last), f"of {steps}", part=name),
        ]
        if runs and all(run["killed"] for run in runs):
            text = f"rank 0 finished all steps in {survived} of {len(runs)} runs in which rank 1 was killed"
            parts.append(holds(name, survived == len(runs), text))
        else:
            parts.append(Part(name, "inconclusive", "a rank was not killed: its run ended before that step"))
    return composed(parts, [*figures, *_recovery(measurements["with_restart"], measurements["undisturbed"])])


def _recovery(elastic: list[dict[str, Any]], undisturbed: str) -> list[Figure]:
    """What an elastic restart mends: told, not judged."""
    recovered = [run for run in elastic if run["status"] == "completed" and run["exit_code"] == 0]
    same = [run for run in recovered if run["weights_sha256"] == undisturbed]
    seconds = [run["seconds_lost"] for run in recovered if run["seconds_lost"] is not None]
    steps = [run["steps_lost"] for run in recovered if run["steps_lost"] is not None]
    of_all = (0, len(elastic))
    figures = [
        Figure("runs that recovered with elastic restart", len(recovered), f"of {len(elastic)}", bounds=of_all),
        Figure("of them with the undisturbed run's bits", len(same), f"of {len(recovered)}", bounds=of_all),
    ]
    if seconds and steps:
        name = "seconds from the kill until training goes on, with elastic restart"
        figures.append(median_interval(seconds).figure(name, "s"))
        figures.append(Figure("steps trained again", max(steps), bounds=COUNT))
    return figures
