"""Copies what a run writes on a small volume to the output directory, and fills or frees that volume.

Runs inside a container with nothing but the standard library. Checkpoints are not copied: nobody outside reads them,
and they are most of the bytes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from pathlib import Path

_FILLER = ".filler"
_PAUSE_SECONDS = 0.2


def copy(source: Path, target: Path) -> None:
    """Copy every file that is newer or of another size; each appears at once, never half."""
    for path in source.rglob("*"):
        if "checkpoints" in path.parts or not path.is_file() or path.name == _FILLER or path.suffix == ".tmp":
            continue
        place = target / path.relative_to(source)
        with contextlib.suppress(FileNotFoundError):
            facts = path.stat()
            with contextlib.suppress(FileNotFoundError):
                known = place.stat()
                if (known.st_size, known.st_mtime_ns) == (facts.st_size, facts.st_mtime_ns):
                    continue
            place.parent.mkdir(parents=True, exist_ok=True)
            partial = place.with_name(place.name + ".copying")
            shutil.copy2(path, partial)
            partial.rename(place)


def fill(disk: Path) -> None:
    """Write until nothing more fits."""
    file = os.open(disk / _FILLER, os.O_WRONLY | os.O_CREAT, 0o600)
    with contextlib.suppress(OSError):
        while True:
            os.write(file, b"\0" * 65536)
    os.close(file)


def main(words: list[str]) -> None:
    """`mirror.py SOURCE TARGET [fill|free|copy]`; without a verb it copies until it is ended."""
    source, target, *verb = Path(words[0]), Path(words[1]), *words[2:]
    if verb == ["fill"]:
        fill(source)
    elif verb == ["free"]:
        (source / _FILLER).unlink()
    elif verb == ["copy"]:
        copy(source, target)
    else:
        while True:
            with contextlib.suppress(OSError):
                copy(source, target)
            time.sleep(_PAUSE_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1:])
