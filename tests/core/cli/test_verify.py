"""What `ddp verify` says: first of the code, then of the data, last of the bits.

Tests cli/repeating.py, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ddp_core.base.digests import weights_digest
from ddp_core.record.directory import RunDirectory
from tests.support.commands import Ended, ddp, train, trained
from tests.support.own_project import edit, write_project


def trained_own(tmp_path: Path, *words: str) -> tuple[Path, RunDirectory]:
    """The experiment's file, and its finished run."""
    file = write_project(tmp_path / "project")
    train(tmp_path / "out", file, "--data-dir", tmp_path / "data", *words)
    return file, trained(tmp_path / "out")[0]


def verify(path: Path, *words: object, env: Mapping[str, str] | None = None) -> Ended:
    return ddp("verify", path, *words, env=env, module="tests.support.quick")


def write_zeros(directory: RunDirectory, name: str = "model.safetensors") -> str:
    """Put zeros in the place of the weights; return their digest."""
    zeros = {name: torch.zeros_like(value) for name, value in load_file(directory.path / name).items()}
    save_file(zeros, directory.path / name)
    return weights_digest(zeros)


def check(ended: Ended, code: int, *words: str) -> None:
    assert ended.code == code, ended.output + ended.errors
    assert ended.errors == ""
    for word in words:
        assert word in ended.output


def test_the_runs_own_copy_is_trained_whatever_has_become_of_the_original(tmp_path: Path) -> None:
    file, directory = trained_own(tmp_path)
    edit(file.parent / "nets" / "big.py", "nn.Sigmoid()", "nn.Tanh()")
    (file.parent / "beside.py").unlink()
    ended = verify(directory.path, env={"PYTHONPATH": f"{file.parent}:{Path(__file__).parents[3]}"})
    check(ended, 0, f"note: {file.parent}/nets/big.py changed after the run", "\nidentical\n")
    assert list(directory.path.rglob("*.pyc")) == []


@pytest.mark.full
def test_the_optimizers_state_is_compared_and_what_was_compared_is_said(tmp_path: Path) -> None:
    _, directory = trained_own(tmp_path)
    said = "compared  weights and buffers, optimizer's state, last evaluation\nidentical\n"
    check(verify(directory.path, "--layout", "dp"), 0, said)
    directory.update(optimizer_sha256="0" * 64)
    check(verify(directory.path), 1, "different state of the optimizer, though the weights are identical")


@pytest.mark.slow
def test_a_run_is_repeated_with_its_own_shard_mode(tmp_path: Path) -> None:
    train(tmp_path, "toy_mlp", "--shard", "gradients", ranks=2)
    ended = verify(trained(tmp_path)[0].path)
    check(ended, 0, "\nidentical\n")
    (repeated,) = [line for line in ended.output.splitlines() if line.startswith("repeated")]
    assert repeated.endswith("ddp-1x2-cpu-shard-gradients")


def test_an_edited_copy_is_named_before_anything_is_trained(tmp_path: Path) -> None:
    _, directory = trained_own(tmp_path)
    edit(directory.path / "source" / "beside.py", ".sum()", ".sum() * 2")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "shift").write_text("1.0")
    ended = verify(directory.path)
    check(ended, 1, "different code: ", "source/beside.py was changed after the run had kept it", "Nothing was trained")
    assert "training" not in ended.output.replace("trained", "")


def test_changed_samples_are_named(tmp_path: Path) -> None:
    _, directory = trained_own(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "shift").write_text("0.001")
    check(verify(directory.path), 1, "different data: changed at sample 3 (training)", "Nothing was trained")
    (directory.path / "data.json").unlink()
    check(verify(directory.path), 1, "different data: the digest is another one")


def test_changed_files_are_named(tmp_path: Path) -> None:
    for number in range(32):
        place = tmp_path / "data" / ("cat" if number % 2 else "dog") / f"{number}.txt"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"{number / 32}")
    _, directory = trained_own(tmp_path, "--set", "data.name=filed_items")
    record = directory.read()
    assert record["data"] == {"digest_of": "32 files", "parts": 32, "sampled": False}
    check(verify(directory.path), 0, "\nidentical\n")
    (tmp_path / "data" / "cat" / "7.txt").write_text("0.5")
    check(verify(directory.path), 1, "different data: changed at cat/7.txt")


