"""What the chain of `--keep-for-audit` costs a step: its own seconds, of those of the step that it stands in.

    python -m benchmarks.chain [--steps 12] [--quick] [--json PATH]

char_transformer with 25 million parameters (AdamW, so 300 MB of weights and state are read in each step), in one
process with one thread, the exact reduction. In each step the seconds in the chain's own functions are compared with
the rest of the same step, so that what else disturbs the machine disturbs both; `cpu` has the same in seconds of the
processor. The two steps in which something is made for the first time do not count. Also: bytes of a step's line, and
the seconds of one SHA-256 over the whole state, as each kept checkpoint takes. The goal is 1 %.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.record import record

LARGE = ("--set", "model.width=512", "--set", "model.depth=8", "--set", "optimizer.lr=0.001")
_UNCOUNTED = 2


class Stopwatch:
    """Adds up the seconds of the functions that it is put around, and notes them at each step."""

    def __init__(self) -> None:
        self.spent = (0.0, 0.0)
        self.at_steps: list[tuple[tuple[float, float], tuple[float, float]]] = []
        """After each step: the clock and the processor's time, and what was spent until then."""

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, measured."""

        def measured(*words: Any, **named: Any) -> Any:
            before = now()
            try:
                return function(*words, **named)
            finally:
                after = now()
                self.spent = (self.spent[0] + after[0] - before[0], self.spent[1] + after[1] - before[1])

        return measured

    def shares(self) -> list[tuple[float, float]]:
        """Of each counted step: what part of the rest of the step the functions took, by clock and by processor."""
        found = []
        pairs = list(zip(self.at_steps, self.at_steps[1:], strict=False))[_UNCOUNTED - 1 :]
        for (before, spent_before), (after, spent_after) in pairs:
            ours = [spent_after[each] - spent_before[each] for each in (0, 1)]
            clock, processor = (ours[each] / (after[each] - before[each] - ours[each]) for each in (0, 1))
            found.append((clock, processor))
        return found


def now() -> tuple[float, float]:
    """Seconds of the clock, and of this process's processors."""
    return time.perf_counter(), time.process_time()


def measure(steps: int, is_quick: bool) -> dict[str, Any]:
    """All figures; prints them."""
    from ddp_core import cli
    from ddp_core.observe.chain import each_link
    from ddp_core.trainers import step_chain

    watch, sha = Stopwatch(), Stopwatch()
    chain: Any = step_chain.StepChain
    for name in ("before_step", "gradients_done", "after_step"):
        setattr(chain, name, watch.around(getattr(chain, name)))
    after_step = chain.after_step

    def noted(self: Any, batch: Any) -> None:
        after_step(self, batch)
        watch.at_steps.append((now(), watch.spent))

    chain.after_step = noted
    step_chain.state_digests = sha.around(step_chain.state_digests)
    with tempfile.TemporaryDirectory() as place:
        words = ["train", "char_transformer", *(() if is_quick else LARGE), "--set", f"max_steps={steps}"]
        words += ["--set", "evaluation.samples_per_batch=8", "--keep-for-audit", "1", "--guard", "off"]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            code = cli.main([*words, "--device", "cpu", "--output", place])
        assert code == 0, f"training ended with {code}"
        (file,) = Path(place).glob("*/*/chain.jsonl")
        lines = [link.end for link in each_link(file) if link.line["kind"] == "step"]
    shares = watch.shares()
    begun, ended = watch.at_steps[_UNCOUNTED - 1], watch.at_steps[-1]
    counted = len(watch.at_steps) - _UNCOUNTED
    found = {
        "load_average": os.getloadavg(),
        "share": median(share[0] for share in shares),
        "cpu_share": median(share[1] for share in shares),
        "shares": shares,
        "seconds_per_step": (ended[0][0] - begun[0][0]) / counted,
        "chain_seconds_per_step": (ended[1][0] - begun[1][0]) / counted,
        "bytes_per_step": (lines[-1] - lines[0]) / (len(lines) - 1),
        "sha256_seconds": sha.spent[0],
    }
    for name in (
        "share",
        "cpu_share",
        "seconds_per_step",
        "chain_seconds_per_step",
        "bytes_per_step",
        "sha256_seconds",
    ):
        print(f"{name:24}{found[name]:12.4f}")
    return found


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--quick", action="store_true", help="a small model; recorded with --json only")
    parser.add_argument("--json", type=Path, help="where to record the results (default: benchmarks/results)")
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    results = measure(arguments.steps, arguments.quick)
    if arguments.json or not arguments.quick:
        command = f"python -m benchmarks.chain --steps {arguments.steps}"
        print(f"recorded in {record('chain', command, results, arguments.json, arguments.steps)}")


if __name__ == "__main__":
    main()
