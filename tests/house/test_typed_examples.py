"""Every example of the documentation is green for mypy --strict, and what they are told is the truth."""

from __future__ import annotations

import pytest

from tools.typed_examples import Example, checkable, examples, red

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


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.extras("mypy", "lightning", "accelerate", "transformers", "torchdata", "torchft")
def test_every_example_is_green() -> None:
    shown, _ = checkable(examples())
    peers = ("lightning", "accelerate", "hf-trainer", "torchft")
    assert {f"docs/tutorials/exact-with-{name}.md" for name in peers} <= {each.page for each in shown}
    assert red(shown) == []


@pytest.mark.slow
@pytest.mark.extras("mypy")
def test_types_are_told_and_a_wrong_one_is_found() -> None:
    assert red([Example("batches.py", 1, BATCHES, "batches")]) == []
    (found,) = red([Example("page.md", 11, WRONG, "wrong")])
    assert found.startswith("page.md:14: ")
