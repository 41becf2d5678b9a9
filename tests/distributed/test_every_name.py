"""One file with every name that a file may define: the same bits and figures on every layout, and after a resume."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from ddp_core.base.digests import weights_digest
from ddp_core.observe.metrics import read_metrics
from tests.support.commands import train, trained
from tests.support.layout_cases import EVERY_NAME


def facts(record: dict[str, Any]) -> tuple[Any, ...]:
    """All that must not depend on the layout."""
    assert record["status"] == "completed"
    figures = {name: value for name, value in record["result"].items() if name.startswith(("test_", "ema_"))}
    return (
        record["weights_sha256"],
        record["optimizer_sha256"],
        record["ema_sha256"],
        record["result"]["train_loss"],
        figures,
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("alone")
    train(output, EVERY_NAME)
    return output


def test_the_record_tells_all_of_it(alone: Path) -> None:
    directory, record = trained(alone)
    told, result = record["experiment"], record["result"]
    assert told["optimizer"] == {"name": "optimizer", "options": {"lr": 0.02, "ratio": 0.5}}
    assert told["schedule"] == {"name": "schedule", "options": {"warm_up": 3}}
    assert (told["model"]["name"], told["data"]["name"], told["loss"]) == ("model", "data", "loss")
    assert sum(map(sum, result["test_confusion"])) == 22
    assert result["test_accuracy"] * 22 == pytest.approx(sum(result["test_confusion"][n][n] for n in range(3)))
    assert sum(result["test_mean_class"]) == pytest.approx(1)
    assert result["test_perplexity"] == pytest.approx(math.exp(result["test_loss"]))
    assert len(result["test_class_f1"]) == 3
    assert 0 < result["test_class_mean_f1"] < 1
    assert result["test_top2"] >= result["test_accuracy"]
    assert result["ema_test_loss"] != result["test_loss"]
    averaged = load_file(directory.path / "model_ema.safetensors")
    assert weights_digest(averaged) == record["ema_sha256"] != record["weights_sha256"]
    last = read_metrics(directory.metrics, "evaluation")[-1]
    assert last["test_confusion"] == result["test_confusion"]
    lines = (directory.path / "lines.txt").read_text().splitlines()
    assert [line.split()[:2] for line in lines] == [["0", "8"], ["1", "16"], ["end", "16"]]
    assert lines[-1].split()[2] == "2", "the last checkpoint is written before on_end"
    assert f"test top2 {result['test_top2']:.4f}" in directory.log.read_text()
    assert f"test perplexity {result['test_perplexity']:.4f}" in directory.log.read_text()
    assert "confusion" not in directory.log.read_text()


def test_three_ranks_end_with_the_same_bits(alone: Path, tmp_path: Path) -> None:
    record = train(tmp_path, EVERY_NAME, ranks=3)
    assert facts(record) == facts(trained(alone)[1])
    directory = trained(tmp_path)[0].path
    assert {file.name: file.read_text() for file in directory.glob("steps-*")} == {
        f"steps-{rank}.txt": "16" for rank in range(3)
    }
    assert len((directory / "lines.txt").read_text().splitlines()) == 3, "rank 0 alone calls it"
