"""What a step's forwards and backwards change beside gradients: flags, parameters, and buffers nobody looks after.

Such a change happens once per micro-batch of one rank or replica, and the passes after it see it in the same process
alone. So it cannot be the same on every layout, unless it ends with the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from ddp_core.base.digests import checksum, weights_digest
from ddp_core.base.torch_internals import buffers_of, writes_to

from .batch_statistics import LOOKED_AFTER

MAX_NORM = (
    "max_norm scales the rows that a micro-batch looks up: leave it out, and scale all rows in a parametrization "
    "(torch.nn.utils.parametrize) or, after the update, in a callback of all ranks"
)


class DependsOnLayout(ValueError):
    """The step just computed depends on the layout; says on what, and what to do."""


class TrainedParameters:
    """The flags `requires_grad` of a module's parameters as they were when this was made."""

    def __init__(self, module: nn.Module) -> None:
        self._names = [name for name, _ in module.named_parameters()]
        self._all = list(module.parameters())
        self._flags = [parameter.requires_grad for parameter in self._all]
        self.parameters = [parameter for parameter in self._all if parameter.requires_grad]
        """Those that are trained."""

    def changes(self) -> dict[str, bool]:
        """The names of parameters whose flag `requires_grad` has changed, each with its new value."""
        now = [parameter.requires_grad for parameter in self._all]
        if now == self._flags:
            return {}
        return {name: flag for name, flag, was in zip(self._names, now, self._flags, strict=True) if flag != was}

    def refuse_changes(self) -> None:
        """Raise DependsOnLayout where a flag has changed, naming the first parameter."""
        if changes := self.changes():
            raise DependsOnLayout(
                f"{describe_changes(changes)}, since this reduction was made: gradients would be lost or pile up, "
                "otherwise on each layout; set requires_grad between steps, with `ddp train` in a callback of all "
                "ranks, and in a loop of your own make the reduction, and DistributedDataParallel, anew afterwards"
            )


def describe_changes(changes: dict[str, bool]) -> str:
    """What is trained or frozen now, in words."""
    words = []
    for flag, word in ((True, "trained"), (False, "frozen")):
        names = [name for name, now in changes.items() if now is flag]
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            words.append(f"{names[0]}{more} {'are' if more else 'is'} {word} now")
    return ", ".join(words)


class WrittenParameters:
    """Finds out which parameters of a module the micro-batches of a step write to, trained or not.

    A clamp, a projection, `nn.Embedding(max_norm=…)`. A write that ends with the same values in every micro-batch, such
    as a clamp, does no harm: after the first micro-batch of a step nothing is left to change. Any other one depends on
    which micro-batches a process runs.

    torch counts the writes to a tensor, which costs nothing to look at; values are compared where the count has moved.
    Writes through `.data` are not counted. They are seen in steps that are compared by values. `passes`: what a message
    calls them. `before_reading` is called before the host reads values from the device.
    """

    def __init__(
        self, module: nn.Module, passes: str = "micro-batch", before_reading: Callable[[], None] = lambda: None
    ) -> None:
        # What cuts parameters among ranks (DTensor) looks after them itself.
        named = [(name, each) for name, each in module.named_parameters() if type(each.detach()) is Tensor]
        self._before_reading = before_reading
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
        self._before_reading()
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


class ForeignBuffers:
    """Finds out, in every step, which buffers of a module have changed: a counter, a moving average, a power iteration.

    torch counts the writes to a tensor. Where the count of a buffer has moved, or another tensor has taken its place,
    the values decide, by a digest from the step's beginning: writing the same values again changes nothing. A digest is
    made anew only where a buffer was changed between steps. Not seen are writes that torch does not count: through
    `.data`, and those of a CUDA graph.
    """

    def __init__(self, module: nn.Module) -> None:
        self._layers = [
            (f"{path}." if path else "", layer, buffers_of(layer)) for path, layer in module.named_modules()
        ]
        self._looked_after: frozenset[nn.Module] = frozenset()
        self._known: dict[str, _Known] = {}

    @property
    def digests(self) -> Mapping[str, str]:
        """The digest of each buffer at the step's beginning, by name."""
        return {name: known.digest for name, known in self._known.items()}

    def begin(self, looked_after: Collection[nn.Module] = (), digests: Mapping[str, str] | None = None) -> None:
        """Start a step in which BatchStatistics looks after these layers.

        `digests` are those of a module whose buffers hold the same values.
        """
        self._looked_after = frozenset(looked_after)
        before, self._known = self._known, {}
        for name, buffer in self._now():
            known, writes = before.get(name), writes_to(buffer)
            if known is None or known.buffer is not buffer or known.writes != writes:
                digest = digests.get(name) if digests is not None else None
                known = _Known(buffer, writes, _digest(buffer) if digest is None else digest)
            self._known[name] = known

    def refuse_changed(self) -> None:
        """Raise DependsOnLayout where a buffer has changed since `begin`, naming the first."""
        changed = self._known.keys() - (now := dict(self._now())).keys()
        for name, buffer in now.items():
            known, writes = self._known.get(name), writes_to(buffer)
            if known is not None and known.buffer is buffer and known.writes == writes:
                continue
            if known is None or known.digest != _digest(buffer):
                changed.add(name)
            else:
                self._known[name] = _Known(buffer, writes, known.digest)
        if changed:
            raise DependsOnLayout(
                f"forward changes the buffer {min(changed)}, which depends on the layout: leave it as it is in "
                "training mode, or use plain reduction"
            )

    def _now(self) -> Iterator[tuple[str, Tensor]]:
        for prefix, layer, buffers in self._layers:
            if buffers:
                is_looked_after = layer in self._looked_after
                for name, buffer in buffers.items():
                    if buffer is not None and not (is_looked_after and name in LOOKED_AFTER):
                        yield prefix + name, buffer


@dataclass(slots=True)
class _Known:
    """A buffer, how often it had been written to, and the digest of its values then."""

    buffer: Tensor
    writes: int
    digest: str


def _digest(buffer: Tensor) -> str:
    return weights_digest({"": buffer.detach()})
