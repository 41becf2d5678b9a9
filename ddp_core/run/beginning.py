"""How every worker begins: it meets the other ranks, and all of them build the same experiment."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from ddp_core.base.determinism import choose_kernels
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.fingerprint import fingerprint, of_all_ranks
from ddp_core.base.process import keep_freed_memory, return_large_blocks
from ddp_core.base.refusals import require_open_files
from ddp_core.data.data_digest import ADVICE, DataDigest, digest_items
from ddp_core.data.splits import Splits
from ddp_core.distributed.process_group import Collectives, local_device, process_group
from ddp_core.distributed.world import World
from ddp_core.experiment.building import BuiltExperiment
from ddp_core.experiment.fresh_model import lines_about
from ddp_core.experiment.request import Request, build_parts, build_splits, check_promise
from ddp_core.experiment.source import Source, collect
from ddp_core.numerics.limits import rules_of
from ddp_core.observe.metrics import Console
from ddp_core.observe.usage import Usage
from ddp_core.record.data import agreed_digest, digest_data, has_files_to_read, read_on_each_node
from ddp_core.record.environment import facts_of
from ddp_core.record.recorded import not_promised
from ddp_core.run.starting import ChosenRun
from ddp_core.sharding import Sharding
from ddp_core.trainers.train_state import score_of

if TYPE_CHECKING:
    from ddp_core.trainers.own_metrics import OwnMetrics


class Beginning(NamedTuple):
    """What a worker has before it trains or evaluates."""

    collectives: Collectives
    console: Console
    parts: BuiltExperiment
    """With the experiment's metrics as they are counted, an `OwnMetrics`."""
    source: Source
    """The user's code, of which all modules are imported by now."""
    data: DataDigest
    fingerprint: dict[str, Any]
    """What a result depends on, bit for bit, and which ranks compute on something else than rank 0."""


@dataclass
class Prepared:
    """What a worker has found out for its first group, and need not find out again for another one."""

    splits: Splits | None = None
    digest: DataDigest | None = None
    source: Source | None = None
    """The user's code, once the metrics were tried, which comes out the same again."""
    run: ChosenRun | None = None
    usage: Usage | None = None

    def prepare(self, request: Request) -> None:
        """Do before there is a group what needs none, so that the others need not wait for it."""
        device = torch.device("cpu")
        with _kernels(request):
            parts = build_parts(request.loaded, Path(request.options.data_dir), device)
            self.splits, self.digest = parts.splits, digest_data(parts.splits)
            with suppress(Exception):  # metrics that cannot be tried on the CPU are tried in the group
                _own_metrics(request, parts, device, is_known=False)
                self.source = collect(request.loaded)
        if request.layout.device == device.type:
            self.usage = Usage(device)
            self.usage.start()


@contextmanager
def begun(
    request: Request,
    world: World,
    prepared: Prepared | None = None,
    kind: Callable[[World, torch.device], Collectives] = Collectives,
) -> Iterator[Beginning]:
    """A block in which this worker has met the others, with kernels and numerics as the request has them.

    `prepared` is filled, and used where it is full. `kind`: see `process_group`.
    """
    options, layout = request.options, request.layout
    require_open_files(world.world_size, options.workers)
    with ExitStack() as stack:
        stack.enter_context(_kernels(request))
        device = local_device(world, layout.device)
        if Sharding.of(layout).cuts_parameters and device.type == "cpu":
            return_large_blocks()
        else:
            keep_freed_memory()
        group = process_group(world, device, options.timeout, options.backend, layout.kind == "ddp", kind)
        collectives = stack.enter_context(group)
        console = stack.enter_context(closing(Console(world.rank, world.world_size)))
        yield Beginning(collectives, console, *_build_the_same(request, collectives, console, prepared or Prepared()))


@contextmanager
def _kernels(request: Request) -> Iterator[None]:
    """A block with kernels and numerics as the request has them."""
    choose_kernels(request.options.deterministic, tf32=request.loaded.experiment.precision == "tf32")
    if request.options.numerics == "native":
        yield
        return
    from ddp_core.numerics.kernels import portable_kernels

    with portable_kernels():
        yield


def _build_the_same(
    request: Request, collectives: Collectives, console: Console, prepared: Prepared
) -> tuple[BuiltExperiment, Source, DataDigest, dict[str, Any]]:
    """All parts, the code of the user, the digest of the data, and the fingerprint of all ranks, alike on each."""
    started, named = time.monotonic(), facts_of(request)
    try:
        parts, source, splits = _built(request, collectives.device, prepared)
        digest = prepared.digest or (None if has_files_to_read(splits) else digest_items(splits))
    except Exception:
        # The others may have been started with something else, which explains it; that they are gone does not.
        with suppress(dist.DistError, RuntimeError):
            facts_of_all(collectives, Facts(named))
        raise
    own = fingerprint(collectives.device, rules_of(request.options.numerics))
    facts = Facts({**named, **source.files}, lines_about(parts.model), digest, own)
    everyones = facts_of_all(collectives, facts)
    digests = [each.data for each in everyones]
    if None in digests:
        digest, digests = read_on_each_node(splits, collectives, digest)
    data = agreed_digest(digest, digests, collectives)
    for module in source.unreadable:
        console.warn(f"the source of module {module} is gone; without it `ddp verify` cannot repeat this run")
    if splits.note:
        console.say(f"data: {splits.note}")
    if data.sha256 is None:
        text = f"the data set gives other items at each read, so no result can be repeated to the bit; {ADVICE}"
        console.say(not_promised(text, request.options))
    elif prepared.digest is None and not splits.digest:
        seconds = time.monotonic() - started
        console.say(f"data: digested {data.digest_of} in {seconds:.1f} s, as the builder gives no digest")
    prepared.splits, prepared.digest, prepared.source = parts.splits, data, source
    return parts, source, data, of_all_ranks([each.fingerprint or own for each in everyones])


