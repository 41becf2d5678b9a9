"""The command line: what it lists, its help, its errors, and that every option reaches the run."""

from __future__ import annotations

import os
import re
import shlex
import signal
from pathlib import Path

import pytest

from ddp_core.cli import main
from ddp_core.cli.commands import ddp as group
from ddp_core.cli.options import asked_in
from ddp_core.spec.options import Asked, NodeRange, groups, option_name
from tests.support.commands import ROOT, command, ddp, forked, train, trained, wait_until
from tests.support.processes import HANG, free_port

COMMANDS = (
    "train",
    "list",
    "compare",
    "verify",
    "verify-layouts",
    "ledger",
    "health",
    "data",
    "doctor",
    "rendezvous",
)
EXPERIMENTS = ("digits", "linear_regression", "counter_buffer", "toy_mlp", "resnet18_synthetic", "fashion_mnist")

# Every field of `Asked`, with a value that is not its default.
VALUES = {
    "experiment": "mine.py",
    "settings": ("optimizer.lr=0.1", "model.sizes=[10, 1]"),
    "resume": "auto",
    "reduction": "plain",
    "record": "run.json",
    "layout": "ddp",
    "device": "cpu",
    "nproc_per_node": 4,
    "nnodes": NodeRange(2, 4),
    "rdzv_endpoint": "there:29400",
    "rdzv_id": "fresh",
    "launcher": "spawn",
    "backend": "gloo",
    "timeout": 1.5,
    "max_restarts": 0,
    "output": "a folder",
    "data_dir": "elsewhere",
    "workers": 2,
    "checkpoint_every": 7,
    "keep_last": 1,
    "keep_every": 100,
    "asynchronous_save": False,
    "max_seconds": 3600.0,
    "stop_signal": "USR1",
    "on_nan": "skip",
    "log_every": 1,
    "digest_every": 5,
    "ledger": True,
    "log_to": ("tensorboard", "wandb"),
    "profile": "20:25",
    "faults": ("kill@60:1", "nan@30"),
}


@pytest.fixture(autouse=True)
def no_folders_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The image sets these variables, which count as given."""
    for name in ("DDP_OUTPUT", "DDP_DATA"):
        monkeypatch.delenv(name, raising=False)


def understood(*words: str) -> Asked:
    """What `ddp train WORDS` asks for."""
    with group.commands["train"].make_context("train", list(words)) as context:
        return asked_in(context)


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line with which `ddp WORDS` is refused."""
    assert main(words) == 2
    line = capsys.readouterr().err
    assert line.startswith("ddp: error: ")
    assert line.count("\n") == 1
    return line


def test_the_console_command_and_the_module_are_one() -> None:
    ended = command("--help")
    assert (ended.code, ended.errors) == (0, "")
    assert ended.output.startswith("Usage: ddp ")
    assert all(f"\n  {name} " in ended.output for name in COMMANDS)
    assert "..." not in ended.output.partition("Commands:")[2], "a line that is cut off"


def test_the_list_shows_every_experiment_with_its_question(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = {line.split()[0]: line.partition(" ")[2].strip() for line in lines}
    assert set(EXPERIMENTS) <= found.keys()
    assert all(found[name].endswith("?") for name in EXPERIMENTS), found


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "Usage: ddp" in capsys.readouterr().out


@pytest.mark.parametrize("name", [*COMMANDS, "data fetch"])
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*name.split(), "--help"]) == 0
    assert f"Usage: ddp {name} " in capsys.readouterr().out


def test_the_help_of_train_has_groups_defaults_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    options, _, examples = capsys.readouterr().out.partition("Examples:\n")
    titles = [title for title, _ in groups()]
    assert len(titles) >= 6
    assert re.findall(r"^(\S.*):$", options, re.MULTILINE) == [*titles, "Options"]
    rows = {row.split()[0]: " ".join(row.split()) for row in re.split(r"\n  (?=--)", options)}
    shown = {
        option_name(name, field)
        for _, fields in groups()
        for name, field in fields.items()
        if name not in ("experiment", "record")
    }
    assert rows.keys() - {"Usage:", "--help"} == shown
    assert [option for option in shown if "[default: " not in rows[option]] == []
    assert 3 <= len(examples.splitlines()) <= 5
    for line in examples.splitlines():
        understood(*line.split()[2:])


def test_only_what_was_written_counts_as_given() -> None:
    assert understood("digits").model_fields_set == {"experiment"}
    assert understood("digits") == Asked(experiment="digits")
    assert understood("digits", "--nnodes", "1", "--log-every=10").model_fields_set == {
        "experiment",
        "nnodes",
        "log_every",
    }


