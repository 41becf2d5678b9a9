"""Bits flipped on purpose: one in a gradient, one in every gradient from a step on, one in a weight."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ddp_core.base.errors import ExitCode
from ddp_core.observe.faults import Fault
from ddp_core.observe.flips import with_flipped_bit
from ddp_core.record.directory import find_runs
from tests.support.commands import Ended, ddp
from tests.support.wording import refusing

FILE = Path(__file__).parent / "experiment_files" / "one_rank_alone.py"


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
@pytest.mark.parametrize(
    ("layout", "shard"),
    [
        ("single", "none"),
        ("ddp", "parameters"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("dp", "none"), ("ddp", "none"), ("ddp", "gradients"))
        ),
    ],
)
def test_flipped_gradients_show_in_the_final_weights(tmp_path: Path, undisturbed: str, layout: str, shard: str) -> None:
    words = ("--shard", shard)
    once = digest_of(tmp_path / "once", "flip@3", layout=layout, words=words)
    assert len({undisturbed, once, digest_of(tmp_path / "on", "flip@3+", layout=layout, words=words)}) == 3


def test_a_flipped_weight_shows_in_the_final_weights(tmp_path: Path, undisturbed: str) -> None:
    assert digest_of(tmp_path, "flipweight@8", layout="single") != undisturbed


@pytest.mark.full
def test_a_flip_in_one_gradient_happens_once_in_a_run_directory(tmp_path: Path, undisturbed: str) -> None:
    words = ("--guard", "off", "--checkpoint-every", 2, "--max-restarts", 1)
    ended = flipped(tmp_path, "flip@3", "exit@3:1", words=words)
    assert ended.code == ExitCode.DONE, ended.errors
    ((_, record),) = find_runs(tmp_path)
    assert record["weights_sha256"] == undisturbed, "step 3 was repeated without it"


@pytest.mark.full
def test_a_flip_hits_one_replica_of_dp(tmp_path: Path) -> None:
    """Both layouts compute each micro-batch's gradient once, so the same ones are flipped: those of the first half."""
    assert digest_of(tmp_path / "dp", "flip@3+", layout="dp") == digest_of(tmp_path / "ddp", "flip@3+:0", layout="ddp")


@pytest.mark.full
def test_a_flipped_weight_is_found_before_the_next_save(tmp_path: Path) -> None:
    ended = flipped(tmp_path, "flipweight@3:1", words=("--checkpoint-every", 2))
    assert ended.code == ExitCode.BAD_INPUT
    assert "step 4 " in ended.errors
    assert "is not the same on all ranks" in ended.errors
    assert "the checkpoint of step 2 is good" in ended.errors
