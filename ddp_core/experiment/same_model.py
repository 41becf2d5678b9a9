"""Whether all ranks have built the same model: the same parameters and buffers, in the same sequence."""

from __future__ import annotations

from itertools import chain, zip_longest

from torch import nn

from ddp_core.base.errors import UserError
from ddp_core.distributed.process_group import Collectives


def require_same_model(collectives: Collectives, model: nn.Module) -> None:
    """Raises UserError on every rank, with the first difference, where a rank has built another model than rank 0.

    Names, shapes, types, and what is trained are compared; the values are not.
    """
    seen = collectives.gather(_tensors_of(model))
    for rank, theirs in enumerate(seen):
        for ours, other in zip_longest(seen[0], theirs, fillvalue="nothing more"):
            if ours != other:
                raise UserError(
                    f"rank {rank} has built another model than rank 0: {other}, where rank 0 has {ours}; every rank "
                    "trains the same model, so let its builder not depend on RANK, the machine, or the time"
                )


def _tensors_of(model: nn.Module) -> list[str]:
    """A line about each parameter and buffer."""
    return [
        f"{name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        f"{'' if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else ', not trained'}"
        for name, tensor in chain(model.named_parameters(), model.named_buffers())
    ]
