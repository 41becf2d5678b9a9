"""What is loaded where it is asked for: packages that may be missing, by the extra that installs them, and functions.

An extra is a list of packages in pyproject.toml: `pip install 'samebits[report]'`. Whoever needs such a package asks
`require` first; whatever a command meets unasked, `missing_extra` puts into the same words.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ddp_core.base.errors import UserError

EXTRAS: Mapping[str, Mapping[str, str]] = {
    "digits": {"sklearn": "scikit-learn"},
    "vision": {"torchvision": "torchvision"},
    "yaml": {"yaml": "pyyaml"},
    "s3": {"s3fs": "s3fs"},
    "tensorboard": {"tensorboard": "tensorboard"},
    "lab": {"ddp_lab": "samebits-lab"},
    "report": {"jinja2": "jinja2", "matplotlib": "matplotlib"},
    "cluster": {"docker": "docker"},
}
"""By extra, the modules that are asked for, each with the package that brings it."""


class Functions(dict[str, Any]):
    """Functions by name; one that is given as its module's name is loaded when it is asked for."""

    def __getitem__(self, name: str) -> Any:
        place = super().__getitem__(name)
        return getattr(import_module(place), name) if isinstance(place, str) else place


def require(what: str, extra: str, *modules: str) -> None:
    """Raises UserError where one of these modules of the extra, or of all its modules, is missing."""
    if (line := missing(what, extra, *modules)) is not None:
        raise UserError(line)


def missing(what: str, extra: str, *modules: str) -> str | None:
    """The line that says which packages `what` needs, and how to install them; None where all are there."""
    packages = EXTRAS[extra]
    names = [packages[module] for module in modules or packages if find_spec(module) is None]
    return needs(what, extra, *names) if names else None


def missing_extra(error: BaseException) -> UserError | None:
    """The UserError where an import has failed because an extra is not installed; None for any other exception."""
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        module = error.name.partition(".")[0]
        for extra, packages in EXTRAS.items():
            if module in packages:
                return UserError(needs("this", extra, packages[module]))
    return None


def needs(what: str, extra: str, *packages: str) -> str:
    """The line itself."""
    *more, last = packages
    return f"{what} needs {', '.join(more)}{' and ' if more else ''}{last}: pip install 'samebits[{extra}]'"
