"""State that is another on one rank: by a bit that is flipped on purpose, or by a function of the user's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ddp_core.base.errors import ExitCode
from ddp_core.checkpoint import find_checkpoints
from ddp_core.observe.faults import Fault, with_flipped_bit
from ddp_core.record.directory import find_runs
from tests.support.commands import Ended, ddp
from tests.support.wording import refusing

FILE = Path(__file__).parent / "experiment_files" / "one_rank_alone.py"
slow = pytest.mark.slow


def flipped(output: Path, *faults: str, layout: str = "ddp", words: tuple[object, ...] = ()) -> Ended:
    ranks = () if layout == "single" else ("--nproc-per-node", 2)
    given = [word for fault in faults for word in ("--fault", fault)]
    where = ("--layout", layout, "--device", "cpu", *ranks)
    return ddp("train", FILE, *where, "--output", output, "--max-restarts", 0, *given, *words)


def digest_of(output: Path, *faults: str, layout: str = "ddp", words: tuple[object, ...] = ()) -> str:
    ended = flipped(output, *faults, layout=layout, words=("--guard", "off", *words))
    assert ended.code == ExitCode.DONE, ended.errors
    ((_, record),) = find_runs(output)
    return str(record["weights_sha256"])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest without a fault, on every layout."""
    return digest_of(tmp_path_factory.mktemp("undisturbed"), layout="single")


def test_a_flip_may_go_on() -> None:
    assert Fault.parse("flip@3+:1") == Fault("flip", 3, 1, goes_on=True)
    assert str(Fault.parse("flip@3+:1")) == "flip@3+:1"
    assert Fault.parse("flipweight@3") == Fault("flipweight", 3, 0)


@pytest.mark.parametrize("text", ["kill@3+", "flipweight@3+:1", "flip@+", "flip@3+1", "flop@3"])
def test_nothing_else_goes_on(text: str) -> None:
    with refusing():
        Fault.parse(text)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(torch.float16, (3, 4)), (torch.bfloat16, ()), (torch.float32, (1,)), (torch.complex64, (3, 4))],
)
def test_one_bit_of_the_largest_element_is_flipped(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    before, last = torch.zeros(shape, dtype=dtype).t(), tuple(size - 1 for size in reversed(shape))
    before[last] = -3.0
    after = with_flipped_bit(before)
    assert (after != before).sum() == 1
    assert after[last] == -2.0, "-1.5 times 2 without its highest bit is -1 times 2"
    assert torch.equal(with_flipped_bit(after), before)


@pytest.mark.full
@pytest.mark.parametrize(("layout", "shard"), [("single", "none"), pytest.param("ddp", "parameters", marks=slow)])
def test_flipped_gradients_show_in_the_final_weights(tmp_path: Path, undisturbed: str, layout: str, shard: str) -> None:
    words = ("--shard", shard)
    once = digest_of(tmp_path / "once", "flip@3", layout=layout, words=words)
    assert len({undisturbed, once, digest_of(tmp_path / "on", "flip@3+", layout=layout, words=words)}) == 3


@pytest.mark.full
def test_a_flip_in_one_gradient_happens_once_in_a_run_directory(tmp_path: Path, undisturbed: str) -> None:
    words = ("--guard", "off", "--checkpoint-every", 2, "--max-restarts", 1)
    ended = flipped(tmp_path, "flip@3", "exit@3:1", words=words)
    assert ended.code == ExitCode.DONE, ended.errors
    ((_, record),) = find_runs(tmp_path)
    assert record["weights_sha256"] == undisturbed, "step 3 was repeated without it"


@pytest.mark.full
def test_a_flipped_weight_is_found_before_the_next_save(tmp_path: Path) -> None:
    ended = flipped(tmp_path, "flipweight@3:1", words=("--checkpoint-every", 2))
    assert ended.code == ExitCode.BAD_INPUT
    assert "step 4 " in ended.errors
    assert "is not the same on all ranks" in ended.errors
    assert "the checkpoint of step 2 is good" in ended.errors


def one_alone(output: Path, ranks: int, *words: object, **env: str) -> Ended:
    where = ("--layout", "ddp", "--device", "cpu", "--nproc-per-node", ranks, "--max-restarts", 0)
    return ddp("train", FILE, *where, "--output", output, *words, env=env)


@pytest.mark.full
@pytest.mark.parametrize(
    ("changed", "ranks", "every", "name", "where"),
    [
        ("1.running_mean", 2, 2, "step 4 buffer 1.running_mean", "0, 1 of 2"),
        ("1.running_var", 3, 2, "step 4 buffer 1.running_var", "0 of 3"),
        # Momentum shows in the weights, which come first, after the next update.
        ("momentum", 3, 2, "step 4 parameter 0.weight", "0 of 3"),
        ("momentum", 3, 3, "step 3 the optimizer's momentum_buffer of 0.weight", "0 of 3"),
    ],
)
def test_the_first_tensor_that_differs_is_named_and_nothing_is_saved(
    tmp_path: Path, changed: str, ranks: int, every: int, name: str, where: str
) -> None:
    ended = one_alone(tmp_path, ranks, "--checkpoint-every", every, CHANGED=changed)
    assert ended.code == ExitCode.BAD_INPUT, ended.errors
    assert f"{name} is not the same" in ended.errors
    assert f"(differs: {where})" in ended.errors
    ((directory, record),) = find_runs(tmp_path)
    assert [each.step for each in find_checkpoints(directory.checkpoints)] == [2] * (every == 2)
    assert ("the checkpoint of step 2 is good" in ended.errors) is (every == 2)
    assert record["exit_code"] == ExitCode.BAD_INPUT


@pytest.mark.full
@pytest.mark.parametrize("shard", ["none", *(pytest.param(each, marks=slow) for each in ("parameters", "optimizer"))])
def test_what_is_cut_among_ranks_is_not_compared(tmp_path: Path, shard: str) -> None:
    """A change of weights by one rank's callback is found by the rehearsal.

    Where weights are cut, no comparison of ranks shows it: the owners' updates have spread the change. Where only the
    optimizer's state is cut, weights differ from one process's in the next step: this one is the last of the rehearsal,
    so the witness finds it.
    """
    words = ("--shard", shard, "--checkpoint-every", 2)
    assert one_alone(tmp_path / "unchanged", 2, *words).code == ExitCode.DONE
    changed = {"CHANGED": "0.weight", "STEP": "5"}
    ended = one_alone(tmp_path / "out", 2, "--shard", shard, "--set", "max_steps=7", "--rehearsal", "on", **changed)
    assert (ended.code, "Traceback" in ended.errors) == (ExitCode.BAD_INPUT, False), ended.errors
    said = "the result depends on the layout" if shard == "optimizer" else "first in step 5 of a rehearsal"
    assert said in ended.errors
