"""With portable numerics, square roots are the nearest numbers, whichever function takes them; other results stay."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ddp_core.numerics.kernels import portable_kernels
from ddp_core.numerics.limits import LIMITS, limits_hold
from tests.support.processes import ask
from tests.support.wording import refusing

COUNT = 100_003
SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1.17e-38, 1e-320, np.inf, -np.inf, np.nan, -1.0, 4.0, 3.4e38]


@pytest.fixture(autouse=True)
def portable() -> Iterator[None]:
    with portable_kernels():
        yield


def numbers(dtype: Any) -> np.ndarray[Any, Any]:
    """All kinds of numbers: any bits at all, with subnormals, infinities, NaN and negatives among them."""
    width = np.dtype(dtype).itemsize
    bits = np.random.default_rng(0).integers(0, 256, (COUNT, width), dtype=np.uint8).view(dtype)[:, 0]
    with np.errstate(over="ignore"):
        return np.concatenate([bits, np.asarray(SPECIAL).astype(dtype)])


def roots(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    with np.errstate(invalid="ignore"):
        return np.sqrt(values)


def same_bits(ours: Tensor, truth: np.ndarray[Any, Any]) -> bool:
    return ours.detach().contiguous().numpy().tobytes() == np.ascontiguousarray(truth).tobytes()


def _into(values: Tensor) -> Tensor:
    out = torch.empty(0, dtype=values.dtype)
    assert torch.sqrt(values, out=out) is out
    return out


def _power_into(values: Tensor) -> Tensor:
    out = torch.empty_like(values)
    torch.pow(values, 0.5, out=out)
    return out


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "sqrt": torch.sqrt,
    "in place": lambda values: values.clone().sqrt_(),
    "out": _into,
    "power": lambda values: values**0.5,
    "power in place": lambda values: values.clone().pow_(0.5),
    "power out": _power_into,
    "foreach": lambda values: torch._foreach_sqrt([values])[0],
    "foreach power": lambda values: torch._foreach_pow([values], 0.5)[0],
    "within autograd": lambda values: values.requires_grad_().sqrt(),
    "vmap": torch.vmap(torch.sqrt),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_roots_are_the_nearest_numbers_in_every_way(way: str, dtype: Any) -> None:
    values = numbers(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = WAYS[way](torch.from_numpy(values.copy()))
    assert same_bits(ours, roots(values))


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_short_numbers_are_rounded_from_exact_roots(kind: torch.dtype) -> None:
    """All 65536 of them, against float64."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(kind)
    truth = torch.from_numpy(roots(values.double().numpy())).to(kind)
    assert torch.equal(values.sqrt().nan_to_num(-1.0), truth.nan_to_num(-1.0))


def test_shapes_and_strides_are_torchs() -> None:
    whole = torch.arange(24.0).reshape(2, 3, 4)
    for values in (whole, whole.permute(2, 0, 1), whole[:, ::2], whole[0, 0, 0], torch.empty(0, 3), whole[:, :1]):
        ours, usual = torch.sqrt(values), torch.exp(values)
        assert (ours.shape, ours.stride()) == (usual.shape, usual.stride())
        assert same_bits(ours, roots(values.numpy()))


def test_whole_and_complex_numbers_have_roots_and_what_torch_refuses_is_refused_in_its_words() -> None:
    assert torch.sqrt(torch.tensor([4, 2])).tolist() == roots(np.float32([4, 2])).tolist()
    assert torch.allclose(torch.sqrt(torch.tensor([-4 + 0j])), torch.tensor([2j]))
    whole = torch.tensor([4])
    for wrong in (lambda: whole.sqrt_(), lambda: torch.sqrt(whole, out=whole), lambda: whole.pow_(0.5)):
        with pytest.raises(RuntimeError, match="can't be cast to"):
            wrong()
    with pytest.raises(RuntimeError, match="single memory location"):
        torch.ones(1).expand(3).sqrt_()


def test_all_is_as_before_after_the_block() -> None:
    before, inside, after, again = ask(_before_and_after)
    assert before == after
    assert (inside, again) == ((1, True), (1, True))
    assert before == (3, False)


def _before_and_after() -> list[tuple[int, bool]]:
    """Number of threads, and whether roots are exact: before `portable_kernels`, in it, after it, and in it again."""
    values = torch.from_numpy(np.random.default_rng(0).random(1000, dtype=np.float32))
    torch.set_num_threads(3)

    def state() -> tuple[int, bool]:
        return torch.get_num_threads(), same_bits(values.sqrt(), roots(values.numpy()))

    found = [state()]
    with portable_kernels():
        found.append(state())
    found.append(state())
    with portable_kernels():
        found.append(state())
    return found


def test_limits_that_torch_has_missed_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits_hold()
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    with refusing(), portable_kernels():
        pass
    monkeypatch.setenv("MKL_CBWR", LIMITS["MKL_CBWR"])
    # As in a process that has loaded torch first, on a CPU with AVX-512.
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert not limits_hold()


@pytest.mark.parametrize("way", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_adam_takes_exact_roots(way: dict[str, bool]) -> None:
    gradient = np.random.default_rng(3).random(COUNT, dtype=np.float32)
    weights = nn.Parameter(torch.zeros(COUNT))
    weights.grad = torch.from_numpy(gradient)
    torch.optim.Adam([weights], lr=1.0, betas=(0.0, 0.0), eps=1e-30, **way).step()
    # With both betas zero, Adam's first step adds -g / sqrt(g * g) to each weight, where g is its gradient.
    truth = -gradient / roots(gradient * gradient)
    assert np.array_equal(weights.detach().numpy(), truth)


def test_the_derivative_comes_from_the_exact_root_and_other_powers_stay() -> None:
    values = torch.from_numpy(np.random.default_rng(1).random(COUNT, dtype=np.float32)).requires_grad_()
    torch.sqrt(values).sum().backward()
    assert same_bits(values.grad, np.float32(1) / (np.float32(2) * roots(values.detach().numpy())))
    powers = [(torch.tensor([4.0]) ** exponent).item() for exponent in (2, -0.5, 3, 0, 1.5)]
    assert powers == [16, 0.5, 64, 1, 8]
