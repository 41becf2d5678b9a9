"""Which rank opens which files for writing, observed inside the processes of a training run.

Python tells an audit hook (PEP 578) of every `open` and `os.open`, but not in which folder a bare name is opened
(`dir_fd`), so `os.open` is wrapped, too. Both come into each process of a run by a module `sitecustomize` on its search
path, which Python imports at start; a process that is forked from another has them. What libraries open in C alone is
not seen, so the files that are there afterwards are compared with those seen.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SITECUSTOMIZE = """
import json, os, sys

watched = set()

def note(rank, name):
    with open(os.path.join({notes!r}, f"{{os.getpid()}}.jsonl"), "a") as notes:
        notes.write(json.dumps({{"rank": int(rank), "name": name}}) + "\\n")

def see(path, flags):
    rank = os.environ.get("RANK")
    if rank is None:
        return
    if (os.getpid(), rank) not in watched:
        watched.add((os.getpid(), rank))
        note(rank, None)
    if isinstance(path, (str, bytes)) and flags & (os.O_WRONLY | os.O_RDWR):
        directory, name = os.path.split(os.path.abspath(os.fsdecode(path)))
        if os.path.basename(directory) == {folder!r}:
            note(rank, name)

def open_in(path, flags, *rest, dir_fd=None, **named):
    if dir_fd is not None and os.path.isdir("/proc/self/fd"):
        see(os.path.join(os.readlink(f"/proc/self/fd/{{dir_fd}}"), os.fsdecode(path)), flags)
    return real(path, flags, *rest, dir_fd=dir_fd, **named)

real, os.open = os.open, open_in
sys.addaudithook(lambda event, arguments: see(arguments[0], arguments[2]) if event == "open" else None)
"""


class FileWatch:
    """Notes of the processes: which ranks were watched, and the names that each opened for writing."""

    def __init__(self, place: Path, folder: str) -> None:
        (self._modules, self._notes) = place / "modules", place / "notes"
        self._modules.mkdir()
        self._notes.mkdir()
        (self._modules / "sitecustomize.py").write_text(_SITECUSTOMIZE.format(notes=str(self._notes), folder=folder))

    @property
    def search_path(self) -> str:
        """What has to stand first in PYTHONPATH of the processes."""
        return str(self._modules)

    def opened(self) -> dict[int, list[str]]:
        """Names opened for writing, by the rank; a rank that was watched and opened none has an empty list."""
        found: dict[int, list[str]] = {}
        for path in sorted(self._notes.iterdir()):
            for line in path.read_text().splitlines():
                note = json.loads(line)
                names = found.setdefault(note["rank"], [])
                if note["name"] is not None:
                    names.append(note["name"])
        return found


@contextmanager
def watch_files(folder: str) -> Iterator[FileWatch]:
    """Watch what is opened for writing in every folder of this name."""
    with tempfile.TemporaryDirectory(prefix="ddp-claim-") as place:
        yield FileWatch(Path(place), folder)
