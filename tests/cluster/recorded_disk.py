"""A disk that writes down, in order, each write that reaches it, so that a power cut can be tried after every one.

    python -m tests.cluster.recorded_disk IMAGE RECORD FILE

mounts FILE as a copy of IMAGE, kept in memory; a loop device on FILE is the disk. What the file system above it keeps
in its caches never gets here, as it would never get to a real disk. Each write is appended to RECORD. The process ends
when FILE is unmounted.

It speaks the kernel's FUSE protocol, version 7.31 (include/uapi/linux/fuse.h), for one regular file without a folder
around it. After "dm-log-writes" of the kernel, which few machines have.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

_IN, _OUT = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ")
_WRITE = struct.Struct("<QQIIQII")
_RECORD = struct.Struct("<QQ")
_MOST_BYTES = 1 << 17
_GETATTR, _SETATTR, _OPEN, _READ, _WRITTEN, _STATFS, _RELEASE, _FSYNC = 3, 4, 14, 15, 16, 17, 18, 20
_FLUSH, _INIT, _DESTROY, _FORGET, _INTERRUPT, _BATCH_FORGET = 25, 26, 38, 2, 36, 42
_UNANSWERED = (_FORGET, _INTERRUPT, _BATCH_FORGET)
_FILE_MODE = 0o100600


class RecordedDisk:
    """Answers the kernel's requests for the file, and appends each write to `record`."""

    def __init__(self, image: Path, record: Path) -> None:
        self._content = bytearray(image.read_bytes())
        self._record = record.open("wb", buffering=0)
        self._answers: Mapping[int, Callable[[bytes], bytes]] = {
            _INIT: self._init,
            _GETATTR: self._attributes,
            _SETATTR: self._attributes,
            _OPEN: lambda _: bytes(16),
            _READ: self._read,
            _WRITTEN: self._write,
            _STATFS: lambda _: bytes(80),
            **dict.fromkeys((_RELEASE, _FSYNC, _FLUSH, _DESTROY), lambda _: b""),
        }

    def serve(self, device: int) -> None:
        """Answer requests until the file is unmounted."""
        while True:
            try:
                request = os.read(device, _MOST_BYTES + 4096)
            except OSError as error:
                if error.errno == errno.ENODEV:  # unmounted
                    return
                raise
            _, kind, number, *_ = _IN.unpack_from(request)
            if kind in _UNANSWERED:
                continue
            answer = self._answers.get(kind)
            body = b"" if answer is None else answer(request[_IN.size :])
            os.write(device, _OUT.pack(_OUT.size + len(body), -errno.ENOSYS if answer is None else 0, number) + body)

    def _init(self, _: bytes) -> bytes:
        return struct.pack("<IIIIHHIIHHII24x", 7, 31, _MOST_BYTES, 0, 16, 12, _MOST_BYTES, 1, 0, 0, 0, 0)

    def _attributes(self, _: bytes) -> bytes:
        size = len(self._content)
        return struct.pack("<QIIQQQQQQIIIIIIIIII", 0, 0, 0, 1, size, size // 512, *(0,) * 6, _FILE_MODE, 1, *(0,) * 5)

    def _read(self, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        return bytes(self._content[offset : offset + size])

    def _write(self, body: bytes) -> bytes:
        _, offset, size, *_ = _WRITE.unpack_from(body)
        data = body[_WRITE.size : _WRITE.size + size]
        self._content[offset : offset + size] = data
        self._record.write(_RECORD.pack(offset, size) + data)
        return struct.pack("<II", size, 0)


def writes_in(record: Path) -> Iterator[tuple[int, bytes]]:
    """The recorded writes, in order: each one's place on the disk and its bytes."""
    content = record.read_bytes()
    at = 0
    while at + _RECORD.size <= len(content):
        place, size = _RECORD.unpack_from(content, at)
        at += _RECORD.size
        yield place, content[at : at + size]
        at += size


def main(image: str, record: str, file: str) -> None:
    """Mount `file`, say so on standard output, and serve it."""
    disk = RecordedDisk(Path(image), Path(record))
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode={_FILE_MODE:o},user_id=0,group_id=0,max_read={_MOST_BYTES}"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"recorded-disk", os.fsencode(file), b"fuse", 0, options.encode()) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), file)
    print("mounted", flush=True)
    disk.serve(device)


if __name__ == "__main__":
    main(*sys.argv[1:])
