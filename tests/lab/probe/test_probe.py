"""`ddp probe`: what it says where digests agree and where they do not, and that its table is whole."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ddp_core.base.errors import UserError
from ddp_core.experiment.file import INSTALLED, list_experiments, load_experiment
from ddp_core.numerics.limits import RULES, portable_refused_by
from ddp_lab.probe import command as probe
from ddp_lab.probe import main
from ddp_lab.probe.command import judge, measured
from ddp_lab.probe.operations import all_operations
from ddp_lab.probe.published import PLACE, Published, Steps, published
from tests.support.commands import ROOT, command
from tests.support.wording import refusing

VERSIONS = {"torch": "2.13.0+cpu", "numpy": "2.4.6"}
needs_avx2 = pytest.mark.skipif(portable_refused_by() is not None, reason=str(portable_refused_by()))


def table() -> Published:
    """A small table: two operations, and one short training."""
    return Published(
        rules=2,
        torch="2.13.0",
        numpy="2.4.6",
        made_on={"cpu": "a CPU", "date": "2026-01-01"},
        operations={"sum": "a" * 64, "sort": "b" * 64},
        training_steps={"toy_mlp": Steps(["max_steps=2"], "c" * 64)},
        runs={},
    )


def all_right() -> probe.Found:
    return {
        ("operations", "sum"): {"digest": "a" * 64},
        ("operations", "sort"): {"digest": "b" * 64},
        ("training_steps", "toy_mlp"): {"digest": "c" * 64},
    }


def test_what_fails_or_was_not_computed_differs() -> None:
    found = all_right() | {("training_steps", "toy_mlp"): {"trouble": "UserError: no room"}}
    del found["operations", "sum"]
    verdict = judge(table(), VERSIONS, found)
    assert verdict.line == "this machine reproduces 1 of 3; sum, toy_mlp differ"
    assert [each.describe() for each in verdict.differences] == [
        "operation sum: published aaaaaaaaaaaa, not computed",
        "training steps of toy_mlp: published cccccccccccc, UserError: no room",
    ]


def test_a_table_of_another_torch_says_so_and_is_compared_all_the_same() -> None:
    verdict = judge(table(), VERSIONS | {"torch": "2.11.0"}, all_right())
    assert verdict.other_torch is not None
    assert "of torch 2.13.0; this is 2.11.0" in verdict.other_torch
    assert verdict.differences == []


def test_an_operation_that_ends_its_process_leaves_the_others_to_another(tmp_path: Path) -> None:
    """`sort` kills the process that computes it."""
    fake = tmp_path / "fake.py"
    fake.write_text(
        "import json, os, signal, sys\n"
        "print(json.dumps({'torch': '2.13.0', 'numpy': '2.4.6'}), flush=True)\n"
        "for asked in json.load(sys.stdin):\n"
        "    if asked['name'] == 'sort':\n"
        "        sys.stdout.write('{\"kind')\n"
        "        sys.stdout.flush()\n"
        "        os.kill(os.getpid(), signal.SIGSEGV)\n"
        "    print(json.dumps({'kind': asked['kind'], 'name': asked['name'], 'digest': 'a' * 64}), flush=True)\n"
    )
    versions, found = measured(table(), [sys.executable, str(fake)])
    assert versions == {"torch": "2.13.0", "numpy": "2.4.6"}
    assert found == {
        ("operations", "sum"): {"digest": "a" * 64},
        ("operations", "sort"): {"trouble": "its process was ended by SIGSEGV"},
        ("training_steps", "toy_mlp"): {"digest": "a" * 64},
    }


def test_a_process_that_hangs_is_ended(tmp_path: Path) -> None:
    fake = tmp_path / "fake.py"
    fake.write_text('import time\nprint(\'{"torch": "2.13.0"}\', flush=True)\ntime.sleep(600)\n')
    only = replace(table(), operations={"sum": "a" * 64}, training_steps={})
    _, found = measured(only, [sys.executable, "-S", str(fake)], limit=3)
    assert found == {("operations", "sum"): {"trouble": "its process did not end within 3 s"}}


def test_a_process_that_cannot_begin_is_an_error_of_one_line(tmp_path: Path) -> None:
    fake = tmp_path / "fake.py"
    fake.write_text("raise ImportError('no torch here')\n")
    with refusing():
        measured(table(), [sys.executable, str(fake)])


def test_a_table_that_cannot_be_read_is_an_error_of_one_line(tmp_path: Path) -> None:
    place = tmp_path / "table.json"
    for content in ("", "[]", "{}", '{"format": 1, "training_steps": {}}', '{"format": 2}'):
        place.write_text(content)
        with pytest.raises(UserError, match=r"table\.json"):
            published(place)
    place.write_text(json.dumps(table().to_json()))
    assert published(place) == table()


def test_the_table_has_every_operation_and_knows_every_experiment() -> None:
    whole = published()
    assert whole.rules == RULES
    page = (ROOT / "docs" / "reference" / "portable-numerics.md").read_text()
    assert f"reproduces all {len(whole.operations) + len(whole.training_steps)} published digests" in page
    assert json.loads(PLACE.read_text()).keys() <= {*re.findall(r"`(\w+)`", page)}, "documented"
    assert whole.operations.keys() == all_operations().keys(), "run `make portable-digests`"
    listed = {each.name for each in list_experiments([INSTALLED])}
    assert whole.training_steps.keys() <= listed
    portable = {
        name for name in listed if load_experiment(str(INSTALLED / f"{name}.py")).experiment.numerics == "portable"
    }
    assert whole.runs.keys() == portable, "run `make portable-digests`"


@needs_avx2
@pytest.mark.skipif(published().other_torch(torch.__version__) is not None, reason="the table is of another torch")
def test_this_machine_reproduces_the_published_table() -> None:
    ended = command("probe", "--json")
    said = json.loads(ended.output)
    assert said["different"] == []
    assert (ended.code, ended.errors, said["reproduced"]) == (0, "", said["published"])
    whole = published()
    assert said["published"] == len(whole.operations) + len(whole.training_steps)
    page = (ROOT / "docs" / "reference" / "portable-numerics.md").read_text()
    assert said.keys() - set(re.findall(r"`(\w+)`", page)) == set(), "documented"


@needs_avx2
def test_the_probe_says_what_differs_and_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probe, "published", table)
    monkeypatch.setattr(
        probe, "measured", lambda _: (VERSIONS, all_right() | {("operations", "sort"): {"digest": "d" * 64}})
    )
    assert main([]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "this machine reproduces 2 of 3; sort differs",
        "  operation sort: published bbbbbbbbbbbb, here dddddddddddd",
    ]
    monkeypatch.setattr(probe, "measured", lambda _: (VERSIONS, all_right()))
    assert main([]) == 0
    assert capsys.readouterr().out == "this machine reproduces all 3 published digests\n"


def test_the_probe_is_refused_where_portable_numerics_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert main([]) == 2
    output, errors = capsys.readouterr()
    assert (output, errors.count("\n")) == ("", 1)
    assert "aarch64" in errors
