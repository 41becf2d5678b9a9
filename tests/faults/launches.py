"""`ddp train` with its workers, as one node of a launch that a test can watch, hurt and wait for."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import psutil

from ddp_core.checkpoint import find_checkpoints
from ddp_core.distributed.world import free_port
from tests.faults.scenarios import Event, Place
from tests.support.commands import Forked, forked_as, train, trained, wait_until
from tests.support.processes import HANG

DOTS = str(Path(__file__).parent / "experiment_files" / "dots.py")


HURRY = "hurry"
"""The file in the output directory of `nodes` after which their micro-batches take no longer than they must."""
RANK = "ddp-rank-"
"""What `ps` calls a worker, before its rank."""


class Launch(Forked):
    """One `ddp` command and everything below it, started in a session of its own."""

    def workers(self) -> dict[int, psutil.Process]:
        """The workers that live now, by rank."""
        found = {}
        for child in self.everything()[1:]:
            with contextlib.suppress(psutil.Error):
                if (name := child.name()).startswith(RANK) and child.status() != psutil.STATUS_ZOMBIE:
                    found[int(name.removeprefix(RANK))] = child
        return found

    def everything(self) -> list[psutil.Process]:
        """The launcher and all that it has started."""
        with contextlib.suppress(psutil.Error):
            launcher = psutil.Process(self.pid)
            return [launcher, *launcher.children(recursive=True)]
        return []

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to the launcher and all processes below it, as `docker kill` or `docker pause` do to a node."""
        for process in self.everything():
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL to the launcher and all processes below it."""
        self.signal_all(signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the launcher alone."""
        os.kill(self.pid, number)


@contextlib.contextmanager
def launched(*words: str | Path, pause: float = 0.0, hurry: Path | None = None) -> Iterator[Launch]:
    """Start `ddp WORDS`; its processes are killed when the block ends.

    Each micro-batch of `dots` takes `pause` seconds longer until the file `hurry` exists. Raises AssertionError if the
    launch leaves a process behind.
    """
    env = {"DOTS_PAUSE": str(pause), "DOTS_HURRY": str(hurry or "")}
    with forked_as(Launch, *words, env=env) as started:
        try:
            yield started
        except BaseException:
            print(*started.said(), sep="\n")
            raise
        finally:
            started.kill()


def train_words(output: Path, *words: str | Path, ranks: int = 2, experiment: str | Path = DOTS) -> list[str]:
    """The words of a `ddp train` of `dots` on this machine's CPU, with a checkpoint every four steps."""
    return [
        *("train", str(experiment), "--output", str(output)),
        *("--layout", "ddp", "--device", "cpu", "--nproc-per-node", str(ranks)),
        *("--checkpoint-every", "4", "--log-every", "1"),
        *map(str, words),
    ]


@contextlib.contextmanager
def nodes(
    count: int, output: Path, *words: str | Path, pause: float = 0.0, ranks: int = 1, allowed: str | None = None
) -> Iterator[tuple[list[Launch], Callable[[], Launch], Store]]:
    """Start `count` launches of `ranks` workers each that meet at a rendezvous; `allowed` is their --nnodes.

    Yields the launches, a function that starts one more, and the rendezvous. `pause` holds until HURRY is there.
    """
    with Store(free_port()) as store, contextlib.ExitStack() as stack:
        meeting = ["--rdzv-endpoint", f"127.0.0.1:{store.port}", "--rdzv-id", f"test-{store.port}"]
        full = train_words(output, *words, "--nnodes", allowed or f"1:{count}", *meeting, ranks=ranks)

        def start() -> Launch:
            return stack.enter_context(launched(*full, pause=pause, hurry=output / HURRY))

        yield [start() for _ in range(count)], start, store