def test_a_request_in_words_is_understood_as_it_was_meant() -> None:
    assert VALUES.keys() == Asked.model_fields.keys()
    for name, value in VALUES.items():
        one = Asked(**{"experiment": "digits", name: value})
        assert one != Asked(experiment="digits"), name
        assert understood(*one.to_words()) == one
        assert len(one.to_words()) <= 5, "defaults are not spelled out"
    everything = Asked(**VALUES)
    assert understood(*everything.to_words()) == everything


def test_every_command_line_of_the_documentation_is_understood() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    lines = [line.strip() for page in pages for line in page.read_text().splitlines()]
    shown = [shlex.split(line, comments=True) for line in lines if line.startswith("ddp train ") and "…" not in line]
    assert len(shown) > 5
    for _, _, *words in shown:
        understood(*words)


def test_the_reference_names_every_option_of_train() -> None:
    """The page may also name options of other commands."""
    page = (ROOT / "docs" / "reference" / "command-line.md").read_text()
    options = {option_name(name, field) for _, fields in groups() for name, field in fields.items()}
    assert options - {"--experiment", "--record"} - set(re.findall(r"--[a-z-]+", page)) == set()


@pytest.mark.parametrize(("words", "nodes"), [(["--nnodes", "3"], (3, 3)), (["--nnodes", "2:4"], (2, 4)), ([], (1, 1))])
def test_nodes_are_a_number_or_a_range(words: list[str], nodes: tuple[int, int]) -> None:
    assert understood("digits", *words).nnodes == nodes


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["train", "digits", "--nnodes", "4:2"], ["--nnodes", "4:2", "smaller"]),
        (["train", "digits", "--nnodes", "0"], ["--nnodes", "0", "greater than 0"]),
        (["train", "digits", "--nnodes", "2:"], ["--nnodes", "2:", "integer"]),
        (["train", "digits", "--nproc-per-node", "-1"], ["--nproc-per-node", "-1", "greater than 0"]),
        (["train", "digits", "--nproc-per-node", "two"], ["--nproc-per-node", "two", "integer"]),
        (["train", "digits", "--checkpoint-every", "0"], ["--checkpoint-every", "0", "greater than 0"]),
        (["train", "digits", "--keep-last"], ["--keep-last", "argument"]),
        (["train", "digits", "--timeout", "inf"], ["--timeout", "inf", "finite"]),
        (["train", "digits", "--layout", "dpp"], ["--layout", "dpp", "'single', 'dp', 'ddp'"]),
        (["train", "digits", "--learning-rate", "0.1"], ["--learning-rate", "ddp train --help"]),
        (["train", "digits", "--nproc_per_node", "2"], ["--nproc_per_node", "did you mean --nproc-per-node?"]),
        (["train", "digits", "--chekpoint-every", "2"], ["--chekpoint-every", "did you mean --checkpoint-every?"]),
        (["train", "digits", "--nproc", "2"], ["--nproc"]),
        (["train", "digits", "more"], ["more", "ddp train --help"]),
        (["train"], ["EXPERIMENT", "ddp train --help"]),
        (["tarin", "digits"], ["tarin", "did you mean train?"]),
        (["--version"], ["--version", "ddp --help"]),
        (["verify", "run", "--device", "gpu"], ["--device", "gpu", "cuda"]),
        (["health", "--within", "soon"], ["--within", "soon", "float"]),
        (["data", "fetch"], ["NAME", "ddp data fetch --help"]),
        (["data", "fecth"], ["fecth", "did you mean fetch?"]),
        (["data"], ["command", "ddp data --help"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_wrong_word_is_an_error_in_one_line(
    words: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = said(capsys, *words)
    assert all(part in line for part in parts), line


def test_the_environment_gives_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DDP_OUTPUT", raising=False)
    monkeypatch.delenv("DDP_DATA", raising=False)
    assert (understood("digits").output, understood("digits").data_dir) == ("outputs", "data")
    monkeypatch.setenv("DDP_OUTPUT", "/elsewhere")
    monkeypatch.setenv("DDP_DATA", "/the/data")
    assert (understood("digits").output, understood("digits").data_dir) == ("/elsewhere", "/the/data")
    assert understood("digits", "--output", "here").output == "here"


def test_settings_reach_the_run_and_its_record(tmp_path: Path) -> None:
    words = [
        "--set",
        "optimizer.lr=0.125",
        "--set",
        "epochs=3",
        "--set",
        "model.sizes=[10, 7, 1]",
        "--set",
        "model.name=mlp",
    ]
    record = train(tmp_path, "toy_mlp", *words, "--keep-last", "1", "--log-every", "2")
    assert record["experiment"]["optimizer"]["lr"] == 0.125
    assert record["experiment"]["epochs"] == 3
    assert record["experiment"]["model"] == {"name": "mlp", "options": {"sizes": [10, 7, 1], "dropout": 0.0}}
    assert (record["options"]["keep_last"], record["options"]["log_every"]) == (1, 2)
    assert record["result"]["steps"] == 6
    assert record["result"]["parameters"] == 7 * 11 + 8
    assert "--set optimizer.lr=0.125" in record["command"]
    directory, _ = trained(tmp_path)
    assert (directory.path / "experiment.py").read_text() == (ROOT / "experiments" / "toy_mlp.py").read_text()


def test_the_record_holds_what_a_reader_needs(tmp_path: Path) -> None:
    record = train(tmp_path, "counter_buffer", "--set", "epochs=2")
    needed = {
        "format",
        "experiment",
        "layout",
        "options",
        "status",
        "exit_code",
        "weights_sha256",
        "result",
        "environment",
    }
    assert needed <= record.keys()
    assert {"train_loss", "samples_per_second", "seconds"} <= record["result"].keys()
    assert len(record["weights_sha256"]) == len(record["data_sha256"]) == 64
    assert {"python", "cpu", "packages", "code"} <= record["environment"].keys()
    assert record["fingerprint"]["threads"] == 1
    assert record["started_at"] <= record["finished_at"]


def test_the_digest_in_the_record_is_that_of_the_saved_weights(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from ddp_core.determinism.digests import weights_digest

    record = train(tmp_path, "counter_buffer", "--set", "epochs=2")
    directory, _ = trained(tmp_path)
    weights = load_file(directory.path / "model.safetensors")
    assert weights["cnt"] == 4
    assert weights_digest(weights) == record["weights_sha256"]


def test_a_file_of_ones_own_needs_no_registration(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        '"""Mine?"""\nfrom torch import nn\nfrom ddp_core.spec.experiment import *\n'
        "def net(width: int = 3):\n    return nn.Sequential(nn.Linear(10, width), nn.Linear(width, 1))\n"
        "experiment = Experiment(name='mine', model=Component(name='net'), data=Component(name='toy_data'),\n"
        "                        loss='mean_squared_error', global_batch_size=16, micro_batch=4)\n"
    )
    record = train(tmp_path / "out", tmp_path / "mine.py", "--set", "model.width=4")
    assert record["experiment"]["model"]["options"] == {"width": 4}
    assert record["question"] == "Mine?"
    assert record["result"]["parameters"] == 49


def test_compare_sets_runs_side_by_side(tmp_path: Path) -> None:
    train(tmp_path / "a", "toy_mlp")
    train(tmp_path / "b", "toy_mlp", "--layout", "dp", "--nproc-per-node", "2")
    ended = ddp("compare", tmp_path)
    assert ended.code == 0
    assert "single-cpu" in ended.output
    assert "dp-2-cpu (threads)" in ended.output
    assert "identical" in ended.output


def test_verify_repeats_a_run_on_another_layout(tmp_path: Path) -> None:
    train(tmp_path, "toy_mlp", "--set", "seed=5")
    directory, _ = trained(tmp_path)
    ended = ddp("verify", directory.path, "--layout", "dp", "--nproc-per-node", "3")
    assert ended.code == 0, ended.errors + ended.output


@pytest.mark.slow
def test_verify_tells_other_weights_from_other_circumstances(tmp_path: Path) -> None:
    train(tmp_path, "toy_mlp")
    directory, record = trained(tmp_path)
    directory.update(weights_sha256="0" * 64)
    assert ddp("verify", directory.path).code == 1
    directory.update(fingerprint=record["fingerprint"] | {"threads": 64})
    other = ddp("verify", directory.path)
    assert "threads" in other.output + other.errors


def test_doctor_says_what_would_run() -> None:
    ended = ddp("doctor")
    assert (ended.code, ended.errors) == (0, "")
    assert "ddp train digits --device cpu" in ended.output


def test_a_rendezvous_answers_and_a_second_one_on_its_port_is_refused() -> None:

    port = free_port()
    assert ddp("rendezvous", "--check", f"127.0.0.1:{port}").code == 6
    with forked("rendezvous", "--port", port) as server:
        wait_until(lambda: server.said()[0] == f"rendezvous: listening on port {port}\n", HANG, "it listens")
        assert ddp("rendezvous", "--check", f"127.0.0.1:{port}").code == 0
        second = ddp("rendezvous", "--port", port)
        assert second.code == 4
        assert f"port {port} is in use" in second.errors
        os.kill(server.pid, signal.SIGTERM)
        assert server.end().code == 0
    assert ddp("rendezvous", "--check", "nowhere").code == 2
