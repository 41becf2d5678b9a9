"""Which optimizers treat each element of a parameter by itself, so that ranks may each update a part of it.

Torch's own are listed. One's own says so by `elementwise = True` on its class, and the rehearsal before a run proves it
by the bits of whole parameters.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import optim

from ddp_core.base.errors import UserError

_ELEMENTWISE = frozenset(
    {
        *(optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam),
        *(optim.RMSprop, optim.Rprop, optim.SGD),
    }
)
"""With all of their options, as fused kernels, for many parameters at once, and in a loop."""
_REASONS: Mapping[type[optim.Optimizer], str] = {
    optim.Adafactor: "it divides by norms of rows, columns and the whole of a parameter",
    optim.LBFGS: "it multiplies the gradients of all parameters with each other, in several passes of a step",
    optim.Muon: "it makes each matrix orthogonal, for which it multiplies the matrix with itself",
    optim.SparseAdam: "it takes sparse gradients alone, and those of shards are dense",
}


def require_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raise UserError (2) for an optimizer that needs more of a parameter than the element that it updates.

    A class that is derived from one of torch's has a rule of its own, so it must say what its rule is.
    """
    kind = type(optimizer)
    for known, reason in _REASONS.items():
        if issubclass(kind, known):
            raise UserError(
                f"{kind.__name__} does not treat each element by itself: {reason}; leave --shard out, or use SGD, "
                "Adam, AdamW, RMSprop, Adagrad and their like"
            )
    if kind not in _ELEMENTWISE and getattr(kind, "elementwise", False) is not True:
        raise UserError(
            f"{kind.__name__} does not say that it updates each element by itself, as --shard needs: where no "
            "element's update reads another one or a random number, write elementwise = True into its class (a "
            "rehearsal proves it); else leave --shard out"
        )
