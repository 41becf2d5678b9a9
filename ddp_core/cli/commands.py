"""The list of commands. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddp_core.cli.options import Group, asked_in, from_fields
from ddp_core.errors import ExitCode, UserError, said_by

if TYPE_CHECKING:
    from ddp_core.spec.layout import LayoutKind

_EXAMPLES = """
\b
Examples:
  ddp train digits
  ddp train digits --layout dp --nproc-per-node 2
  ddp train digits --layout ddp --nproc-per-node 4 --set optimizer.lr=0.05
  ddp train digits --resume auto
  ddp train mine.py --layout ddp --nnodes 2 --rdzv-endpoint HOST:29400 --rdzv-id a-new-word
"""


@said_by("ddp")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; any error is printed in one line."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _call(words)
    except UserError as error:
        from ddp_core.distributed.world import World

        if not World.is_set():
            raise
        from ddp_core.launch.worker import report_error

        return report_error(error)
    except BrokenPipeError:
        return ExitCode.DONE


def _call(words: list[str]) -> int:
    """The exit code of the command. Raises UserError for whatever is wrong with the words.

    click's own `main` is not used: it handles Ctrl-C, a closed pipe and EOFError in its own way.
    """
    if words and words[0] in (offered := _offered()):
        return int(offered[words[0]].load()(words[1:]))
    try:
        with ddp.make_context("ddp", words, obj=words) as context:
            return int(ddp.invoke(context))
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except click.UsageError as error:
        raise _in_one_line(error) from None


def _in_one_line(error: click.UsageError) -> UserError:
    if isinstance(error, click.NoSuchOption) and error.possibilities:
        return UserError(f"no such option {error.option_name}; did you mean {error.possibilities[0]}?")
    where = error.ctx.command_path if error.ctx else "ddp"
    return UserError(f"{error.format_message().rstrip('.')} (see `{where} --help`)")


def _offered() -> dict[str, EntryPoint]:
    """Commands that other packages offer under the entry point group `ddp.commands`: functions of a list of words."""
    return {entry.name: entry for entry in entry_points(group="ddp.commands")}


def _quiet() -> None:
    """Silence the libraries' messages; must be called before torch is imported."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    warnings.simplefilter("ignore")


class _Commands(Group):
    """The commands below, and those of other packages."""

    def offered(self) -> list[str]:
        """Names of the other packages' commands."""
        return sorted(_offered())


# torch.distributed.launch puts --local-rank before all other words, or after the words that its script passes on.
_local_rank = click.option("--local-rank", "--local_rank", hidden=True, expose_value=False)
_run_argument = click.argument("run", metavar="RUN", type=click.Path(path_type=Path))


@click.group("ddp", cls=_Commands, invoke_without_command=True, context_settings={"max_content_width": 120})
@_local_rank
@click.pass_context
def ddp(context: click.Context) -> int:
    """Data-parallel training in PyTorch: the same weights on every layout."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
    return ExitCode.BAD_INPUT  # where there is no command; otherwise the command's own exit code counts


@ddp.command(options=from_fields(), epilog=_EXAMPLES)
@_local_rank
@click.pass_context
def train(context: click.Context, /, **_: object) -> int:
    """Train EXPERIMENT on a layout.

    EXPERIMENT is a name from `ddp list`, or the path of an experiment file of your own.
    """
    _quiet()
    from ddp_core.launch.launch import Meeting, launch
    from ddp_core.run.prepare import prepare

    asked, words = asked_in(context), context.obj
    meeting = Meeting(*asked.nnodes, asked.rdzv_endpoint, asked.rdzv_id)
    return launch(prepare(asked, shlex.join(["ddp", *words])), meeting, words, main)


@ddp.command("list")
def list_() -> int:
    """List the experiments and the questions they answer."""
    from ddp_core.run.experiment_file import list_experiments

    found = list_experiments()
    width = max((len(entry.name) for entry in found), default=0)
    for entry in found:
        print(f"{entry.name:{width}}  {entry.question}")
    return ExitCode.DONE


@ddp.command(options=from_fields("output"))
@click.argument("runs", metavar="[RUN|DIR]...", nargs=-1, type=click.Path(path_type=Path))
def compare(runs: tuple[Path, ...], output: str) -> int:
    """Show runs side by side, and whether the weights agree.

    A name is a run directory or a folder of them. Without any name all runs below --output are shown.
    """
    from ddp_core.commands.compare import compare

    return compare(runs or [Path(output)])


@ddp.command(options=from_fields("layout", "device", "nproc_per_node", default="as recorded"))
@_run_argument
def verify(run: Path, layout: LayoutKind | None, device: str | None, nproc_per_node: int | None) -> int:
    """Train RUN again from its record and compare the weights.

    It may be another layout: the exact reduction gives the same weights on all of them.
    """
    _quiet()
    from ddp_core.commands.verify import verify

    return verify(run, layout, device, nproc_per_node)


@ddp.command(options=from_fields("settings", "data_dir"))
@click.argument("experiment", default="digits")
def verify_layouts(experiment: str, settings: tuple[str, ...], data_dir: str) -> int:
    """Train on every layout that runs here, compare digests.

    EXPERIMENT is digits, if none is named.
    """
    from ddp_core.commands.verify import verify_layouts

    return verify_layouts(experiment, settings, data_dir)


@ddp.command()
@_run_argument
def ledger(run: Path) -> int:
    """Check that RUN trained each sample exactly once.

    RUN is a run that was trained with --ledger.
    """
    from ddp_core.observe.ledger import audit

    print(audit(run))
    return ExitCode.DONE


@ddp.command(options=from_fields("output"))
@click.option(
    "--within",
    type=click.FLOAT,
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="How old the last step may be.",
)
def health(output: str, within: float) -> int:
    """Say whether the ranks of this machine make progress.

    The exit code is 0 as long as they do; for the health checks of containers.
    """
    from ddp_core.observe.heartbeat import check_health

    print(check_health(Path(output), within))
    return ExitCode.DONE


@ddp.group(cls=Group, no_args_is_help=False)
def data() -> None:
    """Fetch a data set."""


@data.command(options=from_fields("data_dir"))
@click.argument("name")
def fetch(name: str, data_dir: str) -> int:
    """Download the data set NAME, checked and resumable."""
    from ddp_core.data.fetch import fetch

    fetch(name, Path(data_dir))
    return ExitCode.DONE


@ddp.command(options=from_fields("settings", "data_dir"))
@click.argument("experiment", required=False)
def doctor(experiment: str | None, settings: tuple[str, ...], data_dir: str) -> int:
    """Say what is here: devices, versions, and what would run.

    With EXPERIMENT, also an estimate of the memory that training it takes.
    """
    from ddp_core.commands.doctor import doctor

    return doctor(experiment, settings, Path(data_dir))


@ddp.command()
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=29400,
    show_default=True,
    help="Listen on this port; 0: on a free one.",
)
@click.option("--check", metavar="HOST:PORT", help="Serve nothing; only say whether a rendezvous answers there.")
def rendezvous(port: int, check: str | None) -> int:
    """Serve the place where the nodes of a launch meet."""
    _quiet()
    from ddp_core.launch import rendezvous

    return rendezvous.check(check) if check else rendezvous.serve(port)
