"""`ddp probe --share`: what is in a machine's record, and the page that is made of such records."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from ddp_core.cli import main
from ddp_lab.probe import command as probe
from tests.lab.probe.test_probe import VERSIONS, all_right, table
from tools import machines_seen, portable_runs

TABLE = table()


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], dict[str, str]]:
    """What the probe's process computes, in place of that process."""
    computed = all_right()
    monkeypatch.setattr(probe, "portable_refused_by", lambda: None)
    monkeypatch.setattr(probe, "published", lambda: TABLE)
    monkeypatch.setattr(probe, "measured", lambda _: (VERSIONS, computed))
    return computed


def shared(capsys: pytest.CaptureFixture[str], expected: int = 0) -> dict[str, Any]:
    assert main(["probe", "--share"]) == expected
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    return record


@pytest.mark.usefixtures("found")
def test_a_machine_that_has_all_bits(capsys: pytest.CaptureFixture[str]) -> None:
    record = shared(capsys)
    assert [(each["rules"], each["reproduced"], each["published"]) for each in record["outcomes"]] == [(2, 3, 3)]
    said = json.dumps(record)
    # A processor's name may have an @ between spaces.
    assert not re.search(r'"/|\\\\|\S@\S', said), "no path and no address"
    page = machines_seen.PAGE.read_text()
    fields = {*record, *record["machine"], *record["outcomes"][0], *record["code"]}
    assert fields - set(re.findall(r"`(\w+)`", page)) == set(), "documented"


def test_a_machine_that_differs(
    capsys: pytest.CaptureFixture[str], found: dict[tuple[str, str], dict[str, str]]
) -> None:
    before = shared(capsys)["outcomes"][0]["digests_sha256"]
    found["operations", "sort"] = {"digest": "d" * 64}
    outcome = shared(capsys, probe.DIFFERENT)["outcomes"][0]
    assert (outcome["reproduced"], outcome["different"]) == (
        2,
        ["operation sort: published bbbbbbbbbbbb, here dddddddddddd"],
    )
    assert outcome["digests_sha256"] != before


def test_the_page_is_what_the_records_say() -> None:
    records = json.loads(machines_seen.KEPT.read_text())
    assert len(records) >= 2
    assert machines_seen.table(records) in machines_seen.PAGE.read_text()


def test_trainings_on_unlike_cpus_agree_and_are_on_the_page() -> None:
    kept, page = json.loads(portable_runs.KEPT.read_text()), machines_seen.PAGE.read_text()
    assert portable_runs.differences(kept) == []
    assert portable_runs.table(kept) in page
    other = kept[0] | {"cpu": "another", "weights_sha256": "d" * 64}
    (line,) = portable_runs.differences([*kept, other])
    assert f"{'d' * 12} on another" in line
