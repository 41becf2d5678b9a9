"""The private names of torch that this project uses: each is tried on the installed torch, as it is used here."""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, api
from torch.distributed.fsdp import fully_shard
from torch.library import get_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from ddp_core.base import torch_internals
from ddp_core.base.torch_internals import TorchDispatchMode
from ddp_core.base.torch_names import PRIVATE_NAMES
from ddp_core.launch.meeting import join
from ddp_core.launch.nodes import Meeting
from tests.support.processes import run_processes

OVERRIDDEN = [name for name, private in PRIVATE_NAMES.items() if private.signature]
TIMEOUT = timedelta(seconds=7)


@contextlib.contextmanager
def explained(name: str) -> Iterator[None]:
    """Add to any failure in the block the private name that it concerns, and what the name is used for."""
    try:
        yield
    except Exception as error:
        private = PRIVATE_NAMES[name]
        pytest.fail(
            f"torch {torch.__version__} has changed {private.owner}'s {name}, which is used to {private.use}: "
            f"{type(error).__name__}: {error}",
            pytrace=False,
        )


@contextlib.contextmanager
def agent(directory: Path, entrypoint: str = "/bin/true", *words: str) -> Iterator[LocalElasticAgent]:
    """An agent of torch with one worker, which is not started yet."""
    handler = join(Meeting(launch_id="contract"), "127.0.0.1", 60)
    spec = WorkerSpec("trainer", 1, handler, entrypoint=entrypoint, args=words, max_restarts=3, local_addr="127.0.0.1")
    try:
        yield LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=str(directory)))
    finally:
        handler.shutdown()


