"""The main function of `ddp`: calls a command, and turns whatever it raises into a line and an exit code."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import click

from ddp_core.base.ending import said_by
from ddp_core.base.errors import UserError
from ddp_core.base.process import leave_first_process, make_patient
from ddp_core.cli.click_kinds import asked_in, meant_by
from ddp_core.cli.train_command import IS_OWN_PROCESS, ddp, train_
from ddp_core.distributed.stop import asking_signals, signals_as_before, stops_at_once
from ddp_core.distributed.world import World

if TYPE_CHECKING:
    from ddp_core.config.options import Asked


@said_by("ddp")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; any error is printed in one line."""
    if arguments is None:
        leave_first_process()
    make_patient()
    words = list(sys.argv[1:] if arguments is None else arguments)
    # A program that calls this function with words may go on afterwards; a worker's process ends with the command.
    goes_on = arguments is not None and not World.is_set()
    if words[:1] != ["train"]:
        import ddp_core.cli.commands  # noqa: F401  (adds the other commands to the group)
    heard = [*asking_signals(), *([] if goes_on else [signal.SIGINT])] if words[:1] == ["train"] else []
    try:
        with (
            signals_as_before() if goes_on else nullcontext(),
            stops_at_once(*heard, prints=World.may_print()),
            # click's own `main` is not used: it handles Ctrl-C, a closed pipe and EOFError in its own way.
            ddp.make_context("ddp", words, obj=words) as context,
        ):
            context.meta[IS_OWN_PROCESS] = not goes_on
            return int(ddp.invoke(context))
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except ModuleNotFoundError as missing:
        if missing.name != "torch":
            raise
        raise UserError(
            "torch is not installed in this environment; which of its builds it shall be is yours to say: "
            "`pip install torch`, or after `uv sync` as docs/how-to/install.md shows"
        ) from None
    except (click.UsageError, UserError) as raised:
        error = _in_one_line(raised) if isinstance(raised, click.UsageError) else raised
        if not World.is_set():
            raise error from None
        from ddp_core.distributed.reports import report_error

        return report_error(error)


def asked_by(words: Sequence[str]) -> Asked:
    """What `ddp train` is asked for by these words. Raises UserError where it would not take them."""
    try:
        with train_.make_context("ddp train", list(words)) as context:
            return asked_in(context)
    except click.UsageError as error:
        raise _in_one_line(error) from None


def _in_one_line(error: click.UsageError) -> UserError:
    """The UserError for words that click does not accept."""
    where = error.ctx.command_path if error.ctx else "ddp"
    if isinstance(error, click.NoSuchOption) and error.ctx is not None and where == "ddp train":
        options = [each for each in error.ctx.command.get_params(error.ctx) if isinstance(each, click.Option)]
        known = [word for option in options if not option.hidden for word in option.opts]
        if (meant := meant_by(error.option_name, known)) is not None:
            return UserError(f"no such option {error.option_name}; did you mean {meant}?")
    return UserError(f"{error.format_message().rstrip('.')} (see `{where} --help`)")
