"""Estimates how much memory training a model takes, before it is trained: one micro-batch is run and watched.

The memory at the peak is counted, not guessed. Weights and the optimizer's state are there all the time. Forward keeps
the tensors that backward will need (`torch.autograd.graph.saved_tensors_hooks` sees each). Backward frees them from the
last layer to the first, while it makes the weights' gradients. So the peak is somewhere within backward: `backward`
notes in which order saved tensors are used and gradients are made, and finds that moment. Backward also holds, for a
while, the gradients of one layer's output and input, here called gradients in flight. `rank_memory` adds what a step
of several micro-batches and several ranks takes. Not counted are the CUDA context (some 500 MB beside the
allocator's), and fragmentation: with 10 million parameters on the CPU malloc had 255 MB in use more than before
training, as estimated, and 65 to 97 MB of free blocks among them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ddp_core.config.cut import BatchCut
from ddp_core.config.experiment import Experiment, Optimizer
from ddp_core.data.loader import Loader
from ddp_core.data.splits import Splits
from ddp_core.data.trees import Tree, map_tensors, tensors_of
from ddp_core.experiment.building import optimizer_of
from ddp_core.experiment.file import LoadedExperiment
from ddp_core.experiment.request import Request, build_model
from ddp_core.model.losses import Loss
from ddp_core.model.optimizers import implementation
from ddp_core.run.backward import bytes_of, watch
from ddp_core.run.rank_memory import MemoryEstimate, Replica, Way
from ddp_core.sharding import Sharding
from ddp_core.sharding.blocks import blocks_of
from ddp_core.sharding.shards import shard_groups

BuildOptimizer = Callable[[nn.Module], torch.optim.Optimizer]

_WATCHED_SAMPLES = 8
"""Enough for batch norm, few enough for any machine; the estimate is then scaled to the real micro-batch."""
LIBRARIES = 15_000_000
"""What a process on the CPU takes with its first step beside tensors: kernels that are loaded then, and their
workspaces. Of small runs of digits and char_transformer, 12 to 15 MB for a rank of two, 22 MB for one process."""


class Prediction(NamedTuple):
    """What training takes, in bytes."""

    weights: int
    """Parameters and buffers that a rank has from step to step."""
    peak: int
    """What a rank needs at the moment that needs most, its weights in it."""


def watch_replica(
    model: nn.Module,
    loss: Loss,
    optimizer: Optimizer | BuildOptimizer,
    inputs: Tree,
    targets: Tree,
    growth: float = 1.0,
    averaged: bool = False,
) -> Replica:
    """What training `model` on micro-batches like this one takes, on the device that it is on.

    Runs one forward and backward. Weights and gradients stay as they were; batch-norm's running statistics change.
    `optimizer` is a built-in one's settings, or a function that makes another; the state of such an optimizer is made
    by a step on a copy of the model, and its temporary tensors are taken to be as large as the gradients. The parts
    that depend on the batch grow in proportion to `growth`. `averaged`: with a moving average of the weights.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trainable = bytes_of(parameters)
    blocks = blocks_of(model)
    inside = {parameter for block in blocks for parameter in block.parameters()}
    return Replica(
        weights=bytes_of([*model.parameters(), *model.buffers()]),
        trainable=trainable,
        optimizer_state=_state_of(optimizer, model, trainable),
        inputs=round(growth * bytes_of(tensors_of((inputs, targets)))),
        in_passing=_in_passing(optimizer, parameters),
        averaged=averaged,
        backward=watch(model, loss, inputs, targets),
        group=_largest_group(parameters),
        block=max((bytes_of(block.parameters()) for block in blocks), default=0),
        rest=bytes_of(parameter for parameter in model.parameters() if parameter not in inside),
        growth=growth,
    )


def estimate_memory(
    model: nn.Module,
    loss: Loss,
    optimizer: Optimizer | BuildOptimizer,
    inputs: Tree,
    targets: Tree,
    growth: float = 1.0,
    bucketed: bool = False,
    averaged: bool = False,
) -> MemoryEstimate:
    """The memory of one replica whose steps have one micro-batch (see `watch_replica`).

    `bucketed`: under DistributedDataParallel without gradient_as_bucket_view.
    """
    replica = watch_replica(model, loss, optimizer, inputs, targets, growth, averaged)
    return replica.estimate(Way(), bucketed)


