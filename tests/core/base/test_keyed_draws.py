"""Python's `random` and numpy's global generator draw what a key says, in each thread, and otherwise what they did.

Tests base/own_generator.py, too.
"""

from __future__ import annotations

import copy
import pickle
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch

from ddp_core.base.keyed_draws import key_draws, watch_draws, without_key
from ddp_core.base.own_generator import OwnGenerator
from ddp_core.base.seeds import generators_kept
from tests.support.processes import ask

KEY = 2**63 + 5
# Everything that numpy.random offers and that draws, with arguments.
NUMPY: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("rand", "randn", "random", "random_sample", "ranf", "sample", "normal", "uniform"), ()),
    **dict.fromkeys(("exponential", "gumbel", "laplace", "logistic", "lognormal", "rayleigh"), ()),
    **dict.fromkeys(("standard_cauchy", "standard_exponential", "standard_normal"), ()),
    **dict.fromkeys(("chisquare", "pareto", "power", "standard_gamma", "standard_t", "weibull", "gamma"), (2,)),
    **dict.fromkeys(("beta", "f", "noncentral_chisquare", "vonmises", "wald"), (1, 2)),
    **dict.fromkeys(("binomial", "negative_binomial"), (5, 0.5)),
    **dict.fromkeys(("choice", "permutation", "poisson", "randint", "random_integers"), (1000,)),
    **{"bytes": (4,), "dirichlet": ([1, 2],), "geometric": (0.1,), "hypergeometric": (50, 50, 20)},
    **{"logseries": (0.9,), "multinomial": (20, [0.2, 0.8]), "multivariate_normal": ([0, 0], [[1, 0], [0, 1]])},
    **{"noncentral_f": (1, 2, 3), "triangular": (0, 0.5, 1), "zipf": (1.5,), "shuffle": (list(range(50)),)},
}
PYTHON: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("random",), ()),
    **{"betavariate": (1, 2), "choice": ("abcdefgh",), "choices": (range(99),), "expovariate": (1,)},
    **{"gammavariate": (1, 2), "gauss": (0, 1), "getrandbits": (40,), "lognormvariate": (0, 1)},
    **{"normalvariate": (0, 1), "paretovariate": (1,), "randbytes": (4,), "randint": (0, 999), "randrange": (999,)},
    **{"sample": (range(99), 5), "shuffle": (list(range(50)),), "triangular": (), "uniform": (0, 1)},
    **{"vonmisesvariate": (0, 1), "weibullvariate": (1, 1)},
}


def drawn(module: Any, functions: dict[str, tuple[Any, ...]]) -> dict[str, str]:
    """What each function of a module returns, and makes of its arguments."""
    found = {}
    for name, words in functions.items():
        given = copy.deepcopy(words)
        found[name] = repr((getattr(module, name)(*given), given))
    return found


def everything() -> tuple[dict[str, str], dict[str, str]]:
    return drawn(random, PYTHON), drawn(np.random, NUMPY)


def same_as_before() -> None:
    random.seed(3)
    np.random.seed(3)
    np.random.randn()  # numpy keeps a second number for the next call
    states = random.getstate(), np.random.get_state()
    expected = everything(), everything()
    random.setstate(states[0])
    np.random.set_state(states[1])
    watch_draws()
    watch_draws()
    first = everything()
    with without_key():
        key_draws(KEY)
        everything()
    assert (first, everything()) == expected


def test_without_a_key_everything_is_drawn_as_before() -> None:
    ask(same_as_before)


@pytest.mark.filterwarnings("ignore:This function is deprecated")
@pytest.mark.parametrize(("module", "functions"), [(random, PYTHON), (np.random, NUMPY)])
def test_every_function_draws_what_the_key_says(module: Any, functions: dict[str, tuple[Any, ...]]) -> None:
    watch_draws()
    with without_key():
        for name, words in functions.items():
            found = []
            for key in (KEY, KEY + 1, KEY):
                key_draws(key)
                found.append(drawn(module, {name: words}))
                everything()
            assert found[0] == found[2], name
        for key in (KEY, KEY + 1):
            key_draws(key)
            found.append(drawn(module, functions))
        assert found[-2] != found[-1]


def test_every_function_of_the_modules_is_tried() -> None:
    others = {"SystemRandom", "Random", "seed", "getstate", "setstate", "binomialvariate"}
    assert set(random.__all__) - others == PYTHON.keys()
    functions = {name for name in np.random.__all__ if not name[0].isupper()}
    assert functions - {"seed", "get_state", "set_state", "default_rng"} == NUMPY.keys()


