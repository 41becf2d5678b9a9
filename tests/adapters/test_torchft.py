"""The tutorial on torchft: replicas are lost and come back, and all end with the digest of one process."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adapters.plain_loop import plain_digest
from tests.adapters.tutorials import blocks
from tests.support.commands import search_path, wait_until
from tests.support.processes import HANG

pytestmark = pytest.mark.extras("torchft")

PAGE = "exact-with-torchft.md"
PACED = "        schedule.step()\n"
"""In the script, after which a step may be made longer."""
LOOP = "while steps.step < 30:\n"
GATE = f"""import time
from pathlib import Path
print("ready", flush=True)
while not Path("begin").exists():
    time.sleep(0.01)
{LOOP}    while steps.step >= 20 and not Path("go").exists():
        time.sleep(0.01)
"""
"""The loop, which waits before its first step, and at step 20, until there is a file."""


def script() -> str:
    (python,) = blocks(PAGE, "python")
    return python


class Replica:
    """A replica in a process of its own; it is killed when its block ends."""

    def __init__(self, folder: Path, text: str, lighthouse: str, name: str) -> None:
        self.name, self._folder = name, folder
        (folder / "train.py").write_text(text)
        self._words = [sys.executable, "-u", "train.py", lighthouse, name]
        self._file = folder / f"{name}-{len(list(folder.iterdir()))}"

    def __enter__(self) -> Replica:
        env = {**os.environ, "PYTHONPATH": search_path(), "OMP_NUM_THREADS": "1"}
        with self._file.open("w") as said:
            self.process = subprocess.Popen(
                self._words, cwd=self._folder, env=env, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def said(self) -> str:
        return self._file.read_text()

    @property
    def steps(self) -> list[tuple[int, int]]:
        """Each step that was committed, and how many replicas took part in it."""
        return [(int(step), int(count)) for step, count in re.findall(r"^step (\d+), (\d+) replicas", self.said, re.M)]

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: any(each >= step for each, _ in self.steps), HANG, f"step {step} of {self.name}")

    def digest(self) -> str:
        """What it prints at its end. Raises AssertionError where it fails."""
        assert self.process.wait(HANG) == 0, self.said
        (found,) = re.findall(r"^weights ([0-9a-f]{64})$", self.said, re.M)
        return str(found)


@contextlib.contextmanager
def lighthouse_for(least: int) -> Iterator[str]:
    """The address of a lighthouse that waits a second for replicas, and until there are so many."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=least, join_timeout_ms=1000, heartbeat_timeout_ms=1000)
    try:
        yield server.address()
    finally:
        server.shutdown()


@pytest.fixture
def lighthouse_for_two() -> Iterator[str]:
    with lighthouse_for(2) as address:
        yield address


def test_one_replica_has_the_digest_of_a_plain_loop(tmp_path: Path) -> None:
    with lighthouse_for(1) as lighthouse, Replica(tmp_path, script(), lighthouse, "a") as alone:
        assert alone.digest() == plain_digest()
        assert alone.steps == [(step, 1) for step in range(1, 31)]


def test_replicas_are_lost_and_come_and_the_bits_stay(tmp_path: Path, lighthouse_for_two: str) -> None:
    text = script().replace(LOOP, GATE).replace(PACED, f"{PACED}        time.sleep(0.05)\n")
    with contextlib.ExitStack() as stack:

        def start(name: str) -> Replica:
            return stack.enter_context(Replica(tmp_path, text, lighthouse_for_two, name))

        first, second, third = all_three = [start(name) for name in "abc"]
        # Two alone would be at step 20 before a third that is slow to start, and wait there, while it waits for them.
        wait_until(lambda: all("ready" in each.said for each in all_three), HANG, "all three are ready")
        (tmp_path / "begin").touch()
        for each in all_three:
            each.wait_for_step(4)
        second.process.kill()
        first.wait_for_step(20)
        again = start("b")
        wait_until(lambda: "ready" in again.said, HANG, "the replica is back")
        (tmp_path / "go").touch()
        replicas = [first, third, again]
        assert {each.digest() for each in replicas} == {plain_digest()}
    for each in (first, third):
        done = [step for step, _ in each.steps]
        assert done == sorted(set(done)), "no step twice"
        # One of the two may have had all parts of the step in which the third was lost, and given it to the other.
        assert len(done) >= done[-1] - done[0]
    counts = dict(first.steps)
    assert {2, 3} <= set(counts.values())
    assert counts[20] == 2
    assert counts[30] == 3
    assert again.steps[0][0] > 20, "it has got the state of the others"


SPARES = "world_size_mode=__import__('torchft').manager.WorldSizeMode.FIXED_WITH_SPARES"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("use_async_quorum=False", f"use_async_quorum=False, {SPARES}", "WorldSizeMode.DYNAMIC"),
        ("micro_batches=6", "micro_batches=6 if name == 'a' else 12", "other micro-batches"),
        (
            "steps = ",
            "if name == 'b': manager._init_sync = False; network[0].weight.data += 1\nsteps = ",
            "other weights than replica 0",
        ),
        pytest.param("(manager, group,", "(manager, None,", "torchft's ProcessGroupGloo", marks=pytest.mark.slow),
    ],
    ids=["spares", "micro-batches", "weights", "group"],
)
def test_what_cannot_be_exact_is_refused_on_all(
    old: str, new: str, said: str, tmp_path: Path, lighthouse_for_two: str
) -> None:
    text = script().replace("use_async_quorum=False", "use_async_quorum=False, init_sync=False").replace(old, new)
    with contextlib.ExitStack() as stack:
        replicas = [stack.enter_context(Replica(tmp_path, text, lighthouse_for_two, name)) for name in "ab"]
        codes = [each.process.wait(HANG) for each in replicas]
    assert all(codes), [each.said for each in replicas]
    assert all(said in each.said for each in replicas)
