"""Whether it matters which launcher starts the processes.

A launcher starts processes and tells each its rank, the number of ranks and where to meet. torchrun does so in
environment variables and starts failed workers again; torch.distributed.launch is its deprecated predecessor, which
also passes --local-rank as an argument; mp.spawn passes the rank to a function, and the program sets the variables
itself. The training is the same in each case. The launchers differ in the rest: restarts, several nodes, and how errors
are reported.
"""

from __future__ import annotations

import sys
from typing import Any

from ddp_core.base.errors import UserError
from ddp_core.record.directory import find_runs
from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements, versions
from ddp_lab.claims.framework.setting import Setting
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
    method="The same experiment on the same layout, started by each: torch's own two launchers from outside, and `ddp "
    "train` with --launcher torchrun and --launcher spawn. Compared: the SHA-256 over the final weights.",
    rule="Confirmed when all end with the same digest. Refuted when one fails or ends with another.",
    loads={
        "ranks": ((2,), (2, 4)),
        "settings": (("model.width=8", "epochs=1"), ("model.width=8", "epochs=1")),
        "seconds_allowed": (120, 120),
    },
    history=versions("2026-11-22 edff62d5e96d714e The rule is the one before, with what is measured among the loads."),
    seconds=(20, 95),
)

OUTSIDE = {"torchrun": "torch.distributed.run", "torch.distributed.launch": "torch.distributed.launch"}


def measure(setting: Setting) -> Measurements:
    """Exit code and digest of each launcher, for each number of ranks."""
    cases = []
    for count in claim.load(setting).ranks:
        device = setting.device_type(count)
        for name in (*OUTSIDE, "ddp train --launcher torchrun", "ddp train --launcher spawn"):
            setting.say(f"{name}, {count} ranks")
            cases.append({"launcher": name, "ranks": count} | _start(setting, name, count, device))
    return {"cases": cases}


def _start(setting: Setting, name: str, count: int, device: str) -> dict[str, Any]:
    load, output = claim.load(setting), setting.runs("C15")
    before = {directory.path for directory, _ in find_runs(output)}
    words = ["train", "digits", "--layout", "ddp", "--device", device, "--output", str(output)]
    for assignment in load.settings:
        words += ["--set", assignment]
    if name in OUTSIDE:
        words = ["-m", OUTSIDE[name], "--standalone", "--nproc-per-node", str(count), "--module", "ddp_core", *words]
    else:
        words = ["-m", "ddp_core", *words, "--nproc-per-node", str(count), "--launcher", name.rpartition(" ")[2]]
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
        Figure(f"weights after {case['launcher']}, {case['ranks']} ranks", (case["weights_sha256"] or "none")[:12])
        for case in cases
    ]
    failed = [case for case in cases if case["exit_code"] != 0 or case["weights_sha256"] is None]
    if failed:
        words = "; ".join(
            f"{case['launcher']} on {case['ranks']} ranks ended with {case['exit_code']}: {case['said']}"
            for case in failed
        )
        return Judgement("refuted", words, figures)
    digests = {case["weights_sha256"] for case in cases}
    launchers = len({case["launcher"] for case in cases})
    if len(digests) == 1:
        return Judgement("confirmed", f"{launchers} ways to start, one digest: {digests.pop()[:12]}", figures)
    return Judgement("refuted", f"{launchers} ways to start gave {len(digests)} digests", figures)