def test_what_the_experiment_seeds_itself_counts() -> None:
    watch_draws()
    with without_key():
        key_draws(KEY)
        np.random.seed(1)
        random.seed(1)
        assert np.random.rand() == np.random.RandomState(1).rand()
        assert random.random() == random.Random(1).random()
        key_draws(KEY)
        states = random.getstate(), np.random.get_state()
        found = random.random(), np.random.rand()
        random.setstate(states[0])
        np.random.set_state(states[1])
        assert (random.random(), np.random.rand()) == found


@pytest.mark.filterwarnings("ignore:This function is deprecated")
@pytest.mark.parametrize("key_before", [None, KEY])
def test_what_was_drawn_before_goes_on_afterwards(key_before: int | None) -> None:
    watch_draws()
    with generators_kept():
        if key_before is not None:
            key_draws(key_before)
        random.seed(4)
        np.random.seed(4)
        expected = [(random.random(), np.random.rand()) for _ in range(2)]
        random.seed(4)
        np.random.seed(4)
        found = [(random.random(), np.random.rand())]
        with without_key():
            key_draws(KEY)
            with generators_kept():
                key_draws(KEY + 1)
                everything()
        found.append((random.random(), np.random.rand()))
        assert found == expected


def test_a_thread_with_a_generator_of_its_own_draws_from_that_one_and_seeds_it() -> None:
    before, alone = torch.get_rng_state(), torch.Generator().manual_seed(3)
    with OwnGenerator(torch.Generator().manual_seed(3)):
        found = [torch.rand(5, out=torch.empty(5)), torch.rand(5)]  # the first takes no generator
        torch.manual_seed(5)
        with torch.random.fork_rng():
            torch.manual_seed(3)
            found.append(torch.rand(5))
        again = torch.rand(5)
    assert torch.equal(torch.get_rng_state(), before)
    expected = [torch.rand(5, generator=alone) for _ in range(2)]
    assert all(map(torch.equal, found, [*expected, expected[0]]))
    assert torch.equal(torch.rand(5, generator=alone.manual_seed(5)), again)


def test_copying_what_draws_moves_no_stream_and_keeps_the_keys() -> None:
    watch_draws()
    with without_key():
        key_draws(KEY)
        first, second = random.random(), random.random()
        key_draws(KEY)
        sent, copied = pickle.dumps(random.random), copy.deepcopy(random.random)
        assert random.random() == first
        received = pickle.loads(sent)
        assert random.random() == second
        for drawn_again in (received, copied):
            key_draws(KEY)
            assert drawn_again() == first
        behind = np.random.rand.__self__
        behind.rand()
        for other in (copy.deepcopy(behind), pickle.loads(pickle.dumps(behind))):
            with generators_kept():
                assert other.rand() == np.random.rand()


def test_a_thread_without_a_key_again_leaves_the_main_threads_to_all() -> None:
    assert ask(drawn_beside_the_main_thread) == random.Random(KEY).random()


def drawn_beside_the_main_thread() -> float:
    watch_draws()
    inside, keyed, found = threading.Event(), threading.Event(), list[float]()

    def beside() -> None:
        with without_key():
            inside.set()
            keyed.wait()
        found.append(random.random())

    thread = threading.Thread(target=beside)
    thread.start()
    inside.wait()
    key_draws(KEY)
    keyed.set()
    thread.join()
    return found[0]


def test_a_signal_while_numpys_numbers_are_exchanged_leaves_no_lock() -> None:
    watch_draws()
    lock: Any = np.random.get_bit_generator().lock  # type: ignore[attr-defined]
    exchange = lock._bring

    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    with without_key():
        key_draws(KEY)
        lock._bring = interrupted
        try:
            with pytest.raises(KeyboardInterrupt):
                np.random.rand()
        finally:
            lock._bring = exchange
        drawn_elsewhere = list[float]()
        thread = threading.Thread(target=lambda: drawn_elsewhere.append(np.random.rand()), daemon=True)
        thread.start()
        thread.join(30)
        assert drawn_elsewhere


def test_an_attention_that_drops_nothing_is_computed_in_a_thread_with_a_generator_of_its_own() -> None:
    queries = torch.randn(1, 2, 4, 8, requires_grad=True)
    expected = torch.nn.functional.scaled_dot_product_attention(queries, queries, queries)
    with OwnGenerator(torch.Generator()) as own:
        found = torch.nn.functional.scaled_dot_product_attention(queries, queries, queries)
        found.sum().backward()
    assert torch.equal(found, expected)
    assert not own.has_drawn