def replicated(**settings: Any) -> DistributedDataParallel:
    """A DDP module on one rank, for a process that ends after it.

    The process group is not destroyed: the module would be the last to hold it, and torch would then wait for gloo's
    thread while it holds the lock of Python, for which that thread may wait.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    return DistributedDataParallel(nn.Linear(2, 1), **settings)


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_the_agent_has_the_methods_that_ours_overrides(name: str) -> None:
    with explained(name):
        method = getattr(LocalElasticAgent, name)
        wanted = PRIVATE_NAMES[name].signature.strip("()").split(", ")
        parameters = list(inspect.signature(method).parameters.values())
        assert [parameter.name for parameter in parameters[: len(wanted)]] == wanted
        assert all(parameter.default is not parameter.empty for parameter in parameters[len(wanted) :])
        # A method that torch still has but no longer calls would be no use either.
        callers = [inspect.unwrap(each) for each in vars(SimpleElasticAgent).values() if inspect.isfunction(each)]
        assert any(name in caller.__code__.co_names for caller in callers), "torch does not call it"


def remaining_restarts(_: int, __: int, place: str) -> None:
    starts = []

    def start(usual: Callable[..., Any], **given: Any) -> Any:
        starts.append(given)
        return usual(**given)

    with agent(Path(place), "/bin/false") as ours, torch_internals.starting_workers_by(start):
        assert ours._remaining_restarts == 3
        ours._remaining_restarts = 0
        assert ours.run().is_failed()
    assert len(starts) == 1


def pcontext(_: int, __: int, place: str) -> None:
    with agent(Path(place), "/bin/true") as ours:
        assert torch_internals.workers_of(ours) == {}
        ours.run()
        (worker,) = torch_internals.workers_of(ours).values()
        assert worker.pid > 0
        assert worker.poll() == 0


def get_subprocess_handler(_: int, __: int, place: str) -> None:
    asked: list[tuple[object, dict[str, str], set[str]]] = []

    def start(usual: Callable[..., Any], *, args: tuple[str, ...], env: dict[str, str], **others: Any) -> Any:
        asked.append((args, env, set(others)))
        return usual(args=args, env=env, **others)

    usual = api.get_subprocess_handler
    with agent(Path(place), "/bin/true", "word") as ours, torch_internals.starting_workers_by(start):
        assert ours.run().state == WorkerState.SUCCEEDED
    ((args, env, others),) = asked
    assert args == ("word",)
    assert env["RANK"] == "0"
    assert {"entrypoint", "stdout", "stderr"} <= others
    assert api.get_subprocess_handler is usual


def stop_heartbeats(_: int, __: int, ___: str) -> None:
    alone = set(threading.enumerate())
    handler = join(Meeting(launch_id="contract"), "127.0.0.1", 60)
    handler.next_rendezvous()
    assert set(threading.enumerate()) > alone
    torch_internals.end_keep_alives(handler, 60)
    assert set(threading.enumerate()) == alone
    assert not handler.is_closed()
    torch_internals.end_keep_alives(handler, 60)


def shutdown_workers(_: int, __: int, ___: str) -> None:
    batches: Any = iter(DataLoader(range(100), num_workers=1, multiprocessing_context="fork"))  # type: ignore[arg-type]
    next(batches)
    assert batches._workers == multiprocessing.active_children() != []
    torch_internals.end_loader_workers(batches)
    assert not multiprocessing.active_children()


def rebuild_buckets(_: int, __: int, ___: str) -> None:
    ddp = replicated()
    ddp(torch.ones(1, 2)).sum().backward()
    assert "rebuilt_bucket_sizes" not in torch_internals.ddp_facts(ddp)
    torch_internals.rebuild_buckets(ddp)
    ddp(torch.ones(1, 2)).sum().backward()
    assert torch_internals.ddp_facts(ddp)["rebuilt_bucket_sizes"]


def logging_data(_: int, __: int, ___: str) -> None:
    ddp = replicated()
    assert str(torch_internals.ddp_facts(ddp)["bucket_sizes"]) == "12"  # three numbers of four bytes


def static_graph(_: int, __: int, ___: str) -> None:
    ddp = replicated(static_graph=True)
    assert vars(ddp)["_static_graph_delay_allreduce_enqueued"] is False
    reduced = []

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        reduced.append(bucket.index())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    ddp.register_comm_hook(None, hook)
    torch_internals.keep_static_graph_from_reducing(ddp)
    with ddp.no_sync():
        ddp(torch.ones(1, 2)).sum().backward()
    assert reduced == []


def timeout(_: int, __: int, ___: str) -> None:
    replicated()
    group = dist.group.WORLD
    assert group is not None
    assert torch_internals.timeout_of(group, torch.device("cpu")) == TIMEOUT


def abort(_: int, __: int, ___: str) -> None:
    replicated()
    torch_internals.abort_process_groups(60)
    assert not dist.is_initialized()


def groups(_: int, __: int, ___: str) -> None:
    replicated()
    another = dist.new_group([0])
    assert torch_internals.process_groups() == [dist.group.WORLD, another]


def sent_together(_: int, __: int, ___: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    net = nn.Linear(2, 1)
    net.register_parameter("frozen", nn.Parameter(torch.ones(2), requires_grad=False))
    fully_shard(net, mesh=DeviceMesh.from_group(dist.group.WORLD, "cpu"))
    net.unshard()
    wholes = dict(net.named_parameters())
    net.reshard()
    (weight, whole_weight), (bias, whole_bias) = torch_internals.sent_together(net)
    assert weight is net.weight
    assert bias is net.bias
    assert whole_weight is wholes["weight"]
    assert whole_bias is wholes["bias"]
    handed_over = []
    whole_bias.register_post_accumulate_grad_hook(handed_over.append)
    net(torch.ones(1, 2)).sum().backward()
    assert handed_over == [whole_bias]
    assert net._is_fsdp_managed_module
    torch_internals.forget_that_it_is_cut(net)
    assert not hasattr(net, "_is_fsdp_managed_module")


def end_of_backward(_: int, __: int, ___: str) -> None:
    seen = []
    first, last = nn.Parameter(torch.ones(1)), torch.ones(1)
    first.register_hook(lambda _: seen.append("first"))
    rows = first * last
    rows.register_hook(lambda _: torch_internals.at_the_end_of_backward(lambda: seen.append("end")))
    rows.sum().backward()
    assert seen == ["first", "end"]
    torch_internals.backward_from((first * 3.0).sum(), torch.tensor(0.1))
    torch_internals.backward_from((first * 3.0).sum(), torch.tensor(0.1))
    again = nn.Parameter(torch.ones(1))
    for _ in range(2):
        (again * 3.0).sum().backward(torch.tensor(0.1))
    assert first.grad is not None
    assert again.grad is not None
    assert first.grad.item() - 1.0 == pytest.approx(again.grad.item())
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch_internals.backward_from(torch.ones(()), torch.tensor(0.1))


def foreach(_: int, __: int, ___: str) -> None:
    ours = [torch.ones(2), torch.ones(3)]
    torch_internals.foreach_add_(ours, [torch.ones(2), torch.ones(3)])
    torch_internals.foreach_mul_(ours, 2.0)
    assert [tensor.tolist() for tensor in ours] == [[4.0] * 2, [4.0] * 3]
    torch_internals.foreach_copy_(ours, [torch.ones(2), torch.zeros(3)])
    assert [tensor.sum().item() for tensor in ours] == [2.0, 0.0]


def dispatch_mode(_: int, __: int, ___: str) -> None:
    seen = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    with Seen():
        torch.ones(2) + 1
    assert "aten::add.Tensor" in seen


def metadata(_: int, __: int, ___: str) -> None:
    state = nn.BatchNorm1d(2).state_dict()
    versions = torch_internals.module_versions(state)
    assert versions is not None
    assert versions[""]["version"] == 2
    torch_internals.set_module_versions(state, {"": {"version": 1}})
    # Without a version, torch takes the state for one of an old format, which has no counter of batches.
    del state["num_batches_tracked"]
    nn.BatchNorm1d(2).load_state_dict(state)


def counter_of_writes(_: int, __: int, ___: str) -> None:
    tensor = torch.zeros(2)
    before = torch_internals.writes_to(tensor)
    tensor.detach()[:1].add_(1)
    assert torch_internals.writes_to(tensor) == before + 1
    with torch.inference_mode():
        tensor = torch.zeros(2)
    assert torch_internals.writes_to(tensor) == 0


def buffers(_: int, __: int, ___: str) -> None:
    layer = nn.Module()
    kept = torch_internals.buffers_of(layer)
    layer.register_buffer("calls", torch.zeros(1))
    layer.calls = layer.calls + 1
    assert kept["calls"] is layer.calls


def hooks(_: int, __: int, ___: str) -> None:
    ours, theirs = (torch.ones(2, requires_grad=True) for _ in range(2))
    seen: list[torch.Tensor] = []
    doubling = theirs.register_hook(lambda gradient: 2 * gradient)
    theirs.register_post_accumulate_grad_hook(seen.append)
    torch_internals.share_hooks(ours, theirs)
    ours.sum().backward()
    assert ours.grad is not None
    assert ours.grad.tolist() == [2, 2]
    assert seen[0] is ours
    theirs.register_hook(lambda gradient: 10 * gradient)
    doubling.remove()
    ours.grad = None
    ours.sum().backward()
    assert ours.grad.tolist() == [10, 10]


def compiled(_: int, __: int, ___: str) -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    names, weight = list(plain.state_dict()), plain[1].weight
    plain[1] = torch.compile(plain[1], backend="eager")
    whole = torch.compile(plain, backend="eager")
    assert [torch_internals.plain_name(name) for name in whole.state_dict()] == names
    assert names != list(whole.state_dict())
    again = torch_internals.uncompiled(whole)
    assert type(again) is nn.Sequential
    assert again[1].weight is weight
    assert list(again.state_dict()) == names
    again.compile(backend="eager")
    assert again._compiled_call_impl is not None
    assert torch_internals.uncompiled(again)._compiled_call_impl is None


def signals(_: int, __: int, place: str) -> None:
    os.environ[torch_internals.HANDLED_SIGNALS] = ""
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    with agent(Path(place), "/bin/true") as ours:
        ours.run()
    assert before == {number: signal.getsignal(number) for number in signal.valid_signals()}
    os.environ[torch_internals.HANDLED_SIGNALS] = "SIGUSR1"
    with agent(Path(place), "/bin/true") as ours:
        ours.run()
    assert callable(signal.getsignal(signal.SIGUSR1))


def int_mm(_: int, __: int, place: str) -> None:
    product = torch._int_mm(torch.full((17, 8), 3, dtype=torch.int8), torch.ones(8, 8, dtype=torch.int8))
    assert product.dtype == torch.int32
    assert product.unique().tolist() == [24]
    get_kernel("aten::_int_mm", "CPU")
    get_kernel("aten::_int_mm.out", "CPU")


def softmax_backward(_: int, __: int, place: str) -> None:
    inputs = torch.arange(6.0).view(2, 3).requires_grad_()
    coming = torch.tensor([[1.0, 2.0, 0.5], [0.0, -1.0, 4.0]])
    result = inputs.softmax(-1)
    result.backward(coming)
    assert torch.equal(torch._softmax_backward_data(coming, result.detach(), -1, torch.float32), inputs.grad)


def separate_stores(_: int, __: int, place: str) -> None:
    with agent(Path(place)) as ours:
        handler = ours.get_worker_group().spec.rdzv_handler
        assert handler.use_agent_store
        os.environ[torch_internals.SEPARATE_STORES] = "1"
        assert not handler.use_agent_store


def alike_nodes(_: int, __: int, place: str) -> None:
    os.environ[torch_internals.ALIKE_NODES] = "1"
    with agent(Path(place)) as ours:
        # A store in which no other node has noted anything, and an agent would wait for it.
        store = dist.HashStore()
        store.set_timeout(TIMEOUT)
        (worker,) = ours._assign_worker_ranks(store, 3, 4, ours.get_worker_group().spec)
    assert (worker.global_rank, worker.world_size) == (3, 4)


CONTRACTS: dict[str, Callable[[int, int, str], None]] = {
    "_remaining_restarts": remaining_restarts,
    "_pcontext": pcontext,
    "get_subprocess_handler": get_subprocess_handler,
    "_stop_heartbeats": stop_heartbeats,
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": separate_stores,
    "TORCH_ELASTIC_WORKER_IDENTICAL": alike_nodes,
    "TORCHELASTIC_SIGNALS_TO_HANDLE": signals,
    "_rebuild_buckets": rebuild_buckets,
    "_static_graph_delay_allreduce_enqueued": static_graph,
    "_get_ddp_logging_data": logging_data,
    "_get_backend": timeout,
    "_timeout": timeout,
    "_abort_process_group": abort,
    "_world": groups,
    **dict.fromkeys(("_fsdp_param_group", "_is_fsdp_managed_module"), sent_together),
    "_execution_engine": end_of_backward,
    **dict.fromkeys(("_foreach_add_", "_foreach_mul_", "_foreach_copy_"), foreach),
    "_int_mm": int_mm,
    "_softmax_backward_data": softmax_backward,
    "torch.Tensor._version": counter_of_writes,
    "_buffers": buffers,
    **dict.fromkeys(("_backward_hooks", "_post_accumulate_grad_hooks"), hooks),
    "_python_dispatch": dispatch_mode,
    "_metadata": metadata,
    **dict.fromkeys(("_orig_mod", "_compiled_call_impl"), compiled),
    **dict.fromkeys(("_shutdown_workers", "_workers"), shutdown_workers),
}


@pytest.mark.parametrize("name", CONTRACTS)
def test_torch_still_keeps_it(name: str, tmp_path: Path) -> None:
    with explained(name):
        run_processes(CONTRACTS[name], 1, str(tmp_path))


def test_every_private_name_is_tried() -> None:
    assert {*OVERRIDDEN, *CONTRACTS} == PRIVATE_NAMES.keys()