def _built(request: Request, device: torch.device, prepared: Prepared) -> tuple[BuiltExperiment, Source, Splits]:
    """All parts, the user's code, and the data to digest."""
    check_promise(request)
    is_known = prepared.source is not None
    splits = prepared.splits
    if request.asked.miniature:
        built = build_splits(request.loaded, Path(request.options.data_dir))
        splits = replace(built, most=request.loaded.experiment.samples_in_miniature(len(built.train)))
    parts = build_parts(request.loaded, Path(request.options.data_dir), device, splits)
    parts = replace(parts, metrics=_own_metrics(request, parts, device, is_known))
    # All modules of the user are imported by now.
    source = prepared.source or collect(request.loaded)
    # Files may take minutes to read, which a run that is only tried does not have.
    is_short = request.is_tried and not request.is_witness
    return parts, source, replace(parts.splits, files=()) if is_short else parts.splits


def _own_metrics(request: Request, parts: BuiltExperiment, device: torch.device, is_known: bool) -> OwnMetrics | None:
    """The experiment's metrics, as they are counted, once they were tried; not where it `is_known` that they work."""
    own_metrics: OwnMetrics | None = None
    if parts.metrics is not None:
        from ddp_core.trainers.own_metrics import OwnMetrics

        own_metrics = OwnMetrics.of(parts.metrics)
    experiment, figures, test = request.loaded.experiment, dict[str, Any](), parts.splits.test
    if is_known:
        return own_metrics
    if test is not None:
        figures = {"test_loss": 0.0} | ({} if parts.hits is None else {"test_accuracy": 0.0})
        if own_metrics is not None:
            from ddp_core.trainers.passes import Passes
            from ddp_core.trainers.trial import try_metrics

            forward = partial(Passes(experiment, parts.loss, device).outputs_and_loss, parts.model)
            figures |= try_metrics(parts.model, forward, own_metrics, test, parts.splits.collate)
        if experiment.ema_decay is not None:
            figures |= {f"ema_{name}": value for name, value in figures.items()}
    if experiment.best is not None:
        score_of(figures, experiment.best)
    return own_metrics


class Facts(NamedTuple):
    """What one rank was started with, and what it has built."""

    named: Mapping[str, str]
    """Version, request and the digest of each of the user's files, by the name that an error message gives them."""
    model: Sequence[str] = ()
    """A line for each parameter and buffer: name, shape, type, and whether it is trained; not its values."""
    data: DataDigest | None = None
    """Without its parts; None where one rank of each node has yet to read the files."""
    fingerprint: Mapping[str, Any] | None = None
    """None where this rank could not build the experiment."""


def facts_of_all(collectives: Collectives, ours: Facts) -> list[Facts]:
    """The facts of all ranks; a collective. Raises UserError, on every rank, where code, request or model differ."""
    # A rank that could not build the experiment tells what it was started with, too, since that may be why. Raises
    # UserError (6) on the other ranks then. A file that only some ranks have imported is not compared.
    data: Any = ours.data and (ours.data.sha256, ours.data.digest_of, {}, ours.data.sampled)
    # Plain types: ranks with another version of this program must be able to read them.
    told = collectives.gather((dict(ours.named), list(ours.model), data, ours.fingerprint))
    everyones = [Facts(named, model, data and DataDigest(*data), prints) for named, model, data, prints in told]
    first = everyones[0]
    for name, value in first.named.items():
        if others := [rank for rank, theirs in enumerate(everyones) if theirs.named.get(name, value) != value]:
            raise UserError(
                f"ranks {', '.join(map(str, others))} have another {name} than rank 0: "
                "start every node with the same code and the same command"
            )
    if ours.fingerprint is None:
        return everyones
    for rank, theirs in enumerate(everyones):
        if theirs.fingerprint is None:
            raise UserError(
                f"rank {rank} could not build the experiment; its own message says why", ExitCode.PEERS_LOST
            )
        for line, other in zip_longest(first.model, theirs.model, fillvalue="nothing more"):
            if line != other:
                raise UserError(
                    f"rank {rank} has built another model than rank 0: {other}, where rank 0 has {line}; every rank "
                    "trains the same model, so let its builder not depend on RANK, the machine, or the time"
                )
    return everyones
