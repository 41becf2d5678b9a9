"""Pieces of parameters on ranks that are threads: gradients, norms, weights and optimizer state of one process.

Tests sharding/parcels.py, too.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp_core.checkpoint import CutTensor
from ddp_core.reduction import ExactReduction
from ddp_core.sharding import OwnsPieces
from ddp_core.sharding.owns_part import whole_on_first
from tests.support.thread_group import on_thread_world
from tests.support.wording import refusing

STEPS = (5, 1, 4)
"""The micro-batches of each step: neither two nor three ranks have equal shares of five, or of one."""
LAYER = nn.Linear(2, 2)
Dealt = Literal["contiguous", "strided"]


class Sometimes(nn.Module):
    """A block that every forward calls, and that uses its parameters only when it is told to."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(37, 5, dtype=dtype)

    def forward(self, hidden: Tensor, is_used: bool) -> tuple[Tensor, Tensor | None]:
        return hidden * 1.5, self.layer(hidden).sum() if is_used else None


class Net(nn.Module):
    """Blocks with rows that two or three ranks cannot share equally; not every micro-batch uses every parameter.

    Outside of them a tied weight, a frozen one, one of a single row, a norm, and a state that is no tensor.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        sizes = [(6, 37), (37, 2), (2, 37), (3, 5)]
        self.layers = nn.ModuleList(nn.Linear(*size, dtype=dtype) for size in sizes)
        self.layers.append(Sometimes(dtype))
        self.layers[1].bias.requires_grad_(False)
        self.layers[3].requires_grad_(False)
        self.signs, self.unused = (nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(2))
        # Of several blocks of the norm, which ranks cut within.
        self.head = nn.Linear(37, 60, dtype=dtype)
        self.first, self.again = (nn.Linear(6, 6, bias=False, dtype=dtype) for _ in range(2))
        self.again.weight = self.first.weight
        self.row, self.norm = nn.Parameter(torch.ones(1, 6, dtype=dtype)), nn.BatchNorm1d(6, dtype=dtype)
        self.frozen = nn.Parameter(torch.ones(3, 6, dtype=dtype), requires_grad=False)
        self.told = "at first"

    def forward(self, rows: Tensor, index: int) -> Tensor:
        hidden = self.again(self.norm(self.first(rows) * self.row) + self.frozen)
        for layer in self.layers[:3]:
            hidden = torch.tanh(layer(hidden))
        hidden, more = self.layers[4](hidden, is_used=index == 3)
        loss: Tensor = self.head(hidden).square().sum()
        # Gradients of -0.0 show where any other zero is added to them.
        return loss if more is None else loss + (more + self.signs.sum()) * -0.0

    def loss(self, step: int, index: int) -> Tensor:
        """Of one micro-batch."""
        generator = torch.Generator().manual_seed(10 * step + index)
        loss: Tensor = self(torch.randn(3, 6, generator=generator, dtype=self.row.dtype), index)
        return loss

    def get_extra_state(self) -> str:
        return self.told

    def set_extra_state(self, state: str) -> None:
        self.told = state


class Mixed(Net):
    """Also parameters of another dtype and without elements, one that is large enough to be cut, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.large = nn.Parameter(torch.ones(2, dtype=torch.float64)), nn.Parameter(torch.ones(3000))
        self.none = nn.ParameterList([torch.ones(0, 3), torch.ones(0, 2)])
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, rows: Tensor, index: int) -> Tensor:
        return super().forward(rows, index).double() * self.scale[0]


class Tiny(nn.Module):
    """Fewer elements than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))

    def loss(self, step: int, index: int) -> Tensor:
        """Of one micro-batch."""
        return (self.weight * (index + 0.1 * step)).square().sum()


@functools.cache
def net() -> Mixed:
    torch.manual_seed(0)
    return Mixed()


@pytest.fixture(autouse=True, scope="module")
def made_before_the_ranks() -> None:
    """Ranks that are threads have one random generator."""
    net()


def bits(tensors: Any) -> Any:
    """Values with their signs, for a comparison."""
    return tensors and {
        name: (str(each.dtype), each.stride(), str(each.tolist())) if isinstance(each, Tensor) else each
        for name, each in tensors.items()
    }


def optimizer(made: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)


def two_groups(made: nn.Module) -> torch.optim.Optimizer:
    """In another sequence than the module's parameters; a step counter beside what is cut."""
    matrices = [each for each in made.parameters() if each.dim() == 2]
    others = [each for each in made.parameters() if each.dim() != 2]
    return torch.optim.AdamW([{"params": others}, {"params": matrices, "lr": 3e-3, "amsgrad": True}], foreach=True)


def adagrad(made: nn.Module) -> torch.optim.Optimizer:
    """Its state is there before its first step."""
    return torch.optim.Adagrad(made.parameters(), lr=0.01, initial_accumulator_value=0.1)


