"""The bytes of weights, gradients and optimizer state, by arithmetic. What activations take, only a step can tell."""

from __future__ import annotations

from collections.abc import Iterable

import psutil
import torch
from torch import Tensor, nn

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.platforms import free_memory
from ddp_core.config.experiment import Experiment, Optimizer
from ddp_core.config.layout import Layout
from ddp_core.sharding import Sharding


def standing_memory(model: nn.Module, experiment: Experiment, sharding: Sharding, ranks: int) -> dict[str, int]:
    """Bytes, by name, that each of so many ranks needs in every update; of one's own optimizer no state is counted."""
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    weights = _bytes([*model.parameters(), *model.buffers()])
    if sharding.cuts_parameters:
        weights += -(-trained // ranks) - trained
    gradients = -(-trained // (ranks if sharding.is_any else 1))
    optimizer, copies = experiment.optimizer, 0
    if isinstance(optimizer, Optimizer):
        copies = 2 if optimizer.name != "sgd" else int(optimizer.momentum > 0)
    averaged = weights if experiment.ema_decay is not None else 0
    found = {"weights": weights, "gradients": gradients, "optimizer state": copies * gradients}
    return found | ({"averaged weights": averaged} if averaged else {})


def require_room(model: nn.Module, experiment: Experiment, layout: Layout, device: torch.device) -> None:
    """Raises UserError (4) where what an update needs is more than is free here, activations not counted."""
    ranks = layout.nproc_per_node if layout.kind == "ddp" else 1
    needed = standing_memory(model, experiment, Sharding.of(layout), layout.shares)
    built = [each for each in (*model.parameters(), *model.buffers()) if each.device.type == device.type]
    missing = max(0, sum(needed.values()) - _bytes(built))
    if device.type == "cuda":
        ranks, free = 1, torch.cuda.mem_get_info(device)[0]
    else:
        free = free_memory() + psutil.swap_memory().free
    if ranks * missing > free:
        each = f" for each of {ranks} ranks" if ranks > 1 else ""
        raise UserError(
            f"{', '.join(needed)} alone need {missing / 2**30:.1f} GiB more{each}, and {free / 2**30:.1f} GiB are free "
            f"on {device}: cut them with --shard over more ranks, train a smaller model, or use a larger machine",
            ExitCode.RESOURCES,
        )


def _bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of the memory that these tensors lie in, each once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
