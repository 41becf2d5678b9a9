"""What an error of NCCL is taken for: a lack with its remedy, a fault of this rank, or a peer that has gone."""

from __future__ import annotations

import pytest

from ddp_core.distributed.nccl_errors import is_own_fault, lack_of

LAST = "NCCL error: unhandled system error\nLast error:\n"


@pytest.mark.parametrize(
    ("text", "is_own", "advice"),
    [
        (f"{LAST}Duplicate GPU detected : rank 0", True, "(Duplicate GPU detected : rank 0)"),
        (f"{LAST}Error while creating shared memory segment", True, "--shm-size"),
        (f"{LAST}Call to ibv_reg_mr failed", True, "ulimit -l"),
        (f"{LAST}Cuda failure 2 'out of memory'", True, "--set micro_batch=N"),
        ("NCCL error: ncclInvalidUsage", True, None),
        ("NCCL error: ncclInternalError\nLast error:\nsocket: connection closed by peer", False, None),
        ("NCCL error: ncclRemoteError: remote peer has exited", False, None),
        ("gloo: out of memory", False, None),
    ],
)
def test_an_error_of_nccl_is_read(text: str, is_own: bool, advice: str | None) -> None:
    lack = lack_of(text)
    assert is_own_fault(text) is is_own
    assert lack is None if advice is None else lack is not None and advice in lack
