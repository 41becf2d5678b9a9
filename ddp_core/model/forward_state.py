"""What a forward may change in a model beside its weights: buffers, and attributes that the model keeps in Python."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ddp_core.base.torch_internals import buffers_of

_TORCHS = ("_parameters", "_modules")
"""Attributes of a module that are left alone: what shards a model replaces parameters there."""


class ForwardState:
    """Buffers, attributes and modes of all layers, as they are now; `put_back` makes them so again.

    An attribute is put back where it was given another value; what was changed within a value, such as a list, is not.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = []
        for layer in model.modules():
            buffers = dict(buffers_of(layer))
            # A lazy layer's have no values yet.
            has_values = {name: each for name, each in buffers.items() if each is not None and not is_lazy(each)}
            copies = {name: each.detach().clone() for name, each in has_values.items()}
            self._layers.append((layer, {**layer.__dict__}, buffers, copies))

    @torch.no_grad()
    def put_back(self) -> None:
        """Make all of it as it was when this object was made."""
        for layer, attributes, *_ in self._layers:
            now = layer.__dict__
            for name in now.keys() - attributes.keys():
                del now[name]
            now.update({name: value for name, value in attributes.items() if name not in _TORCHS})
        for layer, _, buffers, values in self._layers:
            if isinstance(buffers_of(layer), dict):  # a ScriptModule's are fixed
                buffers_of(layer).clear()
                buffers_of(layer).update(buffers)
            for name, value in values.items():
                buffer = buffers[name]
                assert buffer is not None
                if buffer.shape == value.shape:
                    buffer.copy_(value)
                else:
                    buffer.data = value.clone()  # resized in place

    def put_back_modes(self) -> None:
        """Make each layer's mode (training or evaluation) as it was."""
        for layer, attributes, *_ in self._layers:
            layer.training = attributes["training"]
