"""Whether batch norm's running statistics have moved too few times for an evaluation. Loaded for a run's first one."""

from __future__ import annotations

from torch import nn

from ddp_core.reduction.batch_statistics import BatchNorm

_LARGE = 0.5
"""The share of its first values in a running statistic above which it is said."""


def young_statistics(model: nn.Module) -> str | None:
    """A line for the user where statistics still are mostly what their layer began with; None elsewhere.

    After N updates with momentum M they hold (1 - M)^N of it. Layers that are frozen are left out.
    """
    moved = [
        (int(layer.num_batches_tracked), layer.momentum)
        for layer in model.modules()
        if isinstance(layer, BatchNorm) and layer.training and layer.momentum and layer.num_batches_tracked is not None
    ]
    shares = [((1 - momentum) ** times, times, momentum) for times, momentum in moved if times]
    if not shares or max(shares)[0] <= _LARGE:
        return None
    share, times, momentum = max(shares)
    return (
        f"batch norm's running statistics have moved {times} times at momentum {momentum:g}, so this evaluation still "
        f"sees {share:.0%} of the initial ones"
    )
