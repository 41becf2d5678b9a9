"""The guard without the mends: what a mend makes right, or refuses by name, other checks find, too.

A mend knows one culprit: a flag, a buffer, a generator. The guard knows the promise alone: it computes again, compares
ranks, and rehearses a resume. So here each mend is switched off in the processes that train, and an experiment that
needs it goes wrong on some layout; the guard must end the run with a reason of its own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ddp_core.adapters.dealing import deal
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.reduction import BatchStatistics
from tests.adapters.test_keyed_loading import Noise, masked
from tests.adapters.test_repeat_check import Net, train
from tests.support import quick
from tests.support.commands import LAUNCHER_VARIABLES
from tests.support.layout_cases import FILES
from tests.support.processes import run_processes

_take = BatchStatistics.take


def nothing(*_: Any, **__: Any) -> None:
    """Stands for what is switched off."""


def empty_dict(*_: Any) -> dict[str, Any]:
    return {}


def empty_list(*_: Any) -> list[str]:
    return []


def take_alone(statistics: BatchStatistics, weight: float = 1.0) -> Tensor:
    """BatchStatistics.take, which lets the next micro-batch see the statistics of this one."""
    if statistics._step is None:
        return _take(statistics, weight)
    shown: Any = statistics._step.layers.shown
    shown.show = nothing
    try:
        return _take(statistics, weight)
    finally:
        del shown.show


UNKEYED_LOADING = {"ddp_core.data.loader.Loader._keyed": lambda *_: contextlib.nullcontext()}
OFF: Mapping[str, Mapping[str, Any]] = {
    "following requires_grad": {"ddp_core.reduction.trained.TrainedParameters.changes": empty_dict},
    "batch norm in evaluation": {
        "ddp_core.reduction.batch_statistics._Step._before_call": nothing,
        "ddp_core.reduction.batch_statistics.BatchStatistics.take": take_alone,
    },
    "written parameters": {
        "ddp_core.reduction.written_parameters.WrittenParameters.refuse_changes": nothing,
        "ddp_core.trainers.data_parallel.DataParallelTrainer._require_same_parameters": nothing,
    },
    "foreign buffers": {"ddp_core.reduction.foreign_buffers.ForeignBuffers.refuse_changed": nothing},
    "hooks of replicas": {"ddp_core.trainers.data_parallel.share_hooks": nothing},
    "keyed draws": {"ddp_core.base.seeds.key_draws": nothing, "ddp_core.data.loader.key_draws": nothing},
    "generators of threads": {
        "ddp_core.base.own_generator.OwnGenerator.__enter__": nothing,
        "ddp_core.base.own_generator.OwnGenerator.__exit__": nothing,
        **UNKEYED_LOADING,
    },
    "keyed loading": UNKEYED_LOADING,
    "keyed updates": {"ddp_core.base.seeds.MicroBatchSeed.update": nothing},
    "look at attributes": {
        "ddp_core.trainers.attributes.Attributes.changed": empty_dict,
        "ddp_core.trainers.attributes.Attributes.lost": empty_dict,
    },
    "changes between updates": {"ddp_core.trainers.between_updates.BetweenUpdates.changed": empty_list},
    "reading twice": {"ddp_core.trainers.read_twice.ReadTwice.before_step": nothing},
}
"""For each mend, and each screen that sees a culprit by name: what is replaced, and by what."""

SINGLE: tuple[str, ...] = ()
DP = ("--layout", "dp", "--nproc-per-node", "3")
DDP = ("--layout", "ddp", "--nproc-per-node", "2")
DDP_4 = ("--layout", "ddp", "--nproc-per-node", "4")
STRICT = ("--guard", "strict")
SAVES = ("--checkpoint-every", "2")

REPLICAS = "has other bits when it is computed again by another replica"
EACH_TIME = "and others each time"
ALONE = "which no other rank has a copy of, is not what the update has left there"
COUNTS = "every pass changes the buffer seen"
LEFT_OVER = "has a gradient left over from an earlier micro-batch"
EVALUATION = "when it is evaluated again"
FIRST_PASS = "the first pass does something that later ones do not"
RANKS = "is not the same on all ranks"
RESUME = "read into a new job and given the same gradient, gives other bits"
READ_AGAIN = "are not the same when read again in step 1"


def run(output: Path, off: str, words: tuple[str, ...], env: Mapping[str, str]) -> tuple[set[int], str]:
    """Train with a mend switched off: the exit codes of all processes, and what they said in the end."""
    ranks = int(words[words.index("--nproc-per-node") + 1]) if "ddp" in words else 1
    codes = run_processes(_train, ranks, output, off, words, env)
    return set(codes), "".join(file.read_text() for file in sorted(output.glob("said-*")))


def _train(rank: int, world_size: int, output: Path, off: str, words: tuple[str, ...], env: Mapping[str, str]) -> int:
    if world_size == 1:
        for name in LAUNCHER_VARIABLES:
            del os.environ[name]
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", **env})
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(output / f"said-{rank}", os.O_WRONLY | os.O_CREAT), 2)
    with pytest.MonkeyPatch.context() as patch:
        for name, instead in OFF[off].items():
            patch.setattr(name, instead)
        return quick.main(["train", *words, "--device", "cpu", "--output", str(output), "--synchronous-save"])


def file(name: str, kind: str = "") -> tuple[str, ...]:
    return (str(FILES / f"{name}.py"), *(("--set", f"model.kind={kind}") if kind else ()))


def case(off: str, *words: str, said: str, fast: bool = False, **env: str) -> Any:
    known = [Path(word).stem if word.endswith(".py") else word for word in words]
    return pytest.param(off, words, env, said, marks=() if fast else pytest.mark.slow, id=f"{off}, {' '.join(known)}")


@pytest.mark.parametrize(
    ("off", "words", "env", "said"),
    [
        # 1. A callback that changes `requires_grad`.
        case("following requires_grad", *file("changing", "usual"), said=LEFT_OVER),
        case("following requires_grad", *file("changing", "usual"), *DP, said=REPLICAS, fast=True),
        case("following requires_grad", *file("changing", "usual"), *DDP, said=LEFT_OVER),
        case("following requires_grad", *file("changing", "usual"), *DDP, "--shard", "optimizer", said=LEFT_OVER),
        case("following requires_grad", *file("changing", "usual"), *DDP, "--shard", "gradients", said=LEFT_OVER),
        # 2. Batch normalisation in evaluation mode within forward.
        case("batch norm in evaluation", *file("changing", "pseudo labels"), *STRICT, said=FIRST_PASS),
        case("batch norm in evaluation", *file("changing", "pseudo labels"), *DP, *STRICT, said=FIRST_PASS),
        case("batch norm in evaluation", *file("changing", "pseudo labels"), *DDP, *STRICT, said=FIRST_PASS),
        # 3. A forward that writes to its weights.
        case("written parameters", *file("writing", "max_norm"), *STRICT, said=RESUME),
        case("written parameters", *file("writing", "max_norm"), *DP, *STRICT, said=RESUME),
        case("written parameters", *file("writing", "max_norm"), *DDP, said=RANKS),
        case("written parameters", *file("writing", "rows unseen"), *DP, said=EACH_TIME),
        case("written parameters", *file("writing", "rows unseen"), *DDP, said=RANKS),
        case("written parameters", *file("writing", "decay"), said=EACH_TIME),
        # 4 and 5. Buffers that forward changes, and reads; a count that only shows where ranks count unlike; from a
        # late step on.
        case("foreign buffers", *file("changing", "codebook"), said=COUNTS),
        case("foreign buffers", *file("changing", "codebook"), *DP, said=COUNTS),
        case("foreign buffers", *file("changing", "codebook"), *DDP, said=COUNTS),
        case("foreign buffers", *file("changing", "counter"), said=COUNTS),
        case("foreign buffers", *file("changing", "counter"), *DP, said=COUNTS),
        case("foreign buffers", *file("changing", "counter"), *DDP, said=COUNTS),
        case("foreign buffers", *file("changing", "counter"), *DDP_4, said=COUNTS),
        case("foreign buffers", *file("changing", "rare"), *DDP, said=RANKS),
        # 6. Hooks on weights.
        case("hooks of replicas", *file("changing", "hooks"), *DP, said=REPLICAS, fast=True),
        # 8. Random numbers.
        case("keyed draws", *file("draws_forward"), said=EACH_TIME, fast=True),
        case("keyed draws", *file("draws_forward"), *DP, said=EACH_TIME),
        case("keyed draws", *file("draws_forward"), *DDP, said=EACH_TIME),
        case("generators of threads", *file("draws_forward"), *DP, said=EACH_TIME),
        case("generators of threads", *file("draws_own_seed"), *DP, said=EACH_TIME),
        case("keyed loading", *file("draws_collate"), *DDP, *STRICT, said=READ_AGAIN),
        case("keyed updates", *file("draws_optimizer"), *STRICT, *SAVES, said=RESUME),
        case("keyed updates", *file("draws_optimizer"), *DDP, said=RANKS),
        case("keyed draws", *file("draws_metrics"), said=EVALUATION),
        case("keyed draws", *file("draws_metrics"), *DDP, said=EVALUATION),
        # 9. An optimizer that keeps `self.t`.
        case("look at attributes", *file("loses"), *STRICT, *SAVES, said=RESUME, LOSES="attribute"),
        # 10. A callback of rank 0 that changes weights.
        case("changes between updates", *file("one_rank_alone"), *DDP, said=RANKS, CHANGED="0.weight"),
        *(
            case(
                *("changes between updates", *file("one_rank_alone"), *DDP, "--shard", shard),
                said=RANKS,
                CHANGED="0.weight",
            )
            for shard in ("optimizer", "gradients")
        ),
        case(
            *("changes between updates", *file("one_rank_alone"), *DDP, "--shard", "parameters"),
            said=ALONE,
            CHANGED="0.weight",
            STEP="4",
        ),
        # 11. Samples that are random.
        case("reading twice", *file("random_rows"), *STRICT, said=READ_AGAIN, fast=True),
        case("reading twice", *file("random_rows"), *DDP, *STRICT, said=READ_AGAIN),
    ],
)
def test_it_is_found_with_its_mend_switched_off(
    tmp_path: Path, off: str, words: tuple[str, ...], env: dict[str, str], said: str
) -> None:
    codes, ended = run(tmp_path, off, words, env)
    assert (codes, said in ended) == ({ExitCode.BAD_INPUT}, True), (codes, ended)
    assert "Traceback" not in ended


# 12. Under the adapters.
class Unkeyed:
    """Seeds nothing, in the place of MicroBatchSeed."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    begin = __call__ = update = nothing


def test_a_loader_that_is_not_keyed_is_found_by_reading_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_core.adapters.keyed_loading.MicroBatchSeed", Unkeyed)
    loader = deal(DataLoader(Noise(), 5, collate_fn=masked), 6, 0, 0, 2)
    with pytest.raises(UserError, match="is another one when it is read a second time"):
        list(loader)


def test_a_model_whose_draws_are_not_keyed_is_found_by_computing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_core.adapters.micro_steps.MicroBatchSeed", Unkeyed)
    with torch.random.fork_rng():
        said, _ = train(Net)
    assert "computes it again, so it does not follow from the weights, the micro-batch and the step alone" in said