class Processes(Place):
    """The place of scenarios where a node is a launch of this machine."""

    def __init__(self, output: Path, launches: Iterable[Launch], start: Callable[[], Launch], store: Store) -> None:
        self.output, self._start, self._store = output, start, store
        self.here, self._watch = list(launches), Watch(output)
        self.always, self._silent = list(self.here), list[Launch]()

    def happen(self, event: Event) -> set[int]:
        """Let it happen; the process ids of the workers that are gone with it."""
        whom = [self._node_of(rank) for rank in event.ranks]
        gone = {process.pid for launch in whom for process in launch.workers().values()}
        if event.what == "kill worker":
            struck = [self._worker(launch, rank) for launch, rank in zip(whom, event.ranks, strict=True)]
            for process in struck:
                process.kill()
            return {process.pid for process in struck}
        match event.what:
            case "kill":
                for launch in whom:
                    launch.kill()
            case "silence":
                self._silent = whom
                for launch in whom:
                    launch.signal_all(signal.SIGSTOP)
            case "restore":
                for launch in self._silent:
                    launch.signal_all(signal.SIGCONT)
                self.here += self._silent
            case "ask":
                for launch in whom:
                    launch.signal(signal.SIGTERM)
                    left = launch.end()
                    assert left.code == 75, left.errors
                    assert "this node has left the others, who go on (SIGTERM)" in left.errors
            case "stop":
                self._stop(whom)
            case "start":
                self.here.append(self._start())
            case "lose rendezvous":
                self._store.kill()
            case "restore rendezvous":
                self._store.start()
            case "train":
                self._watch.wait_for_step(self.step() + 10)
        self.here = [launch for launch in self.here if launch not in whom]
        if event.what != "silence":
            self.always = [launch for launch in self.always if launch not in whom]
        return gone

    def _stop(self, whom: list[Launch]) -> None:
        for launch in whom:
            launch.signal(signal.SIGTERM)
        for launch in self.here:
            ended = launch.end()
            assert (ended.code, "; saved, continue with `ddp train " in ended.errors) == (75, True), ended.errors
            assert launch in whom or "(another rank was asked to); saved" in ended.errors
        directory, record = trained(self.output)
        assert record["status"] == "stopped"
        assert find_checkpoints(directory.checkpoints)[0].step == self.step()
        self.here.clear()

    def _node_of(self, rank: int) -> Launch:
        if rank < 0:
            return self.here[-1]
        self.until(lambda: any(rank in launch.workers() for launch in self.here), f"there is a rank {rank}")
        return next(launch for launch in self.here if rank in launch.workers())

    def _worker(self, launch: Launch, rank: int) -> psutil.Process:
        self.until(launch.workers, "the node has a worker")
        return launch.workers()[rank] if rank >= 0 else launch.workers().popitem()[1]

    def workers(self) -> set[int]:
        """The process ids of the workers that are here."""
        return {process.pid for launch in self.here for process in launch.workers().values()}

    def said(self) -> dict[Launch, str]:
        """What each launch has said that is here."""
        return {launch: "".join(launch.said()) for launch in self.here}

    def step(self) -> int:
        return self._watch.step()

    def new_step(self, since: float) -> float:
        """Wait for a resume after the moment `since`, then for a step; the seconds until then."""
        return self._watch.wait_for_new_step(since)

    def end(self) -> None:
        """Wait until all that are here have ended with 0."""
        ended = [launch.end() for launch in self.here]
        assert {end.code for end in ended} == {0}, [end.errors for end in ended]


class Store:
    """`ddp rendezvous`, which can be killed and started again on its port."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._stack = contextlib.ExitStack()
        self.launch: Launch | None = None

    def start(self) -> None:
        """Start the rendezvous, and wait until it listens."""
        self.launch = store = self._stack.enter_context(launched("rendezvous", "--port", str(self.port)))
        wait_until(lambda: "listening" in store.said()[0], HANG, "the rendezvous listens")

    def kill(self) -> None:
        """End the rendezvous by SIGKILL."""
        assert self.launch is not None
        self.launch.kill()
        self.launch.end()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._stack.close()


class Watch:
    """What the run directory below `output` shows while the run goes on."""

    def __init__(self, output: Path) -> None:
        self.output = output

    def records(self, kind: str) -> list[dict[str, Any]]:
        """The records of one kind in metrics.jsonl, with those that a resume has rolled back."""
        found = []
        for path in self.output.glob("*/*/metrics.jsonl"):
            for line in path.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):
                    found.append(json.loads(line))
        return [record for record in found if record["kind"] == kind]

    def step(self) -> int:
        """The last step in metrics.jsonl; 0 if there is none."""
        steps = self.records("step")
        return int(steps[-1]["step"]) if steps else 0

    def wait_for_step(self, step: int) -> None:
        """Wait until this step is done."""
        wait_until(lambda: self.step() >= step, HANG, f"step {step}")

    def wait_for_new_step(self, since: float) -> float:
        """Wait for a resume after the moment `since`, then for a step; return the seconds from `since` to the step."""
        first = [0.0]

        def found() -> bool:
            resumed = [record["time"] for record in self.records("resume") if record["time"] > since]
            if resumed:
                first[:] = [record["time"] for record in self.records("step") if record["time"] > resumed[0]][:1]
            return bool(resumed and first)

        wait_until(found, HANG, "a new step")
        return first[0] - since

    def when_struck(self, fault: str) -> float:
        """The time at which a scripted fault happened, in seconds since 1970."""
        (marker,) = self.output.glob(f"*/*/.fault-{fault}")
        return marker.stat().st_mtime


def undisturbed(output: Path, *words: str) -> str:
    """The digest of the weights of `dots`, trained by one process without any fault."""
    return str(train(output, DOTS, *words)["weights_sha256"])


def check_aftermath(output: Path, digest: str, steps: int = 80) -> dict[str, Any]:
    """Check that the run ended as if without faults: same weights, so every sample once; return its record."""
    _, record = trained(output)
    assert (record["status"], record["exit_code"], record["weights_sha256"]) == ("completed", 0, digest)
    assert record["result"]["steps"] == steps
    return record
