"""What a data set contains: digested by the builder, by its files, or by a sample; and where it has changed.

Tests base/trees.py, too.
"""

from __future__ import annotations

import random
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ddp_core.base.digests import tree_digest
from ddp_core.base.trees import map_tensors, structure_difference, tensors_of
from ddp_core.data.data_digest import SAMPLED, changed_at, digest_files, digest_items
from ddp_core.data.splits import InMemory, Splits
from ddp_core.record.data import digest_data
from tests.support.wording import refusing


class Squares:
    """Sample `index` is its square, or what `changed` says."""

    def __init__(self, size: int, changed: dict[int, Any] | None = None) -> None:
        self.size, self.changed = size, changed or {}

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        value = self.changed.get(index, float(index**2))
        return value() if callable(value) else {"x": torch.tensor([value]), "name": (str(index), index)}


def test_the_builders_digest_is_believed() -> None:
    def never() -> None:
        raise AssertionError

    digest = digest_items(Splits(Squares(10, dict.fromkeys(range(10), never)), digest="abc"))
    assert (digest.sha256, digest.digest_of, digest.parts) == ("abc", "content, given by the builder", {})
    other = digest_items(Splits(Squares(10), digest="abd"))
    assert changed_at(digest, other) == "the builder gives another digest"
    assert changed_at(digest, digest) is None


@pytest.mark.parametrize("known", ["the builder", "files", "items"])
def test_what_samples_weigh_is_part_of_the_data(known: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    splits = Splits(
        Squares(3),
        Squares(2),
        digest="abc" if known == "the builder" else "",
        files=[tmp_path / "file"] if known == "files" else (),
    )
    weighed = [splits, *(replace(splits, **{name: np.array([1, 2])}) for name in ("weights", "test_weights"))]
    assert len({digest_data(each).sha256 for each in weighed}) == 3


def test_a_sample_of_the_items_is_read() -> None:
    splits = Splits(Squares(1000), Squares(5))
    digest = digest_items(splits)
    assert digest.digest_of == "64 of 1000 training samples and 5 of 5 held-out samples"
    assert digest.sampled
    assert len(digest.parts) == SAMPLED + 5
    assert digest == digest_items(splits)
    ids = [int(name.split()[1]) for name in digest.parts if "training" in name]
    assert ids == sorted(ids)
    assert max(ids) > 900
    assert min(ids) < 100
    changed = digest_items(Splits(Squares(1000, {ids[7]: 0.5, ids[9]: 0.5}), Squares(5)))
    assert changed_at(digest, changed) == f"changed at sample {ids[7]} (training), and at 1 more"
    assert changed_at(digest, digest_items(Splits(Squares(1001), Squares(5)))) == (
        f"the digest was over {digest.digest_of}, and is over "
        "64 of 1001 training samples and 5 of 5 held-out samples now"
    )


def test_data_sets_that_are_asked_for_many_items_are_read_as_the_loader_reads_them() -> None:
    tensors = InMemory(torch.randn(100, 3), torch.zeros(100))
    assert len(digest_items(Splits(tensors)).parts) == SAMPLED


def test_items_that_change_from_read_to_read_have_no_digest() -> None:
    digest = digest_items(Splits(Squares(100, dict.fromkeys(range(100), lambda: torch.rand(2)))))
    assert (digest.sha256, digest.parts) == (None, {})
    assert changed_at(digest, digest_items(Splits(Squares(100)))) is None


def test_reading_items_draws_nothing_from_the_global_generators() -> None:
    draws: list[Callable[[], Any]] = [lambda: torch.rand(1).item(), random.random, lambda: np.random.rand()]

    def draw() -> Any:
        return [one() for one in draws]

    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # type: ignore[index, union-attr]
    digest_items(Splits(Squares(100, dict.fromkeys(range(100), draw))))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert (before[2] == np.random.get_state()[1]).all()  # type: ignore[index]


def test_an_item_that_cannot_be_read_is_left_to_training() -> None:
    def fail() -> None:
        raise RuntimeError("S3")

    digest = digest_items(Splits(Squares(20, {7: fail})))
    assert digest.parts["sample 7 (training)"] == "raises RuntimeError"


def test_files_are_digested_by_content_wherever_they_lie(tmp_path: Path) -> None:
    def files(folder: str, content: str = "7") -> list[Path]:
        for place, text in (("cat/7.jpg", content), ("dog/7.jpg", "8"), ("index", "9")):
            (tmp_path / folder / place).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / place).write_text(text)
        return sorted(path for path in (tmp_path / folder).rglob("*") if path.is_file())

    digest = digest_files(files("here"))
    assert digest.digest_of == "3 files"
    assert not digest.sampled
    assert list(digest.parts) == ["cat/7.jpg", "dog/7.jpg", "index"]
    assert digest == digest_files(files("there")[::-1])
    assert changed_at(digest, digest_files(files("elsewhere", "6"))) == "changed at cat/7.jpg"
    (tmp_path / "there" / "index").rename(tmp_path / "there" / "contents")
    moved = digest_files(sorted(path for path in (tmp_path / "there").rglob("*") if path.is_file()))
    assert changed_at(digest, moved) == "changed at index (gone), and at 1 more"
    with refusing():
        digest_files([tmp_path / "nothing"])


