"""The list of torch's private names that this project uses, why no public one does, and a look whether all are there.

A private name may be gone with the next torch. So all of them stand here, and are used in torch_internals.py alone;
tests/core/base/test_torch_internals.py tries each on the installed torch. Only the methods of torch's elastic agent are
named in another file: launch/agent.py overrides them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from ddp_core.base.errors import UserError

TRIED = "2.11 to 2.13"
"""The releases of torch on which every test has passed; pyproject.toml admits no others."""


class PrivateName(NamedTuple):
    """One private name of torch."""

    owner: str
    """Where torch has it: a class or a module, or the module whose functions set it."""
    use: str
    """What this project needs it for."""
    why: str
    """Why no public name does."""
    since: str
    """The release of torch that brought the name, as far as torch's pull requests tell; tested is the installed one."""
    upstream: str = ""
    """Where torch's developers speak of it."""
    signature: str = ""
    """For a method that this project overrides: the parameters that torch gives it; others have defaults."""


_SERVER = "torch.distributed.elastic.agent.server"
_AGENT = f"{_SERVER}.local_elastic_agent.LocalElasticAgent"
_ANY_AGENT = f"{_SERVER}.api.SimpleElasticAgent"
_NO_HOOKS = "the agent calls nobody between a failure and the next start"
_DDP = "torch.nn.parallel.distributed.DistributedDataParallel"
_FOREACH = ("public from torch 2.15 as torch.foreach", "2.1", "https://github.com/pytorch/pytorch/pull/193607")

