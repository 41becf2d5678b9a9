"""Compares what errors say with what is kept of it in wording.json, one file in each folder of tests.

So a test names the case and repeats no phrase. `pytest --update-wording` keeps what the tests of that run meet; the
change is read as a diff.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from ddp_core.base.errors import UserError

ROOT = Path(__file__).parents[2]
UPDATE = "DDP_TEST_UPDATE_WORDING"
"""The variable that the option --update-wording sets, so that workers of pytest-xdist see it."""

# Each names what differs from run to run.
_OTHER_EACH_TIME = re.compile(
    "|".join(
        (
            r"[^\s'\"=(]*/pytest-of-[^/\s]+/pytest-\d+/(?:popen-gw\d+/)?[^/\s'\":;,)]+",  # the folder of a test
            r"/tmp/[^\s'\":;,)]+",  # another folder
            r"\b20\d{6}T\d{6}Z-\w+",  # a run
            r"(?<=127\.0\.0\.1:)\d+",  # a port
            r"[0-9a-f]{7,}…",  # a digest
            r"(?<=/)test_\w+\.py:\d+",  # a line of a test
            r"\b0x[0-9a-f]+",  # an object
            r"[\d.]+ .?B(?= are free)",  # the room on a disk
        )
    )
)
_met: dict[str, int] = {}


@contextlib.contextmanager
def refusing(error: type[BaseException] = UserError) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Fail unless the block raises `error`, with the exit code and the message that are kept for this test."""
    with pytest.raises(error) as caught:
        yield caught
    code = f" {caught.value.exit_code:d}" if isinstance(caught.value, UserError) else ""
    said_as_before(f"{type(caught.value).__name__}{code}: {caught.value}")


def said_as_before(text: str) -> None:
    """Fail unless the text equals the kept one; the second call in a test compares with its second text, and so on.

    What differs from run to run, such as folders, ports and digests, is left out of both.
    """
    node = os.environ["PYTEST_CURRENT_TEST"].rpartition(" (")[0]
    file, _, function = node.partition("::")
    folder, test = ROOT / Path(file).parent, f"{Path(file).name}::{function}"
    text = text.replace(str(ROOT), "ROOT")
    text = re.sub(re.escape(version("torch").partition("+")[0]) + r"(\+\w+)?", "TORCH", text)
    text = _OTHER_EACH_TIME.sub("…", text)
    number = _met.get(node, 0)
    _met.clear()
    _met[node] = number + 1
    if UPDATE in os.environ:
        _keep(folder, test, number, text)
        return
    kept = kept_wording(folder).get(test, [])
    assert [text] == kept[number : number + 1], "new, or changed on purpose? run this test with --update-wording"


def kept_wording(folder: Path) -> dict[str, list[str]]:
    """The texts in the folder's wording.json: those of each test, in the order of its calls."""
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
