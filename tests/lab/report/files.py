"""Output folders for the report's tests: run directories, claims and drills, as the project writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ddp_core.config.experiment import Component, Experiment
from ddp_core.config.layout import Layout
from ddp_core.config.options import Options
from tests.support.commands import ROOT
from tests.support.records import a_record

DIGEST = "66f0b33e9ef474215a66cfbeadded291c00d37cba0c14c24bc545bf7cf33c66b"


def write_run(
    output: Path,
    layout: Layout,
    /,
    *,
    seed: int = 0,
    speed: float | None = 1000.0,
    status: str = "completed",
    digest: str | None = DIGEST,
    steps: int = 20,
    name: str = "digits",
    reduction: str = "exact",
    result: dict[str, Any] | None = None,
    **fields: Any,
) -> Path:
    """Write a run directory with metrics for `steps` steps; return it."""
    experiment = Experiment(
        name=name, seed=seed, model=Component(name="small_cnn"), data=Component(name="digits"), global_batch_size=50
    )
    place = output / name
    number = len(list(place.iterdir())) if place.exists() else 0
    path = place / f"{layout.label}-20260101T0000{number:02d}Z-{number:06x}"
    (path / "checkpoints").mkdir(parents=True)
    completed = status == "completed"
    figures = {"samples_per_second": speed, "seconds": 3.0, "test_accuracy": 0.98, "test_loss": 0.03, "steps": steps}
    figures |= {"peak_memory_bytes": 300e6, "data_wait": 0.1, "cpu_utilisation": 0.9} | (result or {})
    record = a_record(
        experiment,
        layout,
        options=Options.model_validate({"reduction": reduction}).model_dump(mode="json"),
        command=f"ddp train {name} --layout {layout.kind}",
        status=status,
        started_at=f"2026-01-01T00:00:{number:02d}Z",
        weights_sha256=digest if completed else None,
        optimizer_sha256="0" * 64,
        result=figures if completed else {},
    )
    record["environment"] |= {"cores": 2, "cpu": "a CPU", "host": "here"}
    (path / "run.json").write_text(json.dumps(record | fields))
    lines = []
    for step in range(5, steps + 1, 5):
        moment = 1000.0 + step / 10
        lines.append({"kind": "step", "time": moment, "step": step, "loss": 2.0 / step, "samples_per_second": 500.0})
        test = {"test_loss": 1.0 / (step + seed), "test_accuracy": 1 - 1.0 / step}
        lines.append({"kind": "evaluation", "time": moment + 0.01, "step": step, "epoch": 0} | test)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def ddp(count: int) -> Layout:
    """The layout of `count` processes on one node's CPU."""
    return Layout(kind="ddp", nproc_per_node=count)


def write_claim(output: Path, **fields: Any) -> Path:
    """Write claims/<id>.json below `output`, the published C06 with one figure and a verdict; return its path."""
    content = json.loads((ROOT / "benchmarks" / "results" / "claims" / "C06.json").read_text())
    figure = {"name": "ratio", "value": 1.76, "unit": "x", "low": 1.7, "high": 1.82}
    content |= {"verdict": "confirmed", "figures": [figure]} | fields
    path = output / "claims" / f"{content['id']}.json"
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(json.dumps(content))
    return path


def write_drill(output: Path, **fields: Any) -> Path:
    """Write a drill's file below `output`; return its path."""
    fault = {"name": "kill node 1", "at_step": 40, "noticed_seconds": 0.2, "resumed_seconds": 5.3, "steps_lost": 3}
    content = {
        "format": "ddp-drill/1",
        "name": "ten faults",
        "backend": "local",
        "seed": 0,
        "faults": [fault | {"outcome": "recovered"}, fault | {"name": "pause node 0", "outcome": "job lost"}],
        "digest": DIGEST,
        "undisturbed_digest": DIGEST,
        "identical": True,
        "exit_code": 0,
        "seconds": 80.0,
    }
    path = output / "drill" / "drill.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content | fields))
    return path


def write_everything(output: Path) -> None:
    """Write runs on every layout, of several seeds and in every state; broken directories; claims and a drill."""
    for seed in (0, 1, 2):
        write_run(output, Layout(), seed=seed, speed=1000 + seed, digest=f"{seed}" * 64)
        write_run(output, ddp(2), seed=seed, speed=1800 + seed, digest=f"{seed}" * 64)
    write_run(output, Layout(kind="dp", nproc_per_node=2), speed=700, digest="0" * 64)
    write_run(output, ddp(4), status="running", steps=10)
    write_run(output, ddp(2), status="failed", steps=0, message="Traceback: <b>bad</b> & worse", exit_code=5)
    write_run(output, ddp(2), status="stopped", steps=10, reduction="plain")
    write_run(output, Layout(), name="toy", steps=0)
    (output / "digits" / "ddp-1x2-cpu-20260101T000100Z-aaaaaa" / "checkpoints").mkdir(parents=True)
    for name, content in {
        "bbbbbb": '{"format": "ddp-run/1", "exp',
        "cccccc": '{"format": "ddp-run/1"}',
        "dddddd": "[]",
    }.items():
        broken = output / "digits" / f"single-cpu-20260101T000100Z-{name}"
        broken.mkdir(parents=True)
        (broken / "run.json").write_text(content)
    write_claim(output)
    write_claim(output, id="C07", verdict="not measurable here", reason="needs 2 CUDA devices", figures=[], series=[])
    write_drill(output)
