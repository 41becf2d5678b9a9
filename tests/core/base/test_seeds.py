"""Random numbers by key, compared with a second implementation."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_core.base.seeds import MicroBatchSeed, mix, sample_uniforms, share_of

CPU = torch.device("cpu")
WORDS = 2**64


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


@settings(deadline=None)
@given(st.integers(0, 60), st.one_of(st.integers(1, 9), st.lists(st.integers(1, 50), min_size=1, max_size=9)))
def test_shares_are_in_a_row_none_is_idle_if_there_is_enough_and_they_are_near_what_was_asked_for(
    count: int, parts: int | list[int]
) -> None:
    weights = [1] * parts if isinstance(parts, int) else parts
    shares = [share_of(count, rank, parts) for rank in range(len(weights))]
    assert [number for share in shares for number in share] == list(range(count))
    assert all(shares) or count < len(weights)
    if count * min(weights) >= sum(weights):  # each is asked to have one at least
        assert all(
            abs(len(share) - count * weight / sum(weights)) <= 1 for share, weight in zip(shares, weights, strict=True)
        )


def test_a_rank_of_three_parts_of_four_has_three_micro_batches_of_four() -> None:
    assert [list(share_of(4, rank, (3, 1))) for rank in range(2)] == [[0, 1, 2], [3]]
    assert [len(share_of(2, rank, (1, 50, 1))) for rank in range(3)] == [0, 2, 0]
