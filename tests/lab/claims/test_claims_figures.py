"""What C08, C17 and C18 measure, against what is known of it."""

from __future__ import annotations

import pytest

from ddp_core.model.builders import small_cnn
from ddp_lab.claims.c08_bytes import count_replicas
from ddp_lab.claims.measuring.killed import train_and_kill
from ddp_lab.claims.measuring.parameter_server import Work, serve_and_work, work_alone
from ddp_lab.claims.measuring.ranks import run_ranks
from tests.support.processes import HANG


@pytest.mark.parametrize("replicas", [2, 3])
def test_c08s_replicas_move_the_weights_and_the_gradients_of_each_further_replica(replicas: int) -> None:
    (found,) = run_ranks(count_replicas, 1, replicas, 16, 2, timeout=HANG)
    module = small_cnn(width=24)
    kinds = (module.parameters(), module.buffers())
    parameters, buffers = (sum(each.numel() * each.element_size() for each in kind) for kind in kinds)
    assert (found["parameters"], found["buffers"]) == (parameters, buffers)
    assert found["weights"] == (replicas - 1) * (parameters + buffers)
    assert found["gradients"] == (replicas - 1) * parameters


def test_c17s_one_process_trains_what_the_synchronous_server_does() -> None:
    work = Work(asynchronous=False, seed=0, gradients=6, slow_seconds=0.0, batch=8, rate=0.05, width=2)
    (served,) = run_ranks(serve_and_work, 3, [work], timeout=HANG)[0]
    ((alone,),) = run_ranks(work_alone, 1, [work], 2, timeout=HANG)
    assert alone == pytest.approx(served["losses"], rel=1e-6)
    assert served["staleness"] == 0


def test_c18s_other_rank_is_left_to_its_fate() -> None:
    found = train_and_kill(12, 3, HANG)
    assert found["killed"]
    assert found["last_step"] == 3
    assert found["exit_code"] != 0
