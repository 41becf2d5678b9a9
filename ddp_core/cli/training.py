"""Start `ddp train` in a process of its own: for a user's Python (`ddp_core.train`), and for commands that train."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import select
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from pydantic import ValidationError

from ddp_core.base.errors import UserError, nearest_name
from ddp_core.config.layout import LayoutKind
from ddp_core.config.options import Asked
from ddp_core.config.records import command_line, explain, is_repeated, setting_text
from ddp_core.distributed.children import error_of
from ddp_core.distributed.reports import caller_variables
from ddp_core.record.reading import Run

_LAST_LINES = 200
"""Among so many, the error is looked for."""
_SIGNAL_SECONDS = 0.2
"""So long a signal may wait for its handler."""


def train(
    name_or_path: str | os.PathLike[str],
    *,
    layout: LayoutKind | None = None,
    settings: Mapping[str, Any] | Iterable[str] = (),
    **options: Any,
) -> Run:
    """Train an experiment as `ddp train` does, and return the finished run.

    `name_or_path`: a name that `ddp list` shows, or the path of an experiment file. `layout`: "single" (the default),
    "dp" or "ddp". `settings`: values of the experiment to change, by name, such as `{"epochs": 3, "optimizer.lr":
    0.05}`, or as a sequence of "name=value". `options`: every other option of `ddp train`, its words joined by `_`:
    `nproc_per_node=2` is `--nproc-per-node 2`; a path may be a Path. `asynchronous_save=False` is `--synchronous-save`,
    and `faults` is `--fault`. `timeout` and `max_seconds` are in seconds.

    Training happens in a new process, so that it does not matter what this one has loaded or computed before; what that
    process prints is written to `sys.stdout` as it comes. Ctrl-C, or a notebook's interrupt, asks it to save and stop,
    waits for that, and raises KeyboardInterrupt; a second one ends it at once. When this process dies, training is
    saved and stopped.

    Raises UserError for a wrong option or setting, with the nearest name; and where training does not come to its end,
    with the error that it printed and its exit code as `exit_code`: 75 where it was saved and stopped on request,
    after `max_seconds` for example.
    """
    words = ["train", *asked_for(name_or_path, layout, settings, options).to_words()]
    with TemporaryDirectory(prefix="ddp-") as folder:
        run_file = Path(folder) / "run"
        code, lines = _follow(words, caller_variables(run_file))
        directory = run_file.read_text() if run_file.exists() else None
    if code != 0:
        raise error_of(code, lines, words)
    if directory is None:
        raise UserError(f"`ddp {' '.join(words)}` ended well, but this machine had no part in it: look at the others")
    return Run(directory)


def asked_for(
    name_or_path: str | os.PathLike[str],
    layout: LayoutKind | None,
    settings: Mapping[str, Any] | Iterable[str],
    options: Mapping[str, Any],
) -> Asked:
    """What such arguments of `train` ask for. Raises UserError."""
    if not isinstance(name_or_path, str | os.PathLike):
        raise UserError(
            f"train takes the name or the file of an experiment, not {type(name_or_path).__name__}: each rank is a new "
            "process, which can import a file only; in a notebook, begin the cell with %%writefile NAME.py and say "
            'train("NAME.py")'
        )
    fields = {name: field for name, field in Asked.model_fields.items() if not command_line(field).hidden}
    for name in options:
        if name == "experiment" or name not in fields:
            raise UserError(f"train has no option {name}; {nearest_name(name, fields.keys() - {'experiment'})}")
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        if isinstance(value, os.PathLike):
            given[name] = os.fspath(value)
        elif isinstance(value, str) and is_repeated(fields[name]):
            given[name] = (value,)
    if layout is not None:
        given["layout"] = layout
    if written := _written(settings):
        given["settings"] = written
    try:
        return Asked(experiment=os.fspath(name_or_path), **given)
    except ValidationError as error:
        raise UserError(f"train: {explain(error)}") from None


def _written(settings: Mapping[str, Any] | Iterable[str]) -> tuple[str, ...]:
    """The settings as `--set` takes them. Raises UserError for a value that JSON does not have."""
    if isinstance(settings, str):
        return (settings,)
    if not isinstance(settings, Mapping):
        return tuple(settings)
    try:
        return tuple(f"{name}={setting_text(value)}" for name, value in settings.items())
    except (TypeError, ValueError) as error:
        raise UserError(f"train: settings: {error}; numbers, texts, lists, True, False and None can be set") from None


def _follow(words: list[str], variables: Mapping[str, str]) -> tuple[int, Iterable[str]]:
    """Run a `ddp` command and print what it prints; returns its exit code, and the last lines.

    Interrupts are passed on to it. Raises KeyboardInterrupt where one came, but only once it has ended.
    """
    last = deque[str](maxlen=_LAST_LINES)
    started: list[subprocess.Popen[bytes]] = []
    came: list[int] = []
    waiting: list[int] = []

    def hear(number: int, _: FrameType | None) -> None:
        came.append(number)
        waiting.append(number)
        pass_on()

    def pass_on() -> None:
        # A signal may interrupt this function anywhere; each is sent once all the same.
        while started and waiting:
            with contextlib.suppress(IndexError):
                started[0].send_signal(waiting.pop())

    # Python delivers signals to its main thread alone, and lets no other thread handle them.
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, hear) if is_main else None
    try:
        with subprocess.Popen(
            [sys.executable, "-m", "ddp_core", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            # In one stream, so that lines come in the order in which they were written.
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables, "PYTHONUNBUFFERED": "1"},
            # A terminal, or a notebook's server, sends an interrupt to the whole group of processes. The command would
            # hear it twice, which means that it shall not save.
            process_group=0,
        ) as process:
            started.append(process)
            pass_on()
            assert process.stdout is not None
            for line in _lines_of(process.stdout.fileno()):
                sys.stdout.write(line)
                sys.stdout.flush()
                last.append(line)
            code = process.wait()
    finally:
        if is_main:
            # None stands for a handler that was not set from Python, and that Python cannot set again.
            signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)
    if came:
        raise KeyboardInterrupt
    return code, last


def _lines_of(descriptor: int) -> Iterator[str]:
    """The lines that come through a pipe."""
    # It waits in pieces: Python calls no signal handler before a read ends, where the signal came just before the read.
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)
    ready, text, is_open = select.poll(), "", True
    ready.register(descriptor)
    while is_open:
        while not ready.poll(1000 * _SIGNAL_SECONDS):
            pass
        piece = os.read(descriptor, 2**16)
        is_open = piece != b""
        *lines, text = (text + decoder.decode(piece, final=not is_open)).split("\n")
        yield from (f"{line}\n" for line in lines)
    if text:
        yield text
