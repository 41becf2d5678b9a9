"""The limits are set before torch is loaded, wherever portable numerics are asked for; else the process starts anew."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddp_core.cli import train
from ddp_core.cli.prepare import prepare
from ddp_core.cli.train import EarlyNumerics, expected_numerics
from ddp_core.config.options import Asked
from ddp_core.numerics.limits import LIMITS, portable_refused_by
from tests.support.commands import ROOT, ddp, trained, without_limits
from tests.support.processes import HANG
from tests.support.wording import refusing

TEXT = '''"""Does it start?"""
from ddp_core.config.experiment import Component, Experiment, Optimizer
experiment = Experiment(
    name="mine", model=Component(name="two_layer"), data=Component(name="toy_data", options={"size": 32}),
    loss="mean_squared_error", optimizer=Optimizer(lr=0.01), global_batch_size=16, micro_batch=4 ADDED
)
'''
PORTABLE, NATIVE = TEXT.replace("ADDED", ', numerics="portable"'), TEXT.replace("ADDED", "")
COMPUTED = TEXT.replace("ADDED", ', numerics="".join(["port", "able"])')
OVERRULED = PORTABLE + 'experiment = experiment.model_copy(update={"numerics": "native"})\n'


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "_GPU_DRIVER", Path("/nowhere"))


def mine(folder: Path, text: str) -> str:
    file = folder / "mine.py"
    file.write_text(text)
    return str(file)


@pytest.mark.parametrize(
    ("text", "asked", "expected"),
    [
        (PORTABLE, {}, "portable"),
        (NATIVE, {}, "native"),
        (COMPUTED, {}, "native"),
        ("not python", {}, "native"),
        (PORTABLE, {"numerics": "native"}, "native"),
        (NATIVE, {"numerics": "portable"}, "portable"),
        (NATIVE, {"settings": ("numerics=portable",)}, "portable"),
        (NATIVE, {"settings": ('numerics = "portable"',)}, "portable"),
        (PORTABLE, {"settings": ("numerics=portable", "numerics=native")}, "native"),
        (PORTABLE, {"settings": ("numerics=native",), "numerics": "portable"}, "portable"),
        (PORTABLE, {"device": "cuda"}, "native"),
        (PORTABLE, {"device": "cpu"}, "portable"),
    ],
)
def test_what_is_expected(tmp_path: Path, text: str, asked: dict[str, Any], expected: str) -> None:
    assert expected_numerics(Asked(experiment=mine(tmp_path, text), **asked)) == expected


def test_a_record_counts_before_the_file(tmp_path: Path) -> None:
    record = tmp_path / "run.json"
    for written, expected in (({"numerics": "portable"}, "portable"), ({}, "native")):
        record.write_text(json.dumps({"experiment": written}))
        assert expected_numerics(Asked(experiment=mine(tmp_path, NATIVE), record=str(record))) == expected
    record.write_text("{")
    assert expected_numerics(Asked(experiment=mine(tmp_path, PORTABLE), record=str(record))) == "native"


def test_where_there_may_be_a_gpu_nothing_is_set_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "_GPU_DRIVER", tmp_path)
    assert expected_numerics(Asked(experiment=mine(tmp_path, PORTABLE))) == "native"
    assert expected_numerics(Asked(experiment=mine(tmp_path, PORTABLE), device="cpu")) == "portable"


def test_other_machines_are_told_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpus = tmp_path / "cpuinfo"
    cpus.write_text("processor : 0\nflags : fpu sse2 avx avx2\n")
    assert portable_refused_by(cpus) is None
    assert portable_refused_by(tmp_path / "missing") is None
    cpus.write_text("processor : 0\nflags : fpu sse2 avx\n")
    assert "needs a CPU with AVX2" in (portable_refused_by(cpus) or "")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert "this machine is aarch64" in (portable_refused_by() or "")


def test_a_program_that_goes_on_keeps_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LIMITS:
        monkeypatch.delenv(name)
    started = EarlyNumerics(Asked(experiment="toy_mlp", numerics="portable"), [], is_own_process=False)
    assert not LIMITS.keys() & os.environ.keys()
    assert not started.can_hold("portable")
    assert started.can_hold("native")


def test_a_program_that_has_loaded_torch_without_the_limits_is_refused_or_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MKL_CBWR")
    with refusing():
        prepare(Asked(experiment="toy_mlp", numerics="portable", device="cpu"), "ddp")
    asked = Asked(experiment=mine(tmp_path, PORTABLE), device="cpu")
    assert prepare(asked, "ddp").options.numerics == "native", "where the file says it, there is a line alone"
    said = "native numerics instead of portable: torch was loaded without the limits"
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "numerics", "starts"),
    [(PORTABLE, "portable", 1), (NATIVE, "native", 1), (COMPUTED, "portable", 2), (OVERRULED, "native", 2)],
    ids=["written", "native", "computed", "overruled"],
)
def test_the_process_starts_anew_only_where_the_file_misled_it(
    tmp_path: Path, text: str, numerics: str, starts: int
) -> None:
    note = tmp_path / "starts"  # gets a letter each time that the file is run
    file = mine(tmp_path, text + f"open({str(note)!r}, 'a').write('x')\n")
    words = [sys.executable, "-m", "ddp_core", "train", file, "--device", "cpu", "--output", str(tmp_path / "out")]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=HANG, cwd=ROOT, env=without_limits())
    assert (ended.returncode, ended.stderr) == (0, "")
    record = trained(tmp_path / "out")[1]
    assert record["options"]["numerics"] == numerics
    assert len(note.read_text()) == starts
    is_portable = numerics == "portable"
    assert record["fingerprint"].get("numerics", "native") == numerics
    assert ("cpu" in record["fingerprint"]) is not is_portable
    assert record["fingerprint"].get("environment", {}) == {}


def test_on_a_gpu_the_option_is_refused(tmp_path: Path) -> None:
    ended = ddp("train", "toy_mlp", "--numerics", "portable", "--device", "cuda", "--output", tmp_path)
    assert ended.code == 2
    assert ended.errors == "ddp: error: --numerics portable: it is for CPUs, and this run is on a GPU\n"


def test_a_model_that_is_not_portable_is_warned_of(tmp_path: Path) -> None:
    text = PORTABLE.replace('"two_layer"', '"fits"') + (
        "import torch\n\n\nclass Fits(torch.nn.Linear):\n    def forward(self, inputs):\n"
        "        return super().forward(torch.linalg.lstsq(inputs.T, inputs.T).solution[: len(inputs)].T @ inputs)\n"
        "\n\ndef fits():\n    return Fits(10, 1)\n"
    )
    ended = ddp("train", mine(tmp_path, text), "--device", "cpu", "--output", tmp_path / "out")
    assert ended.code == 0
    assert "not known to have the same bits on other CPUs: aten::linalg_lstsq" in ended.output + ended.errors


def test_native_numerics_that_were_asked_for_are_refused_nowhere() -> None:
    asked = Asked(experiment="toy_mlp", device="cpu", numerics="native")
    assert prepare(asked, "ddp", can_hold=lambda _: False).options.numerics == "native"
