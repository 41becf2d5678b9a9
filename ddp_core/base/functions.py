"""Functions by name, of which some lie in modules that few programs need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Generic, TypeVar

Made = TypeVar("Made")


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
