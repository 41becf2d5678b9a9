"""Bad input in every launch mode: one line says what, where and what to do; the exit code; nothing left behind."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ddp_core.base.errors import ExitCode
from ddp_core.cli import main
from ddp_core.distributed.reports import report_end
from ddp_core.distributed.world import World, free_port
from ddp_core.run import run
from tests.faults.matrix import REFUSAL, record_row
from tests.support.commands import Ended, ddp, train, trained
from tests.support.processes import run_processes

MODES = {
    "single": [],
    "dp": ["--layout", "dp", "--nproc-per-node", "2"],
    "torchrun": ["--layout", "ddp", "--nproc-per-node", "2"],
}

WHOLE = """from ddp_core.config.experiment import *
{}
experiment = Experiment(name='a', model=Component(name='{}'), data=Component(name='{}'), global_batch_size=8,
                        micro_batch=4)
"""
EMPTY_HELD_OUT = """
from torch import ones, zeros
from ddp_core.data.splits import InMemory, Splits
def data():
    return Splits(train=InMemory(ones(8, 2), zeros(8)), test=InMemory(ones(0, 2), zeros(0)))
"""
AVERAGING = "def averaging(outputs, targets):\n    return outputs.mean()"
BROKEN = {
    "raises": "x = 1 / 0\n",
    "foreign_name": WHOLE.format("", "mlp", "digits").replace("'a'", "'für'"),
    "data_missing": WHOLE.format("def data(root):\n    return (root / 'pixels.npy').read_bytes()", "mlp", "data"),
    "data_raises": WHOLE.format("def data():\n    raise OSError('the disk is on fire')", "mlp", "data"),
    "empty_held_out": WHOLE.format(EMPTY_HELD_OUT, "mlp", "data"),
    "model_raises": WHOLE.format("def model():\n    raise ValueError('no such width')", "model", "digits"),
    "wrong_model": WHOLE.format("def model():\n    return 7", "model", "digits"),
    "empty_model": WHOLE.format("from torch import nn\ndef model():\n    return nn.Flatten()", "model", "digits"),
    "averaging": WHOLE.format(AVERAGING, "two_layer", "toy_data").replace("global", "loss='averaging', global"),
    "wrong_collate": WHOLE.format("collate = 7", "mlp", "digits"),
    "wrong_metrics": WHOLE.format("def metrics(outputs, targets):\n    return {'top': outputs}", "mlp", "digits"),
}

# Words of the command, exit code, and what the error line must contain.
CASES: dict[str, tuple[list[str], int, list[str]]] = {
    "missing file": (["nowhere/mine.py"], 2, ["nowhere/mine.py", "ddp list"]),
    "folder": (["/"], 2, ["experiment /: this is a folder"]),
    "small data": (["toy_mlp", "--set", "global_batch_size=64"], 2, ["32 training samples", "64", "--set"]),
    "GPUs": (["toy_mlp", "--device", "cuda", "--nproc-per-node", "99"], 4, ["CUDA devices", "--device cpu"]),
    "missing data": (["fashion_mnist", "--data-dir", "DATA"], 2, ["ddp data fetch fashion_mnist", "--data-dir DIR"]),
    "missing own data": (["data_missing.py", "--data-dir", "DATA"], 2, ["pixels.npy", "no-data: ", "--data-dir DIR"]),
    "foreign name": (["foreign_name.py"], 2, ["name", "'für'", "from A to Z", "runs' folder"]),
    "no run": (["toy_mlp", "--resume", "nowhere"], 2, ["--resume nowhere", "run.json"]),
    "promise": (["toy_mlp", "--reduction", "exact", "--set", "micro_batch=null"], 2, ["exact", "--reduction plain"]),
    "raises": (["raises.py"], 2, ["raises.py:1", "ZeroDivisionError"]),
    "data raises": (["data_raises.py"], 2, ["data_raises.py:3", "the disk is on fire"]),
    "empty held-out": (["empty_held_out.py"], 2, ["data data", "held-out set without samples", "Splits(train=...)"]),
    "wrong collate": (["wrong_collate.py"], 2, ["wrong_collate.py", "collate is 7", "(inputs, targets)"]),
    "wrong metrics": (["wrong_metrics.py"], 2, ["metrics: top is float [2, 10] for one batch", "sum over the samples"]),
    "model raises": (["model_raises.py"], 2, ["model_raises.py:3", "no such width"]),
    "wrong model": (["wrong_model.py"], 2, ["model", "int", "torch.nn.Module"]),
    "empty model": (["empty_model.py"], 2, ["no parameter that requires a gradient"]),
}
ROWS = {"small data": 18, "missing data": 21, "GPUs": 23}
"""The rows of the fault matrix that these cases produce."""
LAYOUT_OF_ITS_OWN = {"GPUs"}
ENDS_IN_THE_WORKERS = {"model raises", "wrong model", "empty model", "wrong metrics"}


def one_line(ended: Ended, code: int, words: list[str]) -> None:
    assert ended.errors.startswith("ddp: error: "), ended.errors
    assert ended.errors.count("\n") == 1, ended.errors
    assert "Traceback" not in ended.errors + ended.output
    assert ended.code == code, ended.errors
    assert all(word in ended.errors for word in words), ended.errors


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every broken experiment file."""
    folder = tmp_path_factory.mktemp("files")
    for name, text in BROKEN.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def refuse(name: str, mode: str, files: Path, output: Path) -> None:
    words, code, parts = CASES[name]
    words = [str(files / word) if (files / word).is_file() else word for word in words]
    words = [str(output / "no-data") if word == "DATA" else word for word in words]
    device = [] if "--device" in words else ["--device", "cpu"]
    layout = MODES[mode] if name not in LAYOUT_OF_ITS_OWN else ["--layout", "ddp"]
    started = time.monotonic()
    ended = ddp("train", *words, *device, *layout, "--output", output)
    seconds = time.monotonic() - started
    one_line(ended, code, parts)
    assert list(output.glob("**/run.json")) == []
    assert list(output.glob("*/*")) == []
    if name in ROWS:
        said = ended.errors.removeprefix("ddp: error: ").strip().replace(str(output), "OUTPUT")
        record_row(ROWS[name], f"{ended.code}, {said}", {REFUSAL: seconds})


