"""One process in the place of three ranks: which part of their run does it need, to come to the same bits?"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_lab.diagnose.findings import Finding
from ddp_lab.diagnose.recorder import digest
from ddp_lab.diagnose.replay import Part, remaining, replay, sums_in_some_order
from ddp_lab.diagnose.tape import Content, Entry, Exchange, Place, StepMade, Tape, read_tape
from ddp_lab.diagnose.trace import Rank, Run
from tests.support.wording import refusing

PARTS = [torch.tensor([each, 1.0]) for each in (1e8, 1.0, -1e8)]
"""Of the first element, each order has another sum."""


def answer(folder: Path, tapes: Sequence[list[Entry]]) -> Finding:
    for number, entries in enumerate(tapes):
        tape = Tape(1)
        tape._entries = entries
        tape.write(folder / f"{number}.tape")
    return remaining(Run([Rank(number) for number in range(len(tapes))], folder))


def reducing(received: Tensor, weight: Tensor | None = None) -> list[list[Entry]]:
    """Three ranks that all-reduce PARTS, receive this, and have this weight after their step."""
    place = Place(0, torch.float32, (2,), (1,), 0)
    return [
        [
            Content(0, part.numpy().tobytes()),
            Exchange(0, "allreduce_", [place], [[place]], "SUM"),
            Content(0, received.numpy().tobytes(), exchange=0),
            StepMade({"w": place}, {"w": digest(received if weight is None else weight)}),
        ]
        for part in PARTS
    ]


def test_sums_that_were_made_in_another_order_are_the_answer(tmp_path: Path) -> None:
    found = answer(tmp_path, reducing((PARTS[0] + PARTS[2]) + PARTS[1]))
    assert found.name == "remains-order-of-additions"
    assert "another w after step 1, by 0.3 of the largest weight; with the sums that they received the same bits" in (
        found.evidence
    )
    assert found.evidence.endswith("each of the 2 reduced numbers is the ranks' sum in some order, bit for bit")


def test_sums_that_were_made_in_the_ranks_order_are_not(tmp_path: Path) -> None:
    assert answer(tmp_path, reducing((PARTS[0] + PARTS[1]) + PARTS[2])).name == "remains-samples"


def test_what_is_no_sum_is_told_apart(tmp_path: Path) -> None:
    found = answer(tmp_path, reducing(torch.tensor([2.0, 3.0])))
    assert found.name == "other-sums"
    assert "1 of 2 reduced numbers" in found.evidence


def test_weights_that_no_replay_comes_to_are_no_answer(tmp_path: Path) -> None:
    with refusing():
        answer(tmp_path, reducing(PARTS[0] + PARTS[1] + PARTS[2], weight=torch.zeros(2)))


def test_every_order_of_four_is_tried() -> None:
    parts = [torch.tensor([each]) for each in (1e8, 3.0, -1e8, 7.0)]
    assert sums_in_some_order(parts, (parts[0] + parts[2]) + (parts[1] + parts[3])) == 1
    assert sums_in_some_order(parts, (parts[0] + parts[1]) + (parts[2] + parts[3])) == 1
    assert sums_in_some_order(parts, torch.tensor([5.0])) == 0


def test_a_training_is_made_again_to_the_last_bit(tmp_path: Path) -> None:
    """Dropout, views, in-place operations, deep copies, momentum; batches are made while the tape is paused."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten())
    model = nn.Sequential(model, nn.Linear(64, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    tape = Tape(2)
    with tape:
        for _ in range(2):
            with tape.paused():
                images, targets = torch.randn(5, 1, 6, 6), torch.randint(3, (5,))
            F.cross_entropy(model(images), targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            copy.deepcopy(optimizer.state_dict())
            with tape.paused():
                digests = {name: digest(each) for name, each in model.named_parameters()}
            tape.step(dict(model.named_parameters()), digests)
    tape.write(tmp_path / "0.tape")
    problem, entries = read_tape(tmp_path / "0.tape")
    assert (problem, replay([entries], Part.RANDOM).differs) == ("", "")
    assert replay([entries], Part.SAMPLES).differs == "0.0.weight after step 2"


@pytest.mark.parametrize(
    ("operation", "problem"),
    [
        (lambda: torch.ones(2).to_sparse() * 2, "it computes with a Tensor of layout torch.sparse_coo"),
        (lambda: torch.rand(2, generator=torch.Generator()), "it draws from a generator of its own"),
    ],
)
def test_what_a_tape_cannot_hold_is_said(operation: object, problem: str, tmp_path: Path) -> None:
    tape = Tape(1)
    with tape:
        assert callable(operation)
        operation()
    assert tape.problem == problem
