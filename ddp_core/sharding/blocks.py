"""Which modules of a sharded model are gathered and freed as one, and which models fully_shard cannot wrap."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from ddp_core.base.errors import UserError
from ddp_core.base.torch_internals import has_hooks, writes_to
from ddp_core.reduction.refusal import DependsOnLayout

FEWEST_ELEMENTS = 64 * 1024
"""A block with fewer elements costs more in messages than its memory is worth."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def blocks_of(module: nn.Module, fewest_elements: int = FEWEST_ELEMENTS) -> list[nn.Module]:
    """The blocks of a model, in the sequence of its modules: the repeated parts that deep models are made of.

    A block is a module that stands in a ModuleList, a ModuleDict or a Sequential, is none of these itself, has
    `fewest_elements` elements or more, and shares no parameter with a module outside of it. Blocks do not lie within
    blocks. What belongs to no block stays with the model itself, which is gathered for the whole of a pass.
    """
    uses, found = _uses(module), list[nn.Module]()
    places = Counter(part for _, part in module.named_modules(remove_duplicate=False))

    def descend(parent: nn.Module) -> None:
        for child in parent.children():
            if not isinstance(parent, _CONTAINERS) or isinstance(child, _CONTAINERS):
                descend(child)
            elif child not in found and _elements(child) >= fewest_elements:
                inside = _uses(child)
                if all(count * places[child] == uses[parameter] for parameter, count in inside.items()):
                    found.append(child)

    descend(module)
    return found


def _uses(module: nn.Module) -> Counter[nn.Parameter]:
    """In how many parts of the module each parameter is registered; a part may stand in two places."""
    parts = (part for _, part in module.named_modules(remove_duplicate=False))
    own = (part.named_parameters(recurse=False) for part in parts)
    return Counter(parameter for parameters in own for _, parameter in parameters)


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def refusal(reason: str) -> UserError:
    """The UserError (2) for a model that fully_shard cannot wrap for this reason."""
    return UserError(f"the parameters of this model cannot be sharded: {reason}; or use shard mode gradients")


def refuse_unsuitable(module: nn.Module) -> None:
    """Raise UserError (2) where a parameter cannot be cut between rows, or has a hook that its rows would lack."""
    for name, parameter in module.named_parameters():
        if not parameter.dim():
            raise refusal(f"{name} is a single number, which cannot be cut: give it the shape [1]")
        if not parameter.numel():
            raise refusal(f"{name} has no elements, so there is nothing to cut: leave it out")
        if not parameter.is_contiguous():
            raise refusal(f"{name} does not lie row by row in memory: leave out memory_format")
        if has_hooks(parameter):
            raise refusal(f"{name} has a hook on its gradient, which the parameter in its place would not have")


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


class WholeParameters:
    """Whole parameters that nothing is kept of: those `gathered` for a pass, and those `replaced` when ranks cut them.

    What something writes to them is lost, as is a change of their `requires_grad`. Writes through `.data` are not seen.
    """

    def __init__(self, gathered: Mapping[str, Tensor], replaced: Mapping[str, Tensor]) -> None:
        both = [*gathered.items(), *replaced.items()]
        # Whoever holds a parameter that was replaced is looked at; this object must not hold it.
        self._named = [(name, weakref.ref(tensor)) for name, tensor in both]
        self._before = self._now()

    def refuse_changes(self) -> None:
        """Raise UserError (2) where something outside of a pass has changed one of them."""
        if (name := self._changed()) is not None:
            raise refusal(
                f"{name} was changed outside of forward where nothing keeps it: in a list of parameters from before "
                "they were cut, or right after a forward of a callback; take parameters from the model when you "
                "change them, before such a forward"
            )

    @contextlib.contextmanager
    def exact_pass(self) -> Iterator[None]:
        """`refusing_bypasses`, and raise DependsOnLayout where the pass inside changes one of them."""
        self.refuse_changes()
        with refusing_bypasses():
            yield
        if (name := self._changed()) is not None:
            self._before = self._now()  # said once, of the pass that has done it
            raise DependsOnLayout(
                f"forward changes the parameter {name}, which shard mode parameters frees after each pass, so the "
                "change would be lost: change weights in the optimizer, or use shard mode gradients"
            )

    def _changed(self) -> str | None:
        pairs = zip(self._named, self._now(), self._before, strict=True)
        return next((name for (name, _), now, before in pairs if now is not None and now != before), None)

    def _now(self) -> list[tuple[int, bool] | None]:
        alive = (tensor() for _, tensor in self._named)
        return [None if tensor is None else (writes_to(tensor), tensor.requires_grad) for tensor in alive]