@pytest.mark.parametrize("mode", ["single", "torchrun"])
@pytest.mark.parametrize("name", sorted(CASES.keys() - ENDS_IN_THE_WORKERS))
def test_bad_input_is_refused_before_anything_is_started(name: str, mode: str, files: Path, tmp_path: Path) -> None:
    refuse(name, mode, files, tmp_path)


@pytest.mark.parametrize("name", sorted(ENDS_IN_THE_WORKERS))
def test_what_only_a_worker_finds_is_one_line_too(name: str, files: Path, tmp_path: Path) -> None:
    refuse(name, "single", files, tmp_path)


def test_a_loss_that_averages_is_found_before_the_first_step(files: Path, tmp_path: Path) -> None:
    ended = ddp("train", files / "averaging.py", "--device", "cpu", "--output", tmp_path)
    one_line(ended, 2, ["loss averaging gives", "reduction='sum'"])


def test_what_all_workers_find_is_said_once(files: Path, tmp_path: Path) -> None:
    refuse("model raises", "torchrun", files, tmp_path)


def test_a_batch_that_does_not_divide_among_ranks_names_the_nearest_that_do(tmp_path: Path) -> None:
    words = ["toy_mlp", "--reduction", "plain", "--set", "micro_batch=null", "--layout", "ddp", "--nproc-per-node", "3"]
    ended = ddp("train", *words, "--device", "cpu", "--output", tmp_path)
    one_line(ended, 2, ["16", "3 ranks", "15 or 18"])
    record_row(20, f"2, {ended.errors.removeprefix('ddp: error: ').strip()}")
    more = ["toy_mlp", "--layout", "dp", "--nproc-per-node", "5"]
    one_line(ddp("train", *more, "--device", "cpu", "--output", tmp_path), 2, ["5 replicas", "at most 4", "20"])


