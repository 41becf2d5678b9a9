"""Ranks that run twice: each with a network link of a stated rate, and with links as fast as the machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.measuring import namespaces
from ddp_lab.claims.measuring.ranks import run_ranks


def on_links(
    setting: Setting, function: Callable[..., Any], ranks: int, rounds: int, fewer: int, megabits: int, *arguments: Any
) -> dict[str, Any]:
    """What rank 0 returns from `function(rank, world_size, device, rounds, *arguments)`: `judged`, and `unshaped`.

    On CUDA, where each rank has a device of its own, the links are those between the devices: only `judged`. On CPU
    `unshaped` is measured in `fewer` rounds over the loopback interface, where bytes travel as fast as the cores copy
    them, and `judged` over links of `megabits` Mbit/s, each rank in a network namespace of its own; None where
    namespaces cannot be made.
    """
    device = setting.device_type(ranks)
    found: dict[str, Any] = {"device": device, "ranks": ranks, "megabits": megabits, "judged": None, "unshaped": None}
    if device == "cuda":
        return found | {"judged": run_ranks(function, ranks, device, rounds, *arguments, device=device, timeout=400)[0]}
    setting.say(f"{ranks} processes, links as fast as the machine")
    found["unshaped"] = run_ranks(function, ranks, device, fewer, *arguments, timeout=400)[0]
    if namespaces.available():
        setting.say(f"{ranks} processes, each with a link of {megabits} Mbit/s")
        with namespaces.joined(ranks):
            for node in range(ranks):
                namespaces.slow_down(node, megabits)
            found["judged"] = run_ranks(function, ranks, device, rounds, *arguments, own_nodes=True, timeout=600)[0]
    return found