def test_of_very_large_data_a_sample_of_the_files_is_read(tmp_path: Path) -> None:
    files = [tmp_path / f"{number:03}" for number in range(100)]
    for file in files:
        file.write_text("0123456789")
    digest = digest_files(files, budget=105)
    assert digest.digest_of == "100 files: the content of 10 and the sizes of the others"
    assert digest.sampled
    assert sum(part == "10 bytes" for part in digest.parts.values()) == 90
    assert digest == digest_files(files, budget=105)
    assert digest_files(files, budget=1000).digest_of == "100 files"
    assert digest_files(files[:1], budget=1).digest_of == "1 file"
    unread = next(tmp_path / name for name, part in digest.parts.items() if part == "10 bytes")
    unread.write_text("01234567890")
    assert changed_at(digest, digest_files(files, budget=106)) == f"changed at {unread.name}"


@dataclass
class Record:
    value: Any


TREES = [
    1, 1.0, True, "1", b"1", None, [1], {"1": 1}, {"a": 1, "b": 2}, {"ab": 12}, [[1], 2], [1, [2]], ["ab", "c"],
    ["a", "bc"], torch.tensor([1]), torch.tensor([1.0]), torch.tensor([[1]]), torch.tensor([1], dtype=torch.int32),
    torch.tensor([1.0], dtype=torch.bfloat16), np.array([1]), np.float32(1), np.array(["a"], dtype=object),
    Record(1), Record(2), float("nan"), "\ud800",
]  # fmt: skip


def test_any_tree_has_a_digest_of_its_own() -> None:
    digests = [tree_digest(tree) for tree in TREES]
    assert len(set(digests)) == len(TREES)
    assert digests == [tree_digest(tree) for tree in TREES]
    assert tree_digest((1, 2)) == tree_digest([1, 2]), "collating makes no difference between them"
    assert tree_digest(torch.arange(6).view(2, 3).t()) == tree_digest(torch.arange(6).view(2, 3).t().contiguous())


Point = namedtuple("Point", ["x", "y"])
ONE, TWO = torch.ones(1), torch.full((2,), 2.0)


@pytest.mark.parametrize(
    "tree",
    [
        *(ONE, [ONE, TWO], (ONE, (TWO, [])), {"a": ONE, "b": {"c": [TWO]}}, OrderedDict(b=TWO, a=ONE)),
        *(UserDict({"a": ONE}), Point(ONE, [TWO]), torch.max(torch.eye(2), dim=1), ["text", None, 7, ONE]),
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_containers_and_other_leaves_stay_as_they_are(tree: Any) -> None:
    moved = map_tensors(Tensor.clone, tree)
    assert type(moved) is type(tree)
    assert str(moved) == str(tree)
    ours, theirs = list(tensors_of(moved)), list(tensors_of(tree))
    assert ours
    assert all(torch.equal(one, other) and one is not other for one, other in zip(ours, theirs, strict=True))


def test_a_dictionary_that_is_not_made_from_one_becomes_plain() -> None:
    assert map_tensors(Tensor.clone, defaultdict(list, a=ONE)) == {"a": ONE}


def test_trees_of_one_structure_are_walked_together() -> None:
    joined = map_tensors(lambda *parts: torch.cat(parts), {"a": [ONE, TWO]}, {"a": [TWO, TWO]}, {"a": [ONE, ONE]})
    assert [len(tensor) for tensor in joined["a"]] == [4, 5]


@pytest.mark.parametrize(
    ("tree", "other", "words"),
    [
        (ONE, 7, None),
        ({"a": ONE, "b": [TWO]}, {"b": (ONE,), "a": TWO}, None),
        ({"a": ONE}, {"a": ONE, "b": ONE}, "here is a dict with the keys a and a dict with the keys a, b"),
        ({"a": [{}, ONE]}, {"a": [{}, ONE, TWO]}, "here['a'] is a list of 2 and a list of 3"),
        ((ONE, {"a": ONE}), (ONE, ONE), "here[1] is a dict with the keys a and a Tensor"),
    ],
)
def test_a_difference_is_named_by_its_place(tree: Any, other: Any, words: str | None) -> None:
    assert structure_difference(tree, other, "here") == words
