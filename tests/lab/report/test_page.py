"""The report's page: one file that loads nothing from outside and tells every result."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ddp_core.base.digests import weights_digest
from ddp_core.config.layout import Layout
from ddp_lab.report.contents import build_report
from ddp_lab.report.page import render, write_report
from ddp_lab.report.reading.families import find_families
from ddp_lab.report.reading.runs import read_runs
from tests.lab.report.files import ddp, write_claim, write_everything, write_run
from tests.support.records import an_attempt

_LOADING = r"(?:src|(?:xlink:)?href|srcset|data|action|poster|formaction|background|cite|ping)"


def loaded(page: str) -> list[str]:
    """What the page would load from elsewhere than itself, by attributes or by styles."""
    by_attributes = re.findall(rf'\s{_LOADING}\s*=\s*["\']?(?!["\']?(?:#|data:))[^"\'>]*', page)
    return by_attributes + re.findall(r"url\(\s*['\"]?(?!['\"]?(?:#|data:))[^)]*|@import[^;]*", page)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("outputs")
    write_everything(output)
    write_report(output, output / "report")
    return output / "report"


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return (folder / "index.html").read_text()


def test_nothing_is_loaded_from_outside(page: str) -> None:
    for one in ('<img src="x.png">', "<a href=x>", "url(x.png)", "@import x;", "<image xlink:href='//x'>"):
        assert loaded(one), one
    assert loaded(page) == []
    assert not {"iframe", "object", "embed", "base"} & {*re.findall(r"<(\w+)", page)}
    assert re.search(r"\b(fetch|XMLHttpRequest|WebSocket|EventSource|import)\s*\(", page) is None
    assert "default-src 'none'" in page


def test_names_are_unique_and_links_lead_somewhere(page: str) -> None:
    names, links = (re.findall(rf'\s{attribute}([^"]*)"', page) for attribute in ('id="', 'href="#'))
    assert links
    assert sorted({*names}) == sorted(names)
    assert {*links} <= {*names}


def test_every_state_is_told(page: str) -> None:
    for word in ("completed", "interrupted", "failed", "stopped", "unreadable", "confirmed", "not measurable here"):
        assert re.search(rf'<span class="badge \w+">{word}</span>', page), word
    assert "no run.json: it ended before its record was written" in page
    assert "Traceback: &lt;b&gt;bad&lt;/b&gt; &amp; worse" in page
    assert "identical on 3 layouts" in page
    assert "1.76× [1.70, 1.82]" in page  # noqa: RUF001
    assert '<p lang="zh">因此' in page


def test_markup_in_names_stays_text(tmp_path: Path) -> None:
    evil = '"><script>alert(1)</script>'
    odd = {"question": evil, "command": evil, "environment": {"host": evil, "x": evil}, "message": evil}
    write_run(tmp_path, Layout(), steps=0, **odd)
    series = {
        "title": evil,
        "x": {"name": evil, "values": [1, 2]},
        "y": {"name": evil},
        "lines": [{"name": evil, "values": [1, 2]}],
    }
    write_claim(tmp_path, title=evil, claim=evil, original=evil, reason=evil, series=[series, {"title": "$x^2_{$"}])
    write_report(tmp_path, tmp_path / "report")
    assert (tmp_path / "report" / "index.html").read_text().count("<script") == 1


@pytest.mark.slow
def test_the_same_runs_give_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    write_report(folder.parent, tmp_path)
    assert (tmp_path / "index.html").read_bytes() == (folder / "index.html").read_bytes()


def test_an_empty_folder_gives_a_page_that_says_how_to_begin(tmp_path: Path) -> None:
    write_report(tmp_path, tmp_path / "report")
    assert "ddp train digits --layout single" in (tmp_path / "report" / "index.html").read_text()


def page_without_one(output: Path, verdict: str, left_out: str) -> str:
    """The report on three runs of which one is left out, once its verdict is known to be this."""
    (family,) = find_families(read_runs(output).runs)
    assert (family.verdict.text, family.verdict.tone) == (verdict, "bad")
    assert family.judgement.startswith("seed 0: 2 exact runs, identical")
    assert family.judgement.endswith(f"; left out: {left_out}")
    return render(build_report(output))


def test_weights_that_are_not_those_of_the_record_are_seen(tmp_path: Path) -> None:
    for layout in (Layout(), ddp(2), ddp(4)):
        path = write_run(tmp_path, layout)
    save_file({"weight": torch.zeros(2)}, path / "model.safetensors")
    page = page_without_one(tmp_path, "other weights than recorded", "other weights than recorded")
    assert page.count("<small>other weights than recorded</small>") == 1
    assert '<span class="badge bad">other weights than recorded</span>' in page
    assert "model.safetensors holds other weights than run.json says. Its weights are not compared" in page
    (path / "model.safetensors").write_bytes(bytes(500))
    assert "holds no weights" in str(read_runs(tmp_path).runs[-1].weights_problem)
    save_file({"weight": torch.zeros(2)}, path / "model.safetensors")
    recorded = weights_digest({"weight": torch.zeros(2)})
    record = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(record | {"weights_sha256": recorded}))
    assert all(run.is_reference for run in read_runs(tmp_path).runs)


def test_a_broken_promise_is_seen_and_its_run_is_no_reference(tmp_path: Path) -> None:
    for layout in (Layout(), ddp(2)):
        write_run(tmp_path, layout)
    broken = {"step": 3, "what": "micro-batch 7 has other bits", "attempt": 0}
    attempts = [an_attempt(guard={"mode": "normal", "seconds": {"again": 0.1}})]
    write_run(tmp_path, ddp(4), digest="b" * 64, promise_broken=broken, attempts=attempts)
    page = page_without_one(tmp_path, "promise broken", "promise broken in step 3")
    assert page.count('<span class="badge bad">promise broken in step 3</span>') == 1
    assert "promise broken in step 3: micro-batch 7 has other bits. It went on all the same" in page
    assert "<small>promise broken in step 3</small>" in page
    assert "<dt>guard</dt><dd>normal; 0.10 s" in page
