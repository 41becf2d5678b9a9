"""Operations of torch and numpy at fixed inputs, by which a machine shows whether it computes the published bits."""

from __future__ import annotations

from ddp_lab.probe.operations.drawing import drawing, of_numpy
from ddp_lab.probe.operations.elementwise import elementwise
from ddp_lab.probe.operations.inputs import Operation, Operations
from ddp_lab.probe.operations.moving import moving, pooling
from ddp_lab.probe.operations.optimizers import optimizers
from ddp_lab.probe.operations.products import algebra, convolutions, products, products_in_chains, sequences
from ddp_lab.probe.operations.rarer import rarer
from ddp_lab.probe.operations.sums import losses, norms, sums

__all__ = ["Operation", "Operations", "all_operations"]


def all_operations() -> Operations:
    """Every operation of the table by name. Building them makes their inputs, in some milliseconds."""
    kinds = [elementwise(), sums(), losses(), norms(), products(), convolutions(), sequences(), algebra(), moving()]
    kinds += [pooling(), drawing(), of_numpy(), optimizers(), products_in_chains(), rarer()]
    return {name: operation for kind in kinds for name, operation in kind.items()}
