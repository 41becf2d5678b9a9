"""Runs functions in processes of their own, where devices are played by `tests.support.standin_cuda`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.processes import ask, run_processes
from tests.support.standin_cuda import install


def on_devices(count: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function(*arguments)` returns in a process with `count` devices. Raises AssertionError where it raises."""
    return ask(_alone, count, function, arguments)


def ranks_on_devices(count: int, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function(rank, world_size, *arguments)` returns in so many processes on one machine, by rank."""
    return run_processes(_rank, world_size, count, function, arguments)


def _alone(count: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    install(count)
    return function(*arguments)


def _rank(rank: int, world_size: int, count: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    install(count)
    return function(rank, world_size, *arguments)
