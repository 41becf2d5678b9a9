"""Ranks that keep a part of each parameter, of its gradient and its optimizer state alone, with the same bits.

torch's `fully_shard` gathers the parameters of a block before its forward and its backward, and frees them after. What
is its own here: gradients are added up in the canonical tree (`rounds`), the optimizer updates plain tensors in the
memory of this rank's rows (`owned`), and the state of all ranks goes in and out in the form that it has on one process.

Importing this file loads torch's FSDP, which takes a second.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from ddp_core.base.errors import first_line
from ddp_core.base.torch_internals import forget_that_it_is_cut, gathered_together, sent_together
from ddp_core.checkpoint import CutTensor
from ddp_core.reduction import ExactReduction
from ddp_core.reduction.agreement import require_agreement, require_equal_weights
from ddp_core.reduction.communication import Channel, own_group
from ddp_core.reduction.flat import Gradients
from ddp_core.reduction.parts import Parts, parts_on

from .block_parcel import BlockParcel, UnreadMemory
from .blocks import FEWEST_ELEMENTS, BlockCalls, WholeParameters, blocks_of, refusal, refuse_unsuitable
from .owned import Rows
from .owns_part import OwnsPart, first_after_step
from .rounds import Rounds
from .updates import OwnUpdates

_UNDER_WAY = 2
"""So many blocks' gradients may be on their way at a time."""


class OwnsRows(OwnsPart):
    """Cuts the parameters of `module` for the ranks of `process_group`, and lets `optimizer` update this rank's rows.

        owned = OwnsRows(model, optimizer, micro_batches=8, process_group=group)
        for index in owned.reduction.share:                    # an ExactReduction
            with owned.reduction.micro_batch(index):
                loss_sum(model(x[index]), y[index]).backward()
        for _ in range(owned.idle_passes):                     # others gather, so this rank must, too
            with owned.idle_pass():
                (0.0 * loss_sum(model(x[0]), y[0])).backward()
        owned.reduction.finish(scale=1 / samples)
        optimizer.step()

    The module is called as before. `fewest_elements` is the size from which a part of the model is gathered by itself
    (`blocks_of`). Every forward gathers, so all ranks must run as many of them, also in an evaluation. Ranks of one
    node add up among themselves before nodes exchange; `node` is that of `ExactReduction`.

    The same on every rank. Drop the module and this object, and collect garbage, before the process group is destroyed.
    Raises UserError (2) for a module that fully_shard cannot wrap, for an optimizer that may not treat each element by
    itself and for parameters that share memory, and ValueError for ranks that do not agree.
    """

    has_whole_weights = False

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        micro_batches: int,
        *,
        process_group: dist.ProcessGroup,
        fewest_elements: int = FEWEST_ELEMENTS,
        node: str | int | None = None,
    ) -> None:
        refuse_unsuitable(module)
        super().__init__(module, optimizer, process_group)
        nodes: list[list[int]] = []
        if self.group is not None:
            nodes = require_agreement(
                process_group, micro_batches, "strided, in rows", Gradients(module.named_parameters()), node
            )
            require_equal_weights(process_group, module, "before the first step")
        # Gathers are in another sequence than what the caller sends, such as losses, and the two must not mix.
        own = own_group(process_group, self.device)
        wholes = dict(module.named_parameters(remove_duplicate=False))
        self._parts = _wrapped(module, own, self.device, fewest_elements)
        self._rows: dict[str, Rows] = {}
        """By the parameters' names; a shared parameter has several."""
        by_parameter: dict[int, Rows] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if id(parameter) not in by_parameter:
                local = cast(DTensor, parameter.detach()).to_local().detach().view(-1)
                by_parameter[id(parameter)] = Rows(name, wholes[name], local, own.rank(), own.size())
            self._rows[name] = by_parameter[id(parameter)]
        # Here, because some blocks stay gathered between two passes, and the module then names other objects.
        members = itertools.chain.from_iterable(map(gathered_together, self._parts))
        self._wholes = WholeParameters({by_parameter[id(part)].name: whole for part, whole in members}, wholes)
        # All ranks send in this sequence, that of a usual backward, whichever gradients are there first.
        rows, unread, parts = list(by_parameter.values()), UnreadMemory(), reversed(self._parts)
        channel = Channel(process_group, self.device, None, nodes)
        gather_by_messages(self._parts, own, channel.ordered_sum.groups, self.device)
        self._rounds = Rounds(
            [BlockParcel(part, by_parameter, own.size(), unread) for part in parts if sent_together(part)],
            rows,
            Gradients((row.name, row.tensor) for row in rows),
            channel,
            None,  # which were compared above
            _UNDER_WAY,
            in_pass=self._wholes.exact_pass,
        )
        self.reduction = ExactReduction(module, micro_batches, process_group=process_group, shares=self._rounds)
        self.updates = OwnUpdates(optimizer, {id(wholes[name]): rows for name, rows in self._rows.items()}, self.group)
        self.owned = [*rows]

        def take(*_: Any) -> None:
            for each in rows:
                each.take()

        def give(*_: Any) -> None:
            for each in rows:
                each.give()

        # Around the hooks of others, which see the rows, and change them, through the module's parameters.
        self.hooks = [optimizer.register_step_pre_hook(take), first_after_step(optimizer, give)]

    @property
    def idle_passes(self) -> int:
        return self._rounds.idle_passes

    def idle_pass(self) -> contextlib.AbstractContextManager[None]:
        """Run forward and backward of any micro-batch inside, with a loss weight of 0."""
        return self._rounds.idle_pass()

    def forward_alone(self) -> contextlib.AbstractContextManager[None]:
        return self._wholes.exact_pass()

    def forwards_done(self) -> None:
        for part in self._parts:
            part.reshard()

    @property
    def trained(self) -> dict[str, Tensor]:
        return {name: rows.local for name, rows in self._rows.items() if rows.is_trained}

    def described_weights(self) -> dict[str, Any]:
        return {
            name: torch.empty((), dtype=value.dtype).expand(value.shape) if isinstance(value, Tensor) else value
            for name, value in self.module.state_dict().items()
        }

    def whole_weights(self) -> dict[str, Any] | None:
        return self.whole_on_first(self.own_weights())

    def own_weights(self, copy: nn.Module | None = None) -> dict[str, Any]:
        assert copy is None, "a copy of the module would have whole weights"
        self._wholes.refuse_changes()
        self.forwards_done()
        state: dict[str, Any] = self.module.state_dict()
        cuts: dict[int, CutTensor] = {}
        for name, rows in self._rows.items():
            if name in state:
                state[name] = cuts.setdefault(id(rows), rows.cut_tensor(rows.local, rows.local.dtype))
        return state

    def load_weights(self, state: Mapping[str, Any]) -> None:
        self.forwards_done()
        if differing := self.module.state_dict().keys() ^ state.keys():
            raise ValueError(f"{min(differing)} is in the state alone, or in the model alone")
        for name, rows in self._rows.items():
            rows.local.copy_(rows.of_whole(state[name]))
        self.module.load_state_dict({name: state[name] for name in state if name not in self._rows}, strict=False)


