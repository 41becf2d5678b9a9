"""Starts, checks and ends the process group, on a backend that all ranks agree on; and a few collectives.

These are what metrics and decisions need. With one process they cost nothing and need no group, so their callers need
not ask how many processes there are.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddp_core.base.errors import ExitCode, UserError, first_line
from ddp_core.base.torch_internals import abort_process_groups, nccl_failure
from ddp_core.distributed.addresses import address_served, gloo_towards, listen_at, store_on
from ddp_core.distributed.world import World

__all__ = ["Collectives", "local_device", "process_group"]

_SHARED = "ranks that share a GPU"
_LOOKING_SECONDS = 0.0005
"""Between two looks at a device that has not finished."""
ASKING_SECONDS = 0.25
"""Between two looks whether the others have gone on without this rank. A signal's handler waits as long at most."""
_ABORTING_SECONDS = 5.0


@dataclass(eq=False)
class Collectives:
    """What ranks send each other beside gradients. All ranks call the same methods in the same order."""

    world: World
    device: torch.device
    is_abandoned: bool = field(default=False, init=False)

    # What follows, down to `cannot_abort`, is so where the loss of a rank ends all; `ddp_core.live` overrides it.
    runs_ahead = True
    """Whether the host may be ahead of its device by steps, so that it may read losses later."""
    takes_back = False
    """Whether this process goes on after a step that it could not finish: what was changed in it must come back."""
    waits_to_part = True
    """Whether this process waits until the connections of a group that it leaves are closed."""

    @property
    def is_left_behind(self) -> bool:
        """Whether the others go on in another group, as one of them was lost; asked while this rank waits for them."""
        return False

    @property
    def makes_room(self) -> bool:
        """Whether all ranks are to leave at the end of the step, to let a new one in."""
        return False

    def to_successors(self, value: Callable[[], Any]) -> Any:
        """Rank 0's value (plain Python types) on each rank that would take its place; None where none would."""
        return None

    def open_store(self, timeout: float) -> dist.Store:
        """The store of this launch; `timeout`, in seconds, limits every wait."""
        address, port = self.world.store_host, self.world.store_port
        assert address is not None
        assert port is not None
        if self.world.serves_store:
            served = listen_at(address_served(address), port, self.world.port_name, "give the ranks another one")
            return store_on(served, timeout)
        # As torch's env:// does, but without its wait for all ranks, which does not say which ranks are missing.
        limit = timedelta(seconds=timeout)
        return dist.TCPStore(address, port, self.world.world_size, timeout=limit, wait_for_workers=False)

    def connecting(self, uses_nccl: bool) -> contextlib.AbstractContextManager[None]:
        """A block in which ranks connect, or part."""
        return contextlib.nullcontext()

    def await_step(self, before: torch.cuda.Event | None, now: torch.cuda.Event) -> None:
        """Wait until the device is done with the step `before` this one: the host runs one step ahead, and no more."""
        if before is not None:
            self.await_event(before)

    def when_left_behind(self, give_up: Callable[[Exception], None]) -> None:
        """Have a thread call this method once the others go on without this rank, if its object still lives then."""

    def call_collective(self, collective: Callable[[], object]) -> None:
        """Call this function, which waits for other ranks; a live recovery ends the wait when they go on without us."""
        collective()

    def cannot_abort(self) -> None:
        """Called where NCCL's collectives cannot be ended; this process is about to end."""

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """The value of one rank, rank 0 unless another `source` is given (plain Python types), on every rank."""
        if self.world.world_size == 1:
            return value
        box = [value]
        self.call_collective(lambda: dist.broadcast_object_list(box, src=source, device=torch.device("cpu")))
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value (plain Python types), by rank, on every rank."""
        if self.world.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world.world_size
        self.call_collective(lambda: dist.all_gather_object(values, value))
        return values

    def are_alike(self, digest: bytes) -> bool:
        """Whether every rank has this digest, by its first 7 bytes; far cheaper than `gather`."""
        if self.world.world_size == 1:
            return True
        number = int.from_bytes(digest[:7])
        highest = torch.tensor([number, -number])
        self.call_collective(lambda: dist.all_reduce(highest, op=dist.ReduceOp.MAX))
        return int(highest.sum()) == 0

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum in place over the ranks; exact where at most one rank gives a non-zero to each element."""
        if self.world.world_size > 1:
            self.call_collective(lambda: dist.all_reduce(tensor))
        return tensor

    def start_sum(self, tensor: torch.Tensor) -> dist.Work | None:
        """Begin `sum_` without waiting; `tensor` holds the sum once `finish_sum` has had the work that this returns."""
        return dist.all_reduce(tensor, async_op=True) if self.world.world_size > 1 else None

    def finish_sum(self, begun: dist.Work) -> None:
        """Wait for a sum that `start_sum` began."""
        self.call_collective(begun.wait)

    def barrier(self) -> None:
        """Wait for every rank."""
        self.sum_(torch.zeros(1))

    def await_event(self, event: torch.cuda.Event) -> None:
        """Wait until the device has come to this event. Raises DistBackendError where NCCL fails meanwhile.

        torch's own waits, such as for the value of a CUDA tensor, do not end where a kernel of NCCL waits for a peer
        that is gone. NCCL itself notices a peer's end on a network alone, and not between the GPUs of a machine.
        """
        if not self.uses_nccl:
            event.synchronize()
            return
        asked = time.monotonic()
        while True:
            # In this sequence: what ends NCCL's kernels without their work is an abort, which follows the failure.
            is_done = event.query()
            if failure := nccl_failure(self.device):
                raise dist.DistBackendError(f"NCCL met a {failure} while this rank waited for its device")
            if is_done:
                return
            if time.monotonic() - asked > ASKING_SECONDS:
                if self.is_left_behind:
                    raise dist.DistBackendError("another rank was lost while this rank waited for its device")
                asked = time.monotonic()
            time.sleep(_LOOKING_SECONDS)

    @contextlib.contextmanager
    def abandoned_on_error(self) -> Iterator[None]:
        """Where the block raises, end NCCL's collectives without waiting for them; nothing can be sent afterwards.

        Destroying the process group would wait for collectives that a lost peer never joins, and so would the device.
        """
        try:
            yield
        except BaseException:
            if self.uses_nccl and not self.is_abandoned:
                self.is_abandoned = True
                if not abort_process_groups(_ABORTING_SECONDS):
                    self.cannot_abort()
            raise

    def end(self) -> None:
        """Destroy the process group, unless it was abandoned."""
        if not self.is_abandoned:
            with self.connecting(self.uses_nccl):
                dist.destroy_process_group()

    @property
    def uses_nccl(self) -> bool:
        """Whether NCCL carries what ranks send each other from their devices."""
        return self.device.type == "cuda" and dist.is_initialized() and "nccl" in dist.get_backend_config()


