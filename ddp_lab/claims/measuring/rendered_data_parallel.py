"""nn.DataParallel's step rendered on CPU, where torch's class does nothing but call the module.

What nn.DataParallel does in each step is done here in its own terms: scatter the inputs, replicate the module anew
(copies of its parameters that are no leaves, made inside autograd), apply the replicas in threads that are started for
this one forward, gather the outputs on the first device, where the loss is computed, and call backward once: the copy's
backward sums the replicas' gradients into the parameters. Two things remain different from CUDA: a copy moves between
places of the same memory, and torch's autograd engine has one thread for the CPU where it has one for each CUDA device,
so the replicas' backward passes run one after the other.

Source: torch/nn/parallel/data_parallel.py, replicate.py, parallel_apply.py, _functions.py.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


class RenderedDataParallel(nn.Module):
    """`module` over `count` replicas on the CPU; its outputs and gradients are nn.DataParallel's."""

    def __init__(self, module: nn.Module, count: int) -> None:
        super().__init__()
        self.module = module
        # Only the frames: their tensors are replaced in every forward. The first replica is the module itself.
        self._frames = [module, *(copy.deepcopy(module) for _ in range(count - 1))]

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs of all samples, in their sequence. Raises what a replica raises."""
        shares = inputs.chunk(len(self._frames))
        names = [name for name, _ in self.module.named_parameters()]
        copies = _Broadcast.apply(len(shares) - 1, *self.module.parameters())  # type: ignore[no-untyped-call]
        outputs: list[Any] = [None] * len(shares)
        buffers = dict(self.module.named_buffers())

        def apply(number: int, tensors: dict[str, Tensor]) -> None:
            try:
                torch.set_num_threads(threads)
                outputs[number] = functional_call(self._frames[number], tensors, (shares[number],))
            except Exception as error:
                outputs[number] = error

        threads, started = torch.get_num_threads(), []
        for number in range(len(shares)):
            tensors: dict[str, Tensor] = {}
            if number:
                own = copies[(number - 1) * len(names) : number * len(names)]
                # What a replica writes into its buffers is lost, as in nn.DataParallel.
                tensors = dict(zip(names, own, strict=True)) | {name: each.clone() for name, each in buffers.items()}
            started.append(threading.Thread(target=apply, args=(number, tensors)))
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
        for output in outputs:
            if isinstance(output, Exception):
                raise output
        return torch.cat(outputs)


class _Broadcast(torch.autograd.Function):
    """Copies of tensors for so many other replicas; backward sums the copies' gradients."""

    @staticmethod
    def forward(ctx: Any, others: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.count = len(tensors)
        return tuple(tensor.clone() for _ in range(others) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        sums = []
        for place in range(ctx.count):
            found = [gradient for gradient in gradients[place :: ctx.count] if gradient is not None]
            sums.append(sum(found[1:], found[0]) if found else None)
        return (None, *sums)
