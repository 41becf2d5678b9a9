"""Runs that are copied to a store, and a store for S3's own clients: moto's server, which may be made to fail."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch

from ddp_core.checkpoint import Checkpointer
from tests.support.processes import free_port

BUCKET = "bucket"
_REFUSAL = (
    b"<Error><Code>InvalidAccessKeyId</Code><Message>The AWS Access Key Id you provided does not exist in our records."
    b"</Message></Error>"
)


def write_record(run: Path, *attempts: str, status: str = "running") -> None:
    """Write what a store's copier reads of a run.json."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "run.json").write_text(json.dumps({"status": status, "attempts": [{"started_at": at} for at in attempts]}))


def save(run: Path, step: int, numbers: int = 4, keep_last: int = 2) -> None:
    """Save a checkpoint of so many numbers."""
    with Checkpointer(run / "checkpoints", keep_last=keep_last) as checkpointer:
        checkpointer.save({"model": {"weight": torch.full((numbers,), float(step))}}, step=step, epoch=1)


def a_run(folder: Path, *steps: int) -> Path:
    """A run in its first attempt with checkpoints of these steps."""
    run = folder / "digits" / "single-cpu-1"
    write_record(run, "noon")
    (run / "metrics.jsonl").write_text("{}\n")
    for step in steps:
        save(run, step)
    return run


class Store:
    """A store that answers S3's clients, with faults where they are asked for."""

    def __init__(self, port: int, behind: int) -> None:
        self.seconds_each, self.fails, self.refuses = 0.0, False, False
        self.asked: list[str] = []
        """The requests, as `PUT /bucket/name`."""
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "a-secret-word",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        self._behind = behind

    def ask(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Ask the server itself; the status, and the content of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self._behind, timeout=30)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, answer.read()

    def has(self, name: str) -> bool:
        """Whether a file of this name is in the bucket."""
        return f"<Key>{name}</Key>".encode() in self.ask("GET", f"/{BUCKET}?prefix={name}")[1]


def _proxy(store: Store, behind: int) -> type[BaseHTTPRequestHandler]:
    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            store.asked.append(f"{self.command} {self.path}")
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            time.sleep(store.seconds_each)
            if store.fails or store.refuses:
                return self._answer(403, _REFUSAL, {}) if store.refuses else self._answer(500, b"", {})
            connection = http.client.HTTPConnection("127.0.0.1", behind, timeout=60)
            with contextlib.closing(connection):
                connection.request(self.command, self.path, body, dict(self.headers))
                answer = connection.getresponse()
                return self._answer(answer.status, answer.read(), dict(answer.getheaders()))

        do_PUT = do_POST = do_HEAD = do_DELETE = do_GET

        def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(content))
            passed = {
                name: value
                for name, value in headers.items()
                if name.lower() not in ("content-length", "transfer-encoding", "connection", "server", "date")
            }
            for name, value in {**passed, "Content-Length": length}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *words: object) -> None:
            pass

    return Proxy


@contextlib.contextmanager
def a_store(folder: Path) -> Iterator[Store]:
    """A store with an empty bucket; the server is killed when the block ends."""
    behind, port = free_port(), free_port()
    with (folder / "moto.log").open("wb") as said:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(behind)],
            stdout=said,
            stderr=said,
            env={name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
        )
    store = Store(port, behind)
    proxy = ThreadingHTTPServer(("127.0.0.1", port), _proxy(store, behind))
    proxy.daemon_threads = True
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                if store.ask("PUT", f"/{BUCKET}")[0] == 200:
                    break
            assert time.monotonic() < deadline, (folder / "moto.log").read_text()
            assert server.poll() is None, (folder / "moto.log").read_text()
            time.sleep(0.2)
        yield store
    finally:
        proxy.shutdown()
        proxy.server_close()
        server.kill()
        server.wait()
