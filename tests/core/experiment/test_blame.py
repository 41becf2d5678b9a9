"""Whose fault an exception is: the boundary that it crosses decides; a shortage is reported in one line.

Tests base/user_code.py and experiment/layers.py, too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddp_core.base.errors import ExitCode
from ddp_core.base.user_code import our_code, user_code, users
from ddp_core.config.experiment import Component, Experiment
from ddp_core.experiment import blame
from ddp_core.experiment.building import callbacks_of
from ddp_core.experiment.file import LoadedExperiment, load_experiment
from ddp_core.model.losses import cross_entropy
from ddp_core.observe.step import StepBatch, StepObserver, StepObservers
from ddp_core.reduction import ExactReduction
from ddp_core.trainers.own_metrics import NamedSums
from ddp_core.trainers.passes import Passes, WeightUpdate
from ddp_core.trainers.train_state import TrainState
from tests.support.wording import refusing

CPU = torch.device("cpu")
EXPERIMENT = Experiment(name="mine", model=Component(name="m"), data=Component(name="d"), global_batch_size=4)


class WithoutBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("no backward yet")


def passes() -> Passes:
    return Passes(EXPERIMENT, cross_entropy, CPU)


def backward() -> None:
    loss = WithoutBackward.apply(torch.zeros(2, requires_grad=True)).sum()
    passes().backward(loss, torch.ones(()))


def sparse_gradients() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    exact = ExactReduction(embedding, 1)
    with exact.micro_batch(0):
        embedding(torch.tensor([1])).sum().backward()


def optimizer_step() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.register_step_pre_hook(lambda *details: 1 / 0)
    WeightUpdate(EXPERIMENT, TrainState(nn.Linear(1, 1), optimizer), 1, clip=pytest.fail).make(0)


def own_observer() -> None:
    class Sees(StepObserver):
        def after_step(self, batch: StepBatch) -> None:
            raise OSError("no room here")

    loaded = LoadedExperiment(EXPERIMENT, {"callbacks": [Sees()]}, Path("mine.py"), "", "")
    StepObservers(callbacks_of(loaded)[1]).after_step(StepBatch(0, 0, 4, 4, [], [], []))


def raised_by(cause: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as raised:  # noqa: PT011
        cause()
    return raised.value


@pytest.mark.parametrize("cause", [backward, sparse_gradients, optimizer_step, own_observer])
def test_what_the_experiment_raised_is_bad_input(cause: Callable[[], None]) -> None:
    error = raised_by(cause)
    exit_code, line = blame.unforeseen(error)
    assert exit_code == ExitCode.BAD_INPUT
    assert line.partition("; in ")[0] == f"{type(error).__name__}: {error}"
    assert blame.shortage(error, "rank 0") is None


def test_a_line_of_the_experiments_own_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from ddp_core.config.experiment import Experiment\n\n\n"
        "def metrics(outputs, targets):\n    return {}[outputs]\n\n\n"
        "experiment = Experiment(name='mine', global_batch_size=4)\n"
    )
    metrics = load_experiment(str(path)).namespace["metrics"]
    error = raised_by(lambda: NamedSums({"": metrics}).add(3, 4))
    assert blame.unforeseen(error) == (ExitCode.BAD_INPUT, f"{path}:5: KeyError: 3")


NESTED = """
import torch
from torch import nn
from ddp_core.config.experiment import Experiment

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(nn.ReLU(), nn.Linear(width, 8))

    def forward(self, inputs):
        return torch.cat([self.inner(inputs), WRONG])

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body, self.head = nn.Linear(5, 8), nn.ModuleList([Block(8), Block(width)])

    def forward(self, inputs):
        for block in [self.body, *self.head]:
            inputs = block(inputs)
        return inputs

experiment = Experiment(name="mine", global_batch_size=4)
"""


@pytest.mark.parametrize("wrap", [lambda model: model, nn.DataParallel], ids=["alone", "wrapped"])
@pytest.mark.parametrize(
    ("width", "wrong", "said"),
    [
        (
            9,
            "inputs",
            "in model.head.1.inner.1, Linear(in_features=9, out_features=8, bias=True), which was given [8, 8]",
        ),
        (8, "inputs[0]", "in model.head.0, Block, which was given [4, 8]"),
    ],
    ids=["layer-of-torch", "module-of-the-user"],
)
def test_the_layer_in_which_a_forward_fails_is_named_in_the_one_line(
    tmp_path: Path, width: int, wrong: str, said: str, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(NESTED.replace("WRONG", wrong))
    model = wrap(load_experiment(str(path)).namespace["Net"](width))
    error = raised_by(lambda: passes().loss(model, torch.zeros(4, 5), torch.zeros(4, dtype=torch.int64)))
    exit_code, line = blame.unforeseen(error)
    assert exit_code == ExitCode.BAD_INPUT
    assert line == f"{path}:12: RuntimeError: {error}; {said}"


def hook_of_ours_in_backward() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.register_hook(our_code(lambda gradient: gradient.no_such_word))
    passes().backward(weight.sum(), torch.ones(()))


def test_our_own_hook_in_the_midst_of_a_users_model_is_ours() -> None:
    exit_code, line = blame.unforeseen(raised_by(hook_of_ours_in_backward))
    assert exit_code == ExitCode.INTERNAL
    assert "no_such_word" in line


def test_the_first_boundary_decides() -> None:
    error = raised_by(backward)
    assert users(error) == "your model's backward"
    with pytest.raises(NotImplementedError), user_code("something else"):
        raise error
    assert users(error) == "your model's backward"


CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB, of which"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(CUDA),
        torch.OutOfMemoryError(f"Caught OutOfMemoryError in replica 1 on device 1.\nOriginal Traceback:\n{CUDA}\n"),
        RuntimeError(f"The following operation failed in the hook: OutOfMemoryError: {CUDA}\n\nAt:\n  hook.py(7)"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=["alone", "in a replica", "in a hook", "of the driver", "of cuBLAS"],
)
def test_memory_that_a_gpu_does_not_have_is_a_shortage(error: Exception) -> None:
    found = blame.shortage(error, "rank 1 (node 0)")
    assert found is not None
    with refusing():
        raise found


def test_an_operation_that_does_not_repeat_its_bits_is_named_with_a_way_out() -> None:
    """As adaptive average pooling on CUDA, which AlexNet and VGG use."""
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError) as raised:
            torch.zeros(3).put_(torch.zeros(2, dtype=torch.int64), torch.ones(2))
    finally:
        torch.use_deterministic_algorithms(False)
    code, message = blame.unforeseen(raised.value)
    assert code == ExitCode.BAD_INPUT
    assert message.startswith("put_: this operation has no kernel here that repeats its bits; use another layer")
    assert "--reduction plain --deterministic never" in message
