"""What a checkpoint can hold comes back as it was, and what it cannot is refused with its key."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ddp_core.checkpoint import Checkpointer, describe, find_checkpoints, load, newest_valid
from ddp_core.checkpoint.state import StateTensors
from tests.core.checkpoint.saved import same, trained
from tests.support.wording import refusing


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_real_training_state_comes_back_as_it_was(tmp_path: Path, asynchronous: bool) -> None:
    model, optimizer, schedule = trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
    with Checkpointer(tmp_path, asynchronous=asynchronous) as checkpointer:
        checkpointer.save(state, step=7, epoch=1, metadata={"experiment": "abc", "layout": [2, 1]}, metric=0.5)
    checkpoint = newest_valid(tmp_path)
    assert checkpoint == checkpointer.last
    assert (checkpoint.step, checkpoint.epoch, checkpoint.metric) == (7, 1, 0.5)
    assert checkpoint.metadata == {"experiment": "abc", "layout": [2, 1]}
    assert checkpoint.shapes == describe(state)
    loaded = load(checkpoint, expect=describe(state), expect_metadata={"experiment": "abc"})
    assert same(loaded, state)
    assert loaded["model"]._metadata == state["model"]._metadata  # type: ignore[attr-defined]


def test_tied_tensors_stay_tied_views_take_only_their_own_bytes_and_parameters_are_plain(tmp_path: Path) -> None:
    weight, large = torch.randn(100, 100), torch.randn(1_000_000)
    number = torch.randn(5, dtype=torch.complex64)
    state = {
        "a": weight,
        "b": weight,
        "lazy": {"number": number, "conjugate": number.conj(), "negative": number.conj().imag},
        "view": large[:10],
        "wide": torch.ones(1).expand(50),
        "turned": weight.t()[:3],
        "parameter": nn.Parameter(torch.ones(2)),
        "grown": torch.ones(2).requires_grad_(),
    }
    for asynchronous in (False, True):
        directory = tmp_path / str(asynchronous)
        with Checkpointer(directory, asynchronous=asynchronous) as checkpointer:
            checkpointer.save(state, step=1, epoch=0)
        checkpoint = find_checkpoints(directory)[0]
        assert checkpoint.bytes < 60_000
        loaded = load(checkpoint)
        assert same(loaded, state)
        assert loaded["a"].data_ptr() == loaded["b"].data_ptr()
        assert [type(loaded[name]) for name in ("parameter", "grown")] == [torch.Tensor] * 2
        assert not loaded["parameter"].requires_grad
        assert not loaded["grown"].requires_grad
    assert {type(each) for each in StateTensors(state).tensors} == {torch.Tensor}
    assert StateTensors({"a": weight}).tensors[0] is weight


def test_what_could_not_be_read_back_is_refused_with_its_key(tmp_path: Path) -> None:
    tensors = (torch.eye(2).to_sparse(), torch.empty(2, device="meta"))
    for value in (SimpleNamespace(), np.float64(1.0), Path("x"), b"bytes", {None: 2}, {(1, b"x"): 2}, {1, 2}, *tensors):
        with refusing(TypeError):
            Checkpointer(tmp_path).save({"outer": [{"inner": value}]}, step=1, epoch=0)
    assert list(tmp_path.iterdir()) == []


_leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.builds(
        lambda dtype, sizes: torch.ones(sizes, dtype=dtype),
        st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64]),
        st.lists(st.integers(0, 3), max_size=3),
    ),
)
_plain_keys = st.one_of(st.integers(0, 99), st.floats(0, 1), st.text("abc", min_size=1, max_size=3))
_keys = st.one_of(_plain_keys, st.tuples(_plain_keys, _plain_keys))
_trees = st.dictionaries(
    _keys,
    st.recursive(
        _leaves,
        lambda inner: st.one_of(st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(_keys, inner)),
        max_leaves=12,
    ),
)


@pytest.mark.full
@settings(max_examples=25, deadline=None)
@given(state=_trees, asynchronous=st.booleans())
def test_any_tree_of_tensors_and_plain_values_comes_back(
    tmp_path_factory: pytest.TempPathFactory, state: dict[Any, Any], asynchronous: bool
) -> None:
    try:
        describe(state)
    except ValueError:
        return  # such as a dict with both keys, 1 and "1"
    directory = tmp_path_factory.mktemp("tree")
    with Checkpointer(directory, asynchronous=asynchronous) as checkpointer:
        checkpointer.save(state, step=0, epoch=0)
    assert same(load(find_checkpoints(directory)[0]), state)
