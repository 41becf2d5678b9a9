"""Each rank keeps its own part of the optimizer's state, and of gradients: the bits are those of one process."""

from __future__ import annotations

import functools
import itertools
import tempfile
from pathlib import Path

import pytest

from ddp_core.base.digests import optimizer_digest, weights_digest
from ddp_core.checkpoint import load, newest_valid
from ddp_core.config.layout import SHARD_MODES, ShardMode
from tests.distributed.resuming import WORDS, check_whole, kill_at
from tests.distributed.test_layouts import train_on_two_nodes
from tests.support.commands import train, trained
from tests.support.layout_cases import ADAMW_MLP, EXACT, digests

CASES = {
    **EXACT,
    "toy": ["toy_mlp", "--set", "micro_batch=2"],
    # Rank 0 has micro-batch 0 in every layout, so the same loss is NaN.
    "a step skipped": [ADAMW_MLP, "--set", "max_steps=4", "--fault", "nan@2:0", "--on-nan", "skip"],
    # All ranks' gradients overflow in the first steps; then the scale is small enough.
    "overflow": [ADAMW_MLP, "--set", "loss=loud", "--set", "precision=fp16", "--set", "max_steps=12"],
}


@functools.cache
def alone() -> dict[str, tuple[str, str]]:
    """The digests of every case in one process."""
    with tempfile.TemporaryDirectory() as output:
        return digests(CASES, Path(output), "single", 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("shard", SHARD_MODES)
def test_every_case_ends_with_the_bits_of_one_process(tmp_path: Path, shard: ShardMode, count: int) -> None:
    # Rows of a parameter, between which fully_shard cuts, do not lie together in channels_last.
    cases = {name: words for name, words in CASES.items() if (shard, name) != ("parameters", "channels last")}
    assert digests(cases, tmp_path, "ddp", count, shard=shard) == {name: alone()[name] for name in cases}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "bf16"])
@pytest.mark.parametrize("shard", ["none", *SHARD_MODES])
def test_two_nodes_of_two_ranks_end_with_the_bits_of_one_process(tmp_path: Path, shard: ShardMode, name: str) -> None:
    train_on_two_nodes(tmp_path, *CASES[name], "--shard", shard)
    record = trained(tmp_path)[1]
    assert record["layout"]["label"] == "ddp-2x2-cpu" + f"-shard-{shard}" * (shard != "none")
    assert (record["weights_sha256"], record["optimizer_sha256"]) == alone()[name]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kills",
    [
        pytest.param([(7, "parameters", 3)], id="one"),
        pytest.param(
            [(7, "optimizer", 3), (12, "gradients", 2), (18, "none", 2), (23, "parameters", 3)],
            marks=pytest.mark.slow,
            id="all",
        ),
    ],
)
def test_a_run_goes_on_with_any_other_shard_mode(
    tmp_path: Path, undisturbed: tuple[str, str], kills: list[tuple[int, str, int]]
) -> None:
    for step, shard, ranks in kills:
        kill_at(tmp_path, step, *WORDS, "--shard", shard, ranks=ranks)
    record = train(tmp_path, *WORDS, "--resume", "auto")
    check_whole(tmp_path, undisturbed, record)
    assert [attempt["layout"]["shard"] for attempt in record["attempts"]] == [*(shard for _, shard, _ in kills), "none"]


@pytest.mark.slow
def test_a_checkpoint_is_the_same_state_with_any_shard_mode(tmp_path: Path) -> None:
    words = [ADAMW_MLP, "--set", "max_steps=3", "--set", "model.width=400", "--checkpoint-every", "3"]
    found = []
    for number, (shard, ranks) in enumerate(itertools.product(["none", *SHARD_MODES], [2, 3])):
        output = tmp_path / str(number)
        record = train(output, *words, "--shard", shard, ranks=ranks)
        checkpoint = newest_valid(trained(output)[0].checkpoints)
        assert checkpoint is not None
        assert len(checkpoint.data) == (1 if shard == "none" else ranks)
        state = load(checkpoint)
        digests = weights_digest(state["model"]), optimizer_digest(state["optimizer"])
        assert digests == (record["weights_sha256"], record["optimizer_sha256"])
        sizes = sorted(part.bytes for part in checkpoint.data)
        assert sizes[-1] < 2 * sizes[0], "each rank writes its part"
        found.append((checkpoint.shapes, *digests))
    assert found[1:] == found[:-1]
