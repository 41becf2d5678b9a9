"""Functions by name: some lie in modules that few programs need, some in an object's own class."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, Generic, TypeVar

Made = TypeVar("Made")


def overrides(each: Any, base: type, name: str) -> bool:
    """Whether the object does something of its own in this method of its base class."""
    return getattr(getattr(each, name), "__func__", None) is not getattr(base, name)


class Functions(Mapping[str, Callable[..., Made]], Generic[Made]):
    """A mapping whose values are functions; one that is given as its module's name is loaded when it is asked for."""

    def __init__(self, places: Mapping[str, Callable[..., Made] | str]) -> None:
        self._places = places

    def __getitem__(self, name: str) -> Callable[..., Made]:
        place = self._places[name]
        function: Callable[..., Made] = getattr(import_module(place), name) if isinstance(place, str) else place
        return function

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
