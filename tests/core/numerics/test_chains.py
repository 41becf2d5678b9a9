"""Several threads compute portable products, and a process with any number of them has the bits of one thread."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from ddp_core.experiment.file import INSTALLED
from ddp_core.numerics import chains
from ddp_core.numerics.chains import chained, several_threads
from ddp_core.numerics.kernels import portable_kernels
from ddp_lab.probe.child import trained
from ddp_lab.probe.published import published
from tests.support.processes import HANG, run_processes

CPU = torch.device("cpu")


@pytest.fixture(params=[1, 2, 3, 4])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def every_product_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "_ALONE_UP_TO", 0)


def _drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


SHAPES = [
    ((100, 70), (70, 40)),
    ((7, 9), (9, 11)),
    ((300, 2100), (2100, 8)),
    ((5, 30, 17), (5, 17, 9)),
    ((2, 9, 3), (2, 3, 1)),
    ((2, 3, 9, 3), (2, 3, 3, 5)),
    ((1, 5, 9, 3), (1, 5, 3, 5)),
]


def _first_products(rank: int, world_size: int) -> int:
    """Several threads ask at once for code that nobody has made yet, as the replicas of dp do in their first step."""
    pair, threads = (_drawn(3, 4), _drawn(4, 5)), 8
    sys.setswitchinterval(1e-5)
    expected = chained(*pair)
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(30):
            chains._code.cache_clear()
            chains.chain_code.cache_clear()
            together = Barrier(threads)

            def product(together: Barrier = together) -> torch.Tensor:
                together.wait(HANG)
                return chained(*pair)

            found = [pool.submit(product) for _ in range(threads)]
            assert all(each.result(HANG).equal(expected) for each in found)
    return 0


def test_the_code_stays_where_threads_have_made_it_at_the_same_time() -> None:
    assert run_processes(_first_products, 1) == [0]


@pytest.mark.usefixtures("every_product_is_cut")
@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_product_in_parts_has_the_same_bits(count: int) -> None:
    pairs = [(_drawn(*left), _drawn(*right)) for left, right in SHAPES]
    whole = [chained(*pair) for pair in pairs]
    for inference in (False, True):
        with several_threads(count), torch.inference_mode(inference):
            assert all(chained(*pair).equal(each) for pair, each in zip(pairs, whole, strict=True))


@pytest.mark.full
@pytest.mark.usefixtures("every_product_is_cut")
def test_shipped_experiments_end_with_the_published_weights(threads: int) -> None:
    """Forward, backward and updates of all that need no download."""
    with portable_kernels():
        for name, steps in published().training_steps.items():
            weights = trained(INSTALLED / f"{name}.py", steps.settings)
            assert weights == steps.weights_sha256, f"{name} with {threads} threads"
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == threads


@pytest.mark.usefixtures("every_product_is_cut")
def test_a_forked_process_computes_by_itself() -> None:
    left, right = _drawn(100, 70), _drawn(70, 40)
    with several_threads(3):
        ours = chained(left, right)
        child = os.fork()
        if not child:
            os._exit(0 if chained(left, right).equal(ours) else 1)
        assert os.waitpid(child, 0) == (child, 0)
