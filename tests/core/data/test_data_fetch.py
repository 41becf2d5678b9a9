"""Fetching data sets from a real HTTP server on this machine, which can break off, refuse and send wrong bytes."""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import io
import os
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.data.builders import DATA
from ddp_core.data.fetch import SOURCES, Archive, fetch_data_set
from tests.core.data.test_data import write_cifar, write_fashion


@dataclass
class Server:
    """What the server sends, how it misbehaves, and what it was asked for."""

    port: int = 0
    files: dict[str, bytes] = field(default_factory=dict)
    break_after: int | None = None
    knows_ranges: bool = True
    asked: list[tuple[str, str | None]] = field(default_factory=list)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}/{path}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name, wanted = self.path.lstrip("/"), self.headers["Range"]
            state.asked.append((name, wanted))
            if name not in state.files:
                self.send_error(404)
                return
            content, start = state.files[name], 0
            if wanted is not None and state.knows_ranges:
                start = int(wanted.removeprefix("bytes=").rstrip("-"))
                if start >= len(content):
                    self.send_error(416)
                    return
                self.send_response(206)
            else:
                self.send_response(200)
            rest = content[start:]
            self.send_header("Content-Length", str(len(rest)))
            self.end_headers()
            self.wfile.write(rest if state.break_after is None else rest[: state.break_after])

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


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def one_file(server: Server, content: bytes = bytes(range(256)) * 500) -> dict[str, tuple[Archive, ...]]:
    """The archives of a data set `thing`, which is one gzipped file."""
    packed = gzip.compress(content, mtime=0)
    server.files["thing.gz"] = packed
    return {"thing": (Archive((server.url("thing.gz"),), md5(packed), "sub/thing.gz"),)}


def quiet(_: str) -> None:
    pass


def test_fetches_checks_and_unpacks(server: Server, tmp_path: Path) -> None:
    content = os.urandom(100_000)
    lines: list[str] = []
    fetch_data_set("thing", tmp_path, lines.append, one_file(server, content))
    assert (tmp_path / "sub" / "thing").read_bytes() == content
    assert not list(tmp_path.rglob("*.part"))
    assert "is ready" in lines[-1]


def test_what_is_there_is_not_fetched_again(server: Server, tmp_path: Path) -> None:
    sources = one_file(server)
    fetch_data_set("thing", tmp_path, quiet, sources)
    (tmp_path / "sub" / "thing").unlink()
    fetch_data_set("thing", tmp_path, quiet, sources)
    assert len(server.asked) == 1
    assert (tmp_path / "sub" / "thing").is_file()


def test_a_file_of_the_right_name_is_not_believed(server: Server, tmp_path: Path) -> None:
    sources = one_file(server, b"as published" * 100)
    there = tmp_path / "sub" / "thing.gz"
    there.parent.mkdir()
    there.write_bytes(gzip.compress(b"something else"))
    fetch_data_set("thing", tmp_path, quiet, sources)
    assert (tmp_path / "sub" / "thing").read_bytes() == b"as published" * 100
    assert there.read_bytes() == server.files["thing.gz"]


def test_an_interrupted_download_is_continued(server: Server, tmp_path: Path) -> None:
    content = os.urandom(100_000)
    sources = one_file(server, content)
    server.break_after = 40_000
    with pytest.raises(UserError) as failure:
        fetch_data_set("thing", tmp_path, quiet, sources)
    assert failure.value.exit_code == ExitCode.BAD_INPUT
    assert f"run again: ddp data fetch thing --data-dir {tmp_path}" in str(failure.value)
    assert "\n" not in str(failure.value)
    assert (tmp_path / "sub" / "thing.gz.part").stat().st_size == 40_000
    assert not (tmp_path / "sub" / "thing").exists()
    server.break_after = None
    fetch_data_set("thing", tmp_path, quiet, sources)
    assert [wanted for _, wanted in server.asked] == [None, "bytes=40000-"]
    assert (tmp_path / "sub" / "thing").read_bytes() == content


