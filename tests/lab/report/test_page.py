"""The report's page: one file that loads nothing from outside, tells every result, and works in a browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ddp_core.base.digests import weights_digest
from ddp_lab.report.contents import build_report
from ddp_lab.report.page import render, write_report
from ddp_lab.report.reading.families import find_families
from ddp_lab.report.reading.runs import read_runs
from tests.lab.report.files import ddp, single, write_claim, write_everything, write_run
from tests.support.processes import HANG
from tests.support.records import an_attempt

_LOADING = {
    "src",
    "href",
    "xlink:href",
    "srcset",
    "data",
    "action",
    "poster",
    "formaction",
    "background",
    "cite",
    "ping",
}
_INSIDE = ("#", "data:")
"""Of a cell in Markdown."""


class _Elements(HTMLParser):
    """Collects what a page would load, its names and links, and its tables."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.ids: list[str] = []
        self.anchors: list[str] = []
        self.tags: dict[str, int] = {}
        self._styles = False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self._styles = tag == "style"
        for name, value in attributes:
            if name in _LOADING and not (value or "").startswith(_INSIDE):
                self.outside.append(f"{tag} {name}={value}")
            if name in ("style", "fill", "stroke", "clip-path", "mask", "filter"):
                self._check_css(value or "")
            if name == "id":
                self.ids.append(value or "")
            if name == "href" and (value or "").startswith("#"):
                self.anchors.append((value or "")[1:])

    def handle_data(self, data: str) -> None:
        if self._styles:
            self._check_css(data)

    def handle_endtag(self, tag: str) -> None:
        self._styles = False

    def _check_css(self, text: str) -> None:
        targets = re.findall(r"url\(\s*['\"]?([^'\")]*)", text)
        self.outside += [target for target in targets if not target.startswith(_INSIDE)]
        self.outside += re.findall(r"@import[^;]*", text)


def parsed(text: str) -> _Elements:
    elements = _Elements()
    elements.feed(text)
    return elements


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
    elements = parsed(page)
    assert elements.outside == []
    assert not {"iframe", "object", "embed", "base"} & set(elements.tags)
    assert re.search(r"\b(fetch|XMLHttpRequest|WebSocket|EventSource|import)\s*\(", page) is None
    assert "default-src 'none'" in page


def test_the_test_above_can_fail() -> None:
    for bad in (
        '<img src="https://example.org/x.png">',
        '<link href="style.css">',
        '<p style="background: url(x.png)">',
        "<style>@import 'x.css';</style>",
    ):
        assert parsed(bad).outside, bad


def test_names_are_unique_and_links_lead_somewhere(page: str) -> None:
    elements = parsed(page)
    assert sorted(set(elements.ids)) == sorted(elements.ids)
    assert set(elements.anchors) <= set(elements.ids)


def test_every_plot_has_numbers_behind_it(page: str) -> None:
    figures = re.findall(r"<figure>.*?</figure>", page, flags=re.DOTALL)
    assert len(figures) == 4
    assert all("<table" in figure and 'role="img"' in figure and "aria-label=" in figure for figure in figures)


def test_plots_take_their_colours_from_the_page(page: str) -> None:
    plots = re.findall(r'<svg class="plot".*?</svg>', page, flags=re.DOTALL)
    assert all("var(--muted)" in plot and re.search(r"var\(--s\d\)", plot) for plot in plots)
    assert not any(re.search(r"(fill|stroke): #", plot) for plot in plots)
    assert "prefers-color-scheme: dark" in page


def test_the_lines_of_a_plot_are_named_in_it(page: str) -> None:
    plot = re.search(r'<svg class="plot"[^>]*aria-label="Training loss.*?</svg>', page, flags=re.DOTALL)
    assert plot is not None
    named = set(re.findall(r"<text[^>]*>([^<]*)</text>", plot.group()))
    assert {"single-cpu", "dp-2-cpu", "ddp-1x2-cpu", "ddp-1x4-cpu · interrupted"} <= named


