"""What the death of one process means for the others.

Under DDP every rank waits for every other in each step's all-reduce. When one is gone, the sum cannot be completed, and
all ranks fail. What separate processes do bring is an elastic launcher, which outlives the failure: it ends the ranks
that remain and starts all of them again from the latest checkpoint. So the run recovers; the processes do not survive.
"""

from __future__ import annotations

from typing import Any

from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements
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
    method="Rank 1 of 2 is killed (SIGKILL) in the middle of an epoch: once with --max-restarts 0, and again with "
    "elastic restart. Looked at: whether the other rank finishes its work; the seconds from the kill until training "
    "goes on, the steps that are trained again, and the final weights against an undisturbed run's.",
    rule="Confirmed when the run finishes without a restart. Refuted when it does not: the other rank failed, too. "
    "Inconclusive where the kill did not happen.",
    seconds=(20, 60),
)

SETTINGS = ("model.width=8", "epochs=3")
KILL_AFTER, CHECKPOINT_EVERY, STEPS = 29, 10, 66


def measure(setting: Setting) -> Measurements:
    """How each run ended, and what recovery took."""
    whole = _train(setting)
    fault = ("--fault", f"kill@{KILL_AFTER}:1")
    alone = _train(setting, *fault, "--max-restarts", "0")
    elastic = [_train(setting, *fault) for _ in range(setting.choose(1, 5))]
    return {
        "undisturbed": whole.record["weights_sha256"],
        "steps": STEPS,
        "without_restart": _outcome(alone),
        "with_restart": [_outcome(run) for run in elastic],
    }


def _train(setting: Setting, *options: str) -> TrainedRun:
    options = ("--checkpoint-every", str(CHECKPOINT_EVERY), "--log-every", "1", *options)
    device = setting.device_type(2)
    return train(setting, "C18", "digits", "ddp", 2, SETTINGS, options, device, must_succeed=False)


def _outcome(run: TrainedRun) -> dict[str, Any]:
    marks = list(run.path.glob(".fault-kill@*"))
    killed_at = marks[0].stat().st_mtime if marks else None
    again = [line for line in run.metrics("resume") if killed_at is not None and line["time"] >= killed_at - 1e-3]
    steps = [line for line in run.metrics("step") if again and line["time"] >= again[0]["time"]]
    recovered = killed_at is not None and bool(steps)
    return {
        "exit_code": run.exit_code,
        "status": run.record["status"],
        "message": run.record.get("message"),
        "weights_sha256": run.record["weights_sha256"],
        "killed": killed_at is not None,
        "last_step": max((line["step"] for line in run.metrics("step")), default=0),
        "seconds_lost": round(steps[0]["time"] - killed_at, 3) if recovered and killed_at is not None else None,
        "steps_lost": KILL_AFTER - again[0]["step"] if again else None,
    }


def judge(measurements: Measurements) -> Judgement:
    """Apply the rule of the claim."""
    alone, elastic = measurements["without_restart"], measurements["with_restart"]
    recovered = [run for run in elastic if run["status"] == "completed" and run["exit_code"] == 0]
    same = [run for run in recovered if run["weights_sha256"] == measurements["undisturbed"]]
    seconds = [run["seconds_lost"] for run in recovered if run["seconds_lost"] is not None]
    steps = [run["steps_lost"] for run in recovered if run["steps_lost"] is not None]
    figures = [
        Figure("exit code without restart", alone["exit_code"]),
        Figure("last step of the surviving rank, without restart", alone["last_step"], f"of {measurements['steps']}"),
        Figure("runs that recovered with elastic restart", len(recovered), f"of {len(elastic)}"),
        Figure("of them with the undisturbed run's bits", len(same)),
    ]
    recovery = "elastic restart did not save the job"
    if seconds and steps:
        interval = median_interval(seconds)
        figures.append(Figure("seconds lost", interval.value, "s", interval.low, interval.high))
        figures.append(Figure("steps trained again", max(steps)))
        bits = "the same bits" if len(same) == len(recovered) else "other weights"
        recovery = (
            f"elastic restart recovered {len(recovered)} of {len(elastic)} in {interval.value:.1f} s, {max(steps)} "
            f"steps trained again, {bits} at the end"
        )
    if not alone["killed"]:
        return Judgement("inconclusive", "rank 1 was not killed: the run ended before that step", figures)
    if alone["status"] == "completed" and alone["exit_code"] == 0:
        return Judgement("confirmed", f"rank 0 finished all steps after rank 1 was killed; {recovery}", figures)
    return Judgement(
        "refuted",
        f"without restart all ranks fail: rank 0 stopped after step {alone['last_step']} of {measurements['steps']}, "
        f"exit code {alone['exit_code']}; {recovery}",
        figures,
    )
