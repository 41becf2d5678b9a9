"""The figures of every claim, against what is known of the measurements that they are made from."""

from __future__ import annotations

import pytest

from ddp_core.model.builders import small_cnn
from ddp_lab.claims.c08_bytes import count_replicas
from ddp_lab.claims.framework import suite
from ddp_lab.claims.measuring.killed import train_and_kill
from ddp_lab.claims.measuring.parameter_server import Work, serve_and_work, work_alone
from ddp_lab.claims.measuring.ranks import run_ranks
from tests.lab.claims.changes import judged
from tests.support.processes import HANG

KNOWN: list[tuple[str, str, float | bool | str]] = [
    ("c01", "w, single x 1, seed 0", 2.001),
    ("c02", "small stem, batch 8: speed-up of DDP, 2 processes", 2 / 1.1),
    ("c02", "the source's own program, its batch cut: speed-up of the linear model", 16 / 16 / 0.5),
    ("c03", "parameters at construction: equal after construction", True),
    ("c04", "communicates during backward: after backward / overlapped", 1.2 / 1.0),
    ("c04", "communicates during backward: hidden share", 100 * (1.2 - 1.0) / 0.4),
    ("c05", "many small gradients (narrow network): one by one / buckets of 25 MB", 5.0 / 1.0),
    ("c05", "few large gradients (ResNet-18): step, 1 MB, 9 messages", 1000 * 1.1),
    ("c06", "digits: step time of DP / DDP", 1.3 / 1.0),
    ("c07", "peak memory, max/mean over devices, dp", 2 / 1.5),
    ("c08", "DDP moves gradients and no weights: x 4: sent by all ranks, counted", 4 * 153 / 1e6),
    ("c08", "DDP moves gradients and no weights: x 4: gradients and buffers in theory", (2 * 3 * 100 + 3 * 3) / 1e6),
    ("c09", "data that all ranks together see per epoch", 100.0),
    ("c10", "where the ranks divide the length: samples repeated", 0),
    ("c11", "tree: slope / the loop's", 0.5),
    ("c11", "send loop: per further receiver", 200.0),
    ("c12", "backward adds gradients: gradient of x² at 4, second backward", 16.0),
    ("c12", "k micro-batches equal one large batch: gradient too large by", 4.0),
    ("c13", "in less time, this project's evaluation: time on all of 2 ranks", 0.5),
    ("c13", "in less time, the source's own way: time on all of 2 ranks", 0.6),
    ("c14", "two processes with different weights damage one file: files damaged after both", 4),
    ("c15", "weights after torchrun, 2 ranks", "abc"),
    ("c16", "k = 2: test loss, linear / k = 1", 0.052 / 0.05),
    ("c16", "k = 8: test loss, linear / square root", 0.052 / 0.08),
    ("c17", "synchronous updates wait: added wait per gradient", 0.019 * 1.05 / 0.02),
    ("c17", "the loss jitters, parameter server with 8 workers: jitter, asynchronous against", (0.15 / 0.1) ** 2),
    ("c17", "synchronous updates do not jitter: jitter, synchronous against one process", 1.0),
    ("c18", "torch's DDP alone: runs that went on", 0),
    ("c18", "seconds from the kill until training goes on", 4.0),
    ("c19", "DDP may differ from one device: largest difference of a parameter, median", 1e-7 * 1.05),
    ("c19", "DDP may differ from one device: largest difference of a parameter, maximum", 1e-7 * 1.10),
    ("c20", "training is faster with workers: samples per second, 2 workers / none", 1.8),
    ("c21", "DDP trains: mean loss of the first pass", 2.5),
    ("c21", "batch 256: images per second, both processes", 10.0),
    ("c22", "whether a model fits can be told beforehand: a: error", 10.0),
]


@pytest.mark.parametrize(("number", "start", "value"), KNOWN, ids=[f"{number} {start}" for number, start, _ in KNOWN])
def test_a_figure_is_what_its_measurements_make_it(number: str, start: str, value: float | bool | str) -> None:
    figure = next(each for each in judged(number).figures if each.label.startswith(start))
    expected = value if isinstance(value, bool | str) else pytest.approx(value, rel=0.02, abs=1e-12)
    assert figure.value == expected


def test_every_claim_has_a_known_figure() -> None:
    assert {number.upper() for number, _, _ in KNOWN} == {known.claim.id for known in suite.known_claims()}


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
