"""What this project does with private names of torch; torch_names.py says why, and that each is there."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn

from ddp_core.base.torch_names import require_private_names

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.rendezvous import RendezvousHandler
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel

require_private_names()  # before the first use of one, which would end in a traceback
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # noqa: E402

SEPARATE_STORES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Environment variable: "1" gives each round of workers a store of its own."""
HANDLED_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"
"""Environment variable: the names of the signals, with commas between, that torch handles when it starts workers."""
ALIKE_NODES = "TORCH_ELASTIC_WORKER_IDENTICAL"
"""Environment variable: "1" lets an agent count its ranks from its node's number, without asking all other nodes."""

foreach_add_: Callable[..., None] = torch._foreach_add_
foreach_copy_: Callable[..., None] = torch._foreach_copy_
foreach_mul_: Callable[..., None] = torch._foreach_mul_
MOVES: tuple[Any, ...] = (
    *(torch.ops.aten.copy_.default, torch.ops.aten._foreach_copy_.default),
    *(torch.ops.aten.add_.Tensor, torch.ops.aten._foreach_add_.List),
)
"""Operations, as TorchDispatchMode sees them, that copy or add what their second argument holds into the first."""
_counter_of_writes: Callable[[torch.Tensor], int] = cast(Any, torch.Tensor._version).__get__


def workers_of(agent: LocalElasticAgent) -> dict[int, Any]:
    """The processes of the agent's workers by local rank; none before their first start."""
    started = cast(Any, agent._pcontext)
    return {} if started is None else {rank: handler.proc for rank, handler in started.subprocess_handlers.items()}


def start_again(agent: LocalElasticAgent, local_rank: int) -> int:
    """Start a new worker in the place of one that has ended, as the agent has started that; returns its pid."""
    from torch.distributed.elastic.multiprocessing import api

    started = cast(Any, agent._pcontext)
    # The keywords that torch itself gives. Workers are bound to no part of the memory, as no setting of ours asks it.
    handler = api.get_subprocess_handler(
        entrypoint=started.entrypoint,
        args=started.args[local_rank],
        env=started.envs[local_rank],
        stdout=started.stdouts[local_rank],
        stderr=started.stderrs[local_rank],
        local_rank_id=local_rank,
        numa_options=None,
    )
    started.subprocess_handlers[local_rank] = handler
    return int(handler.proc.pid)


def end_keep_alives(handler: RendezvousHandler, patience: float) -> None:
    """End the thread by which a node tells the rendezvous that it is alive; wait `patience` seconds at most."""
    ending = threading.Thread(target=cast(Any, handler)._stop_heartbeats, daemon=True)
    ending.start()
    ending.join(patience)


@contextmanager
def starting_workers_by(start: Callable[..., Any]) -> Iterator[None]:
    """While in the block, torch's agent starts each worker by `start(usual, args=…, env=…, …)`.

    `usual` takes the other arguments and starts a fresh interpreter, as torch would. Both return an object with `proc`,
    a process like subprocess.Popen's, and `close(death_sig)`.
    """
    from torch.distributed.elastic.multiprocessing import api

    usual = api.get_subprocess_handler
    api.get_subprocess_handler = functools.partial(start, usual)
    try:
        yield
    finally:
        api.get_subprocess_handler = usual


def rebuild_buckets(ddp: DistributedDataParallel) -> None:
    """Let DDP settle on its buckets now, which is a collective; does nothing where it has settled already."""
    ddp.reducer._rebuild_buckets()


def keep_static_graph_from_reducing(ddp: DistributedDataParallel) -> None:
    """Let the first backward of a static graph under `ddp.no_sync()` reduce nothing, as later ones do."""
    ddp._static_graph_delay_allreduce_enqueued = True


def ddp_facts(ddp: DistributedDataParallel) -> dict[str, Any]:
    """DDP's own record of its settings, with `bucket_sizes` and `rebuilt_bucket_sizes` (bytes)."""
    return dict(ddp._get_ddp_logging_data())


def gathered_together(module: FSDPModule) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """The parameters of a module of `fully_shard` that are gathered as one, trained or not, in their order.

    Of each parameter: this rank's part of it, and the whole parameter, which stays the same object. Call this only
    after the module has been gathered once.
    """
    from torch.distributed.fsdp import fully_shard

    group = cast(Any, fully_shard).state(module)._fsdp_param_group
    members = [] if group is None else group.fsdp_params
    return [(each.sharded_param, each.unsharded_param) for each in members]


def reduce_zeros_too(module: FSDPModule) -> None:
    """Let a module of `fully_shard` reduce zeros for what a backward has given no gradient, on every rank alike."""
    if hasattr(module, "set_reduce_scatter_unused_params"):
        module.set_reduce_scatter_unused_params(True, recurse=False)  # torch has it from 2.13 on
        return
    from torch.distributed.fsdp import fully_shard

    group = cast(Any, fully_shard).state(module)._fsdp_param_group
    if group is None:
        return
    usual = group.post_backward

    def after_backward(*nothing: Any) -> None:
        for each in group.fsdp_params if group.reduce_grads else ():
            whole = getattr(each, "_unsharded_param", None)
            if whole is None or not whole.requires_grad:
                continue
            if whole.grad is None and each.unsharded_accumulated_grad is None:
                whole.grad = torch.zeros_like(whole)
        usual(*nothing)

    group.post_backward = after_backward


