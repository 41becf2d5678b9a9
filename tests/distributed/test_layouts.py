"""The project's main promise, with real processes and files: the result does not depend on the layout."""

from __future__ import annotations

import functools
import os
import signal
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ddp_core.config.layout import SHARD_MODES
from tests.support.commands import forked, train, trained, wait_until
from tests.support.layout_cases import EXACT, digests
from tests.support.processes import HANG, free_port

LAYOUTS = [("dp", 2), ("dp", 3), ("ddp", 1), ("ddp", 2), ("ddp", 3), ("ddp", 5)]
ADAMW = "AdamW, clipping, cosine"
QUICK_NAMES = (ADAMW, "channels last", "dicts of tensors, bf16", "ragged end")
QUICK = {name: EXACT[name] for name in QUICK_NAMES}
SHARDED = {f"--shard {mode}": [*EXACT[ADAMW], "--shard", mode] for mode in SHARD_MODES}


@functools.cache
def exact_digests(kind: str, count: int) -> dict[str, tuple[str, str]]:
    """The digests of every exact case on one layout; each case runs once."""
    with tempfile.TemporaryDirectory() as output:
        return digests(EXACT, Path(output), kind, count)


@pytest.mark.parametrize(("kind", "count"), [pytest.param("dp", 2, marks=pytest.mark.slow), ("ddp", 3)])
def test_four_trainings_end_with_one_digest_each(kind: str, count: int, tmp_path: Path) -> None:
    # The ragged end trains the same file without shards.
    cases = QUICK if kind == "dp" else {name: QUICK[name] for name in QUICK if name != ADAMW} | SHARDED
    alone = digests(QUICK, tmp_path / "alone", "single", 1)
    assert digests(cases, tmp_path / "here", kind, count) == {name: alone.get(name, alone[ADAMW]) for name in cases}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), LAYOUTS)
def test_exact_reduction_ends_with_one_digest_on_every_layout(kind: str, count: int) -> None:
    assert exact_digests(kind, count) == exact_digests("single", 1)


def train_on_two_nodes(output: Path, *words: str) -> None:
    port = free_port()
    full = ["train", *words, "--layout", "ddp", "--device", "cpu", "--output", str(output)]
    full += ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", f"t{port}"]
    with forked("rendezvous", "--port", port) as rendezvous:
        wait_until(lambda: "listening" in rendezvous.said()[0], HANG, "the rendezvous listens")
        with forked(*full) as first, forked(*full) as second:
            for node in (first, second):
                ended = node.end()
                assert (ended.code, ended.errors) == (0, "")
        os.kill(rendezvous.pid, signal.SIGTERM)
        assert rendezvous.end().code == 0


def test_plain_reduction_agrees_up_to_rounding(tmp_path: Path) -> None:
    """So each sample counts once in its step, too. The layout of 2 x 2 is two launches that meet at a rendezvous."""
    words = ("toy_mlp", "--reduction", "plain", "--set", "micro_batch=4")
    train(tmp_path / "single", *words)
    train(tmp_path / "dp x 2", *words, "--layout", "dp", "--nproc-per-node", "2")
    train(tmp_path / "ddp x 2", *words, ranks=2)
    train_on_two_nodes(tmp_path / "2 x 2", *words)
    reference = load_file(trained(tmp_path / "single")[0].path / "model.safetensors")
    assert sum(value.numel() for value in reference.values()) == 61
    for output in tmp_path.iterdir():
        directory, record = trained(output)
        assert record["options"]["reduction"] == "plain"
        for key, value in load_file(directory.path / "model.safetensors").items():
            assert torch.allclose(value, reference[key], rtol=1e-4, atol=0), (output, key)


DDP_OPTIONS = {
    "small buckets": ["--set", "ddp.bucket_cap_mb=0.001"],
    "gradients as bucket views": ["--set", "ddp.gradient_as_bucket_view=true"],
    "static graph": ["--set", "ddp.static_graph=true"],
    "unused parameters": ["--set", "ddp.find_unused_parameters=true"],
    "buffers by rank": ["--set", "ddp.broadcast_buffers=false"],
}
HOOKS = {hook: ["--set", f"ddp.communication_hook={hook}"] for hook in ("fp16", "powersgd")}


@pytest.mark.slow
def test_ddps_options_do_not_change_the_exact_bits(tmp_path: Path) -> None:
    cases = {name: [*EXACT[ADAMW], *words] for name, words in DDP_OPTIONS.items()}
    found = digests(cases, tmp_path, "ddp", 2)
    assert set(found.values()) == {exact_digests("single", 1)[ADAMW]}


@pytest.mark.slow
def test_plain_reduction_takes_every_option_and_hook(tmp_path: Path) -> None:
    words = ["toy_mlp", "--reduction", "plain", "--set", "epochs=8"]
    cases = {name: [*words, *extra] for name, extra in (DDP_OPTIONS | HOOKS).items()}
    cases["static graph"] += ["--set", "micro_batch=null"]
    cases |= {"one share at once": [*words, "--set", "micro_batch=null"]}
    alone = train(tmp_path / "alone", *words)
    digests(cases, tmp_path / "ddp", "ddp", 2)
    for number, name in enumerate(cases):
        result = trained(tmp_path / "ddp" / str(number))[1]["result"]
        tolerance = 1e-2 if name in HOOKS else 1e-5
        assert result["train_loss"] == pytest.approx(alone["result"]["train_loss"], rel=tolerance), name


@pytest.mark.full
def test_plain_reduction_ends_with_one_average_of_batch_norm_statistics(tmp_path: Path) -> None:
    # Each rank's statistics are its own; ranks that end with different buffers are told to report a bug.
    words = ["digits", "--reduction", "plain", "--set", "max_steps=2", "--set", "ema_decay=0.9"]
    assert train(tmp_path, *words, ranks=2)["exit_code"] == 0


@pytest.mark.slow
def test_plain_reduction_with_a_ragged_end_leaves_nobody_waiting(tmp_path: Path) -> None:
    case = {"ragged": [*EXACT["ragged end"], "--reduction", "plain", "--set", "precision=fp32"]}
    (tmp_path / "five").mkdir()
    digests(case, tmp_path / "five", "ddp", 5)
    digests(case, tmp_path / "one", "single", 1)
    five, one = (trained(tmp_path / name / "0")[1]["result"] for name in ("five", "one"))
    assert five["train_loss"] == pytest.approx(one["train_loss"], rel=0.02)
