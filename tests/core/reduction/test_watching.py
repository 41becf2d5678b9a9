"""What watches a step, alone: flags, buffers and parameters that change, gradients that nobody takes, flat tensors."""

from __future__ import annotations

import contextlib
import copy
import gc
import re
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_core.reduction import ExactReduction
from ddp_core.reduction import flat as flats
from ddp_core.reduction.agreement import require_agreement
from ddp_core.reduction.communication import Channel
from ddp_core.reduction.flat import Gradients, flat_groups, in_memory_order, scale_, view_in
from ddp_core.reduction.refusal import DependsOnLayout
from ddp_core.reduction.watching import MAX_NORM, ForeignBuffers, TrainedParameters, WrittenParameters, describe_changes
from tests.support.thread_group import on_threads, use_threads


def test_changed_flags_are_named_and_counted() -> None:
    assert describe_changes({"a": True}) == "a is trained now"
    assert describe_changes({"a": False, "b": True, "c": True}) == "b and 1 more are trained now, a is frozen now"
    assert describe_changes(dict.fromkeys("abcd", False)) == "a and 3 more are frozen now"
    net = nn.Linear(2, 2)
    trained = TrainedParameters(net)
    assert trained.changes() == {}
    trained.refuse_changes()
    net.bias.requires_grad_(False)
    assert trained.changes() == {"bias": False}
    with pytest.raises(DependsOnLayout, match=r"^bias is frozen now, since this reduction was made"):
        trained.refuse_changes()


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("own", torch.zeros(3))
        self.register_buffer("none", None)
        self.plain = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.norm.register_buffer("more", torch.ones(1))
        self.linear = nn.Linear(2, 2)
        self.linear.register_buffer("running_mean", torch.ones(1))


def changed(net: Buffers, change: Any, **options: Any) -> str | None:
    """The buffer that is named after this change in a step."""
    watch = ForeignBuffers(net)
    watch.begin(**options)
    change()
    try:
        watch.refuse_changed()
    except DependsOnLayout as error:
        return re.findall("changes the buffer (.*), which", str(error))[0]
    change_nothing = watch.digests
    watch.refuse_changed()
    assert watch.digests == change_nothing
    return None


def test_a_buffer_that_has_other_values_is_named() -> None:
    net = Buffers()
    assert changed(net, lambda: None) is None
    assert changed(net, lambda: (net.own.add_(0), net.linear.running_mean.add_(0))) is None
    assert changed(net, lambda: (net.own.add_(0), net.norm.more.add_(1))) == "norm.more"
    assert changed(net, lambda: net.own.add_(1)) == "own"
    assert changed(net, lambda: setattr(net, "own", net.own.clone())) is None
    assert changed(net, lambda: setattr(net, "own", net.own + 1)) == "own"
    assert changed(net, lambda: setattr(net, "none", torch.ones(1))) == "none"
    assert changed(net, lambda: setattr(net, "none", None)) == "none"
    assert changed(net, lambda: net.norm.running_mean.add_(1)) == "norm.running_mean"
    assert changed(net, lambda: net.norm.running_mean.add_(1), looked_after=[net.norm]) is None
    assert changed(net, lambda: net.norm.more.add_(1), looked_after=[net.norm]) == "norm.more"
    assert changed(net, lambda: net.linear.running_mean.add_(1), looked_after=[net.norm]) == "linear.running_mean"


def test_digests_are_made_once_and_taken_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    net, digest = Buffers(), ForeignBuffers.__module__
    made: list[Tensor] = []
    real = __import__(digest, fromlist=["_digest"])._digest
    monkeypatch.setattr(f"{digest}._digest", lambda buffer: made.append(buffer) or real(buffer))
    watch = ForeignBuffers(net)
    assert watch.digests == {}
    watch.begin()
    names = {
        "own",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
        "norm.more",
        "linear.running_mean",
    }
    assert watch.digests.keys() == names
    assert len(made) == len(names)
    watch.begin()
    watch.refuse_changed()
    assert len(made) == len(names)
    net.own.add_(0)
    watch.refuse_changed()
    watch.refuse_changed()
    assert made[len(names) :] == [net.own]
    net.own.add_(0)
    watch.refuse_changed()
    del made[-1]
    net.own = net.own.clone()
    net.norm.more.add_(0)
    watch.begin()
    assert {id(each) for each in made[len(names) + 1 :]} == {id(net.own), id(net.norm.more)}
    other = ForeignBuffers(net)
    before = len(made)
    other.begin(digests=watch.digests)
    assert len(made) == before
    assert other.digests == watch.digests
    other = ForeignBuffers(net)
    other.begin(digests={"own": "of other values"})
    assert len(made) == before + len(names) - 1
    net.own.add_(0)
    with pytest.raises(DependsOnLayout, match="changes the buffer own"):
        other.refuse_changed()