def test_a_server_without_ranges_starts_from_the_front(server: Server, tmp_path: Path) -> None:
    sources = one_file(server)
    part = tmp_path / "sub" / "thing.gz.part"
    part.parent.mkdir()
    part.write_bytes(server.files["thing.gz"][:100])
    server.knows_ranges = False
    fetch_data_set("thing", tmp_path, quiet, sources)
    assert (tmp_path / "sub" / "thing").is_file()


@pytest.mark.parametrize("length", [50, 1_000_000])
def test_a_part_of_something_else_is_thrown_away(server: Server, tmp_path: Path, length: int) -> None:
    sources = one_file(server)
    part = tmp_path / "sub" / "thing.gz.part"
    part.parent.mkdir()
    part.write_bytes(os.urandom(length))
    fetch_data_set("thing", tmp_path, quiet, sources)
    assert (tmp_path / "sub" / "thing").is_file()


def test_a_wrong_checksum_is_refused(server: Server, tmp_path: Path) -> None:
    sources = one_file(server)
    server.files["thing.gz"] = gzip.compress(b"something else")
    with pytest.raises(UserError, match=r"checksum .* instead of") as failure:
        fetch_data_set("thing", tmp_path, quiet, sources)
    assert failure.value.exit_code == ExitCode.BAD_INPUT
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".thing.lock"] == []


def test_the_next_mirror_is_tried(server: Server, tmp_path: Path) -> None:
    sources = one_file(server)
    (archive,) = sources["thing"]
    sources["thing"] = (replace(archive, urls=(server.url("nothing.gz"), "http://127.0.0.1:9/no", *archive.urls)),)
    fetch_data_set("thing", tmp_path, quiet, sources)
    assert (tmp_path / "sub" / "thing").is_file()


def test_a_damaged_unpacked_file_is_mended(server: Server, tmp_path: Path) -> None:
    sources = one_file(server, b"content" * 100)
    fetch_data_set("thing", tmp_path, quiet, sources)
    (tmp_path / "sub" / "thing").write_bytes(b"cut")
    fetch_data_set("thing", tmp_path, quiet, sources)
    assert (tmp_path / "sub" / "thing").read_bytes() == b"content" * 100


def test_without_network_the_message_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    sources = {
        "thing": (Archive(("http://127.0.0.1:9/thing.gz", "http://no-such-host.invalid/"), "0" * 32, "thing.gz"),)
    }
    with pytest.raises(UserError) as failure:
        fetch_data_set("thing", tmp_path, quiet, sources)
    assert failure.value.exit_code == ExitCode.BAD_INPUT
    assert f"ddp data fetch thing --data-dir {tmp_path}" in str(failure.value)
    assert "\n" not in str(failure.value)


