"""Parameters that forward or backward writes to: a clamp, a projection, `nn.Embedding(max_norm=…)`.

What a pass writes stays, so the passes after it see it, in the same process alone. A write that ends with the same
values in every micro-batch, such as a clamp, does no harm: after the first micro-batch of a step nothing is left to
change. Any other one depends on which micro-batches a process runs.
"""

from __future__ import annotations

from torch import Tensor, nn

from ddp_core.base.digests import checksum
from ddp_core.base.torch_internals import writes_to

from .refusal import DependsOnLayout

MAX_NORM = (
    "max_norm scales the rows that a micro-batch looks up: leave it out, and scale all rows in a parametrization "
    "(torch.nn.utils.parametrize) or, after the update, in a callback of all ranks"
)


class WrittenParameters:
    """Finds out which parameters of a module the micro-batches of a step write to, trained or not.

    torch counts the writes to a tensor, which costs nothing to look at; values are compared where the count has moved.
    Writes through `.data` are not counted. They are seen in steps that are compared by values. `passes`: what a message
    calls them.
    """

    def __init__(self, module: nn.Module, passes: str = "micro-batch") -> None:
        # What cuts parameters among ranks (DTensor) looks after them itself.
        named = [(name, each) for name, each in module.named_parameters() if type(each.detach()) is Tensor]
        self._module, self._names, self._passes = module, [name for name, _ in named], passes
        self.parameters = [parameter for _, parameter in named]
        self.begin()

    def begin(self, by_values: bool = False) -> None:
        """Start a step, of several micro-batches if it is to be compared by values."""
        self._by_values = by_values
        self._writes = [writes_to(parameter) for parameter in self.parameters]
        self._first: dict[int, str] | None = None
        self.written: set[int] = set()
        """The positions of the parameters that the step's micro-batches have written to."""

    def refuse_changes(self, is_last: bool) -> None:
        """Call this after each micro-batch; `is_last`: after the last one of this process in the step.

        Raises DependsOnLayout where a parameter has other values than after this process's first micro-batch.
        """
        before, self._writes = self._writes, [writes_to(parameter) for parameter in self.parameters]
        everything = self._by_values and (is_last or self._first is None)
        if self._writes == before and not everything:
            self._first = {} if self._first is None else self._first
            return
        moved = [position for position, count in enumerate(self._writes) if count != before[position]]
        self.written.update(moved)
        looked_at = range(len(self.parameters)) if everything else moved
        sums = {position: checksum(self.parameters[position]) for position in looked_at}
        if self._first is None:
            self._first = sums
            return
        for position, found in sums.items():
            if self._first.get(position) != found:
                raise DependsOnLayout(
                    f"forward changes {self.named(position)} in one {self._passes} otherwise than in the one before "
                    f"it, so its values depend on the layout: {self.advice(position)}"
                )

    def named(self, position: int) -> str:
        """How a message calls a parameter."""
        return f"the parameter {self._names[position]}"

    def advice(self, position: int) -> str:
        """What to do about a parameter that forward changes."""
        layer = self._module.get_submodule(self._names[position].rpartition(".")[0])
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            return MAX_NORM
        return "change weights in the optimizer, or after the update in a callback of all ranks"