Make = Callable[[nn.Module], torch.optim.Optimizer]
Kind = Callable[[], nn.Module]


def train(kind: Kind, shares: Dealt | None, make: Make, group: Any) -> list[Any]:
    """What a training in pieces comes to; `shares`: None for one process that owns all."""
    made = copy.deepcopy(kind())
    updates = make(made)
    how: dict[str, Any] = {"process_group": group, "shares": shares}
    return trained(made, updates, OwnsPieces(made, updates, max(STEPS), **how) if shares else None)


def trained(made: Any, updates: torch.optim.Optimizer, owned: Any) -> list[Any]:
    """What a training comes to: the norm of each step's gradients, the whole weights, the optimizer's whole state."""
    reduction = owned.reduction if owned else ExactReduction(made, max(STEPS))
    found: list[Any] = []
    for step, micro_batches in enumerate(STEPS):
        reduction.begin(micro_batches)
        for index in reduction.share:
            with reduction.micro_batch(index):
                made.loss(step, index).backward()
        for _ in range(owned.idle_passes if owned else 0):
            with owned.idle_pass():
                (0.0 * made.loss(step, 0)).backward()
        reduction.finish(*([1 / micro_batches] if step else []))
        found.append({"norm": reduction.clip_gradients_(3.0)})
        updates.step()
    if not owned:
        return [*found, made.state_dict(), entries(updates.state_dict())]
    found += [owned.whole_weights(), entries(owned.whole_state())]
    reduction.close()
    owned.close()
    assert not any(each._post_accumulate_grad_hooks for each in made.parameters()), "nothing is left on the weights"
    return found


def entries(state: Any) -> Any:
    return state and {f"{number} {name}": each for number, of in state["state"].items() for name, each in of.items()}


@functools.cache
def expected(kind: Kind, make: Make) -> list[Any]:
    return list(map(bits, train(kind, None, make, None)))


def check(ranks: list[Any], make: Make, kind: Kind = net) -> None:
    assert list(map(bits, ranks[0])) == expected(kind, make)
    for other in ranks[1:]:
        # The norms and the weights are everywhere, the optimizer's state is whole on rank 0 alone.
        assert list(map(bits, other[:-1])) == expected(kind, make)[:-1]
        assert other[-1] is None


@pytest.mark.parametrize(
    ("shares", "world_size", "make", "kind"),
    [
        *[("contiguous", 2, optimizer, net), ("contiguous", 3, adagrad, net), ("contiguous", 5, two_groups, net)],
        *[("strided", 2, adagrad, net), ("strided", 3, optimizer, net), ("strided", 5, two_groups, net)],
        *[("contiguous", 3, optimizer, Tiny), ("strided", 3, optimizer, Tiny)],
    ],
)
def test_a_training_has_the_bits_of_one_process(shares: Dealt, world_size: int, make: Make, kind: Kind) -> None:
    check(on_thread_world(world_size, functools.partial(train, kind, shares, make)), make, kind)


@pytest.mark.parametrize("group", [None, SimpleNamespace(size=lambda: 1, rank=lambda: 0)], ids=["none", "of one rank"])
@pytest.mark.parametrize("shares", ["contiguous", "strided"])
def test_one_rank_alone_exchanges_nothing(shares: Dealt, group: Any) -> None:
    check([train(net, shares, optimizer, group)], optimizer)


def refused(make: Callable[[Any], Any]) -> list[str]:
    """What two ranks are told that make OwnsPieces with other arguments, or train with them."""

    def told(group: Any) -> str:
        try:
            make(group)
        except ValueError as error:
            return str(error)
        return ""

    return on_thread_world(2, told)


def test_ranks_that_do_not_fit_together_are_refused() -> None:
    def owns(group: Any, **other: Any) -> OwnsPieces:
        made = copy.deepcopy(LAYER)
        return OwnsPieces(made, optimizer(made), **{"micro_batches": 4, "process_group": group, **other})

    for message in refused(lambda group: owns(group, micro_batches=4 + group.rank())):
        assert message.endswith("micro_batches is 4 on rank 0, but 5 on rank 1")
    for message in refused(lambda group: owns(group, shares=("contiguous", "strided")[group.rank()])):
        assert "shares is contiguous, in 1 flat tensors on rank 0, but strided, in 1" in message

    def owns_on_the_first_alone(group: Any) -> None:
        if group.rank() == 0:
            owns(group)
        else:
            ExactReduction(copy.deepcopy(LAYER), 4, process_group=group)

    for message in refused(owns_on_the_first_alone):
        assert "shares is contiguous, in 1 flat tensors on rank 0, but contiguous on rank 1" in message
    assert refused(lambda group: owns(group, **({"shares": "contiguous"} if group.rank() else {}))) == [""] * 2
    idle = "1 micro-batches cannot be shared by 2 ranks: some would be idle"
    assert refused(lambda group: owns(group, micro_batches=1)) == [idle] * 2
    assert refused(lambda group: ExactReduction(LAYER, 1, process_group=group)) == [idle] * 2


