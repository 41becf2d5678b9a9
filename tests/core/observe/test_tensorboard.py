"""What `ddp train --tensorboard` writes, read back by TensorBoard's own reader."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_core.observe.metrics import read_metrics
from ddp_core.run.directory import find_runs
from tests.support.commands import ddp

accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def test_a_runs_scalars_and_hyper_parameters_are_readable(tmp_path: Path) -> None:
    plugin_data = pytest.importorskip("tensorboard.plugins.hparams.plugin_data_pb2")
    settings = ("--set", "max_steps=24", "--set", "epochs=1", "--set", "seed=3")
    done = ddp("train", "linear_regression", "--device", "cpu", "--tensorboard", *settings, "--output", tmp_path)
    assert done.code == 0, done.errors
    ((directory, record),) = find_runs(tmp_path)
    events = accumulators.EventAccumulator(str(directory.path / "tensorboard"))
    events.Reload()

    written = read_metrics(directory.metrics, "step")
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (step["step"], pytest.approx(step["loss"])) for step in written
    ]
    assert {"lr", "samples_per_second", "data_wait", "test_loss"} <= set(events.Tags()["scalars"])
    assert events.Scalars("result/test_loss")[0].value == pytest.approx(record["result"]["test_loss"])

    content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    shown = plugin_data.HParamsPluginData.FromString(content).session_start_info.hparams
    assert shown["layout"].string_value == "single-cpu"
    assert shown["seed"].number_value == 3
    assert shown["optimizer.lr"].number_value == 0.01
    assert shown["data.options.size"].number_value == 10_000
