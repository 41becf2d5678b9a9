"""What the words after `ddp train` are understood as."""

from __future__ import annotations

import re
import shlex

import pytest

from ddp_core.config.options import Asked, NodeRange, groups
from ddp_core.config.records import option_name
from tests.core.cli.asking import understood
from tests.support.commands import ROOT

# Every field of `Asked`, with a value that is not its default.
VALUES = {
    "experiment": "mine.py",
    "settings": ("optimizer.lr=0.1", "model.sizes=[10, 1]"),
    "resume": "auto",
    "accept_changed_code": True,
    "init_from": "weights.safetensors",
    "fork": "outputs/mine/single-cpu",
    "at": 40,
    "reduction": "plain",
    "numerics": "portable",
    "record": "run.json",
    "only_steps": 2,
    "miniature": True,
    "clock_ahead": True,
    "noted_in": "notes",
    "rehearsal": "off",
    "layout": "ddp",
    "device": "cpu",
    "nproc_per_node": 4,
    "nnodes": NodeRange(2, 4),
    "shard": "optimizer",
    "rdzv_endpoint": "there:29400",
    "rdzv_id": "fresh",
    "launcher": "spawn",
    "deterministic": "always",
    "cuda_graph": True,
    "backend": "gloo",
    "timeout": 1.5,
    "max_restarts": 0,
    "recovery": "live",
    "output": "a folder",
    "data_dir": "elsewhere",
    "workers": 2,
    "checkpoint_every": 7,
    "keep_last": 1,
    "keep_every": 100,
    "keep_for_audit": 12,
    "asynchronous_save": False,
    "max_seconds": 3600.0,
    "stop_signal": "USR1",
    "on_nan": "skip",
    "log_every": 1,
    "digest_every": 5,
    "log_to": ("tensorboard",),
    "profile": "20:25",
    "guard": "strict",
    "on_difference": "warn",
    "faults": ("kill@60:1", "nan@30"),
}


@pytest.fixture(autouse=True)
def nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The image and these tests set variables, which count as given."""
    for name in ("DDP_OUTPUT", "DDP_DATA", "DDP_REHEARSAL"):
        monkeypatch.delenv(name, raising=False)


def test_only_what_was_written_counts_as_given() -> None:
    assert understood("digits") == Asked(experiment="digits")
    given = understood("digits", "--nnodes", "1", "--log-every=10")
    assert given.model_fields_set == {"experiment", "nnodes", "log_every"}
    assert given.nnodes == (1, 1)


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
    hidden = {"--experiment", "--record", "--only-steps", "--miniature", "--clock-ahead", "--noted-in"}
    page = (ROOT / "docs" / "reference" / "command-line.md").read_text()
    options = {option_name(name, field) for _, fields in groups() for name, field in fields.items()}
    assert options - hidden - set(re.findall(r"--[a-z-]+", page)) == set()


def test_the_environment_gives_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (understood("digits").output, understood("digits").data_dir) == ("outputs", "data")
    monkeypatch.setenv("DDP_OUTPUT", "/elsewhere")
    monkeypatch.setenv("DDP_DATA", "/the/data")
    assert (understood("digits").output, understood("digits").data_dir) == ("/elsewhere", "/the/data")
    assert understood("digits", "--output", "here").output == "here"