@contextlib.contextmanager
def process_group(
    world: World,
    device: torch.device,
    timeout: float,
    backend: str = "auto",
    even_alone: bool = False,
    kind: Callable[[World, torch.device], Collectives] = Collectives,
) -> Iterator[Collectives]:
    """The process group of this launch, ended on every way out; yields the collectives.

    One process needs no group, unless it wraps its model in DistributedDataParallel all the same: `even_alone`.
    `backend`: see `agreed_backend`. `timeout`, in seconds, limits every wait. `kind`: makes the collectives.

    TORCH_NCCL_ASYNC_ERROR_HANDLING keeps its default, 3 (`LiveCollectives` has another): NCCL's watchdog ends a
    process whose collective has failed, the last resort for a rank that cannot be woken in another way. Its other
    values would let such a rank go on with wrong gradients (2) or wait for ever (0). The watchdog first waits for a
    minute (four times TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC), in which the rank says what happened: see
    `Collectives.await_event`.

    Raises UserError where a peer is missing, a rank is taken twice, the network interface does not exist, or nccl was
    asked for where ranks share a GPU.
    """
    if world.world_size == 1 and not even_alone:
        yield kind(world, device)
        return
    collectives = kind(world, device)
    # gloo asks for the interface whenever a group is made, also for the groups that are made in this block.
    with gloo_towards(world.store_host, world.nnodes > 1):
        try:
            store = _meet(collectives, timeout) if world.world_size > 1 else dist.HashStore()
            backends = agreed_backend(store, world, device, backend)
            # NCCL connects now, and each further group when it is made, on all ranks in one sequence. Else it would
            # connect in the first step, from two threads, and ranks that begin with unlike groups wait for ever.
            connects = "nccl" in backends
            with collectives.connecting(connects):
                dist.init_process_group(
                    backend=backends,
                    store=store,
                    rank=world.rank,
                    world_size=world.world_size,
                    timeout=timedelta(seconds=timeout),
                    device_id=device if connects else None,
                )
        except dist.DistError as error:
            raise UserError(
                f"{world.place}: the process group did not start: {first_line(error)}", ExitCode.PEERS_LOST
            ) from None
        try:
            with collectives.abandoned_on_error():
                yield collectives
        finally:
            # DDP's reducer holds the GIL while it waits for gloo's threads to end. So everything that refers to the
            # reducer must be gone before the group is.
            gc.collect()
            collectives.end()


