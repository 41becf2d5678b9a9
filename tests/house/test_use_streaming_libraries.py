"""The files of docs/how-to/use-streaming-libraries.md, each on data that its library has written."""

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

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "use-streaming-libraries.md").read_text()
HUGGING_FACE, MDS, LIT = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


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


def require_one_digest(folder: Path, name: str, text: str, write: Callable[[Path], None]) -> None:
    import_torchvision()  # these libraries do, where it is installed
    (folder / "data").mkdir()
    write(folder / "data" / {"hf": "arrow"}.get(name, name))
    file = folder / f"{name}.py"
    file.write_text(text)
    words = (file, "--data-dir", folder / "data")
    alone = train(folder / "alone", *words)
    assert alone["data"]["digest_of"].endswith(("files", "file"))
    two = train(folder / "two", *words, "--workers", "1", ranks=2)
    assert (two["weights_sha256"], two["data_sha256"]) == (alone["weights_sha256"], alone["data_sha256"])


@pytest.mark.extras("datasets")
def test_a_data_set_of_hugging_face_ends_with_one_digest_and_as_a_stream_is_refused(tmp_path: Path) -> None:
    require_one_digest(tmp_path, "hf", HUGGING_FACE, write_arrow)
    from datasets import load_from_disk

    stream = load_from_disk(tmp_path / "data" / "arrow")["train"].to_iterable_dataset()
    with pytest.raises(UserError, match=r"a stream: .*ask its library by index"):
        as_splits(stream, "data")


@pytest.mark.extras("streaming")
def test_mds_shards_end_with_one_digest_and_as_a_stream_are_refused(tmp_path: Path) -> None:
    require_one_digest(tmp_path, "mds", MDS, write_mds)
    from streaming import StreamingDataset

    with pytest.raises(UserError, match=r"a stream: .*ask its library by index"):
        as_splits(StreamingDataset(local=str(tmp_path / "data" / "mds"), batch_size=1), "data")


@pytest.mark.extras("litdata")
def test_chunks_of_litdata_end_with_one_digest_and_as_a_stream_are_refused(tmp_path: Path) -> None:
    require_one_digest(tmp_path, "lit", LIT, write_lit)
    from litdata import StreamingDataset

    with pytest.raises(UserError, match=r"a stream: .*ask its library by index"):
        as_splits(StreamingDataset(str(tmp_path / "data" / "lit")), "data")
