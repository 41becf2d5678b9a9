"""What words are understood as; of wrong ones, one line says which, and what may have been meant.

Tests base/errors.py, cli/click_kinds.py and config/records.py, too.
"""

from __future__ import annotations

import re
import shlex

import pytest

from ddp_core.base.errors import near_names, nearest_name
from ddp_core.config.experiment import common_settings
from ddp_core.config.options import Asked, NodeRange, groups
from ddp_core.config.records import option_name
from tests.core.cli.asking import said, understood
from tests.support.commands import ROOT
from tests.support.wording import said_as_before

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
    "operations_at": 3,
    "rehearsal": "off",
    "layout": "ddp",
    "device": "cpu",
    "nproc_per_node": 4,
    "nnodes": NodeRange(2, 4),
    "shard": "optimizer",
    "shares": "3,1",
    "rdzv_endpoint": "there:29400",
    "rdzv_id": "fresh",
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
    hidden = {
        "--experiment",
        "--record",
        "--only-steps",
        "--miniature",
        "--clock-ahead",
        "--noted-in",
        "--operations-at",
    }
    page = (ROOT / "docs" / "reference" / "command-line.md").read_text()
    options = {option_name(name, field) for _, fields in groups() for name, field in fields.items()}
    assert options - hidden - set(re.findall(r"--[a-z-]+", page)) == set()


def test_the_environment_gives_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (understood("digits").output, understood("digits").data_dir) == ("outputs", "data")
    monkeypatch.setenv("DDP_OUTPUT", "/elsewhere")
    monkeypatch.setenv("DDP_DATA", "/the/data")
    assert (understood("digits").output, understood("digits").data_dir) == ("/elsewhere", "/the/data")
    assert understood("digits", "--output", "here").output == "here"


@pytest.mark.parametrize(
    "words",
    [
        "train digits --learning-rate 0.1",
        "train digits --epochs 3",
        "train digits --batch-size 3",
        "train digits --nproc_per_node 2",
        "train digits --chekpoint-every 2",
        "train digits --nproc 2",
    ],
)
def test_a_wrong_word_is_an_error_in_one_line(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    said_as_before(said(capsys, *words.split()))


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("train digits --nnodes 0", ["--nnodes", "0", "greater than 0"]),
        ("train digits --nnodes 2:", ["--nnodes", "2:", "integer"]),
        ("train digits --shares 3,0", ["--shares", "3,0: give a number above 0 for each rank, such as 3,1; or auto"]),
        ("train digits --nnodes 4:2", ["--nnodes", "4:2: the first number is the smaller one"]),
        ("train digits --nproc-per-node two", ["--nproc-per-node", "two", "integer"]),
        ("train digits --checkpoint-every 0", ["--checkpoint-every", "0", "greater than 0"]),
        ("train digits --timeout inf", ["--timeout", "inf", "finite"]),
        ("train digits --keep-last", ["--keep-last", "argument"]),
        ("train digits --layout dpp", ["--layout", "dpp", "'single', 'dp', 'ddp'"]),
        ("train digits more", ["more", "ddp train --help"]),
        ("train", ["EXPERIMENT", "ddp train --help"]),
        ("verify run --device gpu", ["--device", "gpu", "cuda"]),
        ("data fetch", ["NAME", "ddp data fetch --help"]),
        ("data", ["command", "ddp data --help"]),
        ("tarin digits", ["tarin", "'train'", "ddp --help"]),
        ("caims", ["caims", "'claims'", "ddp --help"]),
        ("--versoin", ["--versoin", "'--version'", "ddp --help"]),
        ("data fecth", ["fecth", "'fetch'", "ddp data --help"]),
        ("compare --jsno", ["--jsno", "'--json'", "ddp compare --help"]),
    ],
)
def test_what_click_or_pydantic_refuses_is_an_error_in_one_line(
    words: str, parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = said(capsys, *words.split())
    assert all(part in line for part in parts), line


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("lr", ["optimizer.lr"]),
        ("learning_rate", ["optimizer.lr"]),
        ("warmup", ["schedule.warmup_steps"]),
        ("optimizer.momentun", ["optimizer.momentum"]),
        ("momentun", ["optimizer.momentum"]),
        ("batch_size", ["global_batch_size"]),
        ("name", []),
        ("xyzzy", []),
    ],
)
def test_a_setting_is_found_by_a_part_of_its_name(wrong: str, near: list[str]) -> None:
    found = near_names(wrong, common_settings())
    assert found == near or (not near and len(found) <= 1)


def test_a_setting_that_many_parts_have_names_them() -> None:
    assert nearest_name("name", ["model.name", "data.name"]) == "did you mean data.name or model.name?"
    assert nearest_name("xyzzy", ["b", "a"]) == "known: a, b"
