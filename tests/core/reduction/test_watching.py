"""What watches a step, alone: flags, buffers and parameters that change, gradients that nobody takes, flat tensors.

Tests reduction/flat.py, too.
"""

from __future__ import annotations

import gc
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from ddp_core.reduction import ExactReduction
from ddp_core.reduction.agreement import require_agreement
from ddp_core.reduction.communication import Channel
from ddp_core.reduction.flat import Gradients, in_memory_order, view_in
from ddp_core.reduction.watching import DependsOnLayout, ForeignBuffers, WrittenParameters
from tests.support.thread_group import on_threads, use_threads
from tests.support.wording import refusing


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
        exact = ExactReduction(net := nn.Linear(2, 2), micro_batches)
        monkeypatch.setattr(exact._written, "begin", lambda by_values=False: asked.append(by_values))
        for index in [*range(micro_batches)] * 9:
            with exact.micro_batch(index):
                net(torch.ones(1, 2)).sum().backward()
            if not exact.remaining:
                exact.finish()
        exact.close()
    assert asked == [False] * 9 + [step in (1, 2, 4, 8) for step in range(1, 10)]


def test_gradients_that_nobody_takes_are_named() -> None:
    net = nn.Linear(2, 2)
    net.bias.requires_grad_(False)
    gradients = Gradients(net.named_parameters())
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


def test_a_reduction_of_a_ddp_module_asks_ddp_and_looks_at_the_module_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("ddp_core.reduction.exact.Channel", lambda *given: asked.append(given[0]) or Channel(*given))
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        with refusing(ValueError):
            ExactReduction(DistributedDataParallel(nn.BatchNorm1d(2)), 4)
        ddp = DistributedDataParallel(nn.Linear(2, 2))
        # Given to DDP, a torch for CUDA asks the driver for a stream, and there may be none here.
        ddp.mixed_precision = _MixedPrecision()
        with refusing(ValueError):
            ExactReduction(ddp, 4)
        ddp.mixed_precision = None
        with ExactReduction(ddp, 4) as exact:
            assert (exact.module, asked) == (ddp, [ddp.process_group])
            assert exact._trained._names == ["weight", "bias"]
        del ddp, exact
        gc.collect()
    finally:
        asked.clear()
        dist.destroy_process_group()


def test_a_host_is_a_node_where_nobody_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    use_threads(monkeypatch)
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    named = (None, "there", "here", "there")

    def nodes(group: Any) -> list[list[int]]:
        return require_agreement(
            group, 4, "contiguous", Gradients(nn.Linear(1, 1).named_parameters()), named[group.rank()]
        )

    assert on_threads(4, nodes) == [[[0, 2], [1, 3]]] * 4