@pytest.mark.full
def test_a_data_set_without_a_digest_is_sampled_and_one_that_is_never_the_same_is_told(tmp_path: Path) -> None:
    file = write_project(tmp_path / "project")
    ended = ddp("train", file, "--device", "cpu", "--output", tmp_path / "sampled")
    assert "data: digested 32 of 32 training samples and 8 of 8 held-out samples in " in ended.output
    words = ("--set", "data.name=random_items", "--layout", "ddp", "--nproc-per-node", "2")
    ended = ddp("train", file, "--device", "cpu", *words, "--output", tmp_path / "random")
    assert ended.code == 0, ended.errors
    assert ended.output.count("warning: the data set gives other items at each read") == 1
    record = trained(tmp_path / "random")[1]
    assert (record["data_sha256"], record["data"]["parts"]) == (None, 0)


def test_data_of_which_a_sample_was_digested_say_so(tmp_path: Path) -> None:
    _, directory = trained_own(tmp_path, "--set", "data.size=200", "--set", "max_steps=2")
    assert directory.read()["data"]["sampled"]
    said = "data      compared by a sample: 64 of 200 training samples and 8 of 8 held-out samples"
    check(verify(directory.path), 0, said, "\nidentical\n")


@pytest.mark.slow
def test_other_bits_are_told_from_other_circumstances(tmp_path: Path) -> None:
    _, directory = trained_own(tmp_path)
    record = directory.read()
    directory.update(weights_sha256=write_zeros(directory))
    check(verify(directory.path), 1, "different under the same fingerprint")
    code = record["environment"] | {"code": {"version": "0.0.1", "commit": "f" * 40, "dirty": False}}
    directory.update(environment=code, fingerprint=record["fingerprint"] | {"threads": 64})
    said = ("the run was made with 0.0.1 at commit ffffffffffff", "; and under another fingerprint", "there 64")
    check(verify(directory.path), 1, "different, under other code", *said)


def test_weights_that_are_not_those_of_the_record_are_told_before_anything_is_trained(tmp_path: Path) -> None:
    _, directory = trained_own(tmp_path)
    weights = directory.path / "model.safetensors"
    whole = weights.read_bytes()
    write_zeros(directory)
    ended = verify(directory.path)
    check(ended, 1, "different file: model.safetensors holds other weights than the record says. Nothing was trained.")
    assert "training" not in ended.output
    weights.write_bytes(whole[:-1])
    ended = verify(directory.path)
    assert (ended.code, ended.errors.count("\n"), ended.output) == (2, 1, "")
    assert "holds no weights" in ended.errors


@pytest.mark.slow
def test_averaged_weights_are_compared_too(tmp_path: Path) -> None:
    _, directory = trained_own(tmp_path, "--set", "ema_decay=0.5")
    check(verify(directory.path), 0, "\nidentical\n")
    average = directory.path / "model_ema.safetensors"
    average.write_bytes((directory.path / "model.safetensors").read_bytes())
    check(verify(directory.path), 1, "different file: model_ema.safetensors holds other", "Nothing was trained")
    directory.update(ema_sha256=weights_digest(load_file(average)))
    check(verify(directory.path), 1, "different under the same fingerprint")


@pytest.mark.parametrize(("change", "words"), [("failed", "is failed"), ("no source", "an earlier version of ddp")])
def test_what_cannot_be_repeated_is_said(tmp_path: Path, change: str, words: str) -> None:
    _, directory = trained_own(tmp_path)
    record = directory.read()
    if change == "failed":
        record["status"] = "failed"
    else:
        del record["source"]
    directory.write(record)
    ended = verify(directory.path)
    assert (ended.code, words in ended.errors) == (2, True)


@pytest.mark.full
def test_a_broken_promise_is_said_before_training_and_in_the_verdict(tmp_path: Path) -> None:
    _, directory = trained_own(tmp_path)
    directory.update(promise_broken={"step": 3, "what": "other bits", "attempt": 0})
    ended = verify(directory.path)
    check(ended, 0, "note: promise broken in step 3: other bits", "\nidentical, but promise broken in step 3\n")
    assert ended.output.index("note: promise") < ended.output.index("training ")
    directory.update(weights_sha256=write_zeros(directory))
    check(verify(directory.path), 1, "\ndifferent, under a promise broken in step 3\n")