def local_device(world: World, device_type: str) -> torch.device:
    """This rank's device: a GPU of its own, or one that it shares where it sees fewer GPUs than ranks."""
    if device_type == "cuda":
        device = torch.device("cuda", world.device_number % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def agreed_backend(store: dist.Store, world: World, device: torch.device, backend: str) -> str:
    """The backends by device type, in torch's own notation, the same on all ranks that have a device of that type.

    gloo carries CPU tensors, and nccl CUDA tensors. NCCL refuses ranks that share a GPU, so gloo takes its place there.
    `store` is the launch's; `backend` is auto, gloo or nccl. Every rank calls this once. Rank 0 says it where ranks
    share a GPU. Not run with nccl yet, for which each rank needs a GPU of its own.

    Raises UserError (4), on every rank with a GPU, where nccl was asked for and ranks share one, and DistError where a
    rank does not answer within the store's timeout.
    """
    # The number of visible GPUs does not tell whether ranks share one: a scheduler may show each rank one GPU, either
    # a GPU of its own or the same for all.
    uuid = "" if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)
    store.set(f"device/{world.rank}", uuid)
    if world.is_first:
        ranks_of: dict[bytes, list[str]] = defaultdict(list)
        for rank, name in enumerate(store.multi_get([f"device/{rank}" for rank in range(world.world_size)])):
            ranks_of[name].append(str(rank))
        found = [f"ranks {', '.join(ranks)} share a GPU" for gpu, ranks in ranks_of.items() if gpu and len(ranks) > 1]
        store.set(_SHARED, json.dumps(found))
    if device.type == "cpu":
        return "gloo"
    sharing: list[str] = json.loads(store.get(_SHARED))
    if sharing and backend == "nccl":
        raise UserError(
            f"{sharing[0]}, and nccl needs one for each rank: use --backend gloo or auto", ExitCode.RESOURCES
        )
    if sharing and world.is_first:
        print(f"{'; '.join(sharing)}: the ranks exchange over gloo, which is slower than nccl", file=sys.stderr)
    return "cpu:gloo,cuda:gloo" if sharing or backend == "gloo" else "cpu:gloo,cuda:nccl"


def _meet(collectives: Collectives, timeout: float) -> dist.Store:
    """The store of this launch, once every rank has come, each exactly once."""
    world = collectives.world
    address, port = world.store_host, world.store_port
    try:
        store = collectives.open_store(timeout)
    except dist.DistError as error:
        why = "cannot be served" if world.serves_store else "is unreachable"
        raise UserError(
            f"{world.place}: no process group at {world.members_at or f'{address}:{port}'} within {timeout:.0f} s, "
            f"its store {why} ({first_line(error)})",
            ExitCode.PEERS_LOST,
        ) from None
    store.set_timeout(timedelta(seconds=timeout))
    if store.add(f"present/{world.rank}", 1) > 1:
        raise UserError(
            f"rank {world.rank} was started twice (MASTER_ADDR={address}, MASTER_PORT={port}): "
            "give each process its own RANK"
        )
    names = [f"present/{rank}" for rank in range(world.world_size)]
    try:
        _await(store, names, timeout, collectives)
    except dist.DistError:
        absent = "some ranks"  # rank 0 has already ended, and so has its store
        with contextlib.suppress(dist.DistError):
            absent = f"rank {', '.join(str(rank) for rank, name in enumerate(names) if not store.check([name]))}"
        raise UserError(
            f"{world.place}: {absent} of {world.world_size} did not come within {timeout:.0f} s: "
            "start the missing processes, or unset RANK and WORLD_SIZE here where no launcher has set them",
            ExitCode.PEERS_LOST,
        ) from None
    return store


def _await(store: dist.Store, names: list[str], timeout: float, collectives: Collectives) -> None:
    """Wait until the store has all names, in short waits: a signal's handler runs between them, not while one lasts.

    Raises DistStoreError where the time is over, or the others go on without this group.
    """
    deadline = time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        try:
            return store.wait(names, timedelta(seconds=min(max(left, 0.001), ASKING_SECONDS)))
        except dist.DistStoreError:
            if left <= ASKING_SECONDS or collectives.is_left_behind:
                raise
