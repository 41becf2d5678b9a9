"""The code that a run has kept: read, compared with today's, and served in the place of it.

`ddp_core.experiment.source` says what is kept, and where.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path, PurePosixPath
from types import CodeType, ModuleType
from typing import Any

from ddp_core.base.beneath import read_file
from ddp_core.base.errors import UserError
from ddp_core.experiment.file import Served
from ddp_core.experiment.source import Source

_SHOWN_LINES = 20


def read_source(directory: Path, recorded: Mapping[str, Any]) -> Source:
    """The files kept in a run's directory, as `recorded`, the `source` of its run.json, names them.

    Raises UserError where a file is missing, or is not the one that was recorded.
    """
    folder, texts = directory / _inside(recorded["folder"]), {}
    for place, digest in recorded["files"].items():
        file = folder / _inside(place)
        try:
            texts[place] = read_file(file)
        except OSError as error:
            raise UserError(f"{file} cannot be read ({error.strerror}): it is the code that the run trained") from None
        if hashlib.sha256(texts[place]).hexdigest() != digest:
            raise UserError(f"{file} was changed after the run had kept it: it is not the code that the run trained")
    if recorded["experiment"] not in texts:
        raise UserError(f"{directory}/run.json names {recorded['experiment']} as the experiment, but no digest of it")
    return Source(recorded["experiment"], texts, recorded["modules"], tuple(recorded["unreadable"]))


def _inside(place: str) -> str:
    """The place itself. Raises UserError for one that leads out of its folder: a record may come from a stranger."""
    path = PurePosixPath(place)
    if path.is_absolute() or ".." in path.parts:
        raise UserError(f"run.json names a source file outside of the run's directory: {place}")
    return place


def serve_modules(served: Served) -> None:
    """From now on, import these modules from their copies, whatever else lies on the path. Raises UserError."""
    sys.meta_path.insert(0, _KeptModules(served))


@contextmanager
def kept_modules(served: Served) -> Iterator[None]:
    """Within the block, import these modules from their copies, even where others of the same name are loaded.

    Afterwards sys.modules and sys.path are as before, so that runs with unlike code can be loaded one after the other.
    """
    finder, path = _KeptModules(served), list(sys.path)
    before = {name: sys.modules.pop(name) for name in served.modules if name in sys.modules}
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        sys.path[:] = path
        for name in served.modules:
            sys.modules.pop(name, None)
        sys.modules.update(before)


class _KeptModules(MetaPathFinder):
    """Finds modules in their copies, by full module name. Raises UserError for a copy outside of the folder."""

    def __init__(self, served: Served) -> None:
        self._places = {name: Path(served.folder) / _inside(place) for name, place in served.modules.items()}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self._places.get(fullname)
        if file is None:
            return None
        inner = [str(file.parent)] if file.name == "__init__.py" else None
        loader = _TextLoader(fullname, str(file))
        return spec_from_file_location(fullname, file, loader=loader, submodule_search_locations=inner)


class _TextLoader(SourceFileLoader):
    """Compiles what the file holds; compiled files beside it, which no digest covers, are neither read nor written."""

    def get_data(self, path: str) -> bytes:
        return read_file(Path(path))

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def changed_files(before: Mapping[str, bytes], now: Mapping[str, bytes]) -> list[str]:
    """The places whose code differs between two sets of files; other comments and line breaks do not count."""
    changed = [place for place in sorted({*before, *now}) if before.get(place) != now.get(place)]
    return [place for place in changed if not (place in before and place in now and _same(before[place], now[place]))]


def _same(one: bytes, other: bytes) -> bool:
    with suppress(SyntaxError, ValueError):
        return ast.dump(ast.parse(one)) == ast.dump(ast.parse(other))
    return False


def diff(before: Source, now: Source) -> str:
    """The changed files as a unified diff, which begins each line with `-` (before) or `+` (now)."""
    parts: list[str] = []
    for place in changed_files(before.texts, now.texts):
        here, there = (source.texts.get(place, b"").decode(errors="replace").splitlines() for source in (now, before))
        parts += difflib.unified_diff(there, here, f"{place} (the run's)", f"{place} (now)", lineterm="", n=1)
    return "\n".join(parts)


def shortened(text: str) -> str:
    """The first lines of a diff, and how many were left out."""
    lines = text.splitlines()
    left_out = len(lines) - _SHOWN_LINES
    return "\n".join([*lines[:_SHOWN_LINES], *([f"… and {left_out} more lines"] if left_out > 0 else [])])
