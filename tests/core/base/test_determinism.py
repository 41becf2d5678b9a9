"""Random numbers by key, and digests in their documented format, each compared with a second implementation."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ddp_core.base.digests import checksum, optimizer_digest, same_bits, weights_digest
from ddp_core.base.seeds import MicroBatchSeed, mix, sample_uniforms
from ddp_core.trainers.keyed_random import KeyedRandom

CPU = torch.device("cpu")

WORDS = 2**64
WHOLE = (torch.int64, torch.int32, torch.uint8, torch.bool)


def documented_digest(state: dict[str, Tensor]) -> str:
    """The digest in the format that run.json's documentation gives, computed element by element in plain Python."""
    content = b""
    for name in sorted(state):
        tensor = state[name]
        dtype = repr(tensor.dtype).split(".")[1]
        content += (
            name.encode("utf-8") + b"\0" + dtype.encode() + b"\0" + ",".join(map(str, tensor.shape)).encode() + b"\0"
        )
        integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        for element in tensor.flatten():
            word = element.view(torch.uint8).item() if tensor.element_size() == 1 else element.view(integers).item()
            content += (word % 2 ** (8 * tensor.element_size())).to_bytes(tensor.element_size(), "little")
    return hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 2), (2, 0, 3)], ids=str)
def test_the_weights_digest_is_the_documented_one(shape: tuple[int, ...]) -> None:
    draws = torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 200 - 100
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, *WHOLE):
        state = {"layer.weight": draws.to(dtype), "a": torch.eye(3)[:2].t(), "ü": torch.tensor(-0.0)}
        assert weights_digest(state) == documented_digest(state)


def test_the_optimizer_digest_covers_every_moment_and_step_count() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    empty = optimizer_digest(optimizer.state_dict())
    weight.grad = torch.ones(3)
    optimizer.step()
    trained = optimizer_digest(optimizer.state_dict())
    assert trained != empty
    assert trained == documented_digest({f"000000.{name}": value for name, value in optimizer.state[weight].items()})
    momentum = torch.tensor([0.5, -1.0])
    state = {"state": {0: {"step": 3, "momentum": momentum, "none": None}, 11: {"pair": (0.5, 1.0)}}}
    named = {"000000.step": torch.as_tensor(3), "000000.momentum": momentum, "000011.pair": torch.tensor([0.5, 1.0])}
    assert optimizer_digest(state) == weights_digest(named)


def splitmix_finaliser(word: int) -> int:
    """The output of SplitMix64 from state `word` (Steele, Lea, Flood 2014)."""
    word = (word + 0x9E3779B97F4A7C15) % WORDS
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % WORDS
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % WORDS
    return word ^ (word >> 31)


@settings(deadline=None)
@given(
    st.integers(0, 2**63 - 1),
    st.integers(0, 10**6),
    st.lists(st.integers(0, 2**40), min_size=1, max_size=5),
    st.integers(1, 6),
)
def test_a_samples_numbers_depend_on_seed_epoch_and_id_alone(seed: int, epoch: int, ids: list[int], draws: int) -> None:
    assert splitmix_finaliser(0) == 0xE220A8397B1DCDAF, "the published first output of seed 0"
    assert mix(seed, 5) == splitmix_finaliser(splitmix_finaliser(seed) ^ 5)
    together = sample_uniforms(seed, epoch, np.array(ids), draws)
    assert together.shape == (len(ids), draws)
    assert together.dtype == np.float64
    assert ((together >= 0) & (together < 1)).all()
    for row, identity in enumerate(ids):
        alone = sample_uniforms(seed, epoch, np.array([identity]), draws)
        assert (together[row] == alone[0]).all()
        per_sample = splitmix_finaliser(identity ^ mix(seed, epoch, 1))
        for draw in range(draws):
            word = splitmix_finaliser((per_sample + draw * 0x9E3779B97F4A7C15) % WORDS)
            assert together[row, draw] == (word >> 11) / 2**53


def test_a_micro_batch_has_its_own_numbers_at_every_time() -> None:
    keys = [(seed, step, micro_batch) for seed in (7, 8) for step in range(20) for micro_batch in range(20)]

    def drawn(seed: int, step: int, micro_batch: int) -> float:
        MicroBatchSeed(seed, CPU)(step, micro_batch)
        return torch.rand(1).item()

    found = {key: drawn(*key) for key in keys}
    assert len(set(found.values())) >= 799, "800 draws of 24 bits: two of the same are likely once in fifty times"
    assert drawn(7, 5, 2) == found[7, 5, 2]


