"""What errors and commands say, kept whole beside the tests, so that a test names what is refused and no phrase of it.

Each folder of tests keeps its wording in one file, wording.json. `pytest --update-wording` rewrites what the tests that
it runs have met; the change is read as a diff.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from ddp_core.base.errors import UserError

ROOT = Path(__file__).parents[2]
UPDATE = "DDP_TEST_UPDATE_WORDING"
"""The variable that the option --update-wording sets, so that workers of pytest-xdist see it."""

_OTHER_EACH_TIME = re.compile(
    "|".join(
        (
            r"[^\s'\"=(]*/pytest-of-[^/\s]+/pytest-\d+/(?:popen-gw\d+/)?[^/\s'\":;,)]+",  # a folder of the test
            r"/tmp/[^\s'\":;,)]+",
            r"(?<=process )\d+|(?<=127\.0\.0\.1:)\d+|(?<=port )\d+|(?<=PORT=)\d+",
            r"\b0x[0-9a-f]+|[0-9a-f]{7,}…|[\d.]+ .?B(?= are free)",
            r"\b20\d{6}T\d{6}Z-\w+|\b20\d\d-\d\d-\d\dT[\d:.+Z]+",  # a run, a time
        )
    )
)
_met: dict[str, int] = {}


@contextlib.contextmanager
def refusing(error: type[BaseException] = UserError, hide: str = "") -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Fail unless the block raises `error`, with the exit code and the message that are kept for this test."""
    with pytest.raises(error) as caught:
        yield caught
    code = f" {caught.value.exit_code:d}" if isinstance(caught.value, UserError) else ""
    said_as_before(f"{type(caught.value).__name__}{code}: {caught.value}", hide)


def said_as_before(text: str, hide: str = "") -> None:
    """Fail unless the text is what is kept for this test: its first, second, … text in the order of the calls.

    Folders, processes, ports, runs and times may differ, and what the pattern `hide` matches.
    """
    node = os.environ["PYTEST_CURRENT_TEST"].rpartition(" (")[0]
    folder, _, name = node.partition("::")[0].rpartition("/")
    test = f"{name}::{node.partition('::')[2]}"
    for name, here in (("ROOT", str(ROOT)), ("HOST", socket.gethostname()), ("TORCH", version("torch"))):
        text = text.replace(here, name)
    text = _OTHER_EACH_TIME.sub("…", text)
    text = re.sub(hide, "…", text) if hide else text
    number = _met.get(node, 0)
    _met.clear()
    _met[node] = number + 1
    if UPDATE in os.environ:
        _keep(ROOT / folder, test, number, text)
        return
    kept = kept_wording(ROOT / folder).get(test, [])
    assert [text] == kept[number : number + 1], "new, or changed on purpose? run this test with --update-wording"


def kept_wording(folder: Path) -> dict[str, list[str]]:
    """The texts that a folder of tests keeps, by file and test."""
    path = folder / "wording.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _keep(folder: Path, test: str, number: int, text: str) -> None:
    with (folder / "wording.json").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        kept = json.loads(file.read() or "{}")
        kept[test] = [*kept.get(test, [])[:number], text]
        file.truncate(0)
        file.write(json.dumps(dict(sorted(kept.items())), indent=1, ensure_ascii=False) + "\n")
