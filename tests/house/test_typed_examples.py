"""Every example of the documentation is green for mypy --strict, and what they are told is the truth."""

from __future__ import annotations

import re

import pytest

from tests.support.commands import ROOT
from tools.typed_examples import FOREIGN, Example, checkable, examples, red

BATCHES = """
from collections.abc import Sequence
from typing import assert_type

import torch
from ddp_core import ElasticSampler, ExactReduction, InMemory, MicroBatches
from torch import Tensor
from torch.utils.data import DataLoader

samples = InMemory(torch.zeros(8, 2), torch.zeros(8))
assert_type(samples[0], tuple[Tensor, Tensor])
sampler = ElasticSampler(samples, num_replicas=1, rank=0)
exact = ExactReduction(torch.nn.Linear(2, 1), micro_batches=2)
for step in MicroBatches(samples, sampler, exact, 2):
    for index, batch in step:
        assert_type(batch, Sequence[Tensor])


def collate(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    return {"inputs": torch.stack([inputs for inputs, _ in samples])}


for named in MicroBatches(samples, sampler, exact, 2, collate_fn=collate, num_workers=0):
    for index, fields in named:
        assert_type(fields, dict[str, Tensor])
loader = DataLoader(samples, batch_size=2, collate_fn=lambda batch: batch)
"""

WRONG = """
from ddp_core import Experiment

experiment = Experiment(name="wrong", global_batch_size="many")
"""


def test_every_block_is_an_example() -> None:
    found = examples()
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    blocks = {page.relative_to(ROOT).as_posix(): page.read_text().count("\n```python\n") for page in pages}
    taken = sum(len([each for each in found if each.page == page]) for page in blocks)
    assert taken == sum(blocks.values()) - len(FOREIGN)
    assert len({each.module for each in found}) == len(found)
    for each in found:
        lines = (ROOT / each.page).read_text().splitlines()
        assert lines[each.line - 1] == each.code.splitlines()[0]
        assert each.place(each.above.count("\n") + 2) == f"{each.page}:{each.line + 1}"


def test_a_block_without_imports_gets_those_of_the_first_block() -> None:
    fragments = [each for each in examples() if each.page == "docs/reference/experiment-file.md"]
    assert "import torch\n" in fragments[1].above
    assert fragments[0].above == ""
    assert re.match(r"import|from", fragments[1].code) is None


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.extras("mypy", "lightning", "accelerate", "transformers", "torchdata", "torchft")
def test_every_example_is_green() -> None:
    shown, _ = checkable(examples())
    peers = ("lightning", "accelerate", "hf-trainer", "torchft")
    assert {f"docs/tutorials/exact-with-{name}.md" for name in peers} <= {each.page for each in shown}
    assert red(shown) == []


@pytest.mark.extras("mypy")
def test_types_are_told_and_a_wrong_one_is_found() -> None:
    assert red([Example("batches.py", 1, BATCHES, "batches")]) == []
    (found,) = red([Example("page.md", 11, WRONG, "wrong")])
    assert found.startswith("page.md:14: ")