DRAWS: dict[str, Callable[[], Tensor]] = {
    "dropout": lambda: functional.dropout(torch.ones(50), 0.4),
    "alpha dropout": lambda: functional.alpha_dropout(torch.ones(50), 0.3, training=True),
    "randn": lambda: torch.randn(9),
    "randperm": lambda: torch.randperm(20),
    "bernoulli_": lambda: torch.zeros(50).bernoulli_(0.5),
    "multinomial": lambda: torch.multinomial(torch.ones(10), 5),
    "rrelu": lambda: functional.rrelu(-torch.ones(9), training=True),
    "attention": lambda: functional.scaled_dot_product_attention(*[torch.ones(1, 1, 4, 8)] * 3, dropout_p=0.5),
}


@pytest.mark.parametrize("name", DRAWS)
def test_replicas_in_threads_draw_what_one_process_draws(name: str) -> None:
    draw = DRAWS[name]
    MicroBatchSeed(7, torch.device("cpu"))(3, 1)
    expected = draw()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with KeyedRandom(7, CPU).micro_batch(3, 1):
        found = draw()
    assert torch.equal(found, expected)
    assert torch.equal(torch.get_rng_state(), before), "the shared generator was touched"


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_backward_that_draws_later_is_keyed_too(use_reentrant: bool) -> None:
    random, drop, found = KeyedRandom(1, CPU), nn.Dropout(0.5), []

    def dropped(weight: Tensor) -> Tensor:
        other = threading.Thread(target=torch.rand, args=(3,))  # another replica's draw from the shared generator
        other.start()
        other.join()
        return drop(weight) * weight

    weight = torch.ones(64, requires_grad=True)
    with random.micro_batch(0, 0):
        loss = weight.sum()
    with random.backward():
        loss.backward()
    for function in (lambda weight: checkpoint(dropped, weight, use_reentrant=use_reentrant), dropped):
        with random.micro_batch(0, 1):
            loss = function(weight).sum()
        weight.grad = None
        with random.backward():
            loss.backward()
        found.append(weight.grad)
    assert torch.equal(*found)


def of_one(**entries: Any) -> dict[str, Any]:
    return {"state": {0: entries}, "param_groups": []}


OTHERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (of_one(kept={0.9: torch.ones(2)}), of_one(kept={0.9: torch.zeros(2)})),
    (of_one(kept={0.9: torch.ones(2)}), of_one(kept={0.5: torch.ones(2)})),
    (of_one(kept=[torch.ones(2), 1]), of_one(kept=[torch.ones(2), 2])),
    (of_one(kept="one"), of_one(kept="two")),
    (of_one(kept=""), of_one(kept="x")),
    ({"state": {"k": torch.ones(1)}}, {"state": {"k": torch.zeros(1)}}),
    ({"inner": {"state": {0: {"step": 1}}}}, {"inner": {"state": {0: {"step": 2}}}}),
    ({"state": {"ema": {"fast": 0.5}}}, {"state": {"ema": {"fast": 0.25}}}),
]


@pytest.mark.parametrize(("state", "other"), OTHERS)
def test_whatever_a_state_holds_counts(state: dict[str, Any], other: dict[str, Any]) -> None:
    assert optimizer_digest(state) == optimizer_digest(state) != optimizer_digest(other)


@pytest.mark.parametrize("size", [0, 1, 3])
def test_the_content_counts_however_it_lies_in_memory(size: int) -> None:
    # So lies the gradient of a sum: each element is the same place in memory.
    expanded, plain = torch.tensor(2.0).expand(1, size)[0], torch.full((size,), 2.0)
    wide = torch.full((size, 2), 2.0)[:, 0]
    assert weights_digest({"b": plain, "a": plain}) == weights_digest({"a": plain, "b": nn.Parameter(expanded)})
    assert {checksum(each) for each in (expanded, plain, wide)} == {checksum(plain)}
    assert {weights_digest({"a": each}) for each in (expanded, plain, wide)} == {weights_digest({"a": plain})}
    assert same_bits(expanded, plain)
    assert same_bits(wide, plain)
    alone = torch.empty(size).as_strided((size,), (0,)).fill_(2.0) if size < 2 else plain
    assert checksum(alone) == checksum(plain)
