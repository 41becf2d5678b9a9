"""Fetching data sets from a real HTTP server on this machine, which can break off, refuse and send wrong bytes."""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.torchvision_import import import_torchvision
from ddp_core.data import fetch
from ddp_core.data.builders import DATA
from ddp_core.data.fetch import fetch_data_set
from tests.core.data.test_vision import write_cifar, write_fashion
from tests.support.wording import refusing

RAW = Path("FashionMNIST") / "raw"


@dataclass
class Server:
    """What the server sends, how it misbehaves, and what it was asked for."""

    port: int = 0
    files: dict[str, bytes] = field(default_factory=dict)
    break_after: int | None = None
    asked: list[str] = field(default_factory=list)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}/{path}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.lstrip("/")
            state.asked.append(name)
            if name not in state.files:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(state.files[name])))
            self.end_headers()
            self.wfile.write(state.files[name][: state.break_after])

        def log_message(self, *_: object) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.port = httpd.server_port
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield state
    httpd.shutdown()
    httpd.server_close()
    thread.join()


@pytest.fixture
def made(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with both data sets in small, which the server has, and which torchvision takes for published."""
    folder = tmp_path / "made"
    write_fashion(folder)
    write_cifar(folder)
    for path in (folder / RAW).iterdir():
        server.files[f"{path.name}.gz"] = gzip.compress(path.read_bytes())
    known = import_torchvision("datasets")
    monkeypatch.setattr(known.FashionMNIST, "mirrors", [server.url("")])
    resources = [(name, hashlib.md5(content).hexdigest()) for name, content in server.files.items()]
    monkeypatch.setattr(known.FashionMNIST, "resources", resources)
    monkeypatch.setattr(fetch, "_SECOND_MIRROR", "http://127.0.0.1:9/no/")
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        archive.add(folder / "cifar-10-batches-py", "cifar-10-batches-py")
    server.files["cifar-10-python.tar.gz"] = stream.getvalue()
    monkeypatch.setattr(known.CIFAR10, "url", server.url("cifar-10-python.tar.gz"))
    monkeypatch.setattr(known.CIFAR10, "tgz_md5", hashlib.md5(stream.getvalue()).hexdigest())
    return folder


@pytest.mark.parametrize("name", ["fashion_mnist", "cifar10"])
def test_what_is_fetched_can_be_trained_on(made: Path, tmp_path: Path, name: str) -> None:
    lines: list[str] = []
    fetch_data_set(name, tmp_path / "data", lines.append)
    assert lines == [f"{name} is ready in {tmp_path / 'data'}"]
    data = DATA[name](root=tmp_path / "data")
    assert data.digest == DATA[name](root=made).digest
    assert np.isfinite(data.train[0][0].numpy()).all()


def test_a_whole_archive_is_not_fetched_again_and_mends_what_was_unpacked(
    made: Path, server: Server, tmp_path: Path
) -> None:
    fetch_data_set("fashion_mnist", tmp_path)
    asked, file = len(server.asked), tmp_path / RAW / "train-labels-idx1-ubyte"
    whole = file.read_bytes()
    file.write_bytes(b"cut")
    fetch_data_set("fashion_mnist", tmp_path)
    assert (file.read_bytes(), len(server.asked)) == (whole, asked)


def test_an_archive_of_the_right_name_is_not_believed(made: Path, tmp_path: Path) -> None:
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"something else")
    fetch_data_set("cifar10", tmp_path)
    assert DATA["cifar10"](root=tmp_path).digest == DATA["cifar10"](root=made).digest


@pytest.mark.parametrize("fault", ["breaks off", "is wrong", "is not there"])
def test_a_download_that_fails_leaves_nothing_to_train_on(
    made: Path, server: Server, tmp_path: Path, fault: str
) -> None:
    root, name = tmp_path / "data", "cifar-10-python.tar.gz"
    published = server.files.pop(name)
    if fault == "breaks off":
        server.files[name], server.break_after = published, 100
    elif fault == "is wrong":
        server.files[name] = gzip.compress(b"something else")
    with pytest.raises(UserError, match=f"could not fetch {server.url(name)}: ") as failure:
        fetch_data_set("cifar10", root)
    assert failure.value.exit_code == ExitCode.BAD_INPUT
    assert f"run again: ddp data fetch cifar10 --data-dir {root}" in str(failure.value)
    assert "\n" not in str(failure.value)
    assert not (root / "cifar-10-batches-py").exists()
    server.files[name], server.break_after = published, None
    fetch_data_set("cifar10", root)
    assert DATA["cifar10"](root=root).digest == DATA["cifar10"](root=made).digest


def test_the_next_mirror_is_tried(made: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = import_torchvision("datasets")
    monkeypatch.setattr(known.FashionMNIST, "mirrors", [server.url("nothing/"), "http://127.0.0.1:9/no/"])
    with pytest.raises(UserError, match=r"HTTP Error 404.*refused.*refused"):
        fetch_data_set("fashion_mnist", tmp_path)
    monkeypatch.setattr(fetch, "_SECOND_MIRROR", server.url(""))
    fetch_data_set("fashion_mnist", tmp_path)
    assert (tmp_path / RAW / "train-labels-idx1-ubyte").is_file()


def test_two_at_once_are_kept_apart(made: Path, tmp_path: Path) -> None:
    with (tmp_path / ".cifar10.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with refusing():
            fetch_data_set("cifar10", tmp_path)
    fetch_data_set("cifar10", tmp_path)


def test_an_unknown_name_and_a_directory_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    with refusing():
        fetch_data_set("cifar", tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("in the way")
    with refusing():
        fetch_data_set("cifar10", tmp_path / "file" / "data")
