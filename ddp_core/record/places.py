"""What a user names where weights are wanted: a run directory, a checkpoint of a run, or a bundle. Loads no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.files import is_file, is_there
from ddp_core.record.bundles import ChangedBundle, unpack_bundle
from ddp_core.record.directory import RunDirectory

_CHECKPOINT = "step-"
"""How the names of a checkpoint's files begin."""


class Place(NamedTuple):
    """A run, and of it the one checkpoint that was named."""

    run: RunDirectory
    name: str
    """The name of the run's directory, or of the bundle without its suffix."""
    checkpoint: Path | None = None
    """The manifest or a data file."""


@contextmanager
def place_named(named: str | os.PathLike[str]) -> Iterator[Place]:
    """The run and the checkpoint that a path means; a bundle is checked, and unpacked for the block.

    Raises UserError where the path means nothing of the kind, and (3) for a bundle that was changed.
    """
    from ddp_core.remote import brought

    path = brought(named)
    if path.is_dir():
        yield Place(RunDirectory(path.absolute()), path.absolute().name)
    elif not is_file(path):
        raise UserError(f"{path} is not there; give a run directory, a checkpoint of a run, or a bundle")
    elif path.name.startswith(_CHECKPOINT):
        run = RunDirectory(path.absolute().parents[1])
        if not is_there(run.path / "run.json"):
            raise UserError(
                f"{path} lies in no run directory, so nothing tells which model its weights are of; "
                "ddp_core.load reads it without a model"
            )
        yield Place(run, run.path.name, path)
    else:
        with TemporaryDirectory(prefix="ddp-bundle-") as folder:
            try:
                unpack_bundle(path, Path(folder))
            except ChangedBundle as changed:
                raise UserError(f"{path}: {changed}; get the bundle anew", ExitCode.NO_CHECKPOINT) from None
            yield Place(RunDirectory(Path(folder)), path.stem)
