"""Which rank is named when a collective times out: the silent one, not another rank that was left waiting."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddp_core.base.errors import ExitCode
from ddp_core.base.torch_internals import TorchDispatchMode
from ddp_core.distributed.process_group import Collectives
from ddp_core.distributed.world import World
from ddp_core.experiment.blame import shortage, unforeseen
from ddp_core.observe import lost_peers
from ddp_core.observe.lost_peers import is_peer_loss, peers_lost, short_message
from tests.core.observe.test_heartbeat import beat
from tests.support.wording import refusing, said_as_before


def test_ranks_that_wait_in_vain_name_the_silent_one_and_not_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_peers, "_RENEWING_SECONDS", 0.3)
    # A rank writes its heartbeat at most once a second. So the paused rank 0 may have the youngest of the three.
    for rank, age in ((0, 10.2), (1, 10.5), (2, 10.9)):
        beat(tmp_path, rank, age, host=f"host-{rank}", pid=1, time=0.0)
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

    class Looks(TorchDispatchMode):
        """A mode through which a collective is called."""

        def __torch_dispatch__(self, *words_of_it: object) -> object:
            raise RuntimeError(words)

    with pytest.raises(RuntimeError) as lost, Looks():
        exec(compile("make()", torch.distributed.__file__, "exec"), {"make": lambda: torch.ones(2)})
    assert not is_peer_loss(lost.value), "the lambda is a caller that is none of them"
    with pytest.raises(RuntimeError) as lost, Looks():
        exec(compile("torch.ones(2)", torch.distributed.__file__, "exec"), {"torch": torch})
    assert is_peer_loss(lost.value)
    with pytest.raises(RuntimeError) as elsewhere:
        raise RuntimeError(words)
    assert not is_peer_loss(elsewhere.value)
    assert not is_peer_loss(RuntimeError(words))
    assert is_peer_loss(dist.DistNetworkError(words)), "torch.distributed's own kind"


NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, {}, NCCL version 2.27.5\n{}\n"
REMOTE = NCCL.format(
    "remote process exited or there was a network error",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
)
SYSTEM = NCCL.format(
    "unhandled system error (run with NCCL_DEBUG=INFO for details)",
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. ",
)
CUDA = NCCL.format(
    "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    "ncclUnhandledCudaError: Call to CUDA function failed.",
)
USAGE = NCCL.format(
    "invalid usage (run with NCCL_DEBUG=WARN for details)",
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
)
INTERNAL = NCCL.format("internal error", "ncclInternalError: Internal check failed.")
SHARED = "Error while creating shared memory segment /dev/shm/nccl-WU88OE (size 9637888)"
STACK = "\nException raised from create at /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268 (most recent …)"


@pytest.mark.parametrize(
    "text",
    [
        f"{REMOTE}Last error:\nsocketProgressOpt: Call to recv from 172.1.2.3<3> failed : Connection reset by peer",
        REMOTE,
        SYSTEM,
        f"{INTERNAL}Last error:\nNet : Connection closed by remote peer user<50260>{STACK}",
        "[PG ID 0 PG GUID 0 Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3) ran for 9",
        "NCCL met a REMOTE_ERROR while this rank waited for its device",
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [10.0.0.2]:5002: Connection reset by "
        "peer. This is typically caused by a remote worker hanging. GLHF!",
        "gloo: out of memory",
    ],
    ids=["socket", "remote", "system", "closed", "watchdog", "waited", "gloo", "gloo's memory"],
)
def test_what_nccl_says_of_a_lost_peer_is_one(text: str) -> None:
    error = dist.DistBackendError(text)
    assert is_peer_loss(error)
    assert shortage(error, "rank 1 (node 0)") is None
    said_as_before(short_message(error))


@pytest.mark.parametrize(
    "text",
    [
        f"{SYSTEM}Last error:\n{SHARED}{STACK}",
        f"{SYSTEM}Last error:\n{SHARED}, error: No space left on device (28)",
        f"{SYSTEM}Last error:\nCall to ibv_reg_mr failed",
        f"{CUDA}Last error:\nCuda failure 2 'out of memory'",
        f"{CUDA}Last error:\nFailed to CUDA calloc 6291456 bytes",
        f"{CUDA}Last error:\nCuda failure 999 'unknown error'",
        f"{USAGE}Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000",
    ],
    ids=["shared memory", "no space", "locked memory", "memory", "calloc", "driver", "one GPU"],
)
def test_what_nccl_says_of_this_machine_is_a_lack_of_something(text: str) -> None:
    error = dist.DistBackendError(text)
    assert not is_peer_loss(error)
    found = shortage(error, "rank 1 (node 0)")
    assert found is not None
    with refusing():
        raise found


@pytest.mark.parametrize("text", [f"{USAGE}Last error:\ninvalid root", INTERNAL])
def test_what_nccl_says_of_a_wrong_call_is_a_fault_of_ours(text: str) -> None:
    error = dist.DistBackendError(text)
    assert not is_peer_loss(error)
    assert shortage(error, "rank 1 (node 0)") is None
    assert unforeseen(error)[0] == ExitCode.INTERNAL
