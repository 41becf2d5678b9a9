"""What the system refuses a process: disk, files, memory, processes. One rule says what, where, and what to do now.

Whoever meets such an error asks here: `refusal` where it may be anything, `refused` where it is of the system, such as
an OSError of a write. Libraries wrap what the system said into RuntimeErrors; their text is searched for its words.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import shutil
import traceback
from io import UnsupportedOperation
from pathlib import Path

from ddp_core.base.errors import ExitCode, UserError, one_line
from ddp_core.base.files import target_of
from ddp_core.base.user_code import users

# Where memory runs out, threads and libraries raise RuntimeErrors that quote the first error.
_OUT_OF_MEMORY = re.compile(
    r"(?:DefaultCPUAllocator|[A-Z]+ out of memory|CUDA error: out of memory|CU[A-Z]+_STATUS_ALLOC_FAILED|"
    r"std::bad_alloc|Cannot allocate memory)[^\n]*"
)
_NO_THREAD = re.compile(
    r"can't start new thread|^Resource temporarily unavailable$|[Tt]hread[^\n]*temporarily unavailable"
)
_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LACKS = (*_ROOM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EIO)
"""What is a lack whoever meets it, the user's code, too."""
_SAID = {number: re.compile(re.escape(os.strerror(number))) for number in _LACKS} | {
    errno.ENOMEM: _OUT_OF_MEMORY,
    errno.EAGAIN: _NO_THREAD,
    # The latter is a loader process that has touched a page of /dev/shm for which there was no room.
    errno.ENOSPC: re.compile("No space left on device|killed by signal: Bus error"),
}
_SHARED_MEMORY = re.compile(r"/dev/shm|shared memory|file </?torch_")
SMALL_ROOM = 1 << 20
"""Bytes below which a disk counts as full where nobody knows how many were needed."""

_OPEN_FILES_ALONE, _OPEN_FILES = 12, 48
"""Files that a process has open that trains alone, and one with others, beside those for each peer or loader."""

_ON_CPU = "use a smaller --set micro_batch=N, fewer processes on this machine, or a machine with more memory"
_ON_CUDA = (
    "use a smaller --set micro_batch=N (more of them make up the same global batch), --set precision=bf16, and where "
    "it happened in an evaluation a smaller --set evaluation.samples_per_batch=N"
)
MORE_SHARED_MEMORY = (
    "give the container more (docker run --shm-size 1g, shm_size: 1gb in compose.yaml, ipc: host), or use --workers 0"
)
MEND_OUTPUT = "choose another with --output DIR, or mend its owner and mode"
_NOT_YOURS = "give an output directory that this user may write to"
_TODO = {
    **dict.fromkeys(
        (errno.EIO, errno.ESHUTDOWN, errno.ENXIO, errno.ENODEV, errno.EUCLEAN, errno.ESTALE),
        "the disk, or the way to it, has failed: the kernel's log (dmesg) tells more; mend it",
    ),
    **dict.fromkeys(
        (errno.ENOLCK, errno.ENOSYS),
        "its file system has no locks: mount it with them, or give an output directory on another",
    ),
    errno.EROFS: f"{_NOT_YOURS}; where it could be written before, its disk has failed: see dmesg",
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), "was it removed or renamed meanwhile?"),
}


def refusal(error: BaseException) -> UserError | None:
    """The UserError (4) where the system has refused something; None for any other exception."""
    # An OSError of the user's code is the user's own, unless something is lacking: memory, disk, processes, files.
    number = _number(error)
    if number is None or (users(error) and not is_lack(error)):
        return None
    return refused(error)


def is_lack(error: BaseException) -> bool:
    """Whether something is lacking here, whoever's code has met it: memory, disk, processes, open files."""
    number = _number(error)
    if number == errno.EAGAIN and isinstance(error, OSError):
        # Whatever else is not ready just now may be tried again; a process that cannot be started may not.
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        module = str(frames[-1].f_globals.get("__name__")) if frames else ""
        return module.partition(".")[0] in ("subprocess", "multiprocessing")
    return number in _LACKS


def refused(error: BaseException, path: Path | None = None, needed: int = 0, todo: str | None = None) -> UserError:
    """The UserError (4) for what the system has refused.

    `path`: what was to be written, in `needed` bytes; by default the file that the error names. `todo`: what to do
    where nothing is lacking.
    """
    return UserError(_in_words(error, _number(error) or 0, path, needed, todo), ExitCode.RESOURCES)


