"""The code of docs/how-to/augment-your-data.md: what it shows has the same bits everywhere, and learns the epoch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_core.data.loader import Loader
from tests.support.commands import ddp, train, trained

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "augment-your-data.md").read_text()
COVERED, PHOTOS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
PHOTOS_FILE = (
    PHOTOS
    + """
from ddp_core import Experiment


def data():
    images = torch.rand(64, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return Photos(images, torch.arange(64) % 4)


def model():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 24 * 24, 4))


experiment = Experiment(name="photos", global_batch_size=16, micro_batch=4, epochs=3)
"""
)


class TellsItsEpoch:
    """Samples that are the epoch that the data set was told."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[float, int]:
        return float(self.epoch), index


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_set_is_told_the_epoch_of_each_micro_batch_in_whichever_process_fetches_it(workers: int) -> None:
    loader = Loader(TellsItsEpoch(), workers=workers)
    asked = [(epoch, [torch.arange(4).numpy(), torch.arange(4, 8).numpy()]) for epoch in (0, 1, 5, 2)]
    found = [{row for inputs, _ in step for row in inputs.tolist()} for step in loader.stream(asked)]
    assert found == [{0.0}, {1.0}, {5.0}, {2.0}]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["covered", "photos"])
def test_the_pages_files_end_with_one_digest_with_workers_on_ranks_and_after_a_stop(tmp_path: Path, name: str) -> None:
    file = tmp_path / f"{name}.py"
    file.write_text({"covered": COVERED, "photos": PHOTOS_FILE}[name])
    whole: dict[str, Any] = train(tmp_path / "whole", file)
    assert train(tmp_path / "two", file, "--workers", "1", ranks=2)["weights_sha256"] == whole["weights_sha256"]
    assert whole["data_sha256"]  # reading twice gave the same
    killed = ddp("train", file, "--device", "cpu", "--output", tmp_path / "killed", "--checkpoint-every", 3,
                 "--fault", "kill@7:0", "--max-restarts", 0)  # fmt: skip
    assert killed.code != 0
    train(tmp_path / "killed", file, "--resume", "auto", "--workers", "2")
    assert trained(tmp_path / "killed")[1]["weights_sha256"] == whole["weights_sha256"]
    fewer = train(tmp_path / "fewer", file, "--set", "seed=1")
    assert fewer["weights_sha256"] != whole["weights_sha256"]
