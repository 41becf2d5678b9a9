"""The code of docs/how-to/stream-from-shards.md on generated data."""

from __future__ import annotations

import io
import re
import runpy
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.commands import train

PAGE = (Path(__file__).parents[3] / "docs" / "how-to" / "stream-from-shards.md").read_text()
COMMANDS = [
    "python shards.py data/shards",
    "ddp train shards.py --workers 2",
    "ddp train shards.py --workers 2 --layout ddp --nproc-per-node 2",
]


def blocks(language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def write_shards(folder: Path) -> list[tuple[Any, int]]:
    """Three tar files with 70 samples, and these samples."""
    folder.mkdir(parents=True)
    generator, samples = np.random.default_rng(0), []
    for shard, count in enumerate((20, 27, 23)):
        with tarfile.open(folder / f"{shard}.tar", "w") as archive:
            for _ in range(count):
                sample = generator.standard_normal(16, dtype=np.float32), int(generator.integers(3))
                array = io.BytesIO()
                np.save(array, sample[0])
                for kind, content in (("npy", array.getvalue()), ("cls", str(sample[1]).encode())):
                    entry = tarfile.TarInfo(f"{len(samples):06}.{kind}")
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))
                samples.append(sample)
    return samples


@pytest.mark.full
def test_shards_are_read_by_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "".join(blocks("console")).splitlines() == COMMANDS
    samples = write_shards(tmp_path / "data" / "shards")
    file = tmp_path / "shards.py"
    file.write_text(blocks()[0])
    monkeypatch.setattr(sys, "argv", ["shards.py", str(tmp_path / "data" / "shards")])
    dataset = runpy.run_path(str(file), run_name="__main__")["data"](tmp_path / "data").train
    assert len(dataset) == 70
    for (array, label), (expected, number) in zip(map(dataset.__getitem__, range(70)), samples, strict=True):
        assert (array.tolist(), label) == (expected.tolist(), number)
    words = ("--workers", "2", "--data-dir", tmp_path / "data", "--set", "max_steps=2")
    assert train(tmp_path / "out", file, *words)["status"] == "completed"


def test_arrays_are_read_by_position(tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.npy" for number in range(2)]
    for number, file in enumerate(files):
        np.save(file, np.arange(100 * number, 100 * number + 31 + number, dtype=np.uint16))
    names: dict[str, Any] = {}
    exec(blocks()[1], names)
    tokens = names["Tokens"](files, 10)
    assert len(tokens) == 6
    for number, first in enumerate((0, 10, 20, 100, 110, 120)):
        inputs, targets = tokens[number]
        assert inputs.tolist() == list(range(first, first + 10))
        assert targets.tolist() == list(range(first + 1, first + 11))