def _number(error: BaseException) -> int | None:
    """The errno of what the system has refused; None for any other exception."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return errno.ENOMEM
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if isinstance(error, OSError | RuntimeError) and not isinstance(error, UnsupportedOperation):
        return next((number for number, words in _SAID.items() if words.search(str(error))), None)
    return None


def _in_words(error: BaseException, number: int, path: Path | None, needed: int, todo: str | None) -> str:
    text = one_line(error)
    reason = (error.strerror if isinstance(error, OSError) else None) or text
    verb, filename = "write", getattr(error, "filename", None)
    if path is None and isinstance(filename, str | bytes):
        verb, path = "use", Path(os.fsdecode(filename))
        path = path.with_name(target_of(path.name) or path.name)
    at = f" for {path}" if path is not None else ""
    match number:
        case errno.ENOMEM:
            return _out_of_memory(reason if isinstance(error, OSError) else str(error))
        case errno.EAGAIN:
            return (
                f"no more processes or threads ({reason}): raise `ulimit -u`, or the container's limit of processes "
                "(docker's --pids-limit), or use fewer processes and --workers"
            )
        case errno.EMFILE:
            return f"too many open files{at} (EMFILE): {_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])}"
        case errno.ENFILE:
            return f"too many open files on this machine{at} (ENFILE): raise fs.file-max, or end other programs"
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            if path is None and _SHARED_MEMORY.search(text):
                has = ""
                with contextlib.suppress(OSError):
                    has = f", it has {human_bytes(shutil.disk_usage('/dev/shm').total)} in all"
                return f"/dev/shm is full{has} ({reason}): {MORE_SHARED_MEMORY}"
            return _without_room(number, path, needed)
    name = f" ({errno.errorcode[number]})" if number in errno.errorcode else ""
    advice = todo or _TODO.get(number, _NOT_YOURS if path is not None else "")
    what = f"cannot {verb} {path}" if path is not None else "the system refuses"
    return f"{what}: {reason}{name}{f'; {advice}' if advice else ''}"


def _out_of_memory(text: str) -> str:
    found = _OUT_OF_MEMORY.search(text)
    line = found[0] if found is not None else text.strip().partition("\n")[0]
    reason = line.partition(". GPU ")[0].removeprefix("DefaultCPUAllocator: ")
    on_cuda = re.match(r"CUDA|CU[A-Z]+_STATUS", reason)
    return f"out of memory{f' ({reason})' if reason else ''}; {_ON_CUDA if on_cuda else _ON_CPU}"


def _open_files(limit: int) -> str:
    return f"a process may have {limit} here; raise `ulimit -n` (docker's --ulimit nofile=65536)"


def require_open_files(world_size: int, workers: int, tensors: int = 0) -> None:
    """Let this process and its children open as many files as they surely need; UserError (4) where they may not."""
    # `tensors` are what loader processes send ahead. Some libraries hang, rather than say so, where they cannot open
    # one more.
    needed = (_OPEN_FILES if world_size > 1 or workers else _OPEN_FILES_ALONE) + 2 * world_size + 4 * workers + tensors
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed and hard != soft:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft < needed:
        less = ", or use --workers 0" if tensors else ""
        raise UserError(f"about {needed} open files are needed (EMFILE): {_open_files(soft)}{less}", ExitCode.RESOURCES)


def human_bytes(count: float) -> str:
    """A count of bytes with a decimal unit, e.g. "94.1 MB"."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def disk_full(path: Path, needed: int, available: int) -> UserError:
    """The error for a disk without room for `path`; `needed` is 0 where that is not known."""
    return UserError(
        f"disk full: {f'needs {human_bytes(needed)}, ' if needed else ''}has {human_bytes(available)} for {path}; free "
        "some space or keep fewer checkpoints, then start again: the run continues from its newest checkpoint",
        ExitCode.RESOURCES,
    )


def _without_room(number: int, path: Path | None, needed: int) -> str:
    """What has run out where a write found no room."""
    name, at = errno.errorcode[number], f" for {path}" if path is not None else ""
    if number == errno.EFBIG:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        has = "its file system allows no more" if limit < 0 else f"`ulimit -f` allows {human_bytes(limit)}"
        return (
            f"file too large ({name}): {f'needs {human_bytes(needed)}, ' if needed else ''}{has}{at}; raise that limit"
        )
    free = None
    if path is not None:
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(path if path.is_dir() else path.parent).free
    if path is None or free is None:
        return f"disk full ({name}){at}; free some space"
    if number == errno.ENOSPC and free < (needed or SMALL_ROOM):
        return str(disk_full(path, needed, free))
    return (
        f"no room{at} ({name}), though {human_bytes(free)} are free on its file system: inodes (`df -i`), a quota "
        "(`quota -s`) or reserved blocks have run out; remove files, or have the limit raised"
    )