def test_a_parameter_that_passes_write_to_must_keep_its_values() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Embedding(3, 2, max_norm=1.0), nn.Embedding(3, 2))
    watch = WrittenParameters(net)
    weight = net[0].weight.detach()
    watch.refuse_changes(is_last=False)
    assert watch.written == set()
    watch.begin()
    for _ in range(3):  # a clamp: after the first pass nothing is left to change
        weight.clamp_(max=0.1)
        watch.refuse_changes(is_last=False)
    assert watch.written == {0}
    watch.begin()
    assert watch.written == set()
    weight.add_(1)
    watch.refuse_changes(is_last=False)
    weight.add_(1)
    with pytest.raises(
        DependsOnLayout, match=r"changes the parameter 0\.weight in one micro-batch otherwise .*callback of"
    ):
        watch.refuse_changes(is_last=False)
    watch = WrittenParameters(net, "pass")
    watch.refuse_changes(is_last=False)
    weight.add_(1)
    with pytest.raises(DependsOnLayout, match="in one pass otherwise"):
        watch.refuse_changes(is_last=False)
    assert [watch.advice(position) == MAX_NORM for position in range(4)] == [False, False, True, False]
    assert watch.named(1) == "the parameter 0.bias"


@pytest.mark.parametrize(("by_values", "passes"), [(True, 2), (True, 3), (False, 2)])
def test_writes_that_torch_does_not_count_are_seen_by_values_after_the_last_pass(by_values: bool, passes: int) -> None:
    net = nn.Linear(2, 2)
    watch = WrittenParameters(net)
    if by_values:
        watch.begin(by_values=True)
    watch.refuse_changes(is_last=False)
    net.bias.data.add_(1)
    for _ in range(passes - 2):
        watch.refuse_changes(is_last=False)
    if by_values:
        with pytest.raises(DependsOnLayout, match="the parameter bias"):
            watch.refuse_changes(is_last=True)
    else:
        watch.refuse_changes(is_last=True)
    assert watch.written == set()


def test_values_are_compared_in_the_steps_that_are_powers_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    for micro_batches in (1, 2):
        exact = ExactReduction(nn.Linear(2, 2), micro_batches)
        monkeypatch.setattr(exact._written, "begin", lambda by_values=False: asked.append(by_values))
        for _ in range(9):
            exact.begin()
        exact.close()
    assert asked == [False] * 9 + [step in (1, 2, 4, 8) for step in range(1, 10)]


def test_gradients_that_nobody_takes_are_named() -> None:
    net = nn.Linear(2, 2)
    net.bias.requires_grad_(False)
    gradients = Gradients(net)
    net.bias.requires_grad_(True)
    net.bias.grad = torch.ones(2)
    gradients.refuse_foreign()
    exact = ExactReduction(net.requires_grad_(False), 1)
    net.bias.requires_grad_(True)
    with (
        pytest.raises(DependsOnLayout, match=r"^bias is trained now, .*gradients would be lost or pile up"),
        exact.micro_batch(0),
    ):
        pytest.fail("no micro-batch begins")
    net.requires_grad_(True)
    net.weight.grad = torch.ones(2, 2)
    with pytest.raises(RuntimeError, match=r"^weight has a gradient from a backward outside"):
        gradients.refuse_foreign()


def test_a_flat_tensor_takes_no_more_from_its_size_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flats, "_FLAT_ELEMENTS", 4)
    sizes = [3, 1, 1, 4, 0, 2, 5]
    assert flat_groups([torch.empty(size) for size in sizes]) == [[0, 1], [2, 3], [4, 5, 6]]
    mixed = [torch.empty(2), torch.empty(2, dtype=torch.float64), torch.empty(2), torch.empty(1)]
    assert flat_groups(mixed) == [[0, 2], [1], [3]]


