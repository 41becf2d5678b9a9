"""The report's command: what it writes and prints, and the server that shows the report."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_core.base.errors import ExitCode
from ddp_core.config.layout import Layout
from ddp_lab.report import main
from ddp_lab.report.serving import make_server
from tests.lab.report.files import write_claim, write_run
from tests.support.processes import HANG
from tests.support.wording import refusing


def test_the_command_writes_and_says_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, Layout(), steps=0)
    write_claim(tmp_path, series=[])
    (tmp_path / "digits" / "ddp-1x2-cpu-20260101T000100Z-aaaaaa" / "checkpoints").mkdir(parents=True)
    assert main(["--output", str(tmp_path), "--to", str(tmp_path / "here")]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("report: 1 run, 1 experiment, 1 claim -> ")
    assert "no run.json" in captured.err
    assert (tmp_path / "here" / "index.html").exists()


def test_the_users_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--output", str(tmp_path / "none")]) == ExitCode.BAD_INPUT
    (tmp_path / "file").write_text("")
    assert main(["--output", str(tmp_path), "--to", str(tmp_path / "file")]) == ExitCode.RESOURCES
    for address in ("8000", "localhost:http", "localhost:99999"):
        assert main(["--output", str(tmp_path), "--serve", address]) == ExitCode.BAD_INPUT
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 5
    assert all(line.startswith("report: error: ") for line in errors)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The address of a server, and the page that it serves."""
    page = tmp_path / "index.html"
    page.write_text("the page")
    (tmp_path / "secret.txt").write_text("secret")
    with make_server(page, ("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", page
        server.shutdown()
        thread.join(HANG)


def _fetch(url: str, method: str = "GET", host: str | None = None) -> tuple[int, str]:
    headers = {} if host is None else {"Host": host}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, None, headers, method=method), timeout=HANG) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        error.close()
        return error.code, ""


def test_the_server_shows_the_page_and_nothing_else(site: tuple[str, Path]) -> None:
    url, page = site
    assert _fetch(f"{url}/") == (200, "the page")
    assert _fetch(f"{url}/index.html?x", "HEAD") == (200, "")
    for path in ("secret.txt", "../secret.txt", "%2e%2e/secret.txt", "none.html"):
        assert _fetch(f"{url}/{path}")[0] == 404, path
    assert _fetch(f"{url}/index.html", "POST")[0] == 501
    page.write_text("the newest")
    assert _fetch(f"{url}/") == (200, "the newest")
    page.unlink()
    assert _fetch(f"{url}/")[0] == 404


def test_a_page_elsewhere_cannot_lead_its_own_name_here(site: tuple[str, Path]) -> None:
    url, _ = site
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "[::1", ""):
        assert _fetch(f"{url}/", host=host)[0] == 421, host
    for host in ("localhost", "localhost:8000", "127.0.0.1", "[::1]:8000"):
        assert _fetch(f"{url}/", host=host) == (200, "the page"), host


def test_a_port_in_use_is_said(site: tuple[str, Path]) -> None:
    url, page = site
    with refusing():
        make_server(page, ("127.0.0.1", int(url.rpartition(":")[2])))
