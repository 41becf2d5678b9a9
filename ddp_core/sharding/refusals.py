"""Which models fully_shard cannot wrap, in one line each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from ddp_core.base.errors import UserError


def refusal(reason: str) -> UserError:
    """The UserError (2) for a model that fully_shard cannot wrap for this reason."""
    return UserError(f"the parameters of this model cannot be sharded: {reason}; or use shard mode gradients")


def refuse_unsuitable(module: nn.Module) -> None:
    """Raise UserError (2) where a parameter cannot be cut between rows."""
    for name, parameter in module.named_parameters():
        if not parameter.dim():
            raise refusal(f"{name} is a single number, which cannot be cut: give it the shape [1]")
        if not parameter.is_contiguous():
            raise refusal(f"{name} does not lie row by row in memory: leave out memory_format")


@contextlib.contextmanager
def refusing_bypasses() -> Iterator[None]:
    """Raise UserError (2) where a forward inside uses parameters of a block that it does not call.

    Nothing but the call gathers them.
    """
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise refusal(
            "its forward uses the parameters of a module in a ModuleList or Sequential without calling that module"
        ) from error
