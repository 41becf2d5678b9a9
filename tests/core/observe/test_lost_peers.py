"""Which rank is named when a collective times out: the silent one, not another rank that was left waiting."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddp_core.distributed.process_group import Collectives
from ddp_core.distributed.world import World
from ddp_core.observe import lost_peers
from ddp_core.observe.lost_peers import is_peer_loss, peers_lost


def test_ranks_that_wait_in_vain_name_the_silent_one_and_not_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_peers, "_SIGNING_SECONDS", 0.3)
    (tmp_path / "heartbeats").mkdir()
    # A rank writes its heartbeat at most once a second. So the paused rank 0 may have the youngest of the three.
    for rank, age in ((0, 10.2), (1, 10.5), (2, 10.9)):
        beat = {"rank": rank, "node_rank": rank, "host": f"host-{rank}", "address": "10.0.0.1", "pid": 1, "step": 7}
        text = json.dumps(beat | {"time": time.time() - age})
        (tmp_path / "heartbeats" / f"rank-{rank}.json").write_text(text)
    said: dict[int, str] = {}

    def lose(rank: int) -> None:
        error = RuntimeError("Timed out waiting 10000ms for recv operation to complete")
        said[rank] = str(peers_lost(error, tmp_path, World(rank, 3, node_rank=rank), 8))

    waiting = [threading.Thread(target=lose, args=(rank,)) for rank in (1, 2)]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join()
    assert all("lost rank 0 (node 0), silent for 1" in line for line in said.values())
    assert said.keys() == {1, 2}


@pytest.mark.parametrize("place", lost_peers._COLLECTIVES, ids=lambda place: place.name)
def test_every_place_where_collectives_run_is_there_and_counts(place: Path) -> None:
    assert place.exists()
    with pytest.raises(RuntimeError) as lost:
        exec(compile("raise RuntimeError('Connection reset by peer')", str(place), "exec"))
    assert is_peer_loss(lost.value)


def test_the_words_of_a_lost_peer_count_only_where_collectives_run() -> None:
    words = "Connection closed by peer [127.0.0.1]:1234"

    class Gone:
        def wait(self) -> None:
            exec(compile(f"raise RuntimeError({words!r})", torch.distributed.__file__, "exec"))

    with pytest.raises(RuntimeError) as lost:
        Collectives(World(0, 2), torch.device("cpu")).finish_sum(Gone())  # type: ignore[arg-type]
    assert is_peer_loss(lost.value)
    with pytest.raises(RuntimeError) as elsewhere:
        raise RuntimeError(words)
    assert not is_peer_loss(elsewhere.value)
    assert not is_peer_loss(RuntimeError(words))
    assert is_peer_loss(dist.DistNetworkError(words)), "torch.distributed's own kind"
