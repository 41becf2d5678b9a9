"""Libraries on docs/how-to/stream-from-shards.md, each on data that it has written."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddp_core.base.errors import UserError
from ddp_core.base.torchvision_import import import_torchvision
from ddp_core.data.splits import as_splits
from tests.support.commands import train

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "stream-from-shards.md").read_text()
_, _, HUGGING_FACE, MDS, LIT = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
EXPERIMENT = HUGGING_FACE[HUGGING_FACE.index("experiment = ") :]


def samples() -> list[dict[str, Any]]:
    generator = np.random.default_rng(0)
    return [{"x": generator.standard_normal(16, dtype=np.float32), "y": int(generator.integers(3))} for _ in range(70)]


def write_arrow(folder: Path) -> None:
    from datasets import Dataset, DatasetDict

    splits = {"train": samples()[:60], "test": samples()[60:]}
    DatasetDict({name: Dataset.from_list(rows) for name, rows in splits.items()}).save_to_disk(folder)


def write_mds(folder: Path) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={"x": "ndarray:float32:16", "y": "int"}, size_limit=2000) as writer:
        for sample in samples():
            writer.write(sample)


def write_lit(folder: Path) -> None:
    from litdata.streaming.writer import BinaryWriter

    folder.mkdir()
    writer = BinaryWriter(str(folder), chunk_size=10)
    for index, sample in enumerate(samples()):
        writer[index] = sample
    writer.done()
    writer.merge()


def a_stream_of_arrow(folder: Path) -> object:
    from datasets import load_from_disk

    return load_from_disk(folder)["train"].to_iterable_dataset()


def a_stream_of_mds(folder: Path) -> object:
    from streaming import StreamingDataset

    return StreamingDataset(local=str(folder), batch_size=1)


def a_stream_of_lit(folder: Path) -> object:
    from litdata import StreamingDataset

    return StreamingDataset(str(folder))


@pytest.mark.parametrize(
    ("place", "text", "write", "stream"),
    [
        pytest.param("arrow", HUGGING_FACE, write_arrow, a_stream_of_arrow, marks=pytest.mark.extras("datasets")),
        pytest.param("mds", MDS + EXPERIMENT, write_mds, a_stream_of_mds, marks=pytest.mark.extras("streaming")),
        pytest.param("lit", LIT + EXPERIMENT, write_lit, a_stream_of_lit, marks=pytest.mark.extras("litdata")),
    ],
)
def test_a_data_set_ends_with_one_digest_and_as_a_stream_is_refused(
    place: str, text: str, write: Callable[[Path], None], stream: Callable[[Path], object], tmp_path: Path
) -> None:
    import_torchvision()  # these libraries do, where it is installed
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / place)
    file = tmp_path / "mine.py"
    file.write_text(text)
    words = (file, "--data-dir", tmp_path / "data")
    alone = train(tmp_path / "alone", *words)
    assert alone["data"]["digest_of"].endswith(("files", "file"))
    two = train(tmp_path / "two", *words, "--workers", "1", ranks=2)
    assert (two["weights_sha256"], two["data_sha256"]) == (alone["weights_sha256"], alone["data_sha256"])
    with pytest.raises(UserError, match=r"a stream: .*ask its library by index"):
        as_splits(stream(tmp_path / "data" / place), "data")
