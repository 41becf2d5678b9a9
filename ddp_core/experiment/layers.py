"""In which layer of the user's model an exception was raised. Loaded only when something has failed."""

from __future__ import annotations

import traceback
from typing import Any

from torch import nn

from ddp_core.base.trees import tensors_of
from ddp_core.base.user_code import users

_CALL: Any = nn.Module.__call__
_WRAPPERS = ("torch.nn.parallel.", "torch.distributed.", "torch._dynamo.", "ddp_core.trainers.")
"""Modules around the user's model, which is what names in its `named_modules` are to begin with."""


def layer_of(error: BaseException) -> str | None:
    """'model.head.0, Linear(in_features=64, out_features=10, bias=True), which was given [16, 32]', or None.

    The layer is the innermost module whose call the exception has left. Its path is known where the whole model was
    called, and not where backward calls a part of it again.
    """
    calls = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code is _CALL.__code__]
    calls = [call for call in calls if not type(call["self"]).__module__.startswith(_WRAPPERS)]
    if not calls:
        return None
    root, layer = calls[0]["self"], calls[-1]["self"]
    shapes = [str(list(tensor.shape)) for tensor in tensors_of((calls[-1]["args"], calls[-1]["kwargs"]))]
    is_torchs = type(layer).__module__.startswith("torch.nn.") and not list(layer.children())
    what = " ".join(repr(layer).split()) if is_torchs else type(layer).__name__
    names = [name for name, module in root.named_modules() if module is layer] if users(error) == "your model" else []
    path = [".".join(["model", *filter(None, names[:1])])] if names else []
    return ", ".join([*path, what]) + (f", which was given {', '.join(shapes)}" if shapes else "")
