"""Whether it matters which launcher starts the processes.

torchrun tells each its rank in environment variables, torch.distributed.launch also as --local-rank, mp.spawn as an
argument of a function. Whether a training begins depends on where the program looks.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ddp_core.base.errors import UserError
from ddp_core.record.directory import find_runs
from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements, composed, holds, versions
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.measuring.started import FUNCTION, WAYS
from ddp_lab.claims.measuring.training import run_command
from ddp_lab.records import Figure

claim = Claim(
    id="C15",
    title="torchrun, torch.distributed.launch and mp.spawn are interchangeable",
    claim="A DDP program can be started with torchrun, with python -m torch.distributed.launch, or with mp.spawn.",
    original='CUDA_VISIBLE_DEVICES="0,1" python -m torch.distributed.launch --nproc_per_node 2 ddp.py\n或 torchrun\n'
    "`mp.spawn`是 PyTorch 提供的便捷函数，用于启动多个进程。\n"
    "PyTorch引入了torch.multiprocessing.spawn，可以使得单卡、DDP下的外部调用一致，即不用使用torch.distributed.launch。\n"
    "启动方式不再推荐使用mp.spawn,而是直接使用Torch自带的CLI工具 torchrun,它能自动处理环境变量"
    "(RANK, WORLD_SIZE, LOCAL_RANK)并支持故障重启。",
    sources=("000", "001", "002", "004"),
    method="The same experiment on the same layout, in programs that learn their rank as those of the sources do: from "
    "os.environ, from `--local_rank` in both spellings or in one, each started by both launchers of torch; and from "
    "the argument that mp.spawn gives. Compared: the SHA-256 over the final weights.",
    rule="What starts ends alike: confirmed when each launcher starts a program, and all that start end with one "
    "digest, else refuted. Every program of the sources starts under each: refuted when one fails.",
    in_short="Confirmed where each launcher starts a program and all end with one digest; refuted where a program of "
    "the sources fails under one.",
    loads={
        "ranks": ((2,), (2, 4)),
        "settings": (("model.width=8", "epochs=1"), ("model.width=8", "epochs=1")),
        "seconds_allowed": (120, 120),
    },
    history=versions(
        "2026-11-22 edff62d5e96d714e The rule is the one before, with what is measured among the loads.",
        "2026-11-29 df436a3b6c9270bd The programs learn their rank as those of the sources do, not as ours does. Two "
        "parts, since a program that does not start says nothing of what it would end with.",
    ),
    seconds=(60, 200),
)

LAUNCHERS = {"torchrun": "torch.distributed.run", "torch.distributed.launch": "torch.distributed.launch"}


def measure(setting: Setting) -> Measurements:
    """Exit code and digest of each program under each launcher, for each number of ranks."""
    cases = []
    for count in claim.load(setting).ranks:
        for way in WAYS:
            for launcher in ["mp.spawn"] if way == FUNCTION else LAUNCHERS:
                setting.say(f"{launcher}, rank from {WAYS[way]}, {count} ranks")
                case = {"launcher": launcher, "rank_from": WAYS[way], "ranks": count}
                cases.append(case | _start(setting, launcher, way, count))
    return {"cases": cases}


def _start(setting: Setting, launcher: str, way: str, count: int) -> dict[str, Any]:
    load, output = claim.load(setting), setting.runs("C15")
    before = {directory.path for directory, _ in find_runs(output)}
    words = ["train", "digits", "--layout", "ddp", "--device", setting.device_type(count), "--output", str(output)]
    for assignment in load.settings:
        words += ["--set", assignment]
    program = "ddp_lab.claims.measuring.started"
    if way == FUNCTION:
        words = ["-m", program, way, str(count), *words]
    else:
        launch = ["-m", LAUNCHERS[launcher], "--standalone", "--nproc-per-node", str(count)]
        words = [*launch, "--module", program, way, *words]
    try:
        exit_code, said = run_command([sys.executable, *words], load.seconds_allowed)
    except UserError as error:
        exit_code, said = None, str(error)
    made = [record for directory, record in find_runs(output) if directory.path not in before]
    digest = made[-1]["weights_sha256"] if made else None
    return {"exit_code": exit_code, "weights_sha256": digest, "said": said if exit_code else ""}


def judge(measurements: Measurements) -> Judgement:
    """Apply the rule of the claim."""
    cases = measurements["cases"]
    figures = [
        Figure(f"weights after {_title(case)}, {case['ranks']} ranks", (case["weights_sha256"] or "none")[:12])
        for case in cases
    ]
    began = [case for case in cases if case["weights_sha256"] is not None]
    failed = {
        _title(case): case["said"].rpartition("error: ")[2]
        for case in cases
        if case["exit_code"] != 0 or case not in began
    }
    digests = {case["weights_sha256"] for case in began}
    starts, ways = (len({_title(case) for case in some}) for some in (began, cases))
    each_starts = {case["launcher"] for case in began} == {case["launcher"] for case in cases}
    parts = [
        holds(
            "all that start end alike",
            len(digests) == 1 and each_starts,
            f"{starts} of {ways} ways start, with digest {', '.join(each[:12] for each in digests)}",
        ),
        holds(
            *("every program of the sources starts under each", not failed, "all did"),
            "; ".join(f"{title}: {said}" for title, said in failed.items()),
        ),
    ]
    return composed(parts, figures)


def _title(case: Mapping[str, Any]) -> str:
    return f"{case['launcher']} with the rank from {case['rank_from']}"