def test_every_state_is_told(page: str) -> None:
    for word in ("completed", "interrupted", "failed", "stopped", "unreadable", "confirmed", "not measurable here"):
        assert re.search(rf'<span class="badge \w+">{word}</span>', page), word
    assert "no run.json: it ended before its record was written" in page
    assert "identical on 3 layouts" in page
    assert "1.76× [1.70, 1.82]" in page  # noqa: RUF001
    assert '<p lang="zh">DP 比 DDP 慢。</p>' in page


def test_what_files_say_is_text_not_markup(page: str) -> None:
    assert "Traceback: &lt;b&gt;bad&lt;/b&gt; &amp; worse" in page


def test_markup_in_names_stays_text(tmp_path: Path) -> None:
    evil = '"><script>alert(1)</script>'
    odd = {"question": evil, "command": evil, "environment": {"host": evil, "x": evil}, "message": evil}
    write_run(tmp_path, single(), steps=0, **odd)
    series = {
        "title": evil,
        "x": {"name": evil, "values": [1, 2]},
        "y": {"name": evil},
        "lines": [{"name": evil, "values": [1, 2]}],
    }
    write_claim(tmp_path, title=evil, claim=evil, original=evil, reason=evil, series=[series, {"title": "$x^2_{$"}])
    write_report(tmp_path, tmp_path / "report")
    assert parsed((tmp_path / "report" / "index.html").read_text()).tags["script"] == 1


@pytest.mark.slow
def test_the_same_runs_give_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    write_report(folder.parent, tmp_path)
    assert (tmp_path / "index.html").read_bytes() == (folder / "index.html").read_bytes()


def test_an_empty_folder_gives_a_page_that_says_how_to_begin(tmp_path: Path) -> None:
    write_report(tmp_path, tmp_path / "report")
    assert "ddp train digits --layout single" in (tmp_path / "report" / "index.html").read_text()


def test_a_busy_machine_is_told_beside_the_figures_that_it_spoils(tmp_path: Path) -> None:
    write_run(tmp_path, single(), steps=0, result={"other_cores_busy": 0.05})
    write_run(tmp_path, ddp(2), steps=0, result={"other_cores_busy": 1.26})
    page = render(build_report(tmp_path))
    assert page.count("<small>busy machine</small>") == 1
    assert "<dd>other programs kept 1.3 of 2 cores busy</dd>" in page


BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed (apt-get install chromium)")