def test_sums_are_made_as_the_nodes_lie_and_wait_as_they_were_told() -> None:
    def told(make: Callable[..., Any], group: Any) -> Any:
        made = make(process_group=group, timeout=timedelta(seconds=9), node=group.rank() // 2)
        reduction = getattr(made, "reduction", made)
        channel, own = reduction._channel, reduction._channel.group
        found = channel.ordered_sum.groups, type(channel.by_parts).__name__
        reduction.close()
        return own.asked, *found

    def owns(shares: Dealt, **how: Any) -> Any:
        made = copy.deepcopy(LAYER)
        return OwnsPieces(made, optimizer(made), 4, shares=shares, **how)

    def whole(shares: Dealt, **how: Any) -> Any:
        return ExactReduction(copy.deepcopy(LAYER), 4, shares=shares, **how)

    expected = (torch.device("cpu"), timedelta(seconds=9)), ((0, 1), (2, 3)), "PartsInTwoLevels"
    for make, shares in itertools.product((owns, whole), ("contiguous", "strided")):
        found = on_thread_world(4, functools.partial(told, functools.partial(make, shares)))
        assert found == [expected] * 4, (make, shares)


@pytest.mark.parametrize("shares", ["contiguous", "strided"])
def test_ranks_with_other_weights_are_refused_in_the_first_step(shares: Dealt) -> None:
    def begin(group: Any) -> None:
        made = copy.deepcopy(LAYER)
        owned = OwnsPieces(made, optimizer(made), 4, process_group=group, shares=shares)
        with torch.no_grad():
            made.weight.add_(group.rank())
        owned.reduction.begin()

    assert all(
        message.startswith("before the first step weight is not the same on all ranks") for message in refused(begin)
    )


def test_what_cannot_be_cut_or_dealt_is_refused() -> None:
    with refusing(ValueError):
        OwnsPieces(nn.ReLU(), optimizer(LAYER), 1)
    with refusing(ValueError):
        OwnsPieces(LAYER, optimizer(LAYER), 1, shares="Strided")  # type: ignore[arg-type]


class CheckpointedTwice(nn.Module):
    """One layer, used in two checkpoints, each of which runs a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = rows.requires_grad_()
        for _ in range(2):
            hidden = checkpoint(self.layer, hidden, use_reentrant=True)
        return hidden


def test_a_gradient_that_comes_after_its_group_is_sent_is_refused() -> None:
    made = CheckpointedTwice()
    with OwnsPieces(made, optimizer(made), 1).reduction as exact:
        exact.begin()
        with pytest.raises(RuntimeError, match="use_reentrant=False"), exact.micro_batch(0):
            made(torch.ones(1, 4)).sum().backward()


class Stored(nn.Module):
    """Its state_dict leaves one parameter out, and has another in another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.left_out, self.reshaped, self.usual = (nn.Parameter(torch.arange(2.0)) for _ in range(3))
        self.register_state_dict_post_hook(self._change)

    @staticmethod
    def _change(_: nn.Module, state: dict[str, Any], *__: Any) -> None:
        del state["left_out"]
        state["reshaped"] = state["reshaped"].view(1, 2)


def test_weights_go_out_as_what_each_rank_owns_of_them() -> None:
    def weights(group: Any) -> Any:
        made = copy.deepcopy(net())
        owned = OwnsPieces(made, optimizer(made), 2, process_group=group)
        average = copy.deepcopy(made)
        with torch.no_grad():
            for parameter in average.parameters():
                parameter.add_(1.0)
        found = owned.own_weights(), owned.own_weights(average)
        trained = [name for name, each in made.named_parameters(remove_duplicate=False) if each.requires_grad]
        for state in found:
            assert [name for name, each in state.items() if isinstance(each, CutTensor)] == trained
            assert state["again.weight"] is state["first.weight"]
        whole = whole_on_first(found[1], group)
        assert bits(whole) == (None if group.rank() else bits(average.state_dict()))
        other = Stored()
        kept = OwnsPieces(other, optimizer(other), 2, process_group=group).own_weights()
        assert isinstance(kept["usual"], CutTensor)
        assert kept["reshaped"].tolist() == [[0.0, 1.0]]
        return {name: sum(map(len, each.pieces.values())) for name, each in found[0].items() if name in trained}

    ranks = on_thread_world(2, weights)
    for name, parameter in net().named_parameters():
        assert not parameter.requires_grad or sum(sizes[name] for sizes in ranks) == parameter.numel()
