"""All ranks agree on the backend, by the names of their GPUs; ranks are threads here, and GPUs are names."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.distributed.backends import agreed_backend
from ddp_core.distributed.world import World

NCCL, GLOO = "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo"


def agreed(monkeypatch: pytest.MonkeyPatch, uuids: list[str], backend: str = "auto") -> list[str | UserError]:
    """What each rank is told, by the names of the ranks' GPUs; an empty name is a CPU."""
    monkeypatch.setattr("ddp_core.distributed.backends._identity", lambda device: uuids[device.index or 0])
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=60))

    def on_rank(rank: int) -> str | UserError:
        device = torch.device("cuda", rank) if uuids[rank] else torch.device("cpu")
        try:
            return agreed_backend(store, World(rank=rank, world_size=len(uuids)), device, backend)
        except UserError as error:
            return error

    with ThreadPoolExecutor(len(uuids)) as ranks:
        return list(ranks.map(on_rank, range(len(uuids))))


@pytest.mark.parametrize(
    ("uuids", "asked", "expected"),
    [
        (["a", "b", "c"], "auto", NCCL),
        (["a", "b", "c"], "nccl", NCCL),
        (["a", "b", "c"], "gloo", GLOO),
        (["a"], "auto", NCCL),
        (["", ""], "auto", "gloo"),
        (["", ""], "nccl", "gloo"),
    ],
)
def test_ranks_with_a_gpu_each_take_nccl(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    uuids: list[str],
    asked: str,
    expected: str,
) -> None:
    assert agreed(monkeypatch, uuids, asked) == [expected] * len(uuids)
    assert capsys.readouterr().err == ""


def test_ranks_that_share_a_gpu_take_gloo_and_rank_0_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert agreed(monkeypatch, ["a", "b", "a", "c", "b"]) == [GLOO] * 5
    said = "ranks 0, 2 share a GPU; ranks 1, 4 share a GPU: the ranks exchange over gloo, which is slower than nccl\n"
    assert capsys.readouterr().err == said


def test_nccl_is_refused_on_every_rank_where_two_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for refusal in agreed(monkeypatch, ["a", "b", "b"], "nccl"):
        assert isinstance(refusal, UserError)
        assert str(refusal).startswith("ranks 1, 2 share a GPU, and nccl needs one for each rank")
        assert refusal.exit_code == ExitCode.RESOURCES
