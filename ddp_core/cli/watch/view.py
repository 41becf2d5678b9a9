"""Runs as a picture for a terminal of any size, drawn anew about once a second."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from textwrap import wrap

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ddp_core.cli.watch.curve import bars
from ddp_core.cli.watch.finding import Watched
from ddp_core.cli.watch.lines import NOT_FIGURES, left, position, share, speed
from ddp_core.cli.watch.ranks import RankSeen
from ddp_core.cli.watch.run import State, WatchedRun
from ddp_core.observe.metrics import duration_text, readable

_STYLES: dict[State, str] = {
    "starting": "cyan",
    "running": "bold green",
    "silent": "bold yellow",
    "interrupted": "bold red",
    "completed": "green",
    "stopped": "yellow",
    "failed": "bold red",
}
_MOST_RANKS = 8
_MOST_BARS = 60
_WORDS_BETWEEN = "  "

Lines = list[RenderableType]
"""Each takes exactly one line of the terminal."""


def follow(watched: Watched, problems: list[str], console: Console, seconds: float) -> None:
    """Show the runs until they are over, of a folder until Ctrl-C; leaves the last picture on the terminal.

    `problems`: the lines about bad records, to which `watched` adds.
    """
    # Ctrl-C is how one leaves a view of runs that go on.
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(picture(watched.runs, problems, console), refresh=True)
            if watched.is_run and watched.runs[0].is_over:
                break
            time.sleep(seconds)
            watched.look()
    console.print(picture(watched.runs, problems, console, whole=True))


def picture(runs: Sequence[WatchedRun], problems: Sequence[str], console: Console, whole: bool = False) -> Group:
    """All runs, as much of each as fits into the terminal; with `whole`, all of each."""
    width, height = console.width, console.height
    is_ascii = console.options.ascii_only
    notes: Lines = [_line(text, "yellow") for problem in problems for text in wrap(f"passed over: {problem}", width)]
    if not runs:
        return Group(_line("no run yet; waiting for one (Ctrl-C leaves)"), *notes)
    parts: list[Lines] = []
    for draw in (_in_full, _in_short, _in_one_line):
        parts = [draw(run, width, is_ascii) for run in runs]
        if whole or sum(map(len, parts)) + len(parts) + len(notes) <= height + 1:
            break
    lines: Lines = []
    for number, part in enumerate(parts):
        lines += [*([_line("")] if number and len(part) > 1 else []), *part]
    lines += notes
    if not whole and len(lines) > height:
        lines = [*lines[: height - 1], _line(f"and {len(lines) - height + 1} more lines; a taller terminal shows them")]
    return Group(*lines)


def _in_full(run: WatchedRun, width: int, is_ascii: bool) -> Lines:
    lines = _in_short(run, width, is_ascii)
    lines.insert(1, _line(str(run.directory.path), "dim", from_end=width))
    lines += [_line(text) for text in _flow(_latest(run), width)]
    lines += _ranks(run, width)
    if (slowest := run.ranks.slowest) is not None and not run.is_over:
        lines += [_line(text, "yellow") for text in wrap(slowest, width)]
    for warning in run.warnings:
        lines += [_line(text, "yellow") for text in wrap(warning, width)]
    return lines


def _in_short(run: WatchedRun, width: int, is_ascii: bool) -> Lines:
    lines = [_title(run), _bar(run, width)]
    lines += [_line(text) for text in _flow(_progress(run), width)]
    if (loss := _loss(run, width, is_ascii)) is not None:
        lines.append(loss)
    if run.state not in ("starting", "running"):
        lines += [_line(text, _STYLES[run.state]) for text in wrap(run.standing(), width)]
    return lines


def _in_one_line(run: WatchedRun, width: int, is_ascii: bool) -> Lines:
    title = _title(run)
    return [Text.assemble(title, _WORDS_BETWEEN, _WORDS_BETWEEN.join(_progress(run)), no_wrap=True, overflow="crop")]


def _title(run: WatchedRun) -> Text:
    attempts = len(run.record["attempts"])
    return Text.assemble(
        (run.record["experiment"]["name"], "bold"),
        _WORDS_BETWEEN,
        run.record["layout"]["label"],
        _WORDS_BETWEEN,
        (run.state, _STYLES[run.state]),
        f"{_WORDS_BETWEEN}{duration_text(run.seconds_trained)}",
        f"{_WORDS_BETWEEN}attempt {attempts}" if attempts > 1 else "",
        no_wrap=True,
        overflow="crop",
    )


def _bar(run: WatchedRun, width: int) -> RenderableType:
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1)
    grid.add_column(justify="right", no_wrap=True, width=6)
    total = run.total_steps
    done = f"{100 * share(run):.0f} %" if total else ""
    grid.add_row(ProgressBar(total=total or 1, completed=min(run.step, total or 0), width=max(1, width - 6)), done)
    return grid


def _progress(run: WatchedRun) -> list[str]:
    each = run.record.get("steps_per_epoch")
    parts = [position(run).partition(" (")[0]]
    if each:
        epoch = min((max(0, run.step - 1)) // each + 1, run.record["experiment"]["epochs"])
        parts.append(f"epoch {epoch}")
    return [*parts, *speed(run), *left(run)]


def _loss(run: WatchedRun, width: int, is_ascii: bool) -> Text | None:
    if run.loss is None or run.losses.first is None:
        return None
    before, after = f"loss {run.losses.first:.4g} ", f" {run.loss:.4g}"
    room = min(_MOST_BARS, width - len(before) - len(after))
    drawn = bars(run.losses.means(room), is_ascii)
    return Text.assemble(before, (drawn, "cyan"), after, no_wrap=True, overflow="crop")


def _latest(run: WatchedRun) -> list[str]:
    """The last evaluation and the last checkpoint, in words."""
    parts = readable({name: value for name, value in run.evaluation.items() if name not in NOT_FIGURES})
    if parts:
        parts[-1] += f" (step {run.evaluation['step']})"
    if run.checkpoint is not None and run.checkpoint_age is not None:
        age = "" if run.is_over else f", {duration_text(run.checkpoint_age)} ago"
        parts.append(f"checkpoint of step {run.checkpoint[0]}{age}")
    if run.data_wait is not None and not run.is_over:
        parts.append(f"{100 * run.data_wait:.0f} % of the time waiting for data")
    return parts


def _ranks(run: WatchedRun, width: int) -> Lines:
    """A line for each rank that is still at work; of very many those that need most time, in the order of ranks."""
    if run.is_over or not run.ranks.seen:
        return []
    shown = sorted(sorted(run.ranks.seen, key=_need, reverse=True)[:_MOST_RANKS], key=lambda rank: rank.rank)
    lines: Lines = [_line(_cells(("rank", "step", "own ms", "waits ms", "ago", "node"), width), "dim")]
    for rank in shown:
        own = f"{1e3 * rank.own_seconds:.1f}" if rank.own_seconds is not None else "-"
        waits = f"{1e3 * rank.waits_seconds:.1f}" if rank.waits_seconds is not None else "-"
        ago = rank.process or duration_text(rank.age)
        cells = (str(rank.rank), str(rank.step), own, waits, ago, f"{rank.node_rank} {rank.host}")
        lines.append(_line(_cells(cells, width), "bold red" if rank.process else ""))
    if len(run.ranks.seen) > len(shown):
        lines.append(_line(f"and {len(run.ranks.seen) - len(shown)} ranks more, which need less time", "dim"))
    return lines


def _need(rank: RankSeen) -> tuple[bool, float, float]:
    return bool(rank.process), rank.own_seconds or 0.0, rank.age


def _cells(cells: Sequence[str], width: int) -> str:
    """The cells of a row under each other; the node only where there is room for it."""
    rank, step, own, waits, ago, node = cells
    row = f"{rank:>4} {step:>8} {own:>7} {waits:>8} {ago:>8}"
    return f"{row}  {node}" if width >= 60 else row


def _flow(parts: Sequence[str], width: int) -> list[str]:
    """The parts side by side, in as many lines as it takes."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(_WORDS_BETWEEN) + len(part) <= width:
            lines[-1] += _WORDS_BETWEEN + part
        else:
            lines.append(part)
    return lines


def _line(text: str, style: str = "", from_end: int | None = None) -> Text:
    """One line, cut where it is too long; with `from_end`, the width, its beginning is cut."""
    if from_end is not None and len(text) > from_end:
        text = f"...{text[len(text) - from_end + 3 :]}"
    return Text(text, style=style, no_wrap=True, overflow="crop")
