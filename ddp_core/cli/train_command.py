"""The `ddp` group with the command that most processes run, `ddp train`; `commands` has all the others."""

from __future__ import annotations

import os
import warnings

import click

from ddp_core.base.errors import ExitCode
from ddp_core.cli.click_kinds import OpenGroup, asked_in, field_options

IS_OWN_PROCESS = "ddp_core.cli.is_own_process"
"""The key in `Context.meta` that tells whether this process ends with the command."""
_EXAMPLES = """
\b
Examples:
  ddp train digits                                    # in one process
  ddp train digits --layout dp --nproc-per-node 2     # two replicas in one process
  ddp train digits --layout ddp --set epochs=3        # a process for each GPU, or 2 on the CPU
  ddp train digits --resume auto                      # go on where it stopped
  ddp train mine.py --layout ddp --nnodes 2 --rdzv-endpoint HOST:29400 --rdzv-id a-new-word
"""

# torch.distributed.launch puts --local-rank before all other words, or after the words that its script passes on.
_local_rank = click.option("--local-rank", "--local_rank", hidden=True, expose_value=False)


def _print_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        from ddp_core.record.environment import version_line

        click.echo(version_line())
        context.exit()


@click.group("ddp", cls=OpenGroup, invoke_without_command=True, context_settings={"max_content_width": 120})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the versions of ddp, torch and Python.",
)
@_local_rank
@click.pass_context
def ddp(context: click.Context) -> int:
    """Data-parallel training in PyTorch: the same weights on every layout."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
    elif context.invoked_subcommand in ddp.commands:  # those of other packages speak for themselves
        _quiet()
    return ExitCode.BAD_INPUT  # where there is no command; otherwise the command's own exit code counts


def _quiet() -> None:
    """Silence libraries; must be called before torch is imported."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    warnings.simplefilter("ignore")


@ddp.command("train", options=field_options, epilog=_EXAMPLES)
@_local_rank
@click.pass_context
def train_(context: click.Context, /, **_: object) -> int:
    """Train EXPERIMENT on a layout.

    EXPERIMENT is a name from `ddp list`, or the path of an experiment file of your own. It says what is trained. The
    layout says where: in one process (single), on several devices of one process (dp), or in a process for each device
    (ddp). The result does not depend on the layout.
    """
    from ddp_core.cli.train import carry_out
    from ddp_core.distributed.reports import stop_with_caller

    stop_with_caller()
    return carry_out(asked_in(context), context.obj, context.meta.get(IS_OWN_PROCESS, False))
