"""The reference page of experiment files holds: each of its examples trains, in the file that the page begins with."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ddp_core.experiment.file import SIGNATURES
from tests.support.processes import ask

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "experiment-file.md").read_text()
WHOLE, *ALL = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
EXAMPLES, WITH_EXTRAS = [[each for each in ALL if ("torchmetrics" in each) is extra] for extra in (False, True)]
ABOVE, LAST = WHOLE.split("experiment = ")


def _file_with(example: str) -> str:
    return ABOVE + example + ("" if "experiment = " in example else f"\n\nexperiment = {LAST}")


def test_every_name_has_a_row_and_an_example() -> None:
    assert EXAMPLES
    for name in [*SIGNATURES, "collate"]:
        assert f"| [`{name}`](#" in PAGE, name
    defined = set(re.findall(r"^(?:def )?(\w+)(?:\(| = )", WHOLE + "".join(EXAMPLES), re.MULTILINE))
    assert {*SIGNATURES, "experiment"} <= defined


@pytest.mark.slow
def test_every_example_trains(tmp_path: Path) -> None:
    results = ask(_train_all, [_file_with(example) for example in ["", *EXAMPLES]], tmp_path)
    assert len(results) == 1 + len(EXAMPLES)
    found = set().union(*results)
    assert {"test_accuracy", "test_confusion", "test_confidence", "ema_test_loss"} <= found
    assert {"test_perplexity", "test_f1_mean", "test_f1_of_class", "test_sure"} <= found
    assert "test_accuracy" not in results[0]


@pytest.mark.extras("torchmetrics")
def test_the_example_with_torchmetrics_trains(tmp_path: Path) -> None:
    (found,) = ask(_train_all, [_file_with(*WITH_EXTRAS)], tmp_path)
    assert {"test_auroc", "test_f1"} <= {*found}


def _train_all(texts: list[str], folder: Path) -> list[list[str]]:
    """The names of each run's figures."""
    from ddp_core.base.torchvision_import import import_torchvision
    from ddp_core.cli import main

    import_torchvision()  # for torchmetrics, where it was built against another torch
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        for number, text in enumerate(texts):
            file, output = folder / f"mine{number}.py", folder / str(number)
            file.write_text(text)
            words = ["train", str(file), "--device", "cpu", "--output", str(output), "--set", "max_steps=4"]
            assert main(words) == 0, text
            record = json.loads(next(output.glob("*/*/run.json")).read_text())
            assert record["status"] == "completed"
            found.append(list(record["result"]))
    return found
