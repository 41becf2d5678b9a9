"""BatchStatistics alone: which layers it looks after, what a micro-batch gives, and the update at the end."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from ddp_core.reduction import BatchStatistics


def rows(seed: int = 0, features: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(7, features, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 3 + 1


def test_only_layers_that_would_update_their_statistics_are_active() -> None:
    active, evaluating, without = nn.BatchNorm1d(3), nn.BatchNorm1d(3).eval(), nn.BatchNorm1d(3)
    without.track_running_stats = False
    never = nn.BatchNorm1d(3, track_running_stats=False)
    odd = nn.BatchNorm1d(3)
    odd.running_mean = None
    statistics = BatchStatistics(nn.ModuleList([active, evaluating, without, never, odd]))
    assert list(statistics.layers) == []
    statistics.begin()
    assert list(statistics.layers) == [active]
    statistics.restore()
    assert list(statistics.layers) == []
    assert statistics.take().numel() == statistics.zeros().numel() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("momentum", [0.1, 0.3, 0.7, 1e-3, None])
def test_the_update_is_made_in_float32_with_momenta_rounded_from_float64(
    momentum: float | None, dtype: torch.dtype
) -> None:
    layer = nn.BatchNorm1d(3, momentum=momentum, dtype=dtype)
    statistics, wide = BatchStatistics(layer), torch.promote_types(dtype, torch.float32)
    for step in range(3):
        batch, before = rows(step, dtype=dtype), copy.deepcopy(layer)
        of_batch = copy.deepcopy(layer)
        of_batch.momentum = 1.0
        of_batch(batch)
        statistics.begin()
        layer(batch)
        taken = statistics.take(0.25)
        assert taken.dtype == wide == statistics.zeros().dtype
        assert taken.shape == statistics.zeros().shape
        statistics.finish(taken)
        assert layer.momentum == momentum
        assert int(layer.num_batches_tracked) == step + 1
        part = torch.tensor(1 / (step + 1) if momentum is None else momentum, dtype=torch.float64)
        for name in ("running_mean", "running_var"):
            old, new = getattr(before, name).to(wide), getattr(of_batch, name).to(wide)
            expected = (1.0 - part).to(wide) * old + part.to(wide) * new
            assert torch.equal(getattr(layer, name), expected.to(dtype)), (step, name)


def taken(statistics: BatchStatistics, layers: Sequence[nn.Module], calls: Sequence[int]) -> Tensor:
    """The weights of a micro-batch that calls each layer so often."""
    for layer, count in zip(layers, calls, strict=True):
        for _ in range(count):
            layer(rows())
    return statistics.take()[-len(layers) :]


def test_a_layer_counts_once_however_often_it_is_called_and_not_where_it_is_not() -> None:
    layers = [nn.BatchNorm1d(3), nn.BatchNorm1d(3)]
    statistics = BatchStatistics(nn.ModuleList(layers))
    for _ in range(2):
        statistics.begin()
        assert taken(statistics, layers, [2, 1]).tolist() == [1, 1]
        found = taken(statistics, layers, [0, 3])
        assert found.tolist() == [0, 1]
        whole = torch.cat([torch.zeros(12), found])
        before = layers[0].running_mean
        statistics.finish(whole)
        assert layers[0].running_mean is not before
    assert [int(layer.num_batches_tracked) for layer in layers] == [0, 2]
    assert layers[0].running_var.tolist() == [1.0] * 3
    for calls in ([1, 1], [0, 1], [1, 0]):
        statistics.begin()
        assert taken(statistics, layers, calls).tolist() == calls
        statistics.finish(torch.cat([torch.zeros(12), torch.ones(2)]))


def test_micro_batches_count_by_their_weights() -> None:
    layer = nn.BatchNorm1d(3)
    statistics = BatchStatistics(layer)
    statistics.begin()
    taken = []
    for seed, weight in ((0, 5), (1, 3)):
        layer(rows(seed))
        taken.append(statistics.take(weight))
    statistics.finish(taken[0] + taken[1])
    mean = (5 * rows(0).mean(0) + 3 * rows(1).mean(0)) / 8
    torch.testing.assert_close(layer.running_mean, 0.1 * mean)
    assert int(layer.num_batches_tracked) == 1


class Foreign(nn.BatchNorm1d):
    """A forward of its own, which puts other tensors in the place of the buffers."""

    def forward(self, input: Tensor) -> Tensor:
        self.running_mean = self.running_mean * (1 - (self.momentum or 0)) + (self.momentum or 0) * input.mean(0)
        self.num_batches_tracked = self.num_batches_tracked + 1
        return input * self.weight + self.bias


def test_a_forward_that_replaces_the_buffers_is_heard() -> None:
    layer = Foreign(3)
    own = layer.running_mean
    statistics = BatchStatistics(layer)
    for step in range(2):
        statistics.begin()
        taken = []
        for batch in (rows(step), rows(step + 5)):
            layer(batch)
            taken.append(statistics.take())
            assert torch.equal(taken[-1], torch.cat([batch.mean(0), layer.running_var, torch.ones(1)]))
        before = own.clone()
        statistics.finish(taken[0] + taken[1])
        assert layer.running_mean is own
        assert torch.allclose(own, 0.9 * before + 0.1 * (rows(step).mean(0) + rows(step + 5).mean(0)) / 2)
    assert int(layer.num_batches_tracked) == 2


def test_layers_of_several_dtypes_are_looked_after_together() -> None:
    layers = [nn.BatchNorm1d(3), nn.BatchNorm1d(2, dtype=torch.float64), nn.BatchNorm1d(4)]
    alone = copy.deepcopy(layers)
    statistics = BatchStatistics(nn.ModuleList(layers))
    for step in range(2):
        statistics.begin()
        for layer in layers:
            layer(rows(step, layer.num_features, layer.running_mean.dtype))
        taken = statistics.take()
        assert (taken.dtype, taken.numel()) == (torch.float64, 2 * 9 + 3)
        statistics.finish(taken)
    for layer, other in zip(layers, alone, strict=True):
        one = BatchStatistics(other)
        for step in range(2):
            one.begin()
            other(rows(step, other.num_features, other.running_mean.dtype))
            one.finish(one.take())
        for name, buffer in other.named_buffers():
            # The layers of float32 are updated in float64 where another one needs it.
            assert torch.allclose(dict(layer.named_buffers())[name], buffer, rtol=1e-6), name
            assert dict(layer.named_buffers())[name].dtype == buffer.dtype


def test_a_call_in_evaluation_mode_that_fails_leaves_the_step_as_it_was() -> None:
    layer = nn.BatchNorm1d(3)
    statistics = BatchStatistics(layer)
    statistics.begin()
    shown = layer.running_mean
    layer.eval()
    with pytest.raises((RuntimeError, ValueError)):
        layer(torch.ones(2, 5))
    assert layer.running_mean is shown
    layer.train()
    layer(rows())
    assert statistics.take()[-1].item() == 1.0
    statistics.restore()
    assert layer.momentum == 0.1
    assert not layer._forward_pre_hooks