def _browse(page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Open the page in a headless browser and wait until it ends; stderr holds the browser's console."""
    with tempfile.TemporaryDirectory(prefix="ddp-browser-", ignore_cleanup_errors=True) as profile:
        quiet = ("--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
        more = ("--disable-component-update", "--disable-sync", f"--user-data-dir={profile}")
        log = ("--enable-logging=stderr", "--v=0")
        return subprocess.run(
            [str(BROWSER), "--headless", "--no-sandbox", *quiet, *more, *log, *options, page.as_uri()],
            capture_output=True,
            text=True,
            timeout=HANG,
            check=True,
            env={name: value for name, value in os.environ.items() if name != "DBUS_SESSION_BUS_ADDRESS"},
        )


def _said(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.slow
@needs_browser
def test_the_browser_has_nothing_to_complain_about(folder: Path) -> None:
    assert _said(_browse(folder / "index.html", "--dump-dom")) == []


@pytest.mark.slow
@needs_browser
def test_the_browser_would_complain(folder: Path, tmp_path: Path) -> None:
    text = (folder / "index.html").read_text()
    bad = '<img src="http://127.0.0.1:9/x.png"><script>throw new Error("broken")</script></body>'
    (tmp_path / "bad.html").write_text(text.replace("</body>", bad))
    said = "\n".join(_said(_browse(tmp_path / "bad.html", "--dump-dom")))
    assert "broken" in said
    assert "Content Security Policy" in said


@pytest.mark.slow
@needs_browser
def test_a_table_that_is_cut_off_says_how_many_columns_follow(folder: Path) -> None:
    hint = r'<p class="note more" aria-hidden="true">(\d+) more columns: scroll sideways →</p>'
    phone = _browse(folder / "index.html", "--dump-dom", "--window-size=390,900").stdout
    wide = _browse(folder / "index.html", "--dump-dom", "--window-size=3000,900").stdout
    assert len(re.findall(hint, phone)) > len(re.findall(hint, wide))
    assert max(map(int, re.findall(hint, phone))) > 5


@pytest.mark.slow
@needs_browser
def test_tables_sort_when_their_headings_are_clicked(folder: Path, tmp_path: Path) -> None:
    clicks = """<script>
      const tables = [...document.querySelectorAll("table.sortable")];
      const table = tables.find((one) => one.textContent.includes("started (UTC)"));
      const column = [...table.tHead.rows[0].cells].findIndex((cell) => cell.textContent === "samples/s");
      const speeds = () => [...table.tBodies[0].rows].map((row) => row.cells[column].textContent.trim()).join(" ");
      const button = table.tHead.rows[0].cells[column].querySelector("button");
      button.click(); const rising = speeds(); button.click();
      document.title = `${rising} | ${speeds()}`;
    </script></body>"""
    (tmp_path / "page.html").write_text((folder / "index.html").read_text().replace("</body>", clicks))
    title = re.search(r"<title>(.*?)</title>", _browse(tmp_path / "page.html", "--dump-dom").stdout)
    assert title is not None
    rising, falling = (
        [float(word.replace(",", "")) for word in part.split() if word[0].isdigit()]
        for part in title.group(1).split("|")
    )
    assert len(rising) > 5
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    assert title.group(1).rstrip().endswith("–")  # noqa: RUF001


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("width", [390, 1400])
def test_the_page_is_not_wider_than_the_window(folder: Path, tmp_path: Path, width: int) -> None:
    # A browser window cannot be as narrow as a phone, but a frame can. The page in the frame measures itself.
    measure = (
        "<script>parent.postMessage([innerWidth, document.documentElement.scrollWidth].join(' '), '*')</script></body>"
    )
    (tmp_path / "page.html").write_text((folder / "index.html").read_text().replace("</body>", measure))
    frame = (
        "<script>addEventListener('message', (event) => { document.title = event.data; })</script>"
        f"<iframe src='page.html' style='border:0;width:{width}px;height:800px'></iframe>"
    )
    (tmp_path / "frame.html").write_text(f"<!doctype html><title>none</title>{frame}")
    done = _browse(tmp_path / "frame.html", "--dump-dom", "--hide-scrollbars", "--window-size=1600,900")
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None
    assert title.group(1) == f"{width} {width}"


def page_without_one(output: Path, verdict: str, left_out: str) -> str:
    """The report on three runs of which one is left out, once its verdict is known to be this."""
    (family,) = find_families(read_runs(output).runs)
    assert (family.verdict.text, family.verdict.tone) == (verdict, "bad")
    assert family.judgement.startswith("seed 0: 2 exact runs, identical")
    assert family.judgement.endswith(f"; left out: {left_out}")
    return render(build_report(output))


def test_weights_that_are_not_those_of_the_record_are_seen(tmp_path: Path) -> None:
    for layout in (single(), ddp(2), ddp(4)):
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
    for layout in (single(), ddp(2)):
        write_run(tmp_path, layout)
    broken = {"step": 3, "what": "micro-batch 7 has other bits", "attempt": 0}
    attempts = [an_attempt(guard={"mode": "normal", "seconds": {"again": 0.1}})]
    write_run(tmp_path, ddp(4), digest="b" * 64, promise_broken=broken, attempts=attempts)
    page = page_without_one(tmp_path, "promise broken", "promise broken in step 3")
    assert page.count('<span class="badge bad">promise broken in step 3</span>') == 1
    assert "promise broken in step 3: micro-batch 7 has other bits. It went on all the same" in page
    assert "<small>promise broken in step 3</small>" in page
    assert "<dt>guard</dt><dd>normal; 0.10 s" in page
