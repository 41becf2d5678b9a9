"""One experiment on every layout: in miniature before a long run (`ddp rehearse`), or whole (`ddp verify-layouts`)."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ddp_core.base.errors import DIFFERENT, ExitCode, UserError
from ddp_core.cli.prepare import check_request, load_with_settings
from ddp_core.cli.repeating import train_silently
from ddp_core.config.experiment import Experiment
from ddp_core.config.layout import SHARD_MODES, DeviceType, Layout
from ddp_core.config.options import Asked
from ddp_core.distributed.children import Children
from ddp_core.distributed.world import World
from ddp_core.experiment.request import Request, build_parts, build_splits
from ddp_core.model.optimizers import load_for_optimizers
from ddp_core.record.directory import find_runs
from ddp_core.run.rehearsal import alone, compared, fitting, require_ended
from ddp_core.run.repeat import Miniature, Repeated, Training
from ddp_core.sharding import Sharding

_COUNTS = {"dp": (2, 3, 4), "ddp": (2, 3, 4, 5, 8)}
_SHARDED_COUNTS = (2, 3)
_MOST_MICRO_BATCHES = 8

Attempts = list[dict[str, Any]]
"""The options of each `ddp train` that makes up one run: all but the last are killed, and the next one resumes."""


def rehearse(request: Request) -> int:
    """Print a row for each layout and a verdict; returns 0 where the run may be submitted, and 1 where bits differ.

    The exit code is otherwise that of the layout asked for; another one may be refused.
    """
    if World.is_set():
        raise UserError("ddp rehearse starts processes itself: run it once, without torchrun or srun before it")
    check_request(request, only_look=True)
    experiment = request.loaded.experiment
    own = fitting(experiment, request.layout)
    if own is None:
        raise UserError(f"{request.layout.label} does not fit this machine", ExitCode.RESOURCES)
    if own != request.layout:
        print(f"{own.label} is tried in the place of {request.layout.label}")
    mini = Miniature.of(request, len(build_splits(request.loaded, Path(request.options.data_dir)).train))
    is_exact = request.options.reduction == "exact"
    load_for_optimizers()  # each process that is forked needs it
    said: dict[Layout, tuple[int, str]] = {}
    with Children("ddp-rehearsal-") as children, ExitStack() as stack:
        single = stack.enter_context(alone(mini, children.folder)) if is_exact else None
        for layout in _layouts(experiment, own) if is_exact else [own]:
            began, digest = time.monotonic(), "-"
            try:
                repeated, other = _tried(mini, layout, single, children.folder / layout.label)
                last = repeated.sums[0][max(repeated.sums[0])]
                digest = hashlib.sha256(json.dumps(sorted(last.items())).encode()).hexdigest()[:12]
                said[layout] = (ExitCode.DONE, "") if other is None else (DIFFERENT, other)
            except UserError as error:
                said[layout] = (error.exit_code, str(error))
            code, why = said[layout]
            result = {ExitCode.DONE: "done", DIFFERENT: "other bits"}.get(code, f"failed ({int(code)})")
            print(f"{layout.label:30}  {result:10}  {digest:12}  {time.monotonic() - began:5.1f} s", flush=True)
            if layout == own and why:
                break  # which the verdict says, whatever others have
            if why:
                print(f"  {why}", flush=True)
    return _verdict(own, said, "the same bits; " if is_exact else "")


def _layouts(experiment: Experiment, own: Layout) -> list[Layout]:
    """The layout asked for first, then one process, two replicas, and two ranks with each shard mode, if they fit."""
    ranks = Layout(kind="ddp", device=own.device, nproc_per_node=2)
    cut = [ranks.model_copy(update={"shard": mode}) for mode in SHARD_MODES]
    others = [Layout(device=own.device), ranks.model_copy(update={"kind": "dp"}), ranks, *cut]
    places = max(torch.cuda.device_count(), own.nproc_per_node) if own.device == "cuda" else ranks.nproc_per_node
    here = [each for each in others if each.nproc_per_node <= places and fitting(experiment, each) == each]
    return list(dict.fromkeys([own, *here]))


def _tried(mini: Miniature, layout: Layout, single: Training | None, folder: Path) -> tuple[Repeated, str | None]:
    """The miniature on the layout; and what is other there than in the `single` process, if there is one, in words."""
    Sharding.of(layout).check(mini.request.loaded.experiment, single is None, None, mini.request.options.cuda_graph)
    if single is not None:
        return compared(mini, layout, single, folder)
    repeated = mini.killed_and_resumed(layout, folder)
    require_ended(repeated, f"on {layout.label}")
    return repeated, None


def _verdict(own: Layout, said: dict[Layout, tuple[int, str]], same: str) -> int:
    """Print the last line; returns the exit code."""
    code, why = said[own]
    if code != ExitCode.DONE:
        print(f"NOT ready: {own.label}: {why}")
        return code
    others = [layout.label for layout, (code, _) in said.items() if code == DIFFERENT]
    if others:
        print(f"NOT ready: {', '.join(others)}: other bits than one process, and the exact reduction promises the same")
        return DIFFERENT
    done = sum(code == ExitCode.DONE for code, _ in said.values())
    print(f"ready: {done} of {len(said)} done, {same}the long run may be submitted")
    return ExitCode.DONE


def compare_layouts(name: str, settings: Sequence[str], data_dir: str, device: DeviceType = "cpu") -> int:
    """Train on every layout that runs here, and killed and resumed on others; returns 0 when there is one digest."""
    loaded = load_with_settings(name, settings)
    if loaded.experiment.micro_batch is None:
        size = loaded.experiment.global_batch_size
        # As many micro-batches as can be, of two samples at least, which BatchNorm needs.
        most = max(1, min(_MOST_MICRO_BATCHES, size // 2))
        added = f"micro_batch={size // max(count for count in range(1, most + 1) if size % count == 0)}"
        print(f"{name} sets no micro_batch, so each layout cuts its own; compared with --set {added}")
        settings = [*settings, added]
        loaded = replace(loaded, experiment=loaded.experiment.with_settings([added]))
    experiment, parts = loaded.experiment, build_parts(loaded, Path(data_dir))
    steps = experiment.total_steps(experiment.steps_per_epoch(len(parts.splits.train)))
    layouts, left_out = layouts_for(experiment.micro_batches or 1, steps, device)
    if left_out:
        count = f"{experiment.micro_batches} micro-batch{'' if experiment.micro_batches == 1 else 'es'}"
        print(f"left out, as a step has only {count} to share: {', '.join(left_out)}", flush=True)
    for mode in SHARD_MODES:
        try:
            Sharding(mode).check(experiment, is_plain=False, inexact_because=None, cuda_graph=False)
            Sharding(mode).check_parts(parts.model, parts.optimizer)
        except UserError as error:
            print(f"left out, --shard {mode}: {error}", flush=True)
            layouts = {title: attempts for title, attempts in layouts.items() if f"--shard {mode}" not in title}
    found, asked = set(), {"experiment": name, "settings": tuple(settings), "data_dir": data_dir, "device": device}
    with Children("ddp-layouts-") as children:
        for number, (title, attempts) in enumerate(layouts.items()):
            output, began = children.folder / str(number), time.monotonic()
            for attempt in attempts:
                whole = asked | {"output": str(output), "reduction": "exact"} | attempt
                train_silently(children, Asked.model_validate(whole))
            _, record = next(find_runs(output))
            found.add((record["weights_sha256"], record["optimizer_sha256"], record["ema_sha256"]))
            print(f"{title:38}  {record['weights_sha256']}  {time.monotonic() - began:5.1f} s", flush=True)
    if len(found) == 1:
        print(f"{len(layouts)} layouts, one digest of weights and buffers, one of the optimizer's state: identical")
        return ExitCode.DONE
    print(f"{len(layouts)} layouts, {len(found)} digests: NOT identical")
    return DIFFERENT


def layouts_for(micro_batches: int, steps: int, device: DeviceType = "cpu") -> tuple[dict[str, Attempts], list[str]]:
    """The layouts by title, and the titles of those left out: they have more ranks than a step has micro-batches."""
    wanted: dict[str, tuple[int, Attempts]] = {"single": (1, [{}])}

    def add(title: str, count: int, **options: Any) -> None:
        wanted[title] = (count, [{"nproc_per_node": count, **options}])

    for kind, counts in _COUNTS.items():
        for count in counts:
            add(f"{kind} x {count}" + (" (threads)" if (kind, device) == ("dp", "cpu") else ""), count, layout=kind)
    for mode in SHARD_MODES:
        for count in _SHARDED_COUNTS:
            add(f"ddp x {count}, --shard {mode}", count, layout="ddp", shard=mode)
    fitting = {title: attempts for title, (count, attempts) in wanted.items() if count <= micro_batches}
    return fitting | _killed(micro_batches, steps), [title for title in wanted if title not in fitting]


def _killed(micro_batches: int, steps: int) -> dict[str, Attempts]:
    """A run that is killed after a quarter, half and three quarters of its steps, each time on another layout."""
    kills = sorted({steps * part // 4 for part in (1, 2, 3)} - {0})
    if not kills:
        return {}
    counts = [min(count, micro_batches) for count in (4, 1, 3, 2)][-len(kills) - 1 :]
    common = {"resume": "auto", "checkpoint_every": max(1, steps // 50), "max_restarts": 0}
    attempts: Attempts = []
    for count, kill in zip(counts, [*kills, None], strict=True):
        attempt = common | ({} if count == 1 else {"layout": "ddp", "nproc_per_node": count})
        attempts.append(attempt | ({} if kill is None else {"faults": (f"kill@{kill}",)}))
    return {f"killed on {', '.join(map(str, counts[:-1]))}, ended on {counts[-1]}": attempts}
