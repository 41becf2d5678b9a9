"""The user's code in a run: the experiment's file and the modules that it imports; collected and kept.

RUN/source/ holds a copy of each file. A file below the experiment's folder keeps its place relative to the experiment,
and a module from elsewhere has the place that its name gives it: `nets.big` is `nets/big.py`. So no path of the machine
is in the copy, and equal code has equal places on all nodes.

Code that an installation brings is recorded by its version instead: the standard library, site-packages, ddp_core with
its experiments, and ddp_lab.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from ddp_core.base.beneath import make_folder_beneath
from ddp_core.base.files import replace_file, sync
from ddp_core.base.refusals import refused
from ddp_core.experiment.file import INSTALLED, LoadedExperiment

FOLDER = "source"
_INSTALLED_FOLDERS = {"site-packages", "dist-packages"}


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
