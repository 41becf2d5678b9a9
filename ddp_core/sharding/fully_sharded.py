"""A model of which every rank keeps a part of each parameter, its gradient and its optimizer state, with the same bits.

torch's `fully_shard` gathers the parameters of a block before its forward and its backward, and frees them after. What
is its own here: gradients are added up in the canonical tree (`rounds`), the optimizer updates plain tensors in the
memory of this rank's rows (`rows`), and the state of all ranks goes in and out in the form that it has on one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from ddp_core.reduction.agreement import require_agreement, require_equal_weights
from ddp_core.reduction.communication import Channel, own_group
from ddp_core.reduction.flat import Gradients

from .blocks import FEWEST_ELEMENTS, blocks_of, refusal, refuse_unsuitable
from .elementwise import require_elementwise
from .plain_rounds import PlainRounds
from .rounds import Rounds
from .rows import Rows


class FullySharded:
    """Cuts the parameters of `module` for the ranks of `process_group`, and lets `optimizer` update this rank's rows.

        sharded = FullySharded(model, optimizer, micro_batches=8, process_group=group)
        exact = ExactReduction(model, 8, shares=sharded.rounds)

    The module stays the same object and is called as before. The optimizer stays the same object, too; its groups hold
    this rank's rows in the place of the parameters, and its own `state_dict` is of these alone. `fewest_elements` is
    the size from which a part of the model is gathered by itself (`blocks_of`). Every forward gathers, so all ranks
    must run as many of them, also in an evaluation. Without `exact` the sums are torch's own, and `rounds` takes the
    place of the reduction.

    The same on every rank. Drop the module and this object, and collect garbage, before the process group is destroyed.
    Raises UserError (2) for a module that fully_shard cannot wrap and for an optimizer that does not treat each element
    by itself, and ValueError for ranks that do not agree.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        micro_batches: int,
        *,
        process_group: dist.ProcessGroup,
        timeout: timedelta | None = None,
        exact: bool = True,
        fewest_elements: int = FEWEST_ELEMENTS,
    ) -> None:
        self.module, self._optimizer = module, optimizer
        refuse_unsuitable(module)
        require_elementwise(optimizer)
        if process_group.size() > 1:
            if exact:
                require_agreement(process_group, micro_batches, "strided", Gradients(module), 0)
            require_equal_weights(process_group, module)
        # Gathers are in another sequence than what the caller sends, such as losses, and the two must not mix.
        device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        self.group = own_group(process_group, device, timeout)
        wholes = dict(module.named_parameters(remove_duplicate=False))
        self._parts = _wrapped(module, self.group, device, fewest_elements)
        self._rows: dict[str, Rows] = {}
        """By the parameters' names; a shared parameter has several."""
        by_parameter: dict[int, Rows] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if id(parameter) not in by_parameter:
                local = cast(DTensor, parameter.detach()).to_local().detach().view(-1)
                by_parameter[id(parameter)] = Rows(name, wholes[name], local, self.group)
            self._rows[name] = by_parameter[id(parameter)]
        self.rounds: Rounds | PlainRounds
        if exact:
            channel = Channel(process_group, device, timeout)
            self.rounds = Rounds(self._parts, by_parameter, process_group, channel)
        else:
            self.rounds = PlainRounds(self._parts, by_parameter, self.group)
        self._hook = self._replace_parameters(wholes)

    @property
    def trained(self) -> dict[str, Tensor]:
        """This rank's rows of the trained parameters by name, each in one dimension."""
        return {name: rows.local for name, rows in self._rows.items() if rows.tensor.requires_grad}

    def whole_weights(self) -> dict[str, Any] | None:
        """The module's state_dict as it is on one process, on rank 0, parameters in host memory; None on the others.

        A collective.
        """
        state = self._weights(lambda rows: rows.put_together(rows.local))
        return state if self.group.rank() == 0 else None

    def own_weights(self) -> dict[str, Any]:
        """The module's state_dict on every rank, with a CutTensor of this rank's rows for each parameter."""
        return self._weights(lambda rows: rows.cut_tensor(rows.local))

    def load_whole_weights(self, state: Mapping[str, Any]) -> None:
        """Load a state_dict of the module as it is on one process; every rank has all of it."""
        for part in self._parts:
            part.reshard()
        if differing := self.module.state_dict().keys() ^ state.keys():
            raise ValueError(f"{min(differing)} is in the state alone, or in the model alone")
        for name, rows in self._rows.items():
            rows.local.copy_(rows.of_whole(state[name]))
            rows.take()
        self.module.load_state_dict({name: state[name] for name in state if name not in self._rows}, strict=False)

    def whole_state(self) -> dict[str, Any] | None:
        """The state_dict that the optimizer would have on one process, on rank 0, in host memory; None on the others.

        A collective.
        """
        state = self._state(Rows.put_together)
        return state if self.group.rank() == 0 else None

    def own_state(self) -> dict[str, Any]:
        """The same on every rank, with a CutTensor of this rank's rows for each tensor with values for each element."""
        return self._state(Rows.cut_tensor)

    def load_whole_state(self, state: Mapping[str, Any]) -> None:
        """Load a state_dict of the optimizer as it is on one process; every rank has all of it."""
        by_number = self._rows_by_number()

        def cut(number: int, value: Any) -> Any:
            rows = by_number[number]
            is_whole = isinstance(value, Tensor) and value.shape == rows.shape
            return rows.filled(rows.of_whole(value)).clone() if is_whole else value

        own = {
            number: {name: cut(number, value) for name, value in entries.items()}
            for number, entries in state["state"].items()
        }
        self._optimizer.load_state_dict({**state, "state": own})

    def close(self) -> None:
        """Let go of the optimizer. The module stays sharded."""
        self._hook.remove()

    def _weights(self, whole: Callable[[Rows], Any]) -> dict[str, Any]:
        """The module's state_dict, with `whole` of the rows in the place of each parameter."""
        for part in self._parts:
            part.reshard()
        state: dict[str, Any] = self.module.state_dict()
        wholes: dict[int, Any] = {}
        for name, rows in self._rows.items():
            if id(rows) not in wholes:
                wholes[id(rows)] = whole(rows)
            if name in state:
                state[name] = wholes[id(rows)]
        return state

    def _state(self, whole: Callable[[Rows, Tensor], Any]) -> dict[str, Any]:
        """The optimizer's state_dict, with `whole` of the rows and their values where each element has a value."""
        state, by_number = self._optimizer.state_dict(), self._rows_by_number()

        def taken(rows: Rows, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            is_filled = value.shape == rows.tensor.shape
            return whole(rows, rows.of_filled(value)) if is_filled else value.clone().cpu()

        # The entries in a state_dict are the optimizer's own, so they are not changed.
        entries = {
            number: {name: taken(by_number[number], value) for name, value in each.items()}
            for number, each in state["state"].items()
        }
        return {**state, "state": entries}

    def _replace_parameters(self, wholes: Mapping[str, nn.Parameter]) -> RemovableHandle:
        """Let the optimizer, and what state it has, be of this rank's rows."""
        optimizer, state = self._optimizer, self._optimizer.state_dict()
        rows_of = {id(whole): self._rows[name] for name, whole in wholes.items()}
        for group in optimizer.param_groups:
            group["params"] = [rows_of[id(whole)].tensor for whole in group["params"]]
        optimizer.state.clear()
        if state["state"]:
            self.load_whole_state(state)
        rows = list({id(each): each for each in self._rows.values()}.values())

        def give(*_: Any) -> None:
            for each in rows:
                each.give()

        return optimizer.register_step_post_hook(give)

    def _rows_by_number(self) -> dict[int, Rows]:
        """The rows by the number that their tensor has in the optimizer's state_dict."""
        by_tensor = {id(rows.tensor): rows for rows in self._rows.values()}
        tensors = (tensor for group in self._optimizer.param_groups for tensor in group["params"])
        return {number: by_tensor[id(tensor)] for number, tensor in enumerate(tensors)}


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
        raise refusal(str(error).partition("\n")[0]) from error
    return wrapped