def forget_that_it_is_cut(module: nn.Module) -> None:
    """Remove the mark of `fully_shard` from the module and its parts: some models compute otherwise where it is."""
    # Some models of transformers leave out layers at random, but not where they are cut (`is_fsdp_managed_module`).
    for part in module.modules():
        vars(part).pop("_is_fsdp_managed_module", None)


def sent_together(module: FSDPModule) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Those of `gathered_together` whose gradients travel as one flat tensor, in their order there."""
    return [(part, whole) for part, whole in gathered_together(module) if part.requires_grad]


def at_the_end_of_backward(function: Callable[[], None]) -> None:
    """Call the function when the backward that runs has ended; for hooks in that backward."""
    cast(Any, torch.autograd.Variable)._execution_engine.queue_callback(function)


def backward_from(loss: torch.Tensor, weight: torch.Tensor) -> None:
    """`loss.backward(weight)` of two single numbers, without what torch checks of them in Python each time."""
    # These checks take as long as a small layer's backward. The engine checks dtype, device and shape by itself.
    if type(loss) is not torch.Tensor:  # a subclass may have a backward of its own
        loss.backward(weight)
        return
    cast(Any, torch.autograd.Variable)._execution_engine.run_backward(
        (loss,), (weight,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long the group's collectives on this device wait for a silent peer."""
    timeout = group._get_backend(device).options._timeout
    assert isinstance(timeout, timedelta)
    return timeout


def process_groups() -> list[dist.ProcessGroup]:
    """All process groups of this process that have not ended."""
    return list(dist.distributed_c10d._world.pg_map)


def nccl_failure(device: torch.device) -> str | None:
    """How NCCL failed in any process group: TIMEOUT, COMM_ERROR or REMOTE_ERROR; None where it has not."""
    # Groups of gloo alone, such as that of ranks that save together, cannot be asked.
    groups = [group for group in process_groups() if "nccl" in dist.get_backend_config(group)]
    failures = [cast(Any, group._get_backend(device)).get_error().name for group in groups]
    return next((failure for failure in failures if failure != "SUCCESS"), None)


def abort_process_groups(patience: float) -> bool:
    """End all process groups without waiting for their collectives; returns whether `patience` seconds were enough."""
    ending = threading.Thread(target=dist.distributed_c10d._abort_process_group, daemon=True)
    ending.start()
    ending.join(patience)
    return not ending.is_alive()


def writes_to(tensor: torch.Tensor) -> int:
    """How many writes to the tensor's memory torch has counted; those through `.data` are not among them."""
    # A tensor of inference mode has no counter, and can be written to in inference mode alone.
    return 0 if tensor.is_inference() else _counter_of_writes(tensor)


def buffers_of(layer: nn.Module) -> dict[str, torch.Tensor | None]:
    """The layer's own buffers, as it keeps them: later changes are seen."""
    return layer._buffers


def share_hooks(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Give `ours` the hooks on its gradient that `theirs` has, now and later. Both must be trained, or neither."""
    if ours._backward_hooks is not theirs._backward_hooks:
        ours._backward_hooks = theirs._backward_hooks
    if ours._post_accumulate_grad_hooks is not theirs._post_accumulate_grad_hooks:
        ours._post_accumulate_grad_hooks = theirs._post_accumulate_grad_hooks


def has_hooks(parameter: torch.Tensor) -> bool:
    """Whether `register_hook` or `register_post_accumulate_grad_hook` has put something on the parameter."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def softmax_gradient(coming: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """The gradient of what a softmax over the last dimension was given; `coming` is that of its `result`, float32."""
    return torch._softmax_backward_data(coming, result, -1, torch.float32)


def module_versions(state: Mapping[str, Any]) -> Any | None:
    """The versions of a module's parts that its state_dict carries; None where `state` is no module's state_dict."""
    return getattr(state, "_metadata", None)


def set_module_versions(state: OrderedDict[str, Any], versions: Any) -> None:
    """Attach to `state` the versions that `module_versions` reads."""
    state._metadata = versions  # type: ignore[attr-defined]


def end_loader_workers(batches: Iterator[Any]) -> None:
    """End the processes behind the iterator of a DataLoader with `num_workers`, and wait for them."""
    # torch waits five seconds for each and then sends SIGTERM, which the process may ignore; so SIGKILL follows here.
    cast(Any, batches)._shutdown_workers()
    for worker in cast(Any, batches)._workers:
        worker.kill()
        worker.join()


def plain_name(name: str) -> str:
    """The name that a weight of a compiled model has in the plain one."""
    return name.replace("_orig_mod.", "")


def is_compiled(model: nn.Module) -> bool:
    """Whether the model, or a part of it, is called as torch.compile has made it."""
    parts = list(model.modules())
    return any(part._compiled_call_impl is not None or "_orig_mod" in dict(part.named_children()) for part in parts)


def uncompiled(model: nn.Module) -> nn.Module:
    """The plain model of one that is compiled, or has compiled parts: the same parameters, in the same objects."""
    while (plain := dict(model.named_children()).get("_orig_mod")) is not None:
        model = plain
    for part in list(model.modules()):
        part._compiled_call_impl = None
        for name, child in list(part.named_children()):
            if "_orig_mod" in dict(child.named_children()):
                setattr(part, name, uncompiled(child))
    return model