@pytest.mark.parametrize(
    "like",
    [
        torch.empty(0, 3),
        torch.empty(1),
        torch.empty(2, 3),
        torch.empty(2, 3).t(),
        torch.empty(2, 6)[:, ::2],
        torch.empty(1, 2, 3, 2).to(memory_format=torch.channels_last),
    ],
    ids=["empty", "one", "rows", "columns", "gaps", "channels last"],
)
def test_elements_are_laid_out_as_in_memory(like: Tensor) -> None:
    values = torch.arange(float(like.numel())).view(like.shape)
    for tensor in (values, torch.empty_strided(like.shape, like.stride()).copy_(values)):
        laid = in_memory_order(tensor, like)
        assert laid.shape == (like.numel(),)
        assert torch.equal(view_in(laid, like), values)
    whole = torch.empty_like(like).copy_(values)
    assert in_memory_order(whole, whole).tolist() == whole.as_strided((whole.numel(),), (1,)).tolist()


def test_scaling_by_one_or_of_nothing_does_nothing() -> None:
    tensor = torch.ones(2)
    writes = tensor._version
    scale_([tensor], 1.0)
    scale_([], 3.0)
    assert tensor._version == writes
    scale_([tensor], 2.0)
    assert tensor.tolist() == [2, 2]


def test_a_reduction_asks_for_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    use_threads(monkeypatch)
    told: list[Any] = []
    agree = "ddp_core.reduction.exact.require_agreement"
    monkeypatch.setattr(agree, lambda group, *facts: told.append((facts[0], facts[1], facts[3])) or [[0], [1, 2]])

    def asked(group: Any) -> tuple[Any, ...]:
        net = nn.Linear(2, 2)
        options: dict[str, Any] = {"process_group": group, "timeout": timedelta(seconds=9)}
        found = []
        for shares, node in (("contiguous", None), ("strided", 7)):
            with ExactReduction(net, 6, shares=shares, node=node, **options) as exact:
                own: Any = exact._channel.group
                found.append((own.asked, exact._channel.ordered_sum.groups, type(exact._shares).__name__))
        return tuple(found)

    device = (torch.device("cpu"), timedelta(seconds=9))
    groups = ((0,), (1, 2))
    expected = ((device, groups, "ContiguousShares"), (device, groups, "StridedShares"))
    assert on_threads(3, asked) == [expected] * 3
    assert sorted(told, key=str) == [(6, "contiguous", None)] * 3 + [(6, "strided", 7)] * 3


def test_a_reduction_of_a_ddp_module_asks_ddp_and_looks_at_the_module_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    channels: list[Any] = []

    def channel(*given: Any) -> Channel:
        channels.append(given[0])
        return Channel(*given)

    monkeypatch.setattr("ddp_core.reduction.exact.Channel", channel)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        with pytest.raises(ValueError, match="broadcast_buffers=False"):
            ExactReduction(DistributedDataParallel(nn.BatchNorm1d(2)), 4)
        ddp = DistributedDataParallel(nn.Linear(2, 2))
        with ExactReduction(ddp, 4) as exact:
            shares: Any = exact._shares
            assert (exact.module, channels, shares._ddp) == (ddp, [ddp.process_group], ddp)
            assert exact._trained._names == ["weight", "bias"]
        del ddp, exact, shares
        gc.collect()
    finally:
        channels.clear()
        dist.destroy_process_group()


def test_a_host_is_a_node_where_nobody_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    use_threads(monkeypatch)
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    named = (None, "there", "here", "there")

    def nodes(group: Any) -> list[list[int]]:
        return require_agreement(group, 4, "contiguous", Gradients(nn.Linear(1, 1)), named[group.rank()])

    assert on_threads(4, nodes) == [[[0, 2], [1, 3]]] * 4


def test_ranks_whose_parameters_differ_are_refused_with_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    use_threads(monkeypatch)
    image = nn.Conv2d(2, 3, 3)
    others = {
        "weight, torch.float32 (3, 2, 3, 3), strides": copy.deepcopy(image).to(memory_format=torch.channels_last),
        "weight, torch.float32 (4, 2, 3, 3)": nn.Conv2d(2, 4, 3),
        "weight, torch.float64 (3, 2, 3, 3)": nn.Conv2d(2, 3, 3, dtype=torch.float64),
    }

    def messages(group: Any) -> list[str]:
        found = []
        for other in others.values():
            gradients = Gradients(image if group.rank() == 0 else other)
            with pytest.raises(ValueError, match="the ranks do not agree") as refused:
                require_agreement(group, 4, "contiguous", gradients, 0)
            found.append(str(refused.value))
        require_agreement(group, 4, "contiguous", Gradients(copy.deepcopy(image)), 0)
        return found

    first, second = on_threads(2, messages)
    assert first == second
    for message, other in zip(first, others, strict=True):
        assert f"parameter 0 is weight, torch.float32 (3, 2, 3, 3) on rank 0, but {other}" in message


