"""The data file of a checkpoint while it is written, and the points of a save."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from ddp_core.base.files import NewFile

POINTS = (
    "data opened",
    "data partly written",
    "data written",
    "data synced",
    "data renamed",
    "manifest opened",
    "manifest written",
    "manifest synced",
    "manifest renamed",
    "directory synced",
    "latest synced",
    "latest renamed",
    "best synced",
    "best renamed",
    "old manifest removed",
    "old data removed",
)
"""The points of a save, in order. A `Checkpointer(at=…)` calls `at(point)` right after each; tests kill it there."""

POINTS_OF_PARTS = ("parts reported", "outcome told")
"""Two more points where several ranks save together: one after "data renamed", and the last of all."""

At = Callable[[str], None]
"""Called with the name of a point."""


class DataFile(NewFile):
    """A NewFile that is hashed while `torch.save` writes into it.

    The first OSError of a `write` is kept for `raise_write_error`, because `torch.save` would replace it by a message
    about "unexpected pos".
    """

    def __init__(self, target: Path, root: Path | None = None) -> None:
        super().__init__(target, root)
        self.written = 0
        self.on_first_write: Callable[[], None] | None = None
        self._digest = hashlib.sha256()
        self._error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Append `data`, unless a `write` has failed before; return its length in bytes."""
        view = memoryview(data).cast("B")
        if self._error is None:
            self._digest.update(view)
            try:
                super().write(view)
            except OSError as error:
                self._error = error
            self.written += len(view)
            if self.on_first_write is not None:
                self.on_first_write()
                self.on_first_write = None
        return len(view)

    def flush(self) -> None:
        """Do nothing, as nothing is buffered here; `torch.save` needs the method."""

    def raise_write_error(self) -> None:
        """Raise the OSError of a `write`, if there was one."""
        if self._error is not None:
            raise self._error

    @property
    def sha256(self) -> str:
        """Hexadecimal digest of everything written so far."""
        return self._digest.hexdigest()
