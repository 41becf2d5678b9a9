"""The graph of a model, by torch.export: with any number of samples in a batch where the model allows that."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ddp_core.base.errors import UserError
from ddp_core.data.trees import Tree, map_tensors, tensors_of

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def exported_program(model: nn.Module, inputs: Tree, whose: str) -> tuple[ExportedProgram, list[str]]:
    """The program of a model in eval mode, and a line where it takes batches of just these inputs' size.

    Raises UserError, in the name of the format `whose`, where the model cannot be traced.
    """
    named = isinstance(inputs, Mapping)
    arguments = () if named else tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    words = dict(inputs) if named else {}
    size = len(next(tensors_of(inputs)))
    batch = torch.export.Dim("batch", min=1, max=2**31 - 1)

    def marked(tensor: Tensor) -> dict[int, object]:
        return {0: batch} if tensor.dim() and len(tensor) == size else {}

    shapes = map_tensors(marked, words if named else arguments)
    problem: Exception | None = None
    for dynamic in (shapes, None):
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                program = torch.export.export(model, arguments, words, dynamic_shapes=dynamic)
        except Exception as error:
            problem = error
        else:
            fixed = f"the graph takes batches of {size} samples only: the model does not allow other sizes"
            return program, [] if dynamic is not None else [fixed]
    reason = str(problem).strip().partition("\n")[0]
    raise UserError(
        f"--to {whose}: torch.export cannot trace {type(model).__name__} ({type(problem).__name__}: {reason}); "
        "--to safetensors holds its weights without a graph"
    ) from problem