def _wrapped(
    module: nn.Module, group: dist.ProcessGroup, device: torch.device, fewest_elements: int
) -> list[FSDPModule]:
    """Let fully_shard wrap the blocks of the module, then the module; return all of them, the module last."""
    mesh = DeviceMesh.from_group(group, device.type)
    blocks = blocks_of(module, fewest_elements)
    try:
        for block in blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
        wrapped = cast(list[FSDPModule], [*blocks, module])
        for part in wrapped:
            # fully_shard looks at the dtypes here.
            part.unshard()
            part.reshard()
    except (ValueError, NotImplementedError, AssertionError) as error:
        raise refusal(first_line(error)) from error
    forget_that_it_is_cut(module)
    if blocks and group.size() > 1:
        BlockCalls(module, blocks, group)
    return wrapped


def gather_by_messages(
    parts: Sequence[FSDPModule],
    group: dist.ProcessGroup,
    groups: tuple[tuple[int, ...], ...],
    device: torch.device,
) -> None:
    """Let these modules of fully_shard gather by messages on `group` where their parameters are in host memory.

    gloo's own all-gather is a ring, in which every rank's part passes through every other rank; NCCL's knows the nodes.
    Nothing else sends messages on `group`. For `groups` see `parts_on`.
    """
    if device.type == "cpu" and group.size() > 1:
        gather = _Gather(parts_on(group, groups, device))
        for part in parts:
            part.set_custom_all_gather(gather)  # type: ignore[arg-type]


class _Gather:
    """Stands in the place of torch's all-gather."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for all ranks' parts."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill `output_tensor` with all ranks' parts, one after the other, and wait; `input_tensor` is this rank's."""
        size = input_tensor.numel()
        cuts = [slice(rank * size, (rank + 1) * size) for rank in range(group.size())]
        mine = output_tensor[cuts[group.rank()]]
        if mine.data_ptr() != input_tensor.data_ptr():
            mine.copy_(input_tensor)
        self._parts.gather([(output_tensor, cuts)])
