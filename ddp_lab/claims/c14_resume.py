"""Who writes a checkpoint, and what a killed run still has.

All ranks hold the same weights, so one file from one rank is enough. If several ranks write to one path at once, the
file may mix what they wrote, or be unreadable; this is shown here with ranks whose weights differ. A run resumes from
the newest checkpoint that is whole. The order of the data, the augmentation and the dropout follow from the position
(epoch and step), so nothing else has to be remembered, and the run ends with the weights of a run that nobody killed,
bit by bit.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddp_core.run.directory import RunDirectory
from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.measuring.ranks import run_ranks
from ddp_lab.claims.measuring.training import run_command, train
from ddp_lab.records import Figure

claim = Claim(
    id="C14",
    title="Only rank 0 writes the checkpoint; training resumes from the latest one",
    claim="After a failure training goes on from the latest checkpoint; only rank 0 may write it, since several "
    "processes that write one file damage it.",
    original="恢复训练时,可以从最新的 Checkpoint 加载权重。这里需要注意的是只允许 Rank 0 写入 Checkpoint,"
    "避免多进程同时写文件造成损坏。\n"
    "if dist.get_rank() == 0 and epoch == num_epoch - 1:",
    sources=("000", "002", "004"),
    method="A run of `digits` is killed (SIGKILL) after an arbitrary step and resumed with --resume, on one process "
    "and on two ranks, for several steps; its final weights are compared with an undisturbed run's. Beside it, ranks "
    "with different weights save to one path at the same time, and the file is read back.",
    rule="Confirmed when every resumed run ends with the bits of the undisturbed one. Refuted when one does not, or "
    "cannot be resumed.",
    seconds=(25, 120),
)

CHECKPOINT_EVERY = 5
SETTINGS = ("model.width=8", "epochs=2")
STEPS = 44
_OPTIONS = ("--checkpoint-every", str(CHECKPOINT_EVERY))


def measure(setting: Setting) -> Measurements:
    """Digests of the undisturbed and the resumed runs, and how many files were damaged that all ranks wrote."""
    device = setting.device_type(2)
    whole = train(setting, "C14", "digits", settings=SETTINGS, options=_OPTIONS, device=device)
    generator = random.Random(14)
    cases = []
    for layout in setting.choose(("single", "ddp"), ("single", "ddp") * 5):
        steps = sorted(generator.sample(range(1, STEPS), 2))
        setting.say(f"{layout}, killed after steps {steps[0]} and {steps[1]}")
        cases.append(_killed_and_resumed(setting, layout, steps, device))
    return {
        "undisturbed": whole.record["weights_sha256"],
        "checkpoint_every": CHECKPOINT_EVERY,
        "cases": cases,
        "shared_path": run_ranks(save_together, 2, setting.choose(8, 40))[0],
    }


def _killed_and_resumed(setting: Setting, layout: str, steps: list[int], device: str) -> dict[str, Any]:
    """One run that is killed at two steps.

    A single process is resumed from here with --resume; the ranks of ddp are started again by their launcher.
    """
    count = 2 if layout == "ddp" else 1
    # The second kill hits the other rank, where there are two.
    faults = [word for number, step in enumerate(steps) for word in ("--fault", f"kill@{step}:{number % count}")]
    options = (*_OPTIONS, *faults)
    run = train(setting, "C14", "digits", layout, count, SETTINGS, options, device, must_succeed=False)
    exit_code = run.exit_code
    for _ in range(len(steps) if layout == "single" else 0):
        words = [sys.executable, "-m", "ddp_core", "train", "digits", "--device", device, "--resume", str(run.path)]
        words += ["--output", str(setting.runs("C14")), *options]
        words += [word for assignment in SETTINGS for word in ("--set", assignment)]
        exit_code, _ = run_command(words, 120)
    record = RunDirectory(run.path).read()
    return {
        "layout": layout,
        "killed_after": steps,
        "resumed_at": [line["step"] for line in run.metrics("resume")],
        "exit_code": exit_code,
        "weights_sha256": record["weights_sha256"] if record["status"] == "completed" else None,
    }


def save_together(rank: int, world_size: int, rounds: int) -> dict[str, int]:
    """All ranks save their rank's number to one path at once; counts the files that are damaged afterwards."""
    place = [tempfile.mkdtemp(prefix="ddp-claim-") if rank == 0 else ""]
    dist.broadcast_object_list(place)
    path = Path(place[0]) / "weights.pt"
    counts = {"rounds": rounds, "unreadable": 0, "mixed": 0}
    for _ in range(rounds):
        weights = {str(layer): torch.full((64 * 1024,), float(rank)) for layer in range(16)}
        dist.all_reduce(torch.zeros(1))
        torch.save(weights, path)
        dist.all_reduce(torch.zeros(1))
        if rank == 0:
            found = _look(path)
            counts[found] = counts.get(found, 0) + 1
        dist.all_reduce(torch.zeros(1))
    if rank == 0:
        path.unlink(missing_ok=True)
        path.parent.rmdir()
    return {name: counts[name] for name in ("rounds", "unreadable", "mixed")}


def _look(path: Path) -> str:
    try:
        weights = torch.load(path, weights_only=True)
    except Exception:
        return "unreadable"
    values = {float(value) for tensor in weights.values() for value in tensor.unique()}
    return "whole" if len(values) == 1 else "mixed"


def judge(measurements: Measurements) -> Judgement:
    """Apply the rule of the claim."""
    cases, shared = measurements["cases"], measurements["shared_path"]
    same = [case for case in cases if case["weights_sha256"] == measurements["undisturbed"]]
    damaged = shared["unreadable"] + shared["mixed"]
    figures = [
        Figure("runs killed twice and resumed", len(cases)),
        Figure("of them with the undisturbed run's bits", len(same)),
        Figure("files damaged when two ranks with different weights wrote one path", damaged, f"of {shared['rounds']}"),
    ]
    figures += [
        Figure(
            f"{case['layout']}, killed after steps {_words(case['killed_after'])}: resumed at",
            _words(case["resumed_at"]),
        )
        for case in cases
    ]
    if cases and len(same) == len(cases):
        where = "; ".join(f"{_words(case['killed_after'])} ({case['layout']})" for case in cases[:4])
        return Judgement(
            "confirmed",
            f"killed after steps {where} and resumed, every run ended with the undisturbed run's bits; two ranks with "
            f"different weights that wrote one path damaged {damaged} of {shared['rounds']} files",
            figures,
        )
    bad = [case for case in cases if case not in same]
    words = "; ".join(f"{_words(case['killed_after'])} ({case['layout']}, exit {case['exit_code']})" for case in bad)
    return Judgement("refuted", f"other weights, or none, where the run was killed after steps {words}", figures)


def _words(steps: list[int]) -> str:
    return " and ".join(str(step) for step in steps)
