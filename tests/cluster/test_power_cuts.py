"""The power goes after any write that has reached the disk: what is found there goes on to the undisturbed result.

A run trains on a real file system, ext4 or XFS, on a disk that records each write (`recorded_disk`). Then the disk as
it was after the first write, the second one, and so on, is mounted again, as after a power cut.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_core.base.digests import weights_digest
from ddp_core.checkpoint import find_checkpoints
from ddp_core.record.directory import find_runs
from ddp_core.record.weights import read_weights
from tests.cluster.recorded_disk import writes_in
from tests.support.commands import ROOT, ddp

DIGEST = "d2553888"
"""Begins the digest with which every undisturbed run of toy_mlp ends."""
MAKE = {"ext4": ("mkfs.ext4", "-q", "-m", "0"), "xfs": ("mkfs.xfs", "-q")}
MEGABYTES = {"ext4": 16, "xfs": 300}
"""The smallest disk that each file system takes."""
RUN = ("train", "toy_mlp", "--device", "cpu", "--checkpoint-every", "1", "--keep-last", "1")
LAYOUTS = {
    "single": ("--layout", "single"),
    "parts": ("--layout", "ddp", "--nproc-per-node", "2", "--shard", "optimizer"),
}

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount file systems"),
]


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    """What Debian calls xfsprogs, where it is missing and `make test-cluster` asks for it."""
    if "DDP_INSTALL" in os.environ and shutil.which("mkfs.xfs") is None:
        subprocess.run(["apt-get", "update", "-qq"], check=True)
        subprocess.run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", "xfsprogs"], check=True)


@contextlib.contextmanager
def mounted(what: Path, kind: str, place: Path) -> Iterator[Path]:
    """Mount the file system in the file `what`, by way of a loop device."""
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", kind, "-o", "loop", what, place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


@contextlib.contextmanager
def recording(image: Path, record: Path) -> Iterator[Path]:
    """A file that is a disk with the content of `image`, whose writes are recorded."""
    disk = record.with_suffix(".disk")
    disk.touch()
    words = [sys.executable, "-m", "tests.cluster.recorded_disk", str(image), str(record), str(disk)]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "mounted\n"
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)
        assert process.wait(30) == 0
        process.stdout.close()


def state_of(place: Path) -> str:
    """Tells two disks apart by what a resume looks at."""
    digest = hashlib.sha256()
    for file in sorted(place.glob("outputs/**/*")):
        if file.is_file() and not {"heartbeats", "log.txt", "run.lock", "fence.lock"} & set(file.parts):
            digest.update(f"{file.relative_to(place)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def goes_on(output: Path, layout: str) -> None:
    """What is left of the run is its result, or continues to it from the newest checkpoint."""
    runs = dict(find_runs(output))
    if any(record["status"] == "completed" for record in runs.values()):
        ((directory, record),) = runs.items()
        assert weights_digest(read_weights(directory.path / "model.safetensors")) == record["weights_sha256"]
        assert record["weights_sha256"].startswith(DIGEST)
        return
    folders = [file.parent for file in output.glob("*/*/checkpoints")]
    steps = [checkpoint.step for folder in folders for checkpoint in find_checkpoints(folder / "checkpoints")]
    ended = ddp(*RUN, *LAYOUTS[layout], "--output", output, "--resume", "auto")
    assert ended.code == 0, ended.output + ended.errors
    assert f"weights sha256 {DIGEST}" in ended.output
    if steps:
        assert f"resumed at step {max(steps)} " in ended.output
        assert len(list(find_runs(output))) == 1


@pytest.mark.parametrize("layout", ["single", pytest.param("parts", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "ext4")) for kind in MAKE])
def test_after_a_power_cut_at_any_write_a_run_goes_on(kind: str, layout: str, tmp_path: Path) -> None:
    if shutil.which(MAKE[kind][0]) is None:
        pytest.skip(f"{MAKE[kind][0]} is not installed; `make test-cluster` installs Debian's")
    image, record, place, after = (tmp_path / name for name in ("image", "record", "mounted", "after"))
    with image.open("wb") as file:
        file.truncate(MEGABYTES[kind] << 20)
    subprocess.run([*MAKE[kind], image], check=True)
    with recording(image, record) as disk, mounted(disk, kind, place):
        assert ddp(*RUN, *LAYOUTS[layout], "--output", place / "outputs").code == 0
        written = sum(1 for _ in writes_in(record))
    seen: set[str] = set()
    with image.open("r+b", buffering=0) as file:
        for number, (at, data) in enumerate(writes_in(record), 1):
            os.pwrite(file.fileno(), data, at)
            subprocess.run(["cp", "--sparse=always", image, after], check=True)
            with mounted(after, kind, place):
                state = state_of(place)
                if state not in seen:
                    goes_on(place / "outputs", layout)
                    seen.add(state)
                if number >= written:  # the command had ended
                    ((_, found),) = find_runs(place / "outputs")
                    assert found["status"] == "completed"
    print(f"{kind}, {layout}: {number} writes, {len(seen)} states")
