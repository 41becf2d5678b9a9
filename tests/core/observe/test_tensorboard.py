"""What `ddp train --log-to tensorboard` writes, read back by TensorBoard's own reader."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from ddp_core.observe.metrics import MetricsWriter, read_metrics
from ddp_core.observe.tensorboard import TensorBoard
from ddp_core.record.directory import find_runs
from tests.support.commands import ddp


def test_a_runs_scalars_and_hyper_parameters_are_readable(tmp_path: Path) -> None:
    settings = ("--set", "max_steps=24", "--set", "epochs=1", "--set", "seed=3")
    done = ddp(
        "train", "linear_regression", "--device", "cpu", "--log-to", "tensorboard", *settings, "--output", tmp_path
    )
    assert done.code == 0, done.errors
    ((directory, record),) = find_runs(tmp_path)
    events = EventAccumulator(str(directory.path / "tensorboard"))
    events.Reload()

    written = read_metrics(directory.metrics, "step")
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (step["step"], pytest.approx(step["loss"])) for step in written
    ]
    assert {"lr", "samples_per_second", "data_wait", "test_loss"} <= set(events.Tags()["scalars"])
    assert events.Scalars("result/test_loss")[0].value == pytest.approx(record["result"]["test_loss"])
    (digest,) = events.Tensors("weights_sha256/text_summary")
    assert digest.tensor_proto.string_val == [record["weights_sha256"].encode()]

    content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    shown = HParamsPluginData.FromString(content).session_start_info.hparams
    assert shown["layout"].string_value == "single-cpu"
    assert shown["seed"].number_value == 3
    assert shown["optimizer.lr"].number_value == 0.01
    assert shown["data.size"].number_value == 10_000


def test_steps_that_a_resume_rolls_back_are_gone(tmp_path: Path) -> None:
    first = TensorBoard(tmp_path, {}, pytest.fail)
    for step in (1, 2, 3):
        first.record("step", step, {"loss": float(step)})
    first.close()
    second = TensorBoard(tmp_path, {}, pytest.fail)
    second.record("resume", 1, {})
    second.record("step", 2, {"loss": 20.0})
    second.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (2, 20.0)]


def test_what_fails_is_left_out_with_one_warning(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").touch()
    warnings: list[str] = []
    with MetricsWriter(tmp_path / "m", TensorBoard(tmp_path, {}, warnings.append)) as metrics:
        for step in (1, 2):
            metrics.write("step", step=step, loss=1.0)
        metrics.finish({"test_loss": 0.25}, "abc")
    (warning,) = warnings
    assert warning.startswith("tensorboard is left out from here on: ")
    assert warning.endswith("; metrics.jsonl has everything")
    assert len(read_metrics(tmp_path / "m", "step")) == 2
