"""Hooks into torch, in a process of a diagnosed script: what its optimizer steps are made of is written as a trace.

The events, in the order in which they happen; all but `step` tell of what has happened since the last one:

    start     once: the seed that torch has when it is loaded
    pass      a DataLoader begins to go through its data: how many batches and samples it has, its sampler
    batch     it has handed out a batch: the samples' indices, and digests of their content
    end       it has handed out its last batch
    forward   a model with trainable parameters was called: its samples, the generators, buffers, DDP's flag
    evaluation  a model was called that is not trained, on a loader's batch: once in each pass
    exchange  after an evaluation, ranks have put their figures together
    unseen    in training, ranks exchange what has a gradient, and autograd does not see it
    loss      a backward pass has reached a loss function (`loss_weights`)
    outside   a loss was computed outside of a model that got another batch than the script has
    figure    in an evaluation, a mean over a batch's elements (`loss_weights`)
    printed   after it, numbers that the script prints
    operations  what the operations of a forward have computed, where that is asked for
    clip      gradients are about to be clipped
    schedule  a schedule has moved on
    saved     torch.save was called
    step      an optimizer has made its step: gradients, weights, learning rates
    stopped   enough was seen; the process ends here
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddp_core.base.digests import optimizer_digest
from ddp_core.base.trees import map_tensors
from ddp_core.observe.operations import Operations
from ddp_lab.diagnose.loaders import Loaders
from ddp_lab.diagnose.loss_weights import LossWeights
from ddp_lab.diagnose.recorder import Recorder, changed, digest, generators, place, rows, site, tensors_of, wrap
from ddp_lab.diagnose.silence import answer_where
from ddp_lab.diagnose.task import Task, ended_file, task
from ddp_lab.diagnose.union import Batches
from ddp_lab.diagnose.updates import Schedules, Watched, settings

LONGER = 6
"""For a second epoch so many times the steps are seen at most."""
_WAIT_SECONDS = 10.0
_EXCHANGES = (
    *("all_reduce", "reduce", "all_gather", "all_gather_into_tensor", "gather", "all_to_all", "all_to_all_single"),
    *("all_gather_object", "gather_object", "reduce_scatter", "reduce_scatter_tensor"),
)
"""Functions of torch.distributed by which figures of all ranks come together."""
_NUMBER = re.compile(r"\d*\.\d+")


def install() -> None:
    """Hook into torch, which was just loaded."""
    answer_where()
    mine = task()
    atexit.register(lambda: ended_file(Path(mine.traces), os.getpid()).touch())
    batches = None
    if mine.given is not None:
        batches = Batches(Path(mine.batches), mine.given)
        batches.install()
    Tracer(Recorder(Path(mine.traces)), mine, batches).install()


class Tracer:
    """What is known of this process between two optimizer steps."""

    def __init__(self, recorder: Recorder, task: Task, batches: Batches | None) -> None:
        self._recorder, self._task, self._batches = recorder, task, batches
        self._losses, self._schedules = LossWeights(recorder), Schedules(recorder)
        self._steps = self._made_before = 0
        self._is_saved = False
        self._watched: dict[int, Watched] = {}
        """Each parameter of a model or an optimizer, by its `id()`."""
        self._moving: list[Watched] = []
        """Those of the optimizer that makes its step."""
        self._gradients: dict[str, dict[str, Any]] = {}
        self._state = ""
        self._stepping: Optimizer | None = None
        self._operations: list[Operations] = []
        self._made: list[Tensor] = []
        """Results of models since the step before the last: a model that is called with one is given no sample."""
        self._scaler: dict[str, Any] | None = None
        self._loaders = Loaders(recorder, batches)
        self._root: nn.Module | None = None
        self._wrapped: nn.Module | None = None
        self._buffer_digests: dict[str, str] = {}

    def install(self) -> None:
        """Hook into everything that an event tells of."""
        self._recorder.write("start", seed=torch.initial_seed())
        self._losses.install()
        self._loaders.install()
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        wrap(nn.Module, "__call__", self._call)
        wrap(torch.autograd, "backward", self._begin_backward)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            wrap(nn.utils, name, self._clip)
        self._schedules.install()
        wrap(torch, "save", self._save)
        wrap(torch.amp.GradScaler, "step", self._scale)
        for stream in (sys.stdout, sys.stderr):
            wrap(stream, "write", self._print)
        if torch.distributed.is_available():
            for name in _EXCHANGES:
                wrap(torch.distributed, name, self._exchange)

    def _call(self, call: Callable[..., Any], module: nn.Module, *words: Any, **named: Any) -> Any:
        if self._root is None and any(each.requires_grad for each in module.parameters()):
            return self._forward(call, module, words, named)
        if module is self._wrapped:
            self._note_buffers(module)
        return call(module, *words, **named)

    def _forward(self, call: Callable[..., Any], module: nn.Module, words: Any, named: Any) -> Any:
        self._root, self._wrapped, self._buffer_digests = module, getattr(module, "module", None), {}
        # Lightning brings only the wrapped model back into training mode after an evaluation, not DDP around it.
        in_training = module.training or (isinstance(self._wrapped, nn.Module) and self._wrapped.training)
        is_training = torch.is_grad_enabled() and in_training
        self._losses.is_evaluating = not is_training
        try:
            if not is_training:
                self._loaders.evaluated()
                result = call(module, *words, **named)
                self._made += tensors_of([result] if self._batches is not None else [])
                return result
            for name, parameter in module.named_parameters():
                if parameter.requires_grad:
                    self._watch(parameter).hook(_plain(name))
            before, sync = generators(), getattr(module, "require_backward_grad_sync", None)
            is_another = False
            if self._batches is not None and not any(each.requires_grad for each in tensors_of([words, named])):
                (words, named), is_another = self._batches.in_forward((words, named))
            with self._noting(module, [words, named]):
                result = call(module, *words, **named)
            if not isinstance(self._wrapped, nn.Module):
                self._note_buffers(module)
            self._loaders.trained()
            made = {each.untyped_storage().data_ptr() for each in self._made}
            given = [each for each in tensors_of([words, named]) if each.untyped_storage().data_ptr() not in made]
            self._recorder.write(
                "forward",
                **{"samples": rows(given), "sync": sync, "generators": before, "buffers": self._buffer_digests},
                draws=changed(before, generators()),
            )
            if is_another:
                result = self._told_if_used(result)
            self._made += tensors_of([result] if self._batches is not None else [])
            return result
        finally:
            self._root = self._wrapped = None

    def _noting(self, module: nn.Module, batch: Any) -> AbstractContextManager[Any]:
        """A block for a forward, whose operations are noted where that is asked for."""
        if not self._task.operations:
            return nullcontext()
        self._operations.append(operations := Operations(module))
        operations.note("the weights", list(module.parameters()))
        operations.note("the batch", batch)
        return operations

    def _told_if_used(self, result: Any) -> Any:
        """The result, of which it is told where a loss is computed: that has the targets of the script's own batch."""

        copies: list[Tensor] = []

        def told(tensor: Tensor) -> Tensor:
            if not tensor.dim() or not tensor.requires_grad:
                return tensor
            copies.append(tensor.clone())
            copies[-1].register_hook(lambda gradient: self._recorder.write("outside"))
            return copies[-1]

        try:
            watched = map_tensors(told, result)
        except TypeError:  # a list or tuple of a kind of its own
            watched = None
        tensors = list(tensors_of([result]))
        # Of an object that cannot be looked into, or not be made again, it is not known.
        if (
            watched is None
            or not tensors
            or len(copies) < sum(bool(each.dim() and each.requires_grad) for each in tensors)
        ):
            self._recorder.write("outside")
        return result if watched is None else watched

    def _note_buffers(self, module: nn.Module) -> None:
        self._buffer_digests = {_plain(name): digest(buffer) for name, buffer in module.named_buffers()}

    def _watch(self, parameter: Tensor) -> Watched:
        if id(parameter) not in self._watched:
            self._watched[id(parameter)] = Watched(parameter, f"a parameter of no model, number {len(self._watched)}")
        return self._watched[id(parameter)]

    def _begin_backward(self, function: Callable[..., Any], *words: Any, **named: Any) -> Any:
        self._losses.calls.clear()
        try:
            return function(*words, **named)
        finally:
            self._losses.backwards += 1

    def _clip(self, function: Callable[..., Any], parameters: Any, *words: Any, **named: Any) -> Any:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        clipped = [self._watch(each) for each in given if each.grad is not None]
        self._recorder.write("clip", site=site(), gradients={each.name: each.is_clipped() for each in clipped})
        return function(given, *words, **named)

    def _exchange(self, function: Callable[..., Any], *words: Any, **named: Any) -> Any:
        if self._losses.is_evaluating:
            callers = [frame.f_code.co_name for frame, _ in traceback.walk_stack(None)]
            # Accelerate takes out of the last batch what its loader had put into it twice.
            self._recorder.write("exchange", trims="gather_for_metrics" in callers)
        elif torch.is_grad_enabled() and any(each.requires_grad for each in tensors_of([*words, named])):
            self._recorder.write("unseen", site=site())
        return function(*words, **named)

    def _print(self, write: Callable[..., Any], text: Any) -> Any:
        if self._losses.is_evaluating and isinstance(text, str) and (numbers := _NUMBER.findall(text)):
            self._recorder.write("printed", numbers=numbers)
        return write(text)

    def _scale(self, step: Callable[..., Any], scaler: torch.amp.GradScaler, *words: Any, **named: Any) -> Any:
        self._scaler = scaler.state_dict() or None
        return step(scaler, *words, **named)

    def _save(self, function: Callable[..., Any], *words: Any, **named: Any) -> Any:
        result = function(*words, **named)
        self._recorder.write("saved", site=site())
        self._is_saved = True
        return result

    def _before_step(self, optimizer: Optimizer, words: Any, named: Any) -> None:
        if self._stepping is not None:  # an optimizer inside of another one
            return
        if self._task.until == "saved" and self._is_saved and self._steps >= min(2, self._task.steps):
            self._stop()
        self._is_saved = False
        self._stepping = optimizer
        self._moving = [self._watch(each) for group in optimizer.param_groups for each in group["params"]]
        for each in self._moving:
            each.begin_step()
        self._state = _state_digest(optimizer)
        for operations in self._operations:
            self._recorder.write("operations", noted=operations.noted)
        self._operations.clear()
        self._gradients = {each.name: each.gradient() for each in self._moving}

    def _after_step(self, optimizer: Optimizer, words: Any, named: Any) -> None:
        if self._stepping is not optimizer:
            return
        self._stepping = None
        self._steps += 1
        closure = len(words) > 1 or named.get("closure") is not None  # the first word is the optimizer itself
        rank, world, is_distributed = place()
        self._recorder.write(
            "step",
            **{"step": self._steps, "rank": rank, "world": world, "distributed": is_distributed, "site": site()},
            **{"optimizer": id(optimizer), "state": self._state},
            # With a closure, forward and the gradients have come in the step, and forward gives parameters their names.
            gradients={each.name: each.gradient() for each in self._moving} if closure else self._gradients,
            weights_before={each.name: each.before for each in self._moving},
            weights={each.name: digest(each.parameter) for each in self._moving},
            updates={each.name: each.update() for each in self._moving if self._batches is not None},
            rates=[float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
            settings=dict(zip((each.name for each in self._moving), settings(optimizer), strict=True)),
            scaler=self._scaler,
            generators=generators(),
            seed=torch.initial_seed(),
            sharded=any(hasattr(each.parameter, "to_local") for each in self._moving),
        )
        if self._batches is not None:
            self._batches.after_step(self._steps, {each.name: each.parameter for each in self._moving})
        self._scaler = None
        del self._made[: self._made_before]
        self._made_before = len(self._made)
        for each in self._watched.values():
            each.end_step()
        self._losses.backwards = 0
        if self._is_enough():
            self._stop()

    def _is_enough(self) -> bool:
        steps, until, seen = self._task.steps, self._task.until, self._steps
        if until != "epoch":
            return seen >= steps and until != "saved"
        return seen >= steps and not (seen < LONGER * steps and self._loaders.second_pass_comes(seen, LONGER * steps))

    def _stop(self) -> None:
        """End the process once every rank has come here: none loses a peer while it still needs it."""
        rank, world, _ = place()
        # Rank 0's schedules are looked at alone, and each takes a sixth of a second.
        self._recorder.write("stopped", ends=[] if rank else self._schedules.ends())
        folder = Path(self._task.traces)
        (folder / f"{rank}.stopped").touch()
        deadline = time.monotonic() + _WAIT_SECONDS
        while len(list(folder.glob("*.stopped"))) < world and time.monotonic() < deadline:
            time.sleep(0.01)
        sys.stdout.flush()
        sys.stderr.flush()
        # No exception: a script may catch it, and its cleaning up may wait for ranks that have ended.
        os._exit(0)


def _state_digest(optimizer: Optimizer) -> str:
    try:
        return optimizer_digest(optimizer.state_dict())[:16]
    except Exception:  # a script's own optimizer may hold anything, or refuse: then its state is not looked at
        return "unknown"


def _plain(name: str) -> str:
    """The parameter's name without what DDP puts into it."""
    return ".".join(part for part in name.split(".") if part != "module") or name
