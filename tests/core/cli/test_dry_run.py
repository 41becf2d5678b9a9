"""`ddp train --dry-run` says what would run, or fails as the run would; it starts nothing and writes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_core.cli import main
from tests.core.cli.asking import said
from tests.support.commands import ddp, train, trained


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    """What a dry run says, by its first words."""
    assert main(["train", *words, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "nothing was started or written; without --dry-run this runs"
    return {line[:11].strip(): line[13:] for line in lines[:-1]}


def test_it_says_what_would_run_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / "outputs"
    words = ["toy_mlp", "--layout", "ddp", "--nproc-per-node", "2", "--device", "cpu", "--output", str(output)]
    found = dry_run(capsys, *words, "--set", "optimizer.lr=0.25", "--set", "epochs=3", "--ledger", "--keep-last", "5")
    assert "toy_mlp.py" in found["experiment"]
    assert found["layout"] == "ddp-1x2-cpu: 2 processes by torchrun, reduction exact, numerics portable"
    assert found["batch"] == "global batch 16 = 4 micro-batches x 4 samples, 2 per step on each of 2"
    assert found["steps"] == "6 in all, 2 per epoch, 3 epochs"
    assert "toy_data: 32 samples to train" in found["data"]
    assert "61 parameters" in found["model"]
    assert "KiB for each rank: weights, gradients, optimizer state" in found["memory"]
    assert found["optimizer"].startswith("sgd, lr 0.25")
    assert found["schedule"] == "constant"
    assert found["starts"] == "at step 0, as a new run"
    assert "ledger/" in found["files"]
    assert str(output / "toy_mlp") in found["files"]
    assert "newest 5" in found["checkpoints"]
    assert not (tmp_path / "new").exists()


def test_the_run_does_what_was_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["counter_buffer", "--set", "last_batch=keep", "--set", "max_steps=5", "--set", "global_batch_size=64"]
    words += ["--set", "micro_batch=16"]
    found = dry_run(capsys, *words, "--device", "cpu", "--output", str(tmp_path), "--ledger")
    record = train(tmp_path, *words, "--ledger")
    assert f"{record['result']['steps']} in all, {-(-100 // 64)} per epoch" in found["steps"]
    assert "max_steps" not in found["steps"] or record["result"]["steps"] == 5
    assert f"{record['result']['parameters']:,} parameters" in found["model"]
    directory, _ = trained(tmp_path)
    written = {
        entry.name + "/" * entry.is_dir() for entry in directory.path.iterdir() if not entry.name.startswith(".")
    }
    promised = set(found["files"].partition(" in ")[0].split(", "))
    assert promised <= written


def test_it_says_where_a_resumed_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["toy_mlp", "--device", "cpu", "--output", str(tmp_path), "--resume", "auto"]
    assert "there is no unfinished run" in dry_run(capsys, *words)["starts"]
    stopped = ddp("train", *words, "--max-seconds", "0.001")
    assert stopped.code == 75, stopped.errors
    directory, _ = trained(tmp_path)
    before = sorted((path, path.stat().st_mtime_ns) for path in directory.path.rglob("*"))
    assert dry_run(capsys, *words)["starts"] == f"at step 1, continuing {directory.path}"
    assert sorted((path, path.stat().st_mtime_ns) for path in directory.path.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["toy_mpl"], 2),
        (["toy_mlp", "--set", "lr=1"], 2),
        (["toy_mlp", "--set", "global_batch_size=64"], 2),
        (["toy_mlp", "--layout", "ddp", "--nproc-per-node", "9"], 2),
        (["toy_mlp", "--stop-signal", "USR9"], 2),
        (["toy_mlp", "--profile", "soon"], 2),
        (["toy_mlp", "--layout", "ddp", "--nnodes", "2"], 2),
        (["toy_mlp", "--shard", "optimizer"], 2),
        (["toy_mlp", "--layout", "ddp", "--shard", "optimizer", "--reduction", "plain"], 2),
        (["toy_mlp", "--resume", "nowhere"], 2),
        (["fashion_mnist", "--data-dir", "no-data"], 2),
        (["toy_mlp", "--output", "FILE"], 4),
        (["toy_mlp", "--output", "FILE/deeper"], 4),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_what_would_fail_fails_with_the_same_words(
    tmp_path: Path, words: list[str], code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FILE").touch()
    full = ["train", *words, "--device", "cpu"]
    alone = said(capsys, *full, "--dry-run", code=code)
    assert list(tmp_path.rglob("*")) == [tmp_path / "FILE"]
    assert said(capsys, *full, code=code) == alone