def test_ranks_without_equal_weights_are_refused_in_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    use_threads(monkeypatch)

    def messages(group: Any) -> list[str]:
        net = nn.Linear(2, 2)
        with torch.no_grad():
            net.weight.fill_(1)
            net.bias.fill_(float(group.rank()))
        exact = ExactReduction(net, 4, process_group=group, node=0)
        with pytest.raises(ValueError, match="bias is another on rank 1 than on rank 0"):
            exact.begin()
        with torch.no_grad():
            net.bias.fill_(0)
        exact.begin()
        with torch.no_grad():
            net.bias.fill_(float(group.rank()))
        exact.begin()  # compared once
        exact.close()
        return []

    assert on_threads(2, messages) == [[], []]


def test_after_close_a_step_begins_anew() -> None:
    net = nn.Linear(2, 2)
    exact = ExactReduction(net, 2)
    with exact.micro_batch(0):
        net(torch.ones(1, 2)).sum().backward()
    assert exact.remaining == range(1, 2)
    exact.close()
    assert exact.remaining == exact.share == range(2)
    with exact.micro_batch(0):
        net(torch.ones(1, 2)).sum().backward()
    assert exact.remaining == range(1, 2)


class Own:
    """Shares of a rank that owns one parameter alone, and keeps what it is asked for."""

    def __init__(self, net: nn.Module, rank: int = 0, world_size: int = 1) -> None:
        self.gradients, self.reduced = Gradients(net), [next(net.parameters())]
        self.channel: Any = SimpleNamespace(error=None, close=lambda waits: self.asked.append("closed"))
        self.weights_to_compare = None
        self.asked: list[Any] = []

    def share(self, micro_batches: int) -> range:
        self.asked.append(("share", micro_batches))
        return range(micro_batches)

    def begin(self, micro_batches: int) -> None:
        self.asked.append(("begin", micro_batches))

    def backward(self, index: int) -> Any:
        return contextlib.nullcontext()

    def push(self, statistics: Tensor) -> None:
        self.gradients.take()

    def finish(self, statistics: Tensor, scale: float) -> None:
        self.reduced[0].grad = torch.full_like(self.reduced[0], scale)

    def norm(self) -> Tensor:
        return torch.tensor(4.0, dtype=torch.float64)

    def close(self) -> None:
        self.asked.append("shares closed")


def test_shares_of_its_own_are_asked_and_their_norm_is_clipped_by() -> None:
    net = nn.Linear(2, 2)
    own = Own(net)
    with ExactReduction(net, 2, shares=own) as exact:
        assert own.asked == [("share", 2)]
        assert exact.share == exact.share_of(2) == range(2)
        for index in range(2):
            with exact.micro_batch(index):
                net(torch.ones(1, 2)).sum().backward()
        exact.finish(scale=8.0)
        assert net.weight.grad is not None
        assert net.bias.grad is None
        assert exact.clip_gradients_(1.0).item() == 4.0
        assert torch.allclose(net.weight.grad, torch.full((2, 2), 2.0))
    assert own.asked == [("share", 2), ("share", 2), ("begin", 2), ("share", 2), "shares closed", "closed"]
    with pytest.raises(ValueError, match='shares are "contiguous" or "strided", not'):
        ExactReduction(net, 2, shares="other")  # type: ignore[arg-type]


def test_more_ranks_than_micro_batches_are_refused_whoever_deals_them() -> None:
    for shares in ("contiguous", Own(nn.Linear(1, 1))):
        group: Any = SimpleNamespace(rank=lambda: 1, size=lambda: 3)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ddp_core.reduction.exact.require_agreement", lambda *_: [[0, 1, 2]])
            with pytest.raises(ValueError, match="2 micro-batches cannot be shared by 3 ranks"):
                ExactReduction(nn.Linear(1, 1), 2, process_group=group, shares=shares)  # type: ignore[arg-type]