def replica_of(loaded: LoadedExperiment, model: nn.Module, loss: Loss, splits: Splits, micro_batch: int) -> Replica:
    """What one replica of this experiment takes, on the model's device and in float32; a few samples are watched."""
    ids = np.arange(min(micro_batch, _WATCHED_SAMPLES, len(splits.train)), dtype=np.int64)
    device = next(model.parameters()).device
    batch = Loader(splits.train, collate=splits.collate).fetch(0, ids)
    inputs, targets = (map_tensors(lambda tensor: tensor.to(device), part) for part in batch)
    chosen = loaded.experiment.optimizer
    return watch_replica(
        model,
        loss,
        chosen if isinstance(chosen, Optimizer) else partial(optimizer_of, loaded),
        inputs,
        targets,
        growth=micro_batch / len(ids),
        averaged=loaded.experiment.ema_decay is not None,
    )


def predict(request: Request, loss: Loss, splits: Splits, device: torch.device) -> Prediction | None:
    """The memory that training needs on each rank of this request, from a replica that is built and watched for it.

    None where nothing is known: `dp`, whose replicas share one process, and mixed precision, of which the copies of
    weights in 16 bits are not counted.
    """
    experiment, layout = request.loaded.experiment, request.layout
    if layout.kind == "dp" or experiment.precision not in ("fp32", "tf32"):
        return None
    world_size, reduction = layout.world_size, request.options.reduction
    sharding = Sharding.of(layout)
    way = Way(experiment.micro_batches or world_size, reduction, world_size, sharding)
    micro_batch = BatchCut.of(experiment, layout).micro_batch
    replica = replica_of(request.loaded, build_model(request.loaded, device, splits), loss, splits, micro_batch)
    bucketed = layout.kind == "ddp" and not sharding.is_any
    estimate = replica.estimate(way, bucketed)
    return Prediction(estimate.weights, estimate.peak + (LIBRARIES if device.type == "cpu" else 0))


def way_of(experiment: Experiment, world_size: int = 1, sharding: Sharding = Sharding()) -> Way:
    """How the ranks of a run of this experiment bring the gradients of a step together."""
    return Way(experiment.micro_batches or world_size, experiment.reduction, world_size, sharding)


def samples_at_once(experiment: Experiment) -> int:
    """The samples of one forward and backward that the estimate is for."""
    return experiment.micro_batch or experiment.global_batch_size


def _state_of(optimizer: Optimizer | BuildOptimizer, model: nn.Module, gradients: int) -> int:
    """Bytes of the optimizer's state; a built-in one keeps tensors of a parameter's size for each parameter."""
    if not isinstance(optimizer, Optimizer):
        return _measured_state(optimizer, copy.deepcopy(model))
    if optimizer.name == "sgd":
        return gradients if optimizer.momentum else 0
    return 2 * gradients


def _measured_state(build: BuildOptimizer, model: nn.Module) -> int:
    optimizer = build(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    return bytes_of(tensors_of(optimizer.state_dict()["state"]))


def _in_passing(optimizer: Optimizer | BuildOptimizer, parameters: Sequence[Tensor]) -> int:
    """Bytes of the optimizer's temporary tensors (torch/optim/{sgd,adam}.py).

    foreach on CUDA makes them for all parameters at once, the loop for one parameter after the other.
    """
    if not isinstance(optimizer, Optimizer):
        return bytes_of(parameters)
    chosen = implementation(optimizer, parameters)
    if chosen == "fused" or not parameters:
        return 0
    adam = optimizer.name != "sgd"
    if not adam and not optimizer.nesterov and not optimizer.weight_decay:
        return 0
    if chosen == "foreach":
        return bytes_of(parameters)
    return (2 if adam else 1) * max(bytes_of([parameter]) for parameter in parameters)


def _largest_group(parameters: Sequence[Tensor]) -> int:
    """The most gradients that ranks send at a time."""
    groups = shard_groups(parameters)
    return max((sum(parameters[position].nbytes for position in group) for group in groups), default=0)
