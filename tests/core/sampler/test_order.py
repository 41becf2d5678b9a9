"""The order of samples is a bijection and a pure function of seed and epoch."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_core.sampler import BLOCK, GlobalOrder, Permutation

# Lengths up to BLOCK use the prefix cipher, longer ones a Feistel network. The longer ones include powers of two and
# the lengths just above.
LENGTHS = [0, 1, 2, 3, 4, 5, 63, 1437, BLOCK - 1, BLOCK, BLOCK + 1, 2**15, 2**15 + 1, 50_000, 2**16 + 1]


@pytest.mark.parametrize("length", LENGTHS)
def test_permutation_is_a_bijection(length: int) -> None:
    for key in ((3, 1), (-(2**70), 1000)):
        permutation = Permutation(length, key)
        ids = permutation(range(length))
        assert ids.dtype == np.int64
        assert np.array_equal(np.sort(ids), np.arange(length))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 2**63 - 1), st.data())
def test_permutation_of_any_length_gives_each_position_another_id(length: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=20, unique=True))
    permutation = Permutation(length, (5,))
    ids = permutation(positions)
    assert ids.dtype == np.int64
    assert 0 <= ids.min() <= ids.max() < length
    assert len(set(ids.tolist())) == len(positions)
    assert np.array_equal(permutation(np.array(positions, dtype=np.uint64)), ids)
    assert int(permutation(positions[:1])[0]) == ids[0]


@pytest.mark.parametrize(
    ("length", "key", "ids"),
    [
        (10, (0, 0), [3, 1, 4, 0, 7, 8, 9, 5, 2, 6]),
        (10**6, (0, 0), [341193, 981294, 305758, 387989, 319461]),
        (10**12, (0, 0), [695945440066, 809194146721, 813804024453, 631335531514, 112740149955]),
        (BLOCK, (7, 3), [9024, 13045, 14126]),
        (BLOCK + 1, (7, 3), [4355, 5030, 13804]),
        (100_000, (7, 3), [44685, 34263, 60190]),
        (2**17 + 5, (7, 3), [58218, 129748, 89725]),
        (2**32 - 1, (7, 3), [1948863262, 3266365061, 1707773062]),
        (2**32, (7, 3), [1581001223, 2585829304, 2433127969]),
        (2**40 + 1, (7, 3), [26475482355, 808543458090, 102095454602]),
    ],
)
def test_the_order_is_the_same_on_every_machine_and_version(length: int, key: tuple[int, int], ids: list[int]) -> None:
    """Saved positions keep their meaning only while these numbers stay the same. If they change, raise ORDER_FORMAT."""
    assert Permutation(length, key)(range(len(ids))).tolist() == ids


@pytest.mark.parametrize("length", [100, 10**6])
def test_positions_and_slices_outside_are_refused(length: int) -> None:
    for outside in (range(-1, 3), [-1], [5, -1, 5], range(98, 10**6 + 1), [10**6], range(5, -2, -1)):
        with pytest.raises(IndexError):
            Permutation(length, (0,))(outside)
    for order in (GlobalOrder(length, 0), GlobalOrder(length, 0, shuffle=False)):
        for start, stop in ((-1, 3), (5, 4), (0, length + 1)):
            with pytest.raises(IndexError):
                order.ids(0, start, stop)
        assert [order.ids(0, place, place).tolist() for place in (0, 3, length)] == [[]] * 3


def test_any_slice_equals_the_slice_of_the_whole() -> None:
    """Also after any other, whose ids may have been computed ahead."""
    order, chance = GlobalOrder(45_000, 3), random.Random(0)
    whole = [Permutation(45_000, (3, epoch))(range(45_000)) for epoch in range(2)]
    for _ in range(300):
        epoch, start = chance.randrange(2), chance.choice((0, 5_000, 20_000, 44_000)) + chance.randrange(100)
        stop = min(start + chance.choice((0, 64, 9_000, BLOCK, 20_000)), 45_000)
        assert np.array_equal(order.ids(epoch, start, stop), whole[epoch][start:stop])


def test_global_order_depends_on_seed_and_epoch_alone() -> None:
    assert np.array_equal(GlobalOrder(500, 1).ids(2, 0, 500), GlobalOrder(500, 1).ids(2, 0, 500))
    orders = [GlobalOrder(500, seed).ids(epoch, 0, 500).tolist() for seed in range(4) for epoch in range(4)]
    # DistributedSampler seeds with seed + epoch, so that (1, 0) and (0, 1) give the same order there.
    assert len({tuple(order) for order in orders}) == 16
    assert np.array_equal(GlobalOrder(500, 1, shuffle=False).ids(7, 3, 9), np.arange(3, 9))
    order = GlobalOrder(1000, seed=0)
    kept = order.ids(0, 10, 20).copy()
    for _ in range(3):
        order.ids(0, 10, 20)[:] = -1
    assert np.array_equal(order.ids(0, 10, 20), kept), "ids are the caller's own"
    assert np.array_equal(
        pickle.loads(pickle.dumps(GlobalOrder(500, 1))).ids(2, 3, 9), GlobalOrder(500, 1).ids(2, 3, 9)
    )
