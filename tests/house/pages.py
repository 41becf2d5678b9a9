"""Follows a page of the documentation as its reader does, and compares what the commands print with what it shows.

In a page, a block of Python is a file: the last `NAME.py` in the prose before the block names it. A `console` block
holds commands, and the `text` block after it holds what they print; `…` stands for lines left out, `^C` for Ctrl-C,
pressed when the lines before it are there, and `^C^C` for Ctrl-C pressed until the end. Prose that says "another
terminal" makes the next commands run while those before go on, and prose that says "first terminal" shows how these
ended. `RUN` is the name of the run directory that was said last. Where the prose after commands says "exit code was N",
that is asserted, and otherwise 0.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes import HANG

_BLOCK = re.compile(r"(?P<prose>.*?)^```(?P<kind>\w+)\n(?P<content>.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A block of a page: `console`, `text`, `python` or another kind, with the prose before it and after it."""

    kind: str
    content: str
    before: str
    after: str

    @property
    def lines(self) -> list[str]:
        """The lines that are not empty."""
        return [line for line in self.content.splitlines() if line.strip()]


EMPTY = Block("", "", "", "")


def blocks(page: str) -> list[Block]:
    """All blocks of the page, from top to bottom."""
    found = list(_BLOCK.finditer(page))
    prose = [match["prose"] for match in found] + [page[found[-1].end() :] if found else page]
    return [Block(match["kind"], match["content"], *prose[at : at + 2]) for at, match in enumerate(found)]


def masked(line: str) -> str:
    """The line without what differs from run to run and from machine to machine: digests, ids, numbers, widths."""
    line = re.sub(r"\d+\.\d+(e[-+]\d+)?|(?<=Z-)[0-9a-f]{6}\b|\b(?=[a-f]*\d)[0-9a-f]{6,}\b|\d+", "#", line)
    return re.sub(r"\s+", " ", re.sub(r"-{3,}", "-", line)).strip()


def digests_in(text: str) -> list[str]:
    """The digests in a text, whole or cut short."""
    return re.findall(r"(?<![\w.])(?=\d*[a-f])(?=[a-f]*\d)[0-9a-f]{12,64}\b", text)


def missing(expected: Sequence[str], said: str) -> str | None:
    """The first expected line that was not said after the one before it; None if there is no such line."""
    rest = iter([masked(line) for line in said.splitlines()])
    return next((line for line in expected if line.strip() != "…" and masked(line) not in rest), None)


class Started:
    """Commands, one after the other, in a session of their own, as in a terminal; what they say goes into a file."""

    def __init__(self, lines: str, folder: Path, log: Path, settings: Mapping[str, str]) -> None:
        self.lines, self._log = lines, log
        with log.open("w") as file:
            self._process = subprocess.Popen(
                ["bash", "-ec", lines], cwd=folder, env=settings, stdout=file, stderr=file, start_new_session=True
            )

    @property
    def said(self) -> str:
        """What has been said until now."""
        return self._log.read_text()

    def wait_for(self, expected: Sequence[str]) -> None:
        """Wait until these lines have been said. Raises AssertionError at the end without them, or after HANG s."""
        deadline = time.monotonic() + HANG
        while lacks := missing(expected, self.said):
            assert self._process.poll() is None, f"`{self.lines}` ended without {lacks!r}:\n{self.said}"
            assert time.monotonic() < deadline, f"`{self.lines}` has not said {lacks!r}:\n{self.said}"
            time.sleep(0.02)

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        os.killpg(self._process.pid, signal.SIGINT)

    def end(self, interrupting: bool = False) -> int:
        """Wait for the end, and return the exit code. Raises subprocess.TimeoutExpired after HANG seconds."""
        deadline = time.monotonic() + HANG
        while interrupting and self._process.poll() is None and time.monotonic() < deadline:
            self.interrupt()
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(0.5)
        return self._process.wait(HANG)

    def kill(self) -> None:
        """End what still runs."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class Reader:
    """Reads a page in one folder, with the environment variables of one shell.

    Commands that begin with a text in `omit` are not run, and nothing is compared where no command is left.
    """

    def __init__(self, folder: Path, settings: Mapping[str, str], omit: Sequence[str] = ()) -> None:
        self._folder, self._settings, self._omit = folder, settings, tuple(omit)
        self._logs = folder.parent / f"{folder.name}-said"
        self._logs.mkdir()
        self._started: list[Started] = []
        self._first_terminal: Started | None = None

    def follow(self, page: str) -> None:
        """Do what the page says. Raises AssertionError where something else happens than the page shows."""
        try:
            self._follow(blocks(page))
        finally:
            for command in self._started:
                command.kill()

    def _follow(self, page: list[Block]) -> None:
        for block, shown, then in zip(page, [*page[1:], EMPTY], [*page[2:], EMPTY, EMPTY], strict=True):
            lines = [line for line in block.lines if not line.startswith(self._omit)]
            if block.kind == "python":
                (self._folder / re.findall(r"`(\w+\.py)`", block.before)[-1]).write_text(block.content)
            elif block.kind == "console" and lines:
                shown = shown if shown.kind == "text" else Block("text", "", "", block.after)
                if then.kind == "console" and "another terminal" in then.before:
                    self._first_terminal = self._start(lines)
                    self._first_terminal.wait_for(shown.lines)
                else:
                    self._finish(self._start(lines), shown)
            elif self._first_terminal is not None and "first terminal" in block.before:
                self._finish(self._first_terminal, block)

    def _start(self, lines: Sequence[str]) -> Started:
        runs = re.findall(r"^run directory (\S+)$", "\n".join(command.said for command in self._started), re.MULTILINE)
        text = re.sub(r"\bRUN\b", Path(runs[-1]).name if runs else "RUN", "\n".join(lines))
        self._started.append(Started(text, self._folder, self._logs / str(len(self._started)), self._settings))
        return self._started[-1]

    def _finish(self, command: Started, shown: Block) -> None:
        """Wait for the end, pressing Ctrl-C where the page does, and compare."""
        if "^C" in shown.lines:
            command.wait_for(shown.lines[: shown.lines.index("^C")])
            command.interrupt()
        code, expected = command.end("^C^C" in shown.lines), re.findall(r"exit code was (\d+)", shown.after)
        assert code == int(expected[0] if expected else 0), f"`{command.lines}` ended with {code}:\n{command.said}"
        lacks = missing([line for line in shown.lines if not line.startswith("^C")], command.said)
        assert lacks is None, f"`{command.lines}` did not say {lacks!r}:\n{command.said}"
        said = "".join(each.said for each in self._started)
        if 0 < said.count(", reduction ") == said.count("numerics portable"):
            # Such digests are the same on every machine that can have them, so the page shows what its readers see; but
            # for those of a bundle and of a record, in which the dates of the run stand.
            dated = (" bytes, sha256 ", "/run.json", " kept states; sha256 ")
            lasting = "\n".join(line for line in shown.lines if not any(words in line for words in dated))
            other = [digest for digest in digests_in(lasting) if digest not in said]
            assert not other, f"`{command.lines}` ended with other digests than {other}:\n{command.said}"
