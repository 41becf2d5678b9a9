"""What `make image-sizes` prints: the layers of an image and its largest Python packages, as tables of Markdown.

    python -m tools.image_sizes samebits-cpu:latest

The layers are `docker history`'s. A package is what lies in site-packages under one name, with the libraries that its
wheel brings (`numpy.libs` counts as numpy), and with its compiled files.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_MEGABYTE = 1_000_000
_LIST_FILES = "find /opt/venv/lib/python3*/site-packages -type f -printf '%s %P\\n'"


class Part(NamedTuple):
    """A layer or a package: its size in bytes, and what it is."""

    size: int
    name: str


def main(images: Sequence[str]) -> int:
    """Print the tables of each image; the exit code is 4 where the engine has no such image or does not answer."""
    try:
        for image in images:
            print(describe(image))
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        said = (
            error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else "there is no docker command"
        )
        print(f"image-sizes: {said} (make image and make image-cpu build the images)", file=sys.stderr)
        return 4
    return 0


def describe(image: str) -> str:
    """Both tables of an image that the engine has. Raises CalledProcessError where it has none."""
    history = _docker("history", "--no-trunc", "--human=false", "--format", "{{json .}}", image)
    files = _docker("run", "--rm", "--network", "none", image, "sh", "-c", _LIST_FILES)
    found = layers(history.splitlines())
    return "\n".join(
        [
            f"{image}: {_megabytes(sum(layer.size for layer in found))} MB\n",
            table("layer", found),
            table("package", packages(files.splitlines())),
        ]
    )


def layers(history: Iterable[str]) -> list[Part]:
    """The layers that take room, the base image's first, from the lines of `docker history` in JSON."""
    steps = [json.loads(line) for line in history]
    return [Part(int(step["Size"]), _step(step["CreatedBy"])) for step in reversed(steps) if int(step["Size"])]


def packages(files: Iterable[str]) -> list[Part]:
    """The packages in site-packages, largest first, from lines with the size and path of a file."""
    sizes: Counter[str] = Counter()
    for line in files:
        size, _, path = line.partition(" ")
        first, *others = path.split("/")
        # CUDA's libraries are many packages in one folder.
        name = f"nvidia/{others[0]}" if first == "nvidia" and others else first
        sizes[re.sub(r"(\.libs|-[^-]+\.dist-info|\.py)$", "", name)] += int(size)
    return [Part(size, name) for name, size in sizes.most_common()]


def table(title: str, parts: Sequence[Part]) -> str:
    """A table of the parts of a megabyte or more; the rest is one line."""
    shown = [part for part in parts if part.size >= _MEGABYTE]
    rest = [part.size for part in parts if part.size < _MEGABYTE]
    rows = [*shown, *([Part(sum(rest), f"{len(rest)} smaller ones")] if rest else [])]
    lines = [f"| {title} | MB |", "|---|---|", *(f"| {part.name} | {_megabytes(part.size)} |" for part in rows)]
    return "\n".join([*lines, ""])


def _step(created_by: str) -> str:
    """A line of the Dockerfile in one cell: without what the builder adds, and not longer than it can be read."""
    words = re.sub(r"^(RUN (\|\d+ .*?)?)?/bin/sh -c (#\(nop\) +)?|# buildkit$|--mount=\S+", " ", created_by)
    words = " ".join(words.split()).replace("|", "\\|")
    if not words:
        return "the base image"
    return f"`{words[:77]}…`" if len(words) > 80 else f"`{words}`"


def _megabytes(size: int) -> str:
    return f"{size / _MEGABYTE:.0f}"


def _docker(*words: str) -> str:
    return subprocess.run(["docker", *words], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