@pytest.mark.parametrize("mode", ["single", "torchrun"])
def test_an_output_that_cannot_be_written(mode: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for output in (tmp_path / "file" / "outputs", Path("/proc/outputs")):
        ended = ddp("train", "toy_mlp", "--device", "cpu", *MODES[mode], "--output", output)
        one_line(ended, 4, [str(output), "--output DIR"])
        said = ended.errors.removeprefix("ddp: error: ").strip().replace(str(tmp_path), "FOLDER")
    record_row(22, f"{ended.code}, {said}")


@pytest.mark.parametrize("mode", ["single", "torchrun"])
def test_a_checkpoint_of_another_experiment_is_refused(mode: str, tmp_path: Path) -> None:
    train(tmp_path / "first", "toy_mlp", "--set", "epochs=1")
    directory, record = trained(tmp_path / "first")
    directory.update(status="failed")
    other = ["toy_mlp", "--set", "seed=1", "--device", "cpu", *MODES[mode]]
    before = {path: path.read_bytes() for path in directory.path.rglob("*") if path.is_file()}
    ended = ddp("train", *other, "--resume", directory.path, "--output", tmp_path / "second")
    one_line(ended, 3, ["experiment", "seed 0 there, 1 here"])
    assert list(tmp_path.glob("second/**/run.json")) == []
    checkpoints = {path: path.read_bytes() for path in before if "checkpoints" in path.parts}
    assert checkpoints.items() <= before.items()
    assert directory.read()["experiment"] == record["experiment"], "the run's own record was taken over"
    record_row(12, "another experiment: 3, 'seed 0 there, 1 here'; the run and its checkpoints are left as they were")


def test_a_run_that_is_not_there_is_one_line_of_verify() -> None:
    one_line(ddp("verify", "nowhere"), 2, [])


def test_workers_of_a_launcher_outside_say_it_once(tmp_path: Path) -> None:
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for rank in ("0", "1"):
        own = world | {"RANK": rank, "LOCAL_RANK": rank}
        ended = ddp("train", "toy_mpl", "--layout", "ddp", "--output", tmp_path, env=own)
        assert ended.code == 2
        assert ended.errors.count("\n") == (1 if rank == "0" else 0), ended.errors


def test_a_worker_of_a_launcher_outside_says_what_it_alone_has_met(capsys: pytest.CaptureFixture[str]) -> None:
    """Another rank would only tell that it has lost this one."""
    assert report_end(World(rank=1, world_size=2), ExitCode.BAD_INPUT, "step 1, rank 1 (node 0): refused") == 2
    assert capsys.readouterr().err == "ddp: error: step 1, rank 1 (node 0): refused\n"
    assert report_end(World(rank=1, world_size=2), ExitCode.STOPPED, "stopped after step 1") == 75
    assert capsys.readouterr().err == ""


def break_the_building(rank: int, world_size: int, output: str) -> int:
    def broken(job: object) -> None:
        raise ValueError("no trainer today")

    run.build_trainer = broken  # type: ignore[assignment]
    return main(["train", "toy_mlp", "--device", "cpu", "--layout", "ddp", "--output", output])


def test_a_trainer_that_cannot_be_built_leaves_a_failed_run(tmp_path: Path) -> None:
    assert run_processes(break_the_building, 1, str(tmp_path)) == [70]
    directory, record = trained(tmp_path)
    assert (record["status"], record["exit_code"]) == ("failed", 70)
    assert "no trainer today; this is a fault of ddp itself" in record["message"]
    assert "no trainer today" in (directory.path / "error-rank-0.txt").read_text()