PRIVATE_NAMES: Mapping[str, PrivateName] = {
    # Of torchrun's agent.
    "_invoke_run": PrivateName(
        _ANY_AGENT, "say at once that the rendezvous is lost", _NO_HOOKS, "1.9", signature="(self, role)"
    ),
    "_start_workers": PrivateName(
        _AGENT, "forget what the last workers reported", _NO_HOOKS, "1.9", signature="(self, worker_group)"
    ),
    "_monitor_workers": PrivateName(
        _AGENT, "decide what follows a failure", _NO_HOOKS, "1.9", signature="(self, worker_group)"
    ),
    "_restart_workers": PrivateName(
        _ANY_AGENT, "say that room is made for a node", _NO_HOOKS, "1.9", signature="(self, worker_group)"
    ),
    "_stop_workers": PrivateName(
        _AGENT, "end workers before their reports are read", _NO_HOOKS, "1.9", signature="(self, worker_group)"
    ),
    "_shutdown": PrivateName(
        _AGENT,
        "ask the workers alone to stop, and not the processes that load their data",
        "the agent signals whole process groups",
        "1.9",
        "https://github.com/pytorch/pytorch/pull/113231",
        "(self, death_sig)",
    ),
    "_exit_barrier": PrivateName(
        _ANY_AGENT,
        "wait at the end for those nodes that are there, after some were lost and others came",
        "the agent waits for all that have met first",
        "1.9",
        signature="(self)",
    ),
    "_remaining_restarts": PrivateName(_ANY_AGENT, "end the launch, or start again for free", _NO_HOOKS, "1.9"),
    "_pcontext": PrivateName(
        _AGENT, "see and signal the workers' processes", "the agent shows their numbers alone", "1.9"
    ),
    "get_subprocess_handler": PrivateName(
        "torch.distributed.elastic.multiprocessing.api",
        "fork a worker from the nursery in the place of starting an interpreter",
        "made to allow other handlers, but nothing in torch lets a user name one",
        "2.3",
        "https://github.com/pytorch/pytorch/pull/120373",
    ),
    "_stop_heartbeats": PrivateName(
        "torch.distributed.elastic.rendezvous.dynamic_rendezvous.DynamicRendezvousHandler",
        "end the thread that talks to the rendezvous, without closing that for the other nodes",
        "shutdown does both",
        "1.8",
    ),
    "TORCHELASTIC_SIGNALS_TO_HANDLE": PrivateName(
        "torch.distributed.elastic.multiprocessing.api",
        "handle signals in our own way: torch's handlers raise at each, also while the workers save",
        "torchrun has an option for it, the agent this variable only",
        "2.9",
        "https://github.com/pytorch/pytorch/pull/160690",
    ),
    "TORCH_ELASTIC_WORKER_IDENTICAL": PrivateName(
        "torch.distributed.elastic.agent.server.api",
        "let a node start its workers without the other nodes' launchers, which it joins later",
        "no parameter does the same",
        "2.6",
        "https://github.com/pytorch/pytorch/pull/136865",
    ),
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": PrivateName(
        "torch.distributed.elastic.rendezvous.dynamic_rendezvous",
        "give every round of workers a store of its own: restarts race for a shared one",
        "no parameter does the same, and the variable is not documented",
        "2.4",
        "https://github.com/pytorch/pytorch/issues/135712",
    ),
    # Of DistributedDataParallel and process groups.
    "_rebuild_buckets": PrivateName(
        "torch.distributed.Reducer",
        "run DDP's hidden collective before a forward that some ranks do not have",
        "DDP runs it in its next forward",
        "1.7",
        "https://github.com/pytorch/pytorch/pull/44798",
    ),
    "_static_graph_delay_allreduce_enqueued": PrivateName(
        _DDP,
        "keep the first backward of a static graph from reducing under no_sync",
        "no_sync ought to, and does not",
        "2.1",
        "https://github.com/pytorch/pytorch/pull/187732",
    ),
    "_get_ddp_logging_data": PrivateName(
        _DDP, "tell how many buckets DDP really uses", "DDP's documentation itself names this method", "1.9"
    ),
    "_get_backend": PrivateName(
        "torch.distributed.ProcessGroup", "reach `_timeout`, and NCCL's `get_error`", "as `_timeout`", "2.0"
    ),
    "_timeout": PrivateName(
        "torch._C._distributed_c10d.Backend.Options",
        "give a second process group the timeout of the first",
        "new_group does not inherit it; in public it can be set, but not read",
        "1.9",
        "https://github.com/pytorch/pytorch/pull/56531",
    ),
    "_abort_process_group": PrivateName(
        "torch.distributed.distributed_c10d",
        "end the collectives of NCCL that wait for a peer that is gone",
        "destroy_process_group waits for them",
        "2.6",
        "https://github.com/pytorch/pytorch/pull/132291",
    ),
    "_world": PrivateName(
        "torch.distributed.distributed_c10d",
        "ask every process group, also those of a reduction, whether NCCL has failed",
        "`get_error` tells of one group, and torch lists groups nowhere else",
        "2.0",
        "https://github.com/pytorch/pytorch/pull/144498",
    ),
    "_fsdp_param_group": PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState",
        "see which gradients travel together, in which sequence, and which of them a backward has made; before torch "
        "2.13, give those that it has not made as zeros",
        "FSDPModule shows neither the sequence nor the whole parameters",
        "2.2",
        "https://github.com/pytorch/pytorch/pull/117867",
    ),
    "_is_fsdp_managed_module": PrivateName(
        "torch.distributed.fsdp._fully_shard._fully_shard",
        "let a model that asks whether it is cut compute what it computes uncut",
        "fully_shard sets it on every part of a model, and nothing public takes it away",
        "2.4",
    ),
    "_execution_engine": PrivateName(
        "torch.autograd.variable.Variable",
        "compare at the end of a backward which blocks of a sharded model it has come to; begin a backward cheaply",
        "hooks are those of tensors and nodes, none of which is known to be the last; a tensor's `backward` checks "
        "what a step of training knows",
        "0.4",
    ),
    # Of tensors, modules and data.
    "_foreach_add_": PrivateName("torch", "add many tensors in one call", *_FOREACH),
    "_foreach_copy_": PrivateName("torch", "copy many tensors in one call", *_FOREACH),
    "_foreach_mul_": PrivateName("torch", "scale many tensors in one call", *_FOREACH),
    "_int_mm": PrivateName(
        "torch",
        "compute products of int8 matrices rightly with portable numerics, by replacing this operation's kernel",
        "the operation itself has no public name",
        "2.1",
    ),
    "torch.Tensor._version": PrivateName(
        "torch.Tensor",
        "see in every step, without looking at the values, whether a buffer was written to",
        "torch's notes on autograd explain the counter, but nothing public reads it",
        "0.2",
    ),
    "_buffers": PrivateName(
        "torch.nn.modules.module.Module",
        "look at all buffers in every step, at a tenth of the price of named_buffers",
        "named_buffers walks through all modules and all names",
        "0.1",
    ),
    "_backward_hooks": PrivateName(
        "torch.Tensor",
        "give the replicas of dp what register_hook has put on a weight",
        "copy.deepcopy leaves it out, and nothing public lists it",
        "0.1",
    ),
    "_post_accumulate_grad_hooks": PrivateName(
        "torch.Tensor",
        "give the replicas of dp what register_post_accumulate_grad_hook has put on a weight",
        "as `_backward_hooks`",
        "2.1",
        "https://github.com/pytorch/pytorch/pull/107063",
    ),
    "_python_dispatch": PrivateName(
        "torch.utils",
        "see every operation on tensors of one thread, through TorchDispatchMode",
        'documented ("Extending PyTorch"), but torch has it in this private module alone',
        "1.13",
        "https://github.com/pytorch/pytorch/pull/110073",
    ),
    "_dynamo": PrivateName(
        "torch._dynamo.eval_frame",
        "load early what the first optimizer of a process loads, at the price of torch itself",
        "torch.compiler, its public face, does not load it before it is used",
        "2.0",
    ),
    "_metadata": PrivateName(
        "torch.nn.modules.module.Module",
        "keep in a checkpoint by which version of its parts a module was saved",
        "load_state_dict looks nowhere else",
        "0.4",
        "https://github.com/pytorch/pytorch/pull/117464",
    ),
    "_orig_mod": PrivateName(
        "torch._dynamo.eval_frame.OptimizedModule",
        "give a compiled model's weights the names that they have in the plain model, and the plain model itself",
        "torch.compile returns a module in which the plain one is a part of this name",
        "2.0",
        "https://github.com/pytorch/pytorch/issues/101107",
    ),
    "_compiled_call_impl": PrivateName(
        "torch.nn.modules.module.Module",
        "see that `Module.compile` has changed a model in place, and give back the plain one",
        "there is a public method to compile a module, and none to ask or to undo it",
        "2.2",
    ),
    "_shutdown_workers": PrivateName(
        "torch.utils.data.dataloader._MultiProcessingDataLoaderIter",
        "end the processes that load data when an epoch is left early",
        "a DataLoader has no close; only the garbage collector ends them",
        "1.0",
        "https://github.com/pytorch/pytorch/issues/64766",
    ),
    "_workers": PrivateName(
        "torch.utils.data.dataloader._MultiProcessingDataLoaderIter",
        "kill a process that loads data, ignores SIGTERM and hangs",
        "as `_shutdown_workers`, which sends SIGTERM and goes on",
        "1.0",
    ),
}

