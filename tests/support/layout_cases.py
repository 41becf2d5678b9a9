"""The trainings that are repeated on every layout, and the function with which a worker process runs them."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.commands import LAUNCHER_VARIABLES, trained
from tests.support.processes import free_port, run_processes

FILES = Path(__file__).parent / "experiment_files"
ADAMW_MLP, SEQUENCES, EVERY_NAME = (str(FILES / f"{name}.py") for name in ("adamw_mlp", "sequences", "every_name"))

# The digits data have 1,438 training samples or a few less: 2 * 704 and a rest smaller than one micro-batch of 64.
EXACT: dict[str, list[str]] = {
    "digits": ["digits", "--set", "max_steps=5"],
    "AdamW, clipping, cosine": [ADAMW_MLP, "--set", "max_steps=8"],
    "bf16": [ADAMW_MLP, "--set", "max_steps=4", "--set", "precision=bf16"],
    "fp16": [ADAMW_MLP, "--set", "max_steps=4", "--set", "precision=fp16"],
    "channels last": ["digits", "--set", "max_steps=3", "--set", "memory_format=channels_last"],
    "dicts of tensors": [SEQUENCES, "--set", "max_steps=6"],
    "dicts of tensors, bf16": [SEQUENCES, "--set", "max_steps=3", "--set", "precision=bf16"],
    "ragged end": [
        *(ADAMW_MLP, "--set", "last_batch=keep", "--set", "epochs=2"),
        *("--set", "global_batch_size=704", "--set", "micro_batch=64"),
    ],
}


def digests(
    cases: dict[str, list[str]], output: Path, kind: str, count: int, shard: str = "none"
) -> dict[str, tuple[str, str]]:
    """The digests of the weights and of the optimizer's state, by case, on `count` ranks or replicas."""
    ranks = count if kind == "ddp" else 1
    words = ["--layout", kind, "--nproc-per-node", str(count), "--device", "cpu"]
    words += ["--shard", shard] if shard != "none" else []
    ports: set[int] = set()
    while len(ports) < len(cases):
        ports.add(free_port())
    plan = [
        ([*case, *words, "--output", str(output / str(number))], port)
        for number, (case, port) in enumerate(zip(cases.values(), ports, strict=True))
    ]
    run_processes(_run_all, ranks, plan, kind == "ddp")
    records = [trained(output / str(number))[1] for number in range(len(cases))]
    return {
        name: (record["weights_sha256"], record["optimizer_sha256"])
        for name, record in zip(cases, records, strict=True)
    }


def _run_all(rank: int, world_size: int, plan: list[tuple[list[str], int]], launched: bool) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["OMP_NUM_THREADS"] = "1"
    if not launched:
        for name in LAUNCHER_VARIABLES:
            os.environ.pop(name, None)
    if rank or world_size == 1:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    from ddp_core.cli import main

    for words, port in plan:
        os.environ["MASTER_PORT"] = str(port)
        code = main(["train", *words])
        assert code == 0, f"ddp train {' '.join(words)} ended with {code}"
