"""What is looked at on a freshly built model before it is trained: that every layout begins with the same weights.

What a first forward makes is made before anything looks at the parameters: a lazy layer (torch.nn.LazyLinear) has none
until it has seen a batch, and the optimizer needs them (`make_real`); a table, such as a rotary embedding's sines, is
kept in a buffer that the first forward fills, which changes a buffer and yet makes nothing that depends on the layout
(`fill_tables`). Every rank of every layout runs the same forwards on the same samples, in evaluation mode, and the
random numbers that come afterwards are as if it had not. Then ranks compare what they have built, by `lines_about`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ddp_core.base.errors import UserError
from ddp_core.base.seeds import generators_kept
from ddp_core.base.torch_internals import buffers_of
from ddp_core.base.trees import Tree, call, map_tensors
from ddp_core.base.user_code import user_code
from ddp_core.config.experiment import Experiment
from ddp_core.data.loader import Loader
from ddp_core.data.splits import Splits
from ddp_core.experiment.file import in_one_line, place_of
from ddp_core.model.forward_state import ForwardState
from ddp_core.reduction.batch_statistics import BatchNorm
from ddp_core.reduction.watching import ForeignBuffers

_SAMPLES = 2  # many models cannot take a single one


def lazy_parts(model: nn.Module) -> list[str]:
    """The names of the parameters and buffers that a first batch has yet to make."""
    return [name for name, tensor in _tensors_of(model) if is_lazy(tensor)]


def make_real(model: nn.Module, experiment: Experiment, splits: Splits) -> None:
    """Run one forward, on the CPU, that gives lazy layers their parameters; does nothing where there are none.

    Their values are the next numbers of torch's generator. Raises UserError where the forward fails, or leaves one out.
    """
    if not lazy_parts(model):
        return
    name = f"model {experiment.model.name}"
    inputs = _inputs(experiment, splits, 0, _SAMPLES)
    state = ForwardState(model)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers() if not is_lazy(buffer)]
    try:
        _forward(model, inputs)
    except (UserError, MemoryError):
        raise
    except Exception as error:
        raise UserError(
            f"{place_of(error, None)}: {name} has lazy layers, and the forward of {_SAMPLES} samples that gives them "
            f"their parameters raised {in_one_line(error)}"
        ) from error
    state.put_back_modes()
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
    if left := lazy_parts(model):
        raise UserError(
            f"{name}: no forward gives {left[0]} its values, so it cannot be trained; let forward use this lazy layer, "
            "or leave it out"
        )


def own_memory(model: nn.Module) -> None:
    """Give each buffer memory for every element, where one number stands for several (`expand`).

    Nothing could be written to it, as a resume and a broadcast do. Raises UserError for such a parameter, and for such
    a view of a parameter, which would follow the parameter no more.
    """
    memory = {each.untyped_storage().data_ptr() for each in model.parameters() if not is_lazy(each)}
    owned: dict[int, Tensor] = {}
    for path, layer in model.named_modules():
        for name, tensor in [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]:
            if is_lazy(tensor) or tensor.layout is not torch.strided:
                continue
            if not any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
                continue
            if isinstance(tensor, nn.Parameter) or tensor.untyped_storage().data_ptr() in memory:
                raise UserError(
                    f"{f'{path}.{name}' if path else name}: one number of a parameter stands for several elements, as "
                    "`expand` makes it, and could not be trained so: clone() it, or expand it in forward"
                )
            setattr(layer, name, owned.setdefault(id(tensor), tensor.clone(memory_format=torch.contiguous_format)))


def fill_tables(model: nn.Module, experiment: Experiment, splits: Splits) -> None:
    """Let buffers that a first forward fills, with what depends on no micro-batch, be filled now.

    That is so where forwards of different samples fill them with the same, and the next forward leaves them. Anything
    else that a forward changes in buffers is as before, and for the reduction to judge.
    """
    before = _digests_of_buffers(model)
    if not before and all(buffer is not None for layer in model.modules() for buffer in buffers_of(layer).values()):
        return
    device, size = next(model.parameters()).device, experiment.micro_batch or _SAMPLES
    start = ForwardState(model)
    with generators_kept(device):
        try:
            one, other = (
                map_tensors(lambda tensor: tensor.to(device), _inputs(experiment, splits, place, size))
                for place in (0, size)
            )
            first = _buffers_after(model, one)
            is_table = first != before
            if is_table:
                start.put_back()
                # First other samples, as if they had come first; then those of before, which must change nothing more.
                is_table = _buffers_after(model, other) == first
                is_table = is_table and _buffers_after(model, one) == first
        except Exception:  # training meets it, too, and says on which rank
            is_table = False
    if is_table:
        start.put_back_modes()
    else:
        start.put_back()


def lines_about(model: nn.Module) -> list[str]:
    """A line for each parameter and buffer: its name, shape, type, and whether it is trained."""
    lines = []
    for name, tensor in _tensors_of(model):
        left_alone = "" if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else ", not trained"
        lines.append(f"{name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{left_alone}")
    return lines


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter, then every buffer, by name."""
    return chain(model.named_parameters(), model.named_buffers())


def _inputs(experiment: Experiment, splits: Splits, first: int, count: int) -> Tree:
    """The inputs of `count` samples from number `first` on, as training has them."""
    loader = Loader(splits.train, splits.augmentation, experiment.seed, collate=splits.collate)
    samples = splits.trained
    with generators_kept():
        return loader.fetch(0, np.arange(first, first + min(count, samples), dtype=np.int64) % samples)[0]


@torch.no_grad()
def _forward(model: nn.Module, inputs: Tree) -> None:
    model.eval()
    with user_code("your model"):
        call(model, inputs)


def _buffers_after(model: nn.Module, inputs: Tree) -> dict[str, str]:
    _forward(model, inputs)
    return _digests_of_buffers(model)


def _digests_of_buffers(model: nn.Module) -> dict[str, str]:
    """The digest of each buffer by name, without those of batch norm that the reduction looks after."""
    buffers = ForeignBuffers(model)
    buffers.begin([layer for layer in model.modules() if isinstance(layer, BatchNorm)])
    return dict(buffers.digests)
