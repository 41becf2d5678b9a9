"""The user's code in a run: the experiment's file and the modules that it imports; collected, kept, compared, served.

RUN/source/ holds a copy of each file. A file below the experiment's folder keeps its place relative to the experiment,
and a module from elsewhere has the place that its name gives it: `nets.big` is `nets/big.py`. So no path of the machine
is in the copy, and equal code has equal places on all nodes.

Code that an installation brings is recorded by its version instead: the standard library, site-packages, ddp_core with
its experiments, and ddp_lab.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path, PurePosixPath
from types import CodeType, ModuleType
from typing import Any

from ddp_core.base.beneath import make_folder_beneath, read_file
from ddp_core.base.errors import UserError
from ddp_core.base.files import replace_file, sync
from ddp_core.base.refusals import refused
from ddp_core.experiment.file import INSTALLED, LoadedExperiment, Served

FOLDER = "source"
_INSTALLED_FOLDERS = {"site-packages", "dist-packages"}
_SHOWN_LINES = 20


@dataclass(frozen=True)
class Source:
    """The user's files: which they are, and what is in them. A place is a path within the folder of the copies."""

    experiment: str
    """The place of the experiment's file."""
    texts: Mapping[str, bytes]
    """The contents of the files by place."""
    modules: Mapping[str, str]
    """The places of the imported modules, by full module name."""
    unreadable: tuple[str, ...] = ()
    """Imported modules whose file is gone or cannot be read."""

    @property
    def files(self) -> dict[str, str]:
        """The SHA-256 of each file by its place."""
        return {place: hashlib.sha256(text).hexdigest() for place, text in sorted(self.texts.items())}

    def to_json(self, folder: str) -> dict[str, Any]:
        """The `source` of run.json, for a copy that is kept in `folder`."""
        return {
            "folder": folder,
            "experiment": self.experiment,
            "files": self.files,
            "modules": dict(sorted(self.modules.items())),
            "unreadable": list(self.unreadable),
        }

    def write(self, folder: Path) -> None:
        """Copy the files into a folder; they are on the disk when this returns. Raises UserError (4)."""
        try:
            for place, text in self.texts.items():
                _make_folders((folder / place).parent, folder.parent)
                replace_file(folder / place, text, durable=True, root=folder.parent)
        except OSError as error:
            raise refused(error) from None


def _make_folders(folder: Path, root: Path) -> None:
    """Make the folder, and those above it up to `root`, so that they survive a power cut. Raises OSError."""
    if folder != root:
        _make_folders(folder.parent, root)
        make_folder_beneath(folder, root)
        sync(folder.parent)


def collect(loaded: LoadedExperiment) -> Source:
    """The experiment's file as it was run, and the files of all modules of the user that it has imported until now.

    A module counts if it was imported after the experiment's file was begun, or if it lies below the file's folder.
    Compiled extensions and the program that was started (`__main__`) do not count.
    """
    folder = loaded.path.resolve().parent
    texts: dict[str, bytes] = {loaded.path.name: loaded.source.encode()}
    modules: dict[str, str] = {}
    unreadable = []
    for name, file in _users_modules(loaded, folder):
        try:
            text = file.read_bytes()
        except OSError:
            unreadable.append(name)
            continue
        below = _below(file, folder)
        if below is not None:
            place = below.as_posix()
        else:
            place = name.replace(".", "/") + ("/__init__.py" if file.name == "__init__.py" else ".py")
        if file.resolve() == loaded.path.resolve():
            place, text = loaded.path.name, texts[loaded.path.name]
        while texts.get(place, text) != text:
            place = f"elsewhere/{place}"
        texts[place] = text
        modules[name] = place
    return Source(loaded.path.name, texts, modules, tuple(sorted(unreadable)))


def _users_modules(loaded: LoadedExperiment, folder: Path) -> Iterator[tuple[str, Path]]:
    """The names and files of the modules that `collect` counts."""
    # Modules stand in sys.modules in the order of their imports. A worker that is forked from its launcher has what the
    # launcher imported, but loads the experiment's file again; the file's module then keeps its first place.
    own = loaded.namespace.get("__name__", "")
    begun = own not in sys.modules
    packages: dict[str, bool] = {}
    for name, module in list(sys.modules.items()):
        begun = begun or name == own
        if name in (own, "__main__", "__mp_main__"):
            continue
        # A module is installed, too, if its outermost package is: torch writes modules of its own to /tmp. The package
        # is asked first, because that is quick: of a thousand modules, most belong to a few packages.
        package = name.partition(".")[0]
        if package not in packages:
            outermost = _file_of(sys.modules.get(package))
            packages[package] = outermost is not None and _is_installed(outermost)
        if packages[package]:
            continue
        file = _file_of(module)
        if file is None or _is_installed(file):
            continue
        if begun or _below(Path(file), folder) is not None:
            yield name, Path(file)


def _file_of(module: ModuleType | None) -> str | None:
    """The module's source file; None for built-in modules, extensions and namespace packages, which have none."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py"):
        return None
    return os.path.abspath(file)  # noqa: PTH100  (resolve() would follow links out of the user's folder)


@cache
def _is_installed(file: str) -> bool:
    path = Path(file)
    return _lies_installed(path) or _lies_installed(path.resolve())


def _lies_installed(path: Path) -> bool:
    return not _INSTALLED_FOLDERS.isdisjoint(path.parts) or any(map(path.is_relative_to, _installed_folders()))


@cache
def _installed_folders() -> tuple[Path, ...]:
    """The folders of the standard library, of ddp_core with its experiments, and of ddp_lab."""
    package = Path(__file__).parents[1]
    library = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    paths = [*library, package, package.with_name("ddp_lab"), INSTALLED]
    return tuple({resolved for path in paths for resolved in (path, path.resolve())})


def _below(file: Path, folder: Path) -> Path | None:
    """The file's path relative to the folder, None where it lies elsewhere."""
    return next((path.relative_to(folder) for path in (file, file.resolve()) if path.is_relative_to(folder)), None)


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
    sys.meta_path.insert(0, _finder(served))


@contextmanager
def kept_modules(served: Served) -> Iterator[None]:
    """Within the block, import these modules from their copies, even where others of the same name are loaded.

    Afterwards sys.modules and sys.path are as before, so that runs with unlike code can be loaded one after the other.
    Raises UserError.
    """
    finder, path = _finder(served), list(sys.path)
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


def _finder(served: Served) -> _KeptModules:
    return _KeptModules({name: Path(served.folder) / _inside(place) for name, place in served.modules.items()})


class _KeptModules(MetaPathFinder):
    """Finds modules in their copies, by full module name."""

    def __init__(self, places: Mapping[str, Path]) -> None:
        self._places = places

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
    return [place for place in sorted({*before, *now}) if not _is_same_code(before.get(place), now.get(place))]


def _is_same_code(one: bytes | None, other: bytes | None) -> bool:
    if one == other:
        return True
    if one is None or other is None:
        return False
    try:
        return ast.dump(ast.parse(one)) == ast.dump(ast.parse(other))
    except (SyntaxError, ValueError):
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
