"""`ddp rehearse`: the rehearsal that precedes each run, made on every layout that fits this machine."""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from ddp_core.base.errors import DIFFERENT, ExitCode, UserError
from ddp_core.cli.prepare import check_request
from ddp_core.config.experiment import Experiment
from ddp_core.config.layout import SHARD_MODES, Layout
from ddp_core.distributed.children import Children
from ddp_core.distributed.world import World
from ddp_core.experiment.request import Request, build_splits
from ddp_core.model.optimizers import load_for_optimizers
from ddp_core.run.rehearsal import alone, compared, fitting, require_ended
from ddp_core.run.repeat import Miniature, Repeated, Training
from ddp_core.sharding import Sharding


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
