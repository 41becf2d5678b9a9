"""The gradient of two ranks beside that of one process, also through what the ranks exchange in forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather, all_reduce
from torch.nn.parallel import DistributedDataParallel

from ddp_core.base.errors import UserError
from ddp_lab.diagnose.gradient import left_out
from ddp_lab.diagnose.recorder import digest, some_elements
from ddp_lab.diagnose.tape import Tape, read_tape
from ddp_lab.diagnose.trace import Rank, Run, Step
from tests.support.processes import run_processes


def of_each_rank_alone(features: Tensor) -> Tensor:
    return features.square().sum()


def of_a_sum_that_autograd_sees(features: Tensor) -> Tensor:
    correlation: Tensor = all_reduce(features.T @ features)
    return (correlation - torch.eye(3)).square().sum()


def of_a_sum_that_autograd_does_not_see(features: Tensor) -> Tensor:
    dist.all_reduce(correlation := features.T @ features)
    return (correlation - torch.eye(3)).square().sum()


def of_what_autograd_gathers(features: Tensor) -> Tensor:
    return torch.cat(list(all_gather(features))).prod(1).square().sum()


def of_what_is_gathered(features: Tensor) -> Tensor:
    everybodys = [torch.zeros_like(features) for _ in range(2)]
    dist.all_gather(everybodys, features)
    everybodys[dist.get_rank()] = features
    return torch.cat(everybodys).sum(0).prod().square()


def of_a_figure_that_is_logged(features: Tensor) -> Tensor:
    with torch.no_grad():
        dist.all_reduce(features.mean())
    return of_each_rank_alone(features)


class Tripled(torch.autograd.Function):
    """A function whose backward is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        return given.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 3


def of_a_backward_of_its_own(features: Tensor) -> Tensor:
    tripled: Tensor = Tripled.apply(features)  # type: ignore[no-untyped-call]
    return of_a_sum_that_autograd_does_not_see(tripled)


LOSSES = {
    each.__name__: each
    for each in (
        *(of_each_rank_alone, of_a_sum_that_autograd_sees, of_a_sum_that_autograd_does_not_see),
        *(of_what_autograd_gathers, of_what_is_gathered, of_a_figure_that_is_logged, of_a_backward_of_its_own),
    )
}


def train(rank: int, world_size: int, loss: str, folder: Path) -> dict[str, Any]:
    """One step under DDP, taped; the gradients of this rank's samples and those that the optimizer uses."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    names, owns = dict(model.named_parameters()), dict[str, Tensor]()
    ddp = DistributedDataParallel(model)
    for name, each in names.items():
        each.register_hook(lambda gradient, name=name: owns.update({name: gradient.clone()}))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    batch = torch.randn(6, 4)[rank::world_size]
    tape = Tape(1)
    tape.watch_functions()
    tape.begin()
    result = LOSSES[loss](ddp(batch))
    with tape.backward(result, None):
        result.backward()
    tape.step_begins()
    used = {name: (each.grad if each.grad is not None else each).clone() for name, each in names.items()}
    optimizer.step()
    tape.step(names, {name: digest(each) for name, each in names.items()})
    tape.write(folder / f"{rank}.tape")
    dist.destroy_process_group()
    return {
        name: {"own": some_elements(owns[name]).tolist(), "reduced": some_elements(used[name]).tolist()}
        for name in names
    }


def look(loss: str, folder: Path) -> str | None:
    """What is found in a run on two ranks with this loss."""
    gradients = run_processes(train, 2, loss, folder)
    ranks = [Rank(rank, [Step({"gradients": each, "scaler": None})]) for rank, each in enumerate(gradients)]
    read = [read_tape(folder / f"{rank}.tape") for rank in range(2)]
    assert [problem for problem, _ in read] == ["", ""]
    found = left_out(Run(ranks, folder), [entries for _, entries in read])
    return None if found is None else found.evidence


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        ("of_each_rank_alone", None),
        ("of_a_sum_that_autograd_sees", None),
        ("of_a_sum_that_autograd_does_not_see", "the gradient of 0.weight is 0.5 times what one process makes"),
        ("of_what_autograd_gathers", None),
        ("of_what_is_gathered", "the gradient of 0.weight is 0.5 times what one process makes"),
        ("of_a_figure_that_is_logged", None),
    ],
)
def test_the_gradient_of_what_ranks_compute_together_is_that_of_one_process(
    loss: str, found: str | None, tmp_path: Path
) -> None:
    evidence = look(loss, tmp_path)
    assert evidence == found or (found is not None and found in str(evidence))


def test_what_autograd_does_not_make_of_the_operations_proves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not proved"):
        look("of_a_backward_of_its_own", tmp_path)
