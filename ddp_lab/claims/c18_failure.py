"""What the death of one process means for the others.

Under DDP every rank waits for every other in each step's all-reduce. When one is gone, the sum cannot be completed, and
all ranks fail. What separate processes do bring is an elastic launcher, which outlives the failure: it ends the ranks
that remain and starts all of them again from the latest checkpoint. So the run recovers; the processes do not survive.
"""

from __future__ import annotations

from typing import Any

from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements, RuleVersion
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.framework.statistics import median_interval
from ddp_lab.claims.measuring.training import TrainedRun, train
from ddp_lab.records import Figure

claim = Claim(
    id="C18",
    title="In DDP one process failing does not affect the others",
    claim="In DDP the processes are rather independent; one that fails affects the others little.",
    original="各进程相对独立,某个进程出错不会影响其他进程,容错性较好。",
    sources=("003",),
    method="Rank 1 of 2 is killed (SIGKILL) after a step: in several runs with --max-restarts 0, and in several with "
    "elastic restart. Looked at: whether the other rank finishes its work; the seconds from the kill until training "
    "goes on, the steps that are trained again, and the final weights against an undisturbed run's.",
    rule="Confirmed when every run with --max-restarts 0 finishes all steps although one rank was killed. Refuted when "
    "one does not: the other rank failed, too. Inconclusive where a kill did not happen. What an elastic restart mends "
    "is told in figures of its own and does not count: the processes that it starts are new ones.",
    loads={
        "killed_after_without_restart": ((29, 47), (11, 29, 38, 47, 55)),
        "killed_after_with_restart": ((29, 29), (29, 29, 29, 29, 29, 29, 29, 29)),
        "checkpoint_every": (10, 10),
        "settings": (("model.width=8", "epochs=3"), ("model.width=8", "epochs=3")),
        "steps": (66, 66),
    },
    history=(
        RuleVersion(
            "2026-11-22",
            "The rule before judged a single kill. Now several are judged, at different steps.",
            "8e993060a3ce6aed",
        ),
    ),
    seconds=(25, 110),
    headline="runs that went on",
)


def measure(setting: Setting) -> Measurements:
    """How each run ended, and what recovery took."""
    load, whole = claim.load(setting), _train(setting)
    without, with_restart = load.killed_after_without_restart, load.killed_after_with_restart
    return {
        "undisturbed": whole.record["weights_sha256"],
        "steps": load.steps,
        "without_restart": [_outcome(_train(setting, *_kill(step), "--max-restarts", "0"), step) for step in without],
        "with_restart": [_outcome(_train(setting, *_kill(step)), step) for step in with_restart],
    }


def _kill(step: int) -> tuple[str, str]:
    return "--fault", f"kill@{step}:1"


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
    alone, elastic = measurements["without_restart"], measurements["with_restart"]
    recovered = [run for run in elastic if run["status"] == "completed" and run["exit_code"] == 0]
    same = [run for run in recovered if run["weights_sha256"] == measurements["undisturbed"]]
    seconds = [run["seconds_lost"] for run in recovered if run["seconds_lost"] is not None]
    steps = [run["steps_lost"] for run in recovered if run["steps_lost"] is not None]
    survived = [run for run in alone if run["status"] == "completed" and run["exit_code"] == 0]
    last = [f"{run['last_step']} (killed after {run['killed_after']})" for run in alone]
    figures = [
        Figure("runs that went on without restart", len(survived), f"of {len(alone)}"),
        Figure("exit codes without restart", ", ".join(str(run["exit_code"]) for run in alone)),
        Figure("last step of the surviving rank, without restart", "; ".join(last), f"of {measurements['steps']}"),
        Figure("runs that recovered with elastic restart", len(recovered), f"of {len(elastic)}"),
        Figure("of them with the undisturbed run's bits", len(same)),
    ]
    recovery = "elastic restart did not save the job"
    if seconds and steps:
        interval = median_interval(seconds)
        figures.append(interval.figure("seconds from the kill until training goes on, with elastic restart", "s"))
        figures.append(Figure("steps trained again", max(steps)))
        bits = "the same bits" if len(same) == len(recovered) else "other weights"
        recovery = (
            f"elastic restart recovered {len(recovered)} of {len(elastic)} in {interval.value:.1f} s, {max(steps)} "
            f"steps trained again, {bits} at the end"
        )
    if not alone or not all(run["killed"] for run in alone):
        return Judgement("inconclusive", "a rank was not killed: its run ended before that step", figures)
    if len(survived) == len(alone):
        return Judgement(
            "confirmed", f"rank 0 finished all steps after each of {len(alone)} kills; {recovery}", figures
        )
    return Judgement(
        "refuted",
        f"without restart rank 0 failed, too, in {len(alone) - len(survived)} of {len(alone)} runs in which rank 1 was "
        f"killed; {recovery}",
        figures,
    )
