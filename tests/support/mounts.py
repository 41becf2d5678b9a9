"""Small file systems of a test's own, mounted where this process has the right to; elsewhere the test is skipped."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_EXT4_IOC_SHUTDOWN = 0x8004587D
_WITHOUT_FLUSH = 2
_NEW_MOUNTS = 0x00020000  # CLONE_NEWNS of linux/sched.h


@contextlib.contextmanager
def mounted(directory: Path, *words: str | Path) -> Iterator[Path]:
    """What `mount WORDS directory` mounts, until the block ends."""
    directory.mkdir(exist_ok=True)
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("needs the right to mount a small file system")
    if subprocess.run([mount, *words, directory], capture_output=True).returncode:
        pytest.skip("needs the right to mount a small file system, which this container does not have")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", directory], check=True)


@contextlib.contextmanager
def tmpfs(directory: Path, options: str) -> Iterator[Path]:
    """A tmpfs with these mount options, such as `size=800k`."""
    with mounted(directory, "-t", "tmpfs", "-o", options, "tmpfs") as place:
        yield place


@contextlib.contextmanager
def ext4(directory: Path) -> Iterator[Path]:
    """An ext4 of 16 MiB in a file beside the directory, on a loop device."""
    image = directory.with_suffix(".image")
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("needs mkfs.ext4")
    with image.open("wb") as file:
        file.truncate(16 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True, capture_output=True)
    with mounted(directory, "-o", "loop", image) as place:
        yield place


def shut_down(directory: Path) -> None:
    """Stop the ext4 file system at `directory` as a power cut does: from now on it writes nothing and answers EIO."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, _EXT4_IOC_SHUTDOWN, struct.pack("I", _WITHOUT_FLUSH))
    finally:
        os.close(descriptor)


def see_instead(place: Path, directory: Path) -> None:
    """Let this process, and those that it starts, find `directory` at `place`; all others find there what they did."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "unshare")
    for words in (["--make-rprivate", "/"], ["--bind", directory, place]):
        subprocess.run(["mount", *words], check=True)
