"""Batch statistics and ExactReduction in one process. Tests reduction/contiguous.py and reduction/exchange.py, too."""

from __future__ import annotations

import copy
import threading
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ddp_core.reduction import ExactReduction, take_gradients
from ddp_core.reduction.communication import CommunicationThreads
from ddp_core.reduction.exchange import LINE_BYTES, cut
from tests.core.reduction.test_tree import by_definition
from tests.support.wording import refusing


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.average = nn.BatchNorm1d(4, momentum=None)
        self.outer = nn.Linear(4, 2)

    def forward(self, rows: Tensor) -> Tensor:
        return self.outer(self.average(torch.relu(self.norm(self.inner(rows)))))


def inputs(micro_batches: int = 4, samples: int = 5) -> Tensor:
    return torch.randn(micro_batches, samples, 3, generator=torch.Generator().manual_seed(1))


def step(exact: ExactReduction, batches: Tensor, scale: float = 1.0) -> None:
    for index in exact.share:
        with exact.micro_batch(index):
            exact.module(batches[index]).square().sum().backward()
    exact.finish(scale)


def test_one_process_sums_the_gradients_in_the_tree_and_scales_once() -> None:
    torch.manual_seed(0)
    net, batches = Net(), inputs(5)
    separately = []
    for batch in batches:
        net.zero_grad()
        net(batch).square().sum().backward()
        separately.append(take_gradients(net.parameters()))
    with ExactReduction(net, 5) as exact:
        for _ in range(2):  # a second step must not see the gradients of the first
            step(exact, batches, scale=0.04)
            for position, parameter in enumerate(net.parameters()):
                expected = by_definition([leaf[position] for leaf in separately]) * 0.04
                assert torch.equal(parameter.grad, expected)


def test_a_layer_that_changes_between_steps_is_heard() -> None:
    net = nn.Sequential(nn.BatchNorm1d(3, momentum=0.5), nn.BatchNorm1d(3))
    batches = inputs()
    with ExactReduction(net, 4) as exact:
        step(exact, batches)
        before = copy.deepcopy(net.state_dict())
        net[0].momentum = 0.25
        net[1].eval()
        step(exact, batches)
    means = by_definition([batch.mean(0) for batch in batches]) / 4
    torch.testing.assert_close(net[0].running_mean, 0.75 * before["0.running_mean"] + 0.25 * means)
    assert torch.equal(net[1].running_mean, before["1.running_mean"])
    assert (net[0].momentum, net[1].momentum) == (0.25, 0.1)


def test_evaluation_within_a_micro_batch_reads_the_steps_beginning() -> None:
    layer = nn.BatchNorm1d(3)
    shown = copy.deepcopy(layer).eval()
    rows = inputs(2)
    with ExactReduction(layer, 2) as exact:
        for index in exact.share:
            with exact.micro_batch(index):
                found = []
                for training in (False, True, False):
                    layer.train(training)
                    found.append(layer(rows[index] * 5))
                copied = copy.deepcopy(layer)  # with the hook that makes it so
                layer.train()
                torch.stack(found).sum().backward()
                expected = shown(rows[index] * 5)
                assert torch.equal(found[0], expected)
                assert torch.equal(found[2], expected)
                assert not torch.equal(found[1], expected)
                copied(rows[index])
        exact.finish()
    means = by_definition([(batch * 5).mean(0) for batch in rows]) / 2
    torch.testing.assert_close(layer.running_mean, 0.1 * means)
    assert not layer._forward_pre_hooks
    assert not layer._forward_hooks


def test_a_compiled_layer_is_left_to_itself() -> None:
    torch.manual_seed(0)
    net, rows = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), inputs()
    compiled, compilations = copy.deepcopy(net), []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        compilations.append(graph)
        return graph.forward

    forward = torch.compile(compiled, backend=backend)
    with ExactReduction(net, 4) as exact, ExactReduction(compiled, 4) as other:
        for _ in range(3):
            for index in range(4):
                with exact.micro_batch(index):
                    net(rows[index]).square().sum().backward()
                with other.micro_batch(index):
                    forward(rows[index]).square().sum().backward()
            exact.finish()
            other.finish()
    assert len(compilations) == 1
    assert all(torch.equal(a, b) for a, b in zip(net.buffers(), compiled.buffers(), strict=True))


def test_an_unfinished_step_leaves_the_buffers_as_they_were() -> None:
    net = Net()
    before = copy.deepcopy(net.state_dict())
    exact = ExactReduction(net, 4)
    with exact.micro_batch(0):
        net(inputs()[0]).sum().backward()
    assert net.norm.momentum == 1.0
    exact.close()
    assert net.norm.momentum == 0.1
    assert net.average.momentum is None
    assert all(torch.equal(net.state_dict()[name], tensor) for name, tensor in before.items())


