"""A private name of torch that is gone is told in one line; of some it is tried that they still do what is needed.

Tests base/torch_names.py, too.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import threading
import tomllib
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.nn.parallel import DistributedDataParallel

from ddp_core.base import torch_internals, torch_names
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.torch_names import PRIVATE_NAMES, TRIED, require_private_names
from ddp_core.launch.meeting import join
from ddp_core.launch.nodes import Meeting
from tests.support.commands import ROOT, command
from tests.support.processes import run_processes
from tests.support.wording import refusing

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


def stop_heartbeats(_: int, __: int, ___: str) -> None:
    alone = set(threading.enumerate())
    handler = join(Meeting(launch_id="contract"), "127.0.0.1", 60)
    handler.next_rendezvous()
    assert set(threading.enumerate()) > alone
    torch_internals.end_keep_alives(handler, 60)
    assert set(threading.enumerate()) == alone
    assert not handler.is_closed()
    torch_internals.end_keep_alives(handler, 60)


def rebuild_buckets(_: int, __: int, ___: str) -> None:
    ddp = replicated()
    ddp(torch.ones(1, 2)).sum().backward()
    assert "rebuilt_bucket_sizes" not in torch_internals.ddp_facts(ddp)
    torch_internals.rebuild_buckets(ddp)
    ddp(torch.ones(1, 2)).sum().backward()
    assert torch_internals.ddp_facts(ddp)["rebuilt_bucket_sizes"]


def static_graph(_: int, __: int, ___: str) -> None:
    ddp = replicated(static_graph=True)
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


def groups(_: int, __: int, ___: str) -> None:
    replicated()
    assert (world := dist.group.WORLD) is not None
    assert torch_internals.timeout_of(world, torch.device("cpu")) == TIMEOUT
    another = dist.new_group([0])
    assert torch_internals.process_groups() == [world, another]


CONTRACTS: dict[str, Callable[[int, int, str], None]] = {
    "_stop_heartbeats": stop_heartbeats,
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": separate_stores,
    "TORCH_ELASTIC_WORKER_IDENTICAL": alike_nodes,
    "_rebuild_buckets": rebuild_buckets,
    "_static_graph_delay_allreduce_enqueued": static_graph,
    "_world": groups,
}


@pytest.mark.parametrize("name", CONTRACTS)
def test_torch_still_keeps_it(name: str, tmp_path: Path) -> None:
    with explained(name):
        run_processes(CONTRACTS[name], 1, str(tmp_path))


def hooks() -> None:
    ours, theirs = (torch.ones(2, requires_grad=True) for _ in range(2))
    seen: list[torch.Tensor] = []
    doubling = theirs.register_hook(lambda gradient: 2 * gradient)
    theirs.register_post_accumulate_grad_hook(seen.append)
    torch_internals.share_hooks(ours, theirs)
    ours.sum().backward()
    assert (ours.grad.tolist(), seen[0] is ours) == ([2, 2], True)
    theirs.register_hook(lambda gradient: 10 * gradient)
    doubling.remove()
    ours.grad = None
    ours.sum().backward()
    assert ours.grad.tolist() == [10, 10], "later changes are shared, too"


def compiled() -> None:
    plain = nn.Sequential(nn.Linear(2, 2))
    names, weight = list(plain.state_dict()), plain[0].weight
    plain[0] = torch.compile(plain[0], backend="eager")
    whole = torch.compile(plain, backend="eager")
    assert [torch_internals.plain_name(name) for name in whole.state_dict()] == names != list(whole.state_dict())
    again = torch_internals.uncompiled(whole)
    assert (type(again), list(again.state_dict()), again[0].weight is weight) == (nn.Sequential, names, True)
    again.compile(backend="eager")
    assert again._compiled_call_impl is not None
    assert torch_internals.uncompiled(again)._compiled_call_impl is None


@pytest.mark.parametrize(("name", "contract"), [("_backward_hooks", hooks), ("_orig_mod", compiled)])
def test_torch_still_does_the_same_with_it(name: str, contract: Callable[[], None]) -> None:
    """Else a hook would not be called, or a compiled model saved in the place of the plain one, without an error.

    A changed meaning of other names is seen in sums, gradients and refusals.
    """
    with explained(name):
        contract()


def take_away(name: str, patch: pytest.MonkeyPatch) -> None:
    """Let torch lack the name: in its files, and as an attribute of its owner."""
    word, real = name.rpartition(".")[2], torch_names._text
    patch.setattr(torch_names, "_text", lambda file: re.sub(rf"\b{word}\b", "other", real(file)))
    owner: Any = torch
    for part in PRIVATE_NAMES[name].owner.split(".")[1:]:
        owner = vars(owner).get(part) if owner is not None else None
    if owner is None or word not in dir(owner):
        return
    if owner is torch.Tensor:  # a type of C, of which nothing can be taken away
        words = {each.rpartition(".")[2] for each, private in PRIVATE_NAMES.items() if private.owner == "torch.Tensor"}
        patch.setattr(torch, "Tensor", type("Tensor", (), dict.fromkeys(words - {word})))
    else:
        patch.delattr(owner, word)


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_a_name_that_is_gone_is_told_in_one_line(name: str) -> None:
    require_private_names()
    with pytest.MonkeyPatch.context() as patch:
        take_away(name, patch)
        with pytest.raises(UserError) as raised:
            require_private_names()
    assert raised.value.exit_code == ExitCode.BAD_INPUT
    line = str(raised.value)
    assert f"torch {torch.__version__} has no {name} ({PRIVATE_NAMES[name].owner})" in line
    assert f"on which ddp was tried, {TRIED}: `pip install" in line
    assert "\n" not in line


@pytest.mark.full
def test_a_command_ends_with_that_line_alone() -> None:
    program = "import sys, torch; del torch._foreach_mul_; from ddp_core.cli import main; sys.exit(main(sys.argv[1:]))"
    ended = command("train", "toy_mlp", "--device", "cpu", program=("-c", program))
    assert (ended.code, ended.output) == (ExitCode.BAD_INPUT, "")
    assert re.fullmatch(r"ddp: error: torch \S+ has no _foreach_mul_ \(torch\), a private name [^\n]+\n", ended.errors)


def test_what_was_tried_begins_with_what_is_admitted_and_is_on_the_page_of_the_promise() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch>={TRIED.split()[0]}" in project["dependencies"]
    pythons = [each.rpartition(" ")[2] for each in project["classifiers"] if re.search(r":: 3\.\d", each)]
    assert project["requires-python"] == f">={pythons[0]}"
    page = (ROOT / "docs" / "reference" / "promise.md").read_text()
    assert f"Python {pythons[0]} to {pythons[-1]}, torch {TRIED}" in page


def test_what_is_found_in_a_file_is_a_whole_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_names, "_text", lambda file: "self._shutdown_all(); self._my_shutdown()")
    monkeypatch.setattr(torch_names, "TRIED", "1.0 to 1.1")
    with refusing():
        require_private_names()