def test_unknown_names_get_the_nearest_right_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean cifar10"):
        fetch_data_set("cifar", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_two_at_once_are_kept_apart(server: Server, tmp_path: Path) -> None:
    sources = one_file(server)
    with (tmp_path / ".thing.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process is fetching thing"):
            fetch_data_set("thing", tmp_path, quiet, sources)
    fetch_data_set("thing", tmp_path, quiet, sources)


def test_an_unwritable_directory_is_a_matter_of_resources(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="--data-dir") as failure:
        fetch_data_set("thing", tmp_path / "file" / "data", quiet, one_file(server))
    assert failure.value.exit_code == ExitCode.RESOURCES


def test_only_expected_members_leave_an_archive(server: Server, tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name in ("folder/wanted", "../outside", "/tmp/absolute-outside", "folder/unexpected"):
            entry = tarfile.TarInfo(name)
            entry.size = 5
            archive.addfile(entry, io.BytesIO(b"12345"))
        link = tarfile.TarInfo("folder/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc"
        archive.addfile(link)
    server.files["a.tar.gz"] = packed.getvalue()
    url, members = server.url("a.tar.gz"), {"folder/wanted": md5(b"12345")}
    root = tmp_path / "data"
    fetch_data_set("a", root, quiet, {"a": (Archive((url,), md5(packed.getvalue()), "a.tar.gz", members),)})
    assert sorted(path.name for path in root.rglob("*")) == [".a.lock", "a.tar.gz", "folder", "wanted"]
    assert list(tmp_path.iterdir()) == [root]
    incomplete = {"a": (Archive((url,), md5(packed.getvalue()), "a.tar.gz", members | {"folder/more": "0" * 32}),)}
    with pytest.raises(UserError, match="folder/more"):
        fetch_data_set("a", root, quiet, incomplete)


def _changed(entry: tarfile.TarInfo) -> io.BytesIO | None:
    return io.BytesIO(b"54321")


def _cut_off(entry: tarfile.TarInfo) -> io.BytesIO | None:
    entry.size = 4
    return io.BytesIO(b"1234")


def _link(entry: tarfile.TarInfo) -> io.BytesIO | None:
    entry.size, entry.type, entry.linkname = 0, tarfile.SYMTYPE, "../../outside"
    return None


@pytest.mark.parametrize("spoil", [_changed, _cut_off, _link])
def test_a_member_that_is_not_as_published_is_refused(
    server: Server, tmp_path: Path, spoil: Callable[[tarfile.TarInfo], io.BytesIO | None]
) -> None:
    (tmp_path / "outside").write_bytes(b"12345")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        entry = tarfile.TarInfo("folder/wanted")
        entry.size = 5
        content = spoil(entry)
        archive.addfile(entry, content)
    server.files["a.tar.gz"] = packed.getvalue()
    members = {"folder/wanted": md5(b"12345")}
    sources = {"a": (Archive((server.url("a.tar.gz"),), md5(packed.getvalue()), "a.tar.gz", members),)}
    with pytest.raises(UserError, match="does not hold folder/wanted as published"):
        fetch_data_set("a", tmp_path / "data", quiet, sources)
    assert not (tmp_path / "data" / "folder" / "wanted").is_symlink()


def test_fetched_files_in_the_published_formats_can_be_trained_on(server: Server, tmp_path: Path) -> None:
    made, root = tmp_path / "made", tmp_path / "data"
    write_fashion(made)
    write_cifar(made)
    fashion = []
    for path in sorted((made / "FashionMNIST" / "raw").iterdir()):
        packed = gzip.compress(path.read_bytes())
        server.files[f"{path.name}.gz"] = packed
        fashion.append(Archive((server.url(f"{path.name}.gz"),), md5(packed), f"FashionMNIST/raw/{path.name}.gz"))
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        archive.add(made / "cifar-10-batches-py", "cifar-10-batches-py")
    server.files["cifar-10-python.tar.gz"] = stream.getvalue()
    batches = {f"{path.parent.name}/{path.name}": md5(path.read_bytes()) for path in made.glob("cifar*/*")}
    cifar = Archive((server.url("cifar-10-python.tar.gz"),), md5(stream.getvalue()), "cifar-10-python.tar.gz", batches)
    sources = {"fashion_mnist": tuple(fashion), "cifar10": (cifar,)}
    for name in sources:
        fetch_data_set(name, root, quiet, sources)
        assert DATA[name](root=root).digest == DATA[name](root=made).digest
    first = DATA["cifar10"](root=root).train[0][0]
    assert first.shape == (3, 32, 32)
    assert np.isfinite(first.numpy()).all()


def test_sources_are_torchvisions() -> None:
    from ddp_core.base.torchvision_import import import_torchvision

    datasets = import_torchvision("datasets")
    ours = {(Path(archive.path).name, archive.md5) for archive in SOURCES["fashion_mnist"]}
    assert ours == set(datasets.FashionMNIST.resources)
    (cifar,) = SOURCES["cifar10"]
    theirs = datasets.CIFAR10
    assert (cifar.urls, cifar.md5, cifar.path) == ((theirs.url,), theirs.tgz_md5, theirs.filename)
    named = [*theirs.train_list, *theirs.test_list, (theirs.meta["filename"], theirs.meta["md5"])]
    assert cifar.members == {f"{theirs.base_folder}/{name}": checksum for name, checksum in named}
