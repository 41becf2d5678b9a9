"""Digests of the result of training: SHA-256 over weights, buffers and the optimizer's state."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch


def weights_digest(state: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over a state dict, the `weights_sha256` of run.json.

    For each entry in sorted key order: the UTF-8 name, NUL, the dtype's name, NUL, the shape as decimal numbers
    joined by commas, NUL, then the raw little-endian bytes.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        shape = ",".join(str(size) for size in tensor.shape)
        digest.update(f"{name}\0{str(tensor.dtype).removeprefix('torch.')}\0{shape}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    return digest.hexdigest()


def optimizer_digest(optimizer: torch.optim.Optimizer) -> str:
    """SHA-256 over the optimizer's tensors (momenta, second moments, step counts).

    As `weights_digest`, under names made of the parameter's number and the tensor's name.
    """
    return weights_digest(dict(_optimizer_tensors(optimizer)))


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for number, entries in optimizer.state_dict()["state"].items():
        for name, value in entries.items():
            if value is not None:
                yield f"{number:06d}.{name}", torch.as_tensor(value)
