"""How much of a traced training a GPU had nothing to do, from the trace that `ddp train --profile` writes.

python -m benchmarks.gpu_trace [benchmarks/results/gpu-trace.json.gz]
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

from benchmarks.gpu import TRACE
from benchmarks.record import RESULTS

_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCH = 5.0
"""Microseconds between two kernels that come from starting the second one; a longer gap is a wait for the host."""


def gaps(path: Path) -> tuple[float, list[float]]:
    """Microseconds from the first to the last work of the busiest stream, and those of each gap in it."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    streams: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        if event.get("cat") in _WORK:
            streams.setdefault(event["args"]["stream"], []).append((event["ts"], event["ts"] + event["dur"]))
    busiest = max(streams, key=lambda stream: len(streams[stream]))
    work = sorted(streams[busiest])
    began = end = work[0][0]
    found = []
    for start, stop in work:
        if start > end:
            found.append(start - end)
        end = max(end, stop)
    return end - began, found


def idle_in_words(path: Path) -> str:
    """The share of the time in which the stream that trains stood still, in short gaps and in long ones."""
    whole, found = gaps(path)
    long = [gap for gap in found if gap > _LAUNCH]
    return (
        f"the stream that trains stood still for {sum(long) / whole:.1%} of {whole / 1000:.0f} ms in {len(long)} gaps "
        f"above {_LAUNCH:.0f} µs, the longest of {max(found, default=0) / 1000:.1f} ms, and for "
        f"{(sum(found) - sum(long)) / whole:.1%} between two kernels"
    )


if __name__ == "__main__":
    print(idle_in_words(Path(sys.argv[1]) if sys.argv[1:] else RESULTS / TRACE))
