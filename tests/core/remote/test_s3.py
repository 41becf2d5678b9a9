"""A run in S3, by s3fs, with a server that answers as S3 does, and with one between that fails, waits and hangs up."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ddp_core.distributed.world import free_port
from tests.support.commands import ddp, train, wait_until

pytestmark = pytest.mark.extras("s3fs", "moto")

WORDS = ("train", "toy_mlp", "--device", "cpu", "--rehearsal", "off", "--set", "epochs=4", "--checkpoint-every", "2")
Trouble = Callable[[str, str], str]
"""What becomes of a request, by its method and path: "answer", "500", "wait" or "hang up"."""


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    """The port of moto's server."""
    port = free_port()
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: _answers(port), 60, "the server answers")
            yield port
        finally:
            process.kill()


def _answers(port: int) -> bool:
    try:
        _ask(port, "GET", "/", {}, b"")
    except OSError:
        return False
    return True


def _ask(
    port: int, method: str, path: str, headers: dict[str, str], body: bytes
) -> tuple[int, list[tuple[str, str]], bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.getheaders(), answer.read()
    finally:
        connection.close()


class Between(ThreadingHTTPServer):
    """Hands requests on to the server, with trouble on the way."""

    daemon_threads = True

    def __init__(self, port: int, trouble: Trouble) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.port, self.trouble, self.released = port, trouble, threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: Between
    protocol_version = "HTTP/1.1"  # answers "Expect: 100-continue"

    def _hand_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        what = self.server.trouble(self.command, self.path)
        if what == "hang up":
            self.close_connection = True
            return
        if what == "wait":
            self.server.released.wait(60)
        status, headers, content = (
            (500, [], b"")
            if what == "500"
            else _ask(self.server.port, self.command, self.path, dict(self.headers.items()), body)
        )
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in ("transfer-encoding", "connection", "server", "date", "content-length"):
                self.send_header(name, value)
        length = dict(headers).get("Content-Length", len(content)) if self.command == "HEAD" else len(content)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _hand_on

    def log_message(self, format: str, *arguments: object) -> None:
        """Stay silent."""


NUMBERS = itertools.count()


@pytest.fixture
def bucket(server: int) -> str:
    """A bucket that no other test has."""
    name = f"bucket-{next(NUMBERS)}"
    assert _ask(server, "PUT", f"/{name}", {}, b"")[0] == 200
    return name


def client(port: int, folder: Path, **more: str) -> dict[str, str]:
    """The variables of a client of the server, on a machine with a local folder of its own."""
    named = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
    return named | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "XDG_CACHE_HOME": str(folder)} | more


def digest_on(port: int, bucket: str, folder: Path) -> str:
    """The digest that a reader's `compare` shows."""
    compared = ddp("compare", "--json", f"s3://{bucket}/runs", env=client(port, folder))
    assert compared.code == 0, compared.errors
    return compared.output


def test_a_run_in_s3_has_the_same_bits_and_is_evaluated_from_there(server: int, bucket: str, tmp_path: Path) -> None:
    usual = train(tmp_path / "usual", *WORDS[1:])
    ended = ddp(*WORDS, "--output", f"s3://{bucket}/runs", env=client(server, tmp_path / "a"))
    assert ended.code == 0, ended.errors
    assert usual["weights_sha256"] in digest_on(server, bucket, tmp_path / "b")


def test_a_store_that_fails_for_a_while_gets_all_in_the_end(server: int, bucket: str, tmp_path: Path) -> None:
    seen = itertools.count()

    def trouble(method: str, path: str) -> str:
        return "answer" if method not in ("PUT", "POST") or next(seen) % 3 else "500"

    between = Between(server, trouble)
    ended = ddp(*WORDS, "--output", f"s3://{bucket}/runs", env=client(between.server_port, tmp_path / "a"))
    between.shutdown()
    assert ended.code == 0, ended.errors
    assert "sha256" in digest_on(server, bucket, tmp_path / "b")


@pytest.mark.slow
def test_a_store_that_stops_answering_ends_with_4_and_the_next_launch_copies(
    server: int, bucket: str, tmp_path: Path
) -> None:
    def trouble(method: str, path: str) -> str:
        return "hang up" if method in ("PUT", "POST") and "step-" in path else "answer"

    between = Between(server, trouble)
    words = (*WORDS, "--output", f"s3://{bucket}/runs")
    ended = ddp(*words, env=client(between.server_port, tmp_path / "a"), timeout=400)
    between.shutdown()
    assert ended.code == 4
    assert "copies it first" in ended.errors
    # Nothing of it can be taken for a run: no checkpoint is committed, and no record is there.
    compared = ddp("compare", f"s3://{bucket}/runs", env=client(server, tmp_path / "b"))
    assert compared.code == 2
    again = ddp(*words, "--resume", "auto", "--set", "epochs=5", env=client(server, tmp_path / "a"))
    assert again.code == 0, again.errors
    assert "sha256" in digest_on(server, bucket, tmp_path / "b")


def test_missing_credentials_and_an_unknown_bucket_are_one_line_each(server: int, bucket: str, tmp_path: Path) -> None:
    nobody = client(
        server, tmp_path / "a", AWS_ACCESS_KEY_ID="", AWS_SECRET_ACCESS_KEY="", AWS_EC2_METADATA_DISABLED="true"
    )
    for env, name in ((nobody, bucket), (client(server, tmp_path / "a"), "no-such-bucket")):
        ended = ddp(*WORDS, "--output", f"s3://{name}/runs", env=env)
        assert (ended.code, len(ended.errors.splitlines())) == (4, 1), ended.errors
        assert f"s3://{name}/runs" in ended.errors
