"""What the user is told where the system refuses something: what it was, the system's own name for it, what to do."""

from __future__ import annotations

import contextlib
import errno
import io
import multiprocessing
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing import popen_fork
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ddp_core.base.errors import ExitCode
from ddp_core.base.refusals import human_bytes, is_lack, refusal, refused, require_open_files
from ddp_core.base.user_code import user_code
from tests.support.mounts import tmpfs
from tests.support.processes import ask
from tests.support.wording import refusing

MIB = 1 << 20


def test_a_count_of_bytes_is_said_in_its_unit() -> None:
    counts = (0, 999, 1000, 94_140_000, 2.5e9, 1e12, 4e15)
    texts = ["0 bytes", "999 bytes", "1.0 kB", "94.1 MB", "2.5 GB", "1.0 TB", "4000.0 TB"]
    assert [human_bytes(count) for count in counts] == texts


@pytest.mark.parametrize(
    ("number", "needed", "free"),
    [
        (errno.ENOSPC, 3000, 2000),
        (errno.ENOSPC, 0, 2000),
        (errno.ENOSPC, 0, 100 * MIB),
        (errno.ENOSPC, 3000, 5000),
        (errno.EDQUOT, 3000, 2000),
        (errno.EDQUOT, 0, None),
    ],
)
def test_what_has_run_out_is_said_as_it_is(
    number: int, needed: int, free: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def statvfs(place: Path) -> SimpleNamespace:
        if free is None:
            raise FileNotFoundError
        return SimpleNamespace(f_bavail=free, f_bfree=free, f_blocks=free, f_frsize=1)

    monkeypatch.setattr(os, "statvfs", statvfs)
    with refusing():
        raise refused(OSError(number, os.strerror(number)), Path("here"), needed)


def test_the_last_inode_of_a_real_disk_is_told_from_the_last_byte(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "size=8m,nr_inodes=5") as small:
        while os.statvfs(small).f_favail:
            (small / str(os.statvfs(small).f_favail)).touch()
        with pytest.raises(OSError, match="No space left") as raised:
            (small / "more").touch()
        assert str(refused(raised.value)).startswith(f"no room for {small}/")


@pytest.mark.parametrize(("limit", "has"), [(2000, "`ulimit -f` allows 2.0 kB"), (resource.RLIM_INFINITY, "its file")])
def test_a_limited_file_names_the_limit(limit: int, has: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", {resource.RLIMIT_FSIZE: (limit, 123_000_000)}.__getitem__)
    error = refused(OSError(errno.EFBIG, "too large"), Path("file"), 9000)
    assert str(error).startswith(f"file too large (EFBIG): needs 9.0 kB, {has}")


def test_any_other_error_is_said_as_the_system_says_it() -> None:
    numbers = (errno.EACCES, errno.EIO, errno.EROFS, errno.ENOENT)
    for met in (*(OSError(number, os.strerror(number)) for number in numbers), OSError("no number")):
        with refusing():
            raise refused(met, Path("file"))


def test_an_error_names_its_file_without_the_temporary_name_and_no_disk_where_it_knows_no_file() -> None:
    with refusing():
        raise refused(OSError(errno.EIO, "Input/output error", "/run/.fence.json.0123456789ab.tmp"))
    with refusing():
        raise refused(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


WRAPPED = [
    (RuntimeError("[enforce fail at device.cc:186] rv != -1. -1 vs -1. Too many open files"), "too many open files"),
    (
        RuntimeError("unable to write to file </torch_7_1>: No space left on device (28)"),
        "/dev/shm is full.*--shm-size",
    ),
    (
        RuntimeError(
            "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's "
            "workers are out of shared memory. Please try to raise your shared memory limit."
        ),
        "/dev/shm is full, it has .* in all .*--shm-size.*--workers 0",
    ),
    (RuntimeError("can't start new thread"), "no more processes or threads .*ulimit -u.*--workers"),
    (RuntimeError("Resource temporarily unavailable"), "no more processes or threads"),
    (RuntimeError("unable to mmap 80 bytes from file: Cannot allocate memory (12)"), "out of memory .*micro_batch"),
    (RuntimeError("std::bad_alloc"), "out of memory"),
    (
        OSError("Caught OSError in DataLoader worker process 0.\nOSError: [Errno 24] Too many open files"),
        "too many open",
    ),
    (MemoryError(), "out of memory; use a smaller"),
]


@pytest.mark.parametrize(("met", "said"), WRAPPED)
def test_a_lack_is_found_in_the_words_of_libraries_whoever_calls_them(met: Exception, said: str) -> None:
    with pytest.raises(type(met)), user_code("your model"):
        raise met
    found = refusal(met)
    with pytest.raises(Exception, match=f"^{said}"):
        raise found
    assert found.exit_code == ExitCode.RESOURCES


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.EAGAIN, errno.ECONNREFUSED])
def test_what_the_users_code_is_refused_is_its_own_mistake(number: int) -> None:
    with pytest.raises(OSError, match="no") as raised, user_code("your data set"):
        raise OSError(number, "no")
    assert refusal(raised.value) is None


@pytest.mark.parametrize(
    "error",
    [RuntimeError("Connection reset by peer"), ValueError("No space left on device"), io.UnsupportedOperation("x")],
)
def test_anything_else_is_no_refusal(error: Exception) -> None:
    assert refusal(error) is None


def _met(action: Callable[[], object], limit: int, value: int) -> tuple[bool, str] | None:
    """In a process of its own that may have `value` of something and no more: whether it lacks that, and the line.

    None where this process may not become another user: root may have any number of processes.
    """
    if limit == resource.RLIMIT_NPROC:
        try:
            os.setuid(64123)
        except PermissionError:
            return None
    if limit == resource.RLIMIT_AS:
        value += int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(limit, (value, value))
    try:
        action()
    except Exception as error:
        return is_lack(error), str(refusal(error))
    return False, "nothing was refused"


def _open_many() -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(2000):
            stack.enter_context(open(os.devnull))  # noqa: PTH123


def _fork() -> None:
    with user_code("your model"):
        popen_fork.Popen(multiprocessing.get_context("fork").Process(target=print))


def _thread() -> None:
    threading.Thread(target=print).start()


def _bytes() -> None:
    bytearray(999 * MIB)


def _tensor() -> None:
    torch.empty(999 * MIB)


def _run() -> None:
    with user_code("your model"):
        subprocess.run([sys.executable, "--version"], check=True)


@pytest.mark.parametrize(
    ("action", "limit", "value", "said"),
    [
        (_open_many, resource.RLIMIT_NOFILE, 200, "too many open files for /dev/null (EMFILE): a process may have 200"),
        (_fork, resource.RLIMIT_NPROC, 0, "no more processes or threads (Resource temporarily unavailable): raise"),
        (_run, resource.RLIMIT_NPROC, 0, "no more processes or threads (Resource temporarily unavailable): raise"),
        (_thread, resource.RLIMIT_NPROC, 0, "no more processes or threads (can't start new"),
        (_bytes, resource.RLIMIT_AS, 200 * MIB, "out of memory; use a smaller"),
        (_tensor, resource.RLIMIT_AS, 200 * MIB, "out of memory (can't allocate memory: you tried"),
    ],
    ids=["files", "fork", "command", "thread", "python", "torch"],
)
def test_a_limit_of_the_system_is_met_and_named(
    action: Callable[[], object], limit: int, value: int, said: str
) -> None:
    found = ask(_met, action, limit, value)
    if found is None:
        pytest.skip("needs the right to become another user")
    lacks, line = found
    assert lacks, line
    assert line.startswith(said)


def _require(soft: int, hard: int, workers: int) -> tuple[int, str | None]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    said = None
    try:
        require_open_files(2, workers)
    except Exception as error:
        said = str(error)
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0], said


def test_a_process_takes_as_many_open_files_as_it_may() -> None:
    assert ask(_require, 24, 4096, 2) == (60, None)
    assert ask(_require, 1024, 4096, 2) == (1024, None)
    soft, said = ask(_require, 24, 40, 2)
    assert soft == 40
    assert said.startswith("about 60 open files are needed (EMFILE): a process may have 40 here; raise `ulimit -n`")
