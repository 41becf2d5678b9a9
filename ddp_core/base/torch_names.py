"""The list of torch's private names that this project uses, and a look whether all are there.

A private name may be gone with the next torch. So all of them stand here, and are used in torch_internals.py alone;
tests/core/base/test_torch_internals.py tries on the installed torch those that it could change without an error. Only
the methods of torch's elastic agent are named in another file: launch/agent.py overrides them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from ddp_core.base.errors import UserError

TRIED = "2.11 to 2.15"
"""The releases of torch on which the tests have passed; pyproject.toml admits newer ones, too."""


class PrivateName(NamedTuple):
    """One private name of torch."""

    owner: str
    """Where torch has it: a class or a module, or the module whose functions set it."""
    use: str
    """What this project uses it for; where that does not show it, also why no public name serves."""
    signature: str = ""
    """For a method that this project overrides: the parameters that torch gives it; others have defaults."""


_SERVER = "torch.distributed.elastic.agent.server"
_AGENT = f"{_SERVER}.local_elastic_agent.LocalElasticAgent"
_ANY_AGENT = f"{_SERVER}.api.SimpleElasticAgent"
_PROCESSES = "torch.distributed.elastic.multiprocessing.api"
_RENDEZVOUS = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
_DDP = "torch.nn.parallel.distributed.DistributedDataParallel"
_GROUPS = "torch.distributed.distributed_c10d"
_FSDP = "torch.distributed.fsdp._fully_shard"
_MODULE = "torch.nn.modules.module.Module"
_LOADING = "torch.utils.data.dataloader._MultiProcessingDataLoaderIter"
_OF_GROUP = "(self, worker_group)"

PRIVATE_NAMES: Mapping[str, PrivateName] = {
    # The agent of torchrun calls nobody between a failure and the next start.
    "_invoke_run": PrivateName(_ANY_AGENT, "say at once that the rendezvous is lost", "(self, role)"),
    "_start_workers": PrivateName(_AGENT, "forget what the last workers reported", _OF_GROUP),
    "_monitor_workers": PrivateName(_AGENT, "decide what follows a failure", _OF_GROUP),
    "_restart_workers": PrivateName(_ANY_AGENT, "say that room is made for a node", _OF_GROUP),
    "_stop_workers": PrivateName(_AGENT, "end workers before their reports are read", _OF_GROUP),
    "_shutdown": PrivateName(_AGENT, "ask workers to stop, and not what loads their data", "(self, death_sig)"),
    "_exit_barrier": PrivateName(_ANY_AGENT, "wait at the end for those nodes alone that are still there", "(self)"),
    "_remaining_restarts": PrivateName(_ANY_AGENT, "end the launch, or start again for free"),
    "_pcontext": PrivateName(_AGENT, "see and signal the workers' processes"),
    "get_subprocess_handler": PrivateName(_PROCESSES, "fork a worker in the place of starting an interpreter"),
    "_stop_heartbeats": PrivateName(
        f"{_RENDEZVOUS}.DynamicRendezvousHandler", "end the thread that talks to a rendezvous, which others still need"
    ),
    "TORCHELASTIC_SIGNALS_TO_HANDLE": PrivateName(
        _PROCESSES, "handle signals in our own way: torch's handlers raise at each, also while the workers save"
    ),
    "TORCH_ELASTIC_WORKER_IDENTICAL": PrivateName(
        f"{_SERVER}.api", "let a node start its workers without the other nodes' launchers, which it joins later"
    ),
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": PrivateName(
        _RENDEZVOUS, "give every round of workers a store of its own: restarts race for a shared one"
    ),
    "_rebuild_buckets": PrivateName(
        "torch.distributed.Reducer", "run DDP's hidden collective before a forward that some ranks do not have"
    ),
    "_static_graph_delay_allreduce_enqueued": PrivateName(
        _DDP, "keep the first backward of a static graph from reducing under no_sync (pytorch#187732)"
    ),
    "_get_ddp_logging_data": PrivateName(
        _DDP, "tell how many buckets DDP really uses; its documentation itself names this method"
    ),
    "_get_backend": PrivateName("torch.distributed.ProcessGroup", "reach `_timeout`, and NCCL's `get_error`"),
    "_timeout": PrivateName(
        "torch._C._distributed_c10d.Backend.Options", "give a second process group the timeout of the first"
    ),
    "_abort_process_group": PrivateName(
        _GROUPS, "end NCCL's collectives that wait for a peer that is gone; destroy_process_group waits for them"
    ),
    "_world": PrivateName(_GROUPS, "ask every process group, also those of a reduction, whether NCCL has failed"),
    "_fsdp_param_group": PrivateName(
        f"{_FSDP}._fsdp_state.FSDPState", "see which gradients travel together, and which of them a backward has made"
    ),
    "_is_fsdp_managed_module": PrivateName(
        f"{_FSDP}._fully_shard", "let a model that asks whether it is cut compute what it computes uncut"
    ),
    "_execution_engine": PrivateName(
        "torch.autograd.variable.Variable", "begin a backward cheaply, and compare at its end which blocks it came to"
    ),
    # These are public from torch 2.15 on as torch.foreach.
    "_foreach_add_": PrivateName("torch", "add many tensors in one call"),
    "_foreach_copy_": PrivateName("torch", "copy many tensors in one call"),
    "_foreach_mul_": PrivateName("torch", "scale many tensors in one call"),
    "_softmax_backward_data": PrivateName("torch", "compute a softmax's gradient as the graph of a backward does"),
    "torch.Tensor._version": PrivateName("torch.Tensor", "see in every step whether a buffer was written to"),
    "_buffers": PrivateName(_MODULE, "look at all buffers in every step, at a tenth of the price of named_buffers"),
    "_backward_hooks": PrivateName("torch.Tensor", "give the replicas of dp what register_hook has put on a weight"),
    "_post_accumulate_grad_hooks": PrivateName("torch.Tensor", "give replicas of dp a weight's hooks of this kind"),
    "_python_dispatch": PrivateName("torch.utils", "see every operation of one thread; documented, but placed here"),
    "_metadata": PrivateName(_MODULE, "keep in a checkpoint by which version of its parts a module was saved"),
    "_orig_mod": PrivateName(
        "torch._dynamo.eval_frame.OptimizedModule",
        "give a compiled model's weights the names that they have uncompiled",
    ),
    "_compiled_call_impl": PrivateName(
        _MODULE, "see that `Module.compile` has changed a model, and give back the plain one"
    ),
    "_shutdown_workers": PrivateName(_LOADING, "end the processes that load data when an epoch is left early"),
    "_workers": PrivateName(_LOADING, "kill a process that loads data, ignores SIGTERM and hangs"),
}

_FOLDER = Path(torch.__file__).parent


def require_private_names() -> None:
    """Raise UserError (2), which tells the first of the names above that this torch lacks, and what to install."""
    gone = [name for name, private in PRIVATE_NAMES.items() if not _is_there(private.owner, name.rpartition(".")[2])]
    if not gone:
        return
    owner, use, _ = PRIVATE_NAMES[gone[0]]
    more = f", and {len(gone) - 1} more such names" if gone[1:] else ""
    raise UserError(
        f"torch {torch.__version__} has no {gone[0]} ({owner}), a private name that is used to {use}{more}; install a "
        f"torch on which ddp was tried, {TRIED}: `pip install 'torch~={TRIED.split()[-1]}.0'`"
    )


def _is_there(owner: str, name: str) -> bool:
    """Whether the file of torch that `owner` names has the word, or where there is no such file, the owner itself."""
    # Nothing is imported here: that would take a second. And some names are attributes that only objects have.
    place, holder = _FOLDER, cast(Any, torch)
    for part in owner.split(".")[1:]:
        place /= part
        if (file := place.with_suffix(".py")).is_file():
            return re.search(rf"\b{name}\b", _text(file)) is not None
        holder = getattr(holder, "__dict__", {}).get(part)
    return hasattr(holder, name)


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")