_FOLDER = Path(torch.__file__).parent


def require_private_names() -> None:
    """Raise UserError (2), which tells the first of the names above that this torch lacks, and what to install."""
    gone = [name for name, private in PRIVATE_NAMES.items() if not _is_there(private.owner, name.rpartition(".")[2])]
    if not gone:
        return
    owner, use, *_ = PRIVATE_NAMES[gone[0]]
    more = f", and {len(gone) - 1} more such names" if gone[1:] else ""
    raise UserError(
        f"torch {torch.__version__} has no {gone[0]} ({owner}), a private name that is used to {use}{more}; install a "
        f"torch on which ddp was tried, {TRIED}: `pip install 'torch~={TRIED.split()[-1]}.0' torchvision`"
    )


def _is_there(owner: str, name: str) -> bool:
    """Whether the file of torch that `owner` names has the word, or where there is no such file, the owner itself.

    Nothing is imported here: that would take a second. And some names are attributes that only objects have.
    """
    place, holder = _FOLDER, cast(Any, torch)
    for part in owner.split(".")[1:]:
        place /= part
        if (file := place.with_suffix(".py")).is_file():
            return re.search(rf"\b{name}\b", _text(file)) is not None
        holder = getattr(holder, "__dict__", {}).get(part)
    return hasattr(holder, name)


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")
