"""Buffers that forward changes and nobody looks after: a counter, a moving average, a power iteration.

Such a change happens once per micro-batch of one rank or replica, so it cannot be the same on every layout.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from ddp_core.base.digests import weights_digest
from ddp_core.base.torch_internals import buffers_of, writes_to

from .batch_statistics import LOOKED_AFTER
from .refusal import DependsOnLayout


class ForeignBuffers:
    """Finds out, in every step, which buffers of a module the step's forwards and backwards have changed.

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
