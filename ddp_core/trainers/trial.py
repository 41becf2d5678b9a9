"""Passes made to find a mistake before training begins, which leave no trace in what is trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ddp_core.base.seeds import generators_kept


@contextmanager
def unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """The model in eval mode; afterwards its mode, its buffers and every state of random numbers are as before."""
    training, buffers = model.training, [buffer.clone() for buffer in model.buffers()]
    with generators_kept(device):
        model.eval()
        try:
            yield
        finally:
            model.train(training)
            with torch.no_grad():
                for buffer, value in zip(model.buffers(), buffers, strict=True):
                    buffer.copy_(value)
