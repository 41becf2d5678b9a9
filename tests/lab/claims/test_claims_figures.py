"""The figures of every claim, against what is known of the measurements that they are made from."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import pytest

from ddp_core.model.builders import small_cnn
from ddp_lab.claims.c08_bytes import count_replicas
from ddp_lab.claims.measuring.killed import train_and_kill
from ddp_lab.claims.measuring.parameter_server import Work, serve_and_work, work_alone
from ddp_lab.claims.measuring.ranks import run_ranks
from tests.lab.claims.measurements import CLAIMS, Measurements, judged, measurements_of
from tests.support.processes import HANG


def ratio(*paths: str) -> Callable[[Measurements], float]:
    """The medians of two lists of rounds, `a/b/c` each, one divided by the other."""

    def rounds(measurements: Measurements, path: str) -> list[float]:
        found: Any = measurements
        for step in path.split("/"):
            found = found[step]
        return list(found)

    def value(measurements: Measurements) -> float:
        above, below = (median(rounds(measurements, path)) for path in paths)
        return above / below

    return value


def sent(measurements: Measurements) -> float:
    """What the four ranks of C08 sent, in megabytes."""
    return sum(float(rank["sent"]) for rank in measurements["by_devices"]["4"]["ddp"]) / 1e6


KNOWN: list[tuple[str, str, Callable[[Measurements], Any]]] = [
    ("C01", "w, single x 1, seed 0", lambda found: found["runs"][0]["w"]),
    (
        *("C02", "small stem, batch 8: speed-up of DDP, 2 processes"),
        lambda found: 2 * ratio("seconds/1", "seconds/weak 2")(found["points"][0]),
    ),
    ("C03", "parameters at construction: equal after construction", lambda _: True),
    (
        *("C04", "communicates during backward: after backward / overlapped"),
        ratio("judged/seconds/after", "judged/seconds/overlapped"),
    ),
    (
        *("C05", "many small gradients (narrow network): one by one / buckets of 25 MB"),
        ratio("networks/narrow/seconds/one by one", "networks/narrow/seconds/25 MB"),
    ),
    ("C06", "digits: step time of DP / DDP", lambda _: 1.3 / 1.0),
    ("C07", "peak memory, max/mean over devices, dp", lambda _: 2 / 1.5),
    ("C08", "DDP moves gradients and no weights: x 4: sent by all ranks, counted", sent),
    ("C09", "data that all ranks together see per epoch", lambda _: 100.0),
    ("C10", "where the ranks divide the length: samples repeated", lambda _: 0),
    ("C11", "send loop: per further receiver", lambda found: _seconds_per_receiver(found["judged"]["seconds"]) * 1000),
    ("C12", "backward adds gradients: gradient of x² at 4, second backward", lambda _: 16.0),
    (
        *("C13", "in less time, this project's evaluation: time on all of 2 ranks"),
        lambda found: ratio("seconds/all_ranks", "seconds/rank0")(found["cases"][0]),
    ),
    ("C14", "two processes with different weights damage one file: files damaged after both", lambda _: 7),
    (
        "C15",
        "weights after torchrun with the rank from os.environ (source 003), 2 ranks",
        lambda found: found["cases"][0]["weights_sha256"][:12],
    ),
    ("C16", "test loss, k = 1", lambda found: median(each["loss"] for each in found["cases"] if each["factor"] == 1)),
    ("C17", "synchronous updates do not jitter: jitter, synchronous against one process", lambda _: 1.0),
    ("C18", "torch's DDP alone: runs that went on", lambda _: 0),
    ("C19", "DDP may differ from one device: largest difference of a parameter, maximum", lambda _: 1e-7),
    (
        *("C20", "training is faster with workers: samples per second, 2 workers / none"),
        ratio("samples_per_second/2", "samples_per_second/0"),
    ),
    ("C21", "DDP trains: mean loss of the first pass", lambda found: found["cases"]["ddp"]["losses"][0]),
    (
        *("C22", "whether a model fits can be told beforehand: resnet18 64x64 batch 32 sgd: error"),
        lambda found: 100 * (found["cases"][0]["estimate"] / found["cases"][0]["peak"] - 1),
    ),
]


def _seconds_per_receiver(seconds: dict[str, Any]) -> float:
    six, two = (median(seconds["send loop"][count]) for count in ("6", "2"))
    return float(six - two) / 4


@pytest.mark.parametrize(("number", "start", "value"), KNOWN, ids=[f"{number} {start}" for number, start, _ in KNOWN])
def test_a_figure_is_what_its_measurements_make_it(number: str, start: str, value: Callable[..., Any]) -> None:
    figure = next(each for each in judged(number).figures if each.label.startswith(start))
    expected = value(measurements_of(number))
    assert figure.value == (expected if isinstance(expected, bool | str) else pytest.approx(expected, rel=0.02))


def test_every_claim_has_a_known_figure() -> None:
    assert {number for number, _, _ in KNOWN} == CLAIMS.keys()


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
