"""`ddp verify-layouts`: train one experiment on every layout and compare the digests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddp_core.base.errors import DIFFERENT, ExitCode, UserError
from ddp_core.cli.prepare import load_with_settings
from ddp_core.cli.repeating import train_silently
from ddp_core.config.layout import SHARD_MODES, DeviceType
from ddp_core.config.options import Asked
from ddp_core.distributed.children import Children
from ddp_core.experiment.request import build_parts
from ddp_core.record.directory import find_runs
from ddp_core.sharding import Sharding

_COUNTS = {"dp": (2, 3, 4), "ddp": (2, 3, 4, 5, 8)}
_SHARDED_COUNTS = (2, 3)
_MOST_MICRO_BATCHES = 8

Attempts = list[dict[str, Any]]
"""The options of each `ddp train` that makes up one run: all but the last are killed, and the next one resumes."""


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
