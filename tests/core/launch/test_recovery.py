"""Which recovery a request gets, where the user leaves the choice to the launcher."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddp_core import Callback
from ddp_core.cli.prepare import load_with_settings
from ddp_core.config.layout import Layout
from ddp_core.config.options import Options
from ddp_core.experiment.request import Evaluated, Request
from ddp_core.launch.launch import with_recovery

EVALUATED = Evaluated("a run", "/a/run", 5, None, False)


def request(
    device: str = "cpu", shard: str = "none", nproc_per_node: int = 2, dealt: tuple[int, ...] = (), **options: object
) -> Request:
    layout = Layout(kind="ddp", device=device, shard=shard, nproc_per_node=nproc_per_node, dealt=dealt)
    return Request(load_with_settings("toy_mlp", ()), layout, Options(**{"reduction": "exact", **options}))


def chosen(asked: Request, most_nodes: int = 1) -> str:
    return with_recovery(asked, most_nodes).options.recovery


@pytest.mark.parametrize(
    "asked",
    [
        request(device="cuda"),
        request(shard="optimizer"),
        request(nproc_per_node=1),
        request(dealt=(3, 1)),
        request(reduction="plain"),
        request(max_restarts=0),
        request(recovery="restart"),
        replace(request(), evaluated=EVALUATED),
    ],
    ids=["on-gpus", "shards", "alone", "unlike shares", "plain", "no-restarts", "asked for", "evaluation"],
)
def test_the_others_go_on_unless_they_cannot(asked: Request) -> None:
    assert chosen(asked) == "restart"
    assert chosen(request()) == chosen(request(nproc_per_node=1), most_nodes=2) == "live"


def test_all_start_again_with_callbacks() -> None:
    asked = request()
    loaded = replace(asked.loaded, namespace={**asked.loaded.namespace, "callbacks": [Callback()]})
    assert chosen(replace(asked, loaded=loaded)) == "restart"
    wanted = replace(asked, loaded=loaded, options=asked.options.model_copy(update={"recovery": "live"}))
    assert chosen(wanted) == "live"
