"""One save by several ranks: each writes a data file, the first commits them all, and all ranks hear how it ended."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

from ddp_core.base.errors import UserError
from ddp_core.checkpoint.data_file import At, write_error
from ddp_core.checkpoint.manifest import Checkpoint, DataPart, uncommitted
from ddp_core.checkpoint.ranks import Ranks

Value = TypeVar("Value")


def write_together(
    ranks: Ranks,
    target: Path,
    needed: int,
    data: AbstractContextManager[DataPart],
    commit: Callable[[Sequence[DataPart]], Checkpoint],
    at: At,
) -> Checkpoint | None:
    """Write this rank's data file; the checkpoint is returned by the rank that commits it, the first.

    `data` writes `target`, of `needed` bytes, and holds its lock until it is left. `commit` is called on the first rank
    with all data files. An error of one rank is raised on all, and then nothing is committed, unless it came after the
    commit.

    A rank that cannot hear how it ended leaves its file to `sweep`, as the first rank may have committed it.
    """
    with contextlib.ExitStack() as locked:
        part, problem = _tried(lambda: locked.enter_context(data), target, needed)
        reports = ranks.gather(part if problem is None else told(problem, ranks.place))
        at("parts reported")
        problems = [report for report in reports if isinstance(report, Exception)]
        checkpoint, is_committed = None, False
        if not problems:
            parts = [report for report in reports if isinstance(report, DataPart)]
            if ranks.is_first:
                checkpoint, problem = _tried(lambda: commit(parts), target, needed)
            said = None if problem is None else told(problem, ranks.place)
            is_committed, said = ranks.hear_first((ranks.is_first and not uncommitted(target), said))
            at("outcome told")
            problems = [] if said is None else [said]
    if not is_committed:
        with contextlib.suppress(OSError):
            target.unlink(missing_ok=True)
    if problem is not None and not isinstance(problem, UserError):
        raise problem
    if problems:
        raise problems[0] from problem
    return checkpoint


@contextlib.contextmanager
def telling_others(ranks: Ranks | None) -> Iterator[None]:
    """Let the other ranks raise what the block raises: they wait for this rank's data file."""
    try:
        yield
    except Exception as error:
        if ranks is not None:
            with contextlib.suppress(Exception):  # the first error is the one to raise
                ranks.gather(told(error, ranks.place))
        raise


def told(error: Exception, place: str) -> Exception:
    """An error as the other ranks raise it: `place` is the rank that met it."""
    if isinstance(error, UserError):
        return type(error)(f"{place}: {error}", error.exit_code)
    return RuntimeError(f"{place} could not save a checkpoint: {type(error).__name__}: {error}")


def _tried(work: Callable[[], Value], target: Path, needed: int) -> tuple[Value | None, Exception | None]:
    try:
        return work(), None
    except OSError as error:
        problem = write_error(error, target, needed)
        problem.__cause__ = error
        return None, problem
    except Exception as error:
        return None, error
