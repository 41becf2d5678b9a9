"""Fetching data sets from a real HTTP server on this machine, which can break off, refuse and send wrong bytes."""

from __future__ import annotations

import gzip
import hashlib
import io
import shutil
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
from ddp_core.data.builders import DATA
from ddp_core.data.vision import fetch_data_set
from tests.core.data.test_data import CIFAR, FASHION, take_for_published, write_cifar, write_fashion

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
def served(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both data sets in small, which the server has, and which torchvision takes for published."""
    folder = tmp_path / "made"
    write_fashion(folder)
    write_cifar(folder)
    for path in (folder / RAW).iterdir():
        server.files[f"{path.name}.gz"] = gzip.compress(path.read_bytes())
    known = import_torchvision("datasets")
    monkeypatch.setattr(known.FashionMNIST, "mirrors", [server.url("")])
    resources = [(name, hashlib.md5(content).hexdigest()) for name, content in server.files.items()]
    monkeypatch.setattr(known.FashionMNIST, "resources", resources)
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        archive.add(folder / "cifar-10-batches-py", "cifar-10-batches-py")
    server.files["cifar-10-python.tar.gz"] = stream.getvalue()
    monkeypatch.setattr(known.CIFAR10, "url", server.url("cifar-10-python.tar.gz"))
    monkeypatch.setattr(known.CIFAR10, "tgz_md5", hashlib.md5(stream.getvalue()).hexdigest())
    take_for_published(folder, monkeypatch)
    shutil.rmtree(folder)


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize(("name", "digest"), [("fashion_mnist", FASHION), ("cifar10", CIFAR)])
def test_what_is_fetched_can_be_trained_on_and_is_not_fetched_again(
    server: Server, tmp_path: Path, name: str, digest: str
) -> None:
    lines: list[str] = []
    fetch_data_set(name, tmp_path / "data", lines.append)
    assert lines == [f"{name} is ready in {tmp_path / 'data'}"]
    data = DATA[name](root=tmp_path / "data")
    assert data.digest == digest
    assert np.isfinite(data.train[0][0].numpy()).all()
    asked = len(server.asked)
    fetch_data_set(name, tmp_path / "data")
    assert len(server.asked) == asked


@pytest.mark.usefixtures("served")
def test_an_archive_of_the_right_name_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"something else")
    fetch_data_set("cifar10", tmp_path)
    assert DATA["cifar10"](root=tmp_path).digest == CIFAR


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("fault", ["breaks off", "is wrong", "is not there"])
def test_a_download_that_fails_leaves_nothing_to_train_on(server: Server, tmp_path: Path, fault: str) -> None:
    root, name = tmp_path / "data", "cifar-10-python.tar.gz"
    published = server.files.pop(name)
    if fault == "breaks off":
        server.files[name], server.break_after = published, 100
    elif fault == "is wrong":
        server.files[name] = gzip.compress(b"something else")
    with pytest.raises(UserError, match="could not fetch cifar10: ") as failure:
        fetch_data_set("cifar10", root)
    assert failure.value.exit_code == ExitCode.BAD_INPUT
    assert f"run again: ddp data fetch cifar10 --data-dir {root}" in str(failure.value)
    assert "\n" not in str(failure.value)
    assert not (root / "cifar-10-batches-py").exists()
    server.files[name], server.break_after = published, None
    fetch_data_set("cifar10", root)
    assert DATA["cifar10"](root=root).digest == CIFAR


def test_unknown_names_get_the_nearest_right_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean cifar10"):
        fetch_data_set("cifar", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_directory_is_a_matter_of_resources(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=str(tmp_path / "file")) as failure:
        fetch_data_set("cifar10", tmp_path / "file" / "data")
    assert failure.value.exit_code == ExitCode.RESOURCES
