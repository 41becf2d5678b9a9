"""`ddp verify-layouts`: train one experiment on every layout and compare the digests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from ddp_core.base.errors import DIFFERENT, ExitCode, UserError
from ddp_core.cli.prepare import load_with_settings
from ddp_core.cli.repeating import train_silently
from ddp_core.config.experiment import Experiment
from ddp_core.config.layout import SHARD_MODES, DeviceType, ShardMode
from ddp_core.config.options import Asked
from ddp_core.distributed.children import Children
from ddp_core.experiment.request import build_parts, promise_broken_by
from ddp_core.record.directory import find_runs
from ddp_core.sharding import Sharding
from ddp_core.sharding.elementwise import require_elementwise

_COUNTS = {"dp": (2, 3, 4), "ddp": (2, 3, 4, 5, 8)}
_SHARDED_COUNTS = (2, 3)
_MOST_MICRO_BATCHES = 8

Attempts = list[dict[str, Any]]
"""The options of each `ddp train` that makes up one run: all but the last are killed, and the next one resumes."""


def compare_layouts(name: str, settings: Sequence[str], data_dir: str, device: DeviceType = "cpu") -> int:
    """Train on every layout that runs here and print a line for each; returns 0 when there is one digest.

    One of the runs is killed and resumed on other layouts. Raises UserError where the experiment cannot have the exact
    reduction.
    """
    loaded = load_with_settings(name, settings)
    experiment = loaded.experiment
    if experiment.micro_batch is None:
        added = f"micro_batch={_micro_batch_for(experiment)}"
        print(f"{experiment.name} sets no micro_batch, so each layout cuts its own; compared with --set {added}")
        settings, experiment = [*settings, added], experiment.with_settings([added])
    reason = promise_broken_by(experiment)
    if reason is not None:
        raise _nothing_to_compare(experiment, reason)
    parts = build_parts(loaded, Path(data_dir))
    steps = experiment.total_steps(experiment.steps_per_epoch(len(parts.splits.train)))
    modes, refused = shard_modes_for(experiment, parts.optimizer)
    if refused is not None:
        print(f"left out, {refused}", flush=True)
    layouts, left_out = layouts_for(experiment.micro_batches or 1, steps, device, modes)
    if left_out:
        count = f"{experiment.micro_batches} micro-batch{'' if experiment.micro_batches == 1 else 'es'}"
        print(f"left out, as a step has only {count} to share: {', '.join(left_out)}", flush=True)
    try:
        return _train_all(name, settings, data_dir, device, layouts)
    except UserError as error:
        if "plain reduction" not in str(error):
            raise
        # The model itself may rule out the exact reduction, which only a forward shows.
        reason = str(error).partition(f" ended with {int(error.exit_code)}: ")[2]
        raise _nothing_to_compare(experiment, reason) from None


def shard_modes_for(experiment: Experiment, optimizer: Optimizer) -> tuple[Sequence[ShardMode], str | None]:
    """The shard modes that the experiment can have; and which it cannot, and why."""
    reason = Sharding("optimizer").refused_by(experiment)
    try:
        if reason is None:
            require_elementwise(optimizer)
            needed = Sharding("parameters").whole_parameters_needed_by(experiment)
            if needed is not None:
                return [mode for mode in SHARD_MODES if mode != "parameters"], f"--shard parameters: {needed}"
            return SHARD_MODES, None
    except UserError as error:
        reason = str(error)
    return (), f"every --shard: {reason}"


def _nothing_to_compare(experiment: Experiment, reason: str) -> UserError:
    return UserError(f"no two layouts promise the same bits for {experiment.name}: {reason}")


def _train_all(
    name: str, settings: Sequence[str], data_dir: str, device: DeviceType, layouts: dict[str, Attempts]
) -> int:
    digests, states = set(), set()
    with Children("ddp-layouts-") as children:
        for number, (title, attempts) in enumerate(layouts.items()):
            output, started = children.folder / str(number), time.monotonic()
            common = {"experiment": name, "settings": tuple(settings), "data_dir": data_dir, "output": str(output)}
            for attempt in attempts:
                asked = common | {"device": device, "reduction": "exact"} | attempt
                train_silently(children, Asked.model_validate(asked))
            _, record = next(find_runs(output))
            digests.add(record["weights_sha256"])
            states.add((record["optimizer_sha256"], record["ema_sha256"]))
            seconds = time.monotonic() - started
            print(f"{title:38}  {record['weights_sha256']}  {seconds:5.1f} s", flush=True)
    if len(digests) == len(states) == 1:
        print(f"{len(layouts)} layouts, one digest of weights and buffers, one of the optimizer's state: identical")
        return ExitCode.DONE
    print(f"{len(layouts)} layouts, {len(digests)} digests: NOT identical")
    return DIFFERENT


def _micro_batch_for(experiment: Experiment) -> int:
    """The size of micro-batch that gives the most of them, up to eight; 2 samples at least, which BatchNorm needs."""
    size = experiment.global_batch_size
    most = max(1, min(_MOST_MICRO_BATCHES, size // 2))
    return size // max(count for count in range(1, most + 1) if size % count == 0)


def layouts_for(
    micro_batches: int, steps: int, device: DeviceType = "cpu", modes: Sequence[ShardMode] = SHARD_MODES
) -> tuple[dict[str, Attempts], list[str]]:
    """The layouts by title, and the titles of those left out: they have more ranks than a step has micro-batches."""
    wanted: dict[str, tuple[int, Attempts]] = {"single": (1, [{}])}
    for kind, counts in _COUNTS.items():
        for count in counts:
            title = f"{kind} x {count}" + (" (threads)" if (kind, device) == ("dp", "cpu") else "")
            wanted[title] = (count, [{"layout": kind, "nproc_per_node": count}])
    wanted["ddp x 2, mp.spawn"] = (2, [{"layout": "ddp", "nproc_per_node": 2, "launcher": "spawn"}])
    for mode in modes:
        for count in _SHARDED_COUNTS:
            attempt = {"layout": "ddp", "nproc_per_node": count, "shard": mode}
            wanted[f"ddp x {count}, --shard {mode}"] = (count, [attempt])
    if (killed := _killed(micro_batches, steps)) is not None:
        wanted |= killed
    fitting = {title: attempts for title, (count, attempts) in wanted.items() if count <= micro_batches}
    return fitting, [title for title in wanted if title not in fitting]


def _killed(micro_batches: int, steps: int) -> dict[str, tuple[int, Attempts]] | None:
    """A run that is killed after a quarter, half and three quarters of its steps, each time on another layout.

    None where a run has too few steps for that.
    """
    kills = sorted({steps * part // 4 for part in (1, 2, 3)} - {0})
    if not kills:
        return None
    counts = [min(count, micro_batches) for count in (4, 1, 3, 2)][-len(kills) - 1 :]
    common = {"resume": "auto", "checkpoint_every": max(1, steps // 50), "max_restarts": 0}
    attempts: Attempts = []
    for count, kill in zip(counts, [*kills, None], strict=True):
        attempt = common | ({} if count == 1 else {"layout": "ddp", "nproc_per_node": count})
        attempts.append(attempt | ({} if kill is None else {"faults": (f"kill@{kill}",)}))
    title = f"killed on {', '.join(map(str, counts[:-1]))}, ended on {counts[-1]}"
    return {title: (1, attempts)}
