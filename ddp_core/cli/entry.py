"""The main function of `ddp`: calls a command, and turns whatever it raises into a line and an exit code."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext

import click

from ddp_core.base.errors import UserError, near_names, said_by
from ddp_core.base.process import make_patient
from ddp_core.cli.click_options import meant_by
from ddp_core.cli.commands import IS_OWN_PROCESS, ddp
from ddp_core.cli.completion import VARIABLE, answer
from ddp_core.cli.config import DEFAULT_MAP, config_of
from ddp_core.distributed.stop import asking_signals, signals_as_before, stops_at_once
from ddp_core.distributed.world import World


@said_by("ddp")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; any error is printed in one line."""
    make_patient()
    words = list(sys.argv[1:] if arguments is None else arguments)
    # A program that calls this function with words may go on afterwards; a worker's process ends with the command.
    goes_on = arguments is not None and not World.is_set()
    is_training = words[:1] == ["train"]
    heard = [*asking_signals(), *([] if goes_on else [signal.SIGINT])] if is_training else []
    try:
        with signals_as_before() if goes_on else nullcontext(), stops_at_once(*heard, silent=not World.is_heard()):
            return _call(words, is_own=not goes_on)
    except UserError as error:
        if not World.is_set():
            raise
        from ddp_core.distributed.reports import report_error

        return report_error(error)


def _call(words: list[str], is_own: bool) -> int:
    """The exit code of the command. Raises UserError for whatever is wrong with the words.

    `is_own`: whether this process ends with the command.

    click's own `main` is not used: it handles Ctrl-C, a closed pipe and EOFError in its own way.
    """
    if VARIABLE in os.environ:
        return answer(ddp, os.environ[VARIABLE])
    try:
        with ddp.make_context("ddp", words, obj=words) as context:
            context.meta[IS_OWN_PROCESS] = is_own
            return int(ddp.invoke(context))
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except click.UsageError as error:
        raise _in_one_line(error) from None


def _in_one_line(error: click.UsageError) -> UserError:
    where = error.ctx.command_path if error.ctx else "ddp"
    if isinstance(error, click.NoSuchOption) and error.ctx is not None:
        known = [word for option in error.ctx.command.get_params(error.ctx) for word in _shown(option)]
        near = near_names(error.option_name, known)
        meant = meant_by(error.option_name, known) if where == "ddp train" else near[0] if near else None
        if meant is not None:
            return UserError(f"no such option {error.option_name}; did you mean {meant}?")
    return UserError(f"{_file_of(error)}{error.format_message().rstrip('.')} (see `{where} --help`)")


def _shown(parameter: click.Parameter) -> list[str]:
    """The words of an option that the help shows."""
    return parameter.opts if isinstance(parameter, click.Option) and not parameter.hidden else []


def _file_of(error: click.UsageError) -> str:
    """The file of --config, where the wrong value stands in it."""
    context, parameter = error.ctx, getattr(error, "param", None)
    if context is None or parameter is None or context.get_parameter_source(parameter.name) is not DEFAULT_MAP:
        return ""
    return f"{config_of(context).path}: "