def test_a_reduction_that_is_closed_in_the_midst_of_a_step_begins_anew() -> None:
    net = nn.Linear(1, 1)
    exact = ExactReduction(net, 2)
    assert exact.remaining == range(2)
    with exact.micro_batch(0):
        net(torch.tensor([[100.0]])).sum().backward()
    exact.close()
    assert exact.remaining == range(2)
    with exact:
        for index in range(2):
            with exact.micro_batch(index):
                net(torch.tensor([[1.0 + index]])).sum().backward()
        exact.finish()
    assert net.weight.grad.item() == 3.0
    untrained = nn.BatchNorm1d(1, momentum=1.0, affine=False)  # has statistics all the same
    with ExactReduction(untrained, 2) as exact:
        for index in range(2):
            with exact.micro_batch(index):
                untrained(torch.tensor([[1.0 + index], [3.0 + index]]))
        exact.finish()
    assert untrained.running_mean.tolist() == [2.5]


def test_misuse_is_named() -> None:
    net = Net()
    exact = ExactReduction(net, 4)
    with refusing(RuntimeError):
        exact.finish()
    with refusing(ValueError), exact.micro_batch(1):
        pass
    with refusing(ValueError):
        ExactReduction(net, 0)
    with refusing(ValueError):
        ExactReduction(net, 4, shares="dealt")  # type: ignore[arg-type]
    exact.begin(3)
    assert exact.share == range(3)
    step(exact, inputs())
    assert exact.share == range(4), "another number of micro-batches holds for one step"
    with refusing(ValueError):
        exact.begin(0)


@pytest.mark.parametrize(("threads", "variable", "warned"), [(2, None, True), (2, "2", False), (1, None, False)])
def test_a_number_of_threads_that_nobody_chose_is_warned_of(
    threads: int, variable: str | None, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ExactReduction(Net(), 4)
    assert [warning.filename for warning in caught] == [__file__] * warned
    assert all("computes with 2 threads" in str(warning.message) for warning in caught)


def test_gradients_from_a_foreign_backward_are_refused() -> None:
    net, batches = Net(), inputs()
    exact = ExactReduction(net, 4)
    with exact.micro_batch(0):
        net(batches[0]).sum().backward()
    net(batches[1]).sum().backward()
    outside = r"inner\.weight has a gradient from a backward outside"
    with pytest.raises(RuntimeError, match=outside), exact.micro_batch(1):
        pass
    net.zero_grad()
    for index in exact.remaining:
        with exact.micro_batch(index):
            net(batches[index]).sum().backward()
    net(batches[1]).sum().backward()
    with pytest.raises(RuntimeError, match=outside):
        exact.finish()


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, rows: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(rows)


def test_what_cannot_be_exact_is_refused() -> None:
    with pytest.raises(ValueError, match="SyncBatchNorm"):
        ExactReduction(nn.SyncBatchNorm(3), 4)
    net = nn.Sequential(nn.BatchNorm1d(3), Counting())
    with pytest.raises(ValueError, match=r"1\.calls"), ExactReduction(net, 4) as exact:
        step(exact, inputs())
    embedding = nn.Embedding(4, 2, sparse=True)
    exact = ExactReduction(embedding, 1)
    with pytest.raises(ValueError, match="sparse"), exact.micro_batch(0):
        embedding(torch.tensor([1])).sum().backward()


@given(st.integers(0, 5000), st.integers(1, 9), st.sampled_from([torch.bfloat16, torch.float32, torch.float64]))
def test_the_parts_of_a_sum_are_even_and_begin_at_whole_lines(elements: int, parts: int, dtype: torch.dtype) -> None:
    flat = torch.arange(elements, dtype=dtype)
    cuts = cut(elements, parts, dtype)
    assert len(cuts) == parts
    assert torch.equal(torch.cat([flat[part] for part in cuts]), flat)
    line = LINE_BYTES // flat.element_size()
    assert all(part.start % line == 0 or part.start == elements for part in cuts)
    sizes = [part.stop - part.start for part in cuts]
    assert max(sizes) - min(sizes) < 2 * line


def test_communication_threads_choose_the_device_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread is on GPU 0, so every rank of a node would hold memory there."""
    chosen: dict[str, torch.device] = {}
    both = threading.Barrier(3, timeout=60)

    def choose(device: torch.device) -> None:
        chosen[threading.current_thread().name] = device
        both.wait()

    monkeypatch.setattr("torch.cuda.set_device", choose)
    threads = CommunicationThreads("test", 2, torch.device("cuda", 1))
    both.wait()
    assert threads.close(timeout=60)
    assert chosen == {"test": torch.device("cuda", 1)}
