"""Passes made to find a mistake before training begins, which leave no trace in what is trained."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn


@contextmanager
def unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """The model in eval mode; afterwards its mode, its buffers and every state of random numbers are as before."""
    training, buffers = model.training, [buffer.clone() for buffer in model.buffers()]
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        model.eval()
        try:
            yield
        finally:
            model.train(training)
            with torch.no_grad():
                for buffer, value in zip(model.buffers(), buffers, strict=True):
                    buffer.copy_(value)
            random.setstate(python)
            np.random.set_state(numpy)
