"""The list of commands. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import io
import json
import os
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from ddp_core.base.errors import ExitCode
from ddp_core.cli import completion
from ddp_core.cli.click_options import asked_in, from_fields
from ddp_core.cli.config import config_of, take_config
from ddp_core.cli.kinds import Group, OpenGroup, TitledOption

if TYPE_CHECKING:
    from ddp_core.config.layout import DeviceType, LayoutKind

Function = TypeVar("Function", bound=Callable[..., int])

IS_OWN_PROCESS = "ddp_core.cli.is_own_process"
"""The key of click's notes that tells whether this process ends with the command."""

_EXAMPLES = """
\b
Examples:
  ddp train digits                                    # in one process
  ddp train digits --layout dp --nproc-per-node 2     # two replicas in one process
  ddp train digits --layout ddp --set epochs=3        # a process for each GPU, or 2 on the CPU
  ddp train digits --layout ddp --dry-run             # only say what that would do
  ddp train digits --resume auto                      # go on where it stopped
  ddp train mine.py --layout ddp --nnodes 2 --rdzv-endpoint HOST:29400 --rdzv-id a-new-word
"""


def _quiet() -> None:
    """Silence the libraries' messages; must be called before torch is imported."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    warnings.simplefilter("ignore")


# torch.distributed.launch puts --local-rank before all other words, or after the words that its script passes on.
_local_rank = click.option("--local-rank", "--local_rank", hidden=True, expose_value=False)
_run_argument = click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
_as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")


def _config(title: str | None = None) -> Callable[[Function], Function]:
    """The option --config; `title` is the group under which it stands in the help."""
    return click.option(
        "--config",
        cls=TitledOption,
        title=title,
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=take_config,
        shell_complete=completion.complete_value,
        help="Read settings, and options from a table [train], from a TOML, YAML or JSON file. The command line "
        "overrides it. [default: none]",
    )


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
    return ExitCode.BAD_INPUT  # where there is no command; otherwise the command's own exit code counts


@ddp.command(options=from_fields(), epilog=_EXAMPLES)
@_config("What is trained, and from where on")
@click.option(
    "--dry-run", "only_said", is_flag=True, help="Say what would run, or why nothing can; start nothing, write nothing."
)
@_local_rank
@click.pass_context
def train(context: click.Context, /, only_said: bool, **_: object) -> int:
    """Train EXPERIMENT on a layout.

    EXPERIMENT is a name from `ddp list`, or the path of an experiment file of your own. It says what is trained. The
    layout says where: in one process (single), on several devices of one process (dp), or in a process for each device
    (ddp). The result does not depend on the layout.
    """
    _quiet()
    from ddp_core.cli.train import train
    from ddp_core.distributed.reports import stop_with_caller

    stop_with_caller()
    asked, config = asked_in(context), config_of(context)
    # What a file says is written out, so that the run's record needs the file no more.
    words = context.obj if config.options is None else ["train", *asked.to_words()]
    return train(asked, words, context.meta.get(IS_OWN_PROCESS, False), only_said, config.blamed())


@ddp.command("list")
def list_() -> int:
    """List the experiments and the questions they answer."""
    from ddp_core.experiment.file import list_experiments

    found = list_experiments()
    width = max((len(entry.name) for entry in found), default=0)
    for entry in found:
        print(f"{entry.name:{width}}  {entry.question}")
    return ExitCode.DONE


@ddp.command(options=from_fields("output"))
@click.argument("runs", metavar="[RUN|DIR]...", nargs=-1, type=click.Path(path_type=Path))
@_as_json
def compare(runs: tuple[Path, ...], output: str, as_json: bool) -> int:
    """Show runs side by side, and whether the weights agree.

    A name is a run directory or a folder of them. Without any name all runs below --output are shown.
    """
    from ddp_core.cli.compare import compare

    return compare(runs or [Path(output)], as_json)


@ddp.command(options=from_fields("layout", "device", "nproc_per_node", "data_dir", default="as recorded"))
@_run_argument
@_as_json
def verify(
    run: Path,
    layout: LayoutKind | None,
    device: str | None,
    nproc_per_node: int | None,
    data_dir: str | None,
    as_json: bool,
) -> int:
    """Train RUN again from its record and compare the weights.

    It may be another layout: the exact reduction gives the same weights on all of them. RUN may also be a bundle; this
    runs the code in it.
    """
    _quiet()
    from ddp_core.cli.verify import verify
    from ddp_core.cli.verify_bundle import verify_bundle

    check = verify_bundle if run.is_file() else verify
    if not as_json:
        return check(run, layout, device, nproc_per_node, data_dir)
    said = io.StringIO()
    with redirect_stdout(said):
        code = check(run, layout, device, nproc_per_node, data_dir)
    lines = said.getvalue().splitlines()
    click.echo(json.dumps({"run": str(run), "identical": code == ExitCode.DONE, "verdict": lines[-1], "lines": lines}))
    return code


@ddp.command()
@_run_argument
@click.option(
    "-o",
    "target",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Where to write the bundle. [default: EXPERIMENT-RUN.zip, here]",
)
def bundle(run: Path, target: Path | None) -> int:
    """Put the finished RUN into one file, to hand it over.

    It holds record, metrics, weights, code and package versions; `ddp verify FILE` trains it again elsewhere.
    """
    _quiet()
    from ddp_core.cli.bundle import bundle

    return bundle(run, target)


@ddp.command(options=from_fields("settings", "data_dir"))
@click.argument("experiment", default="digits", shell_complete=completion.complete_experiment)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="cuda: on this machine's GPUs; ranks or replicas that have none of their own share one.",
)
@_config()
@click.pass_context
def verify_layouts(
    context: click.Context, experiment: str, settings: tuple[str, ...], data_dir: str, device: DeviceType
) -> int:
    """Train on every layout that runs here, compare digests.

    EXPERIMENT is digits, if none is named.
    """
    _quiet()
    from ddp_core.cli.verify_layouts import verify_layouts

    with config_of(context).blamed():
        return verify_layouts(experiment, settings, data_dir, device)


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
@click.argument("experiment", required=False, shell_complete=completion.complete_experiment)
@_config()
@_as_json
@click.pass_context
def doctor(
    context: click.Context, experiment: str | None, settings: tuple[str, ...], data_dir: str, as_json: bool
) -> int:
    """Say what is here: devices, versions, and what would run.

    With EXPERIMENT, also an estimate of the memory that training it takes.
    """
    from ddp_core.cli.doctor import doctor

    with config_of(context).blamed():
        return doctor(experiment, settings, Path(data_dir), as_json)


@ddp.command()
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=29400,
    show_default=True,
    help="Listen on this port; 0: on a free one.",
)
@click.option(
    "--bind",
    metavar="ADDRESS",
    help="Listen at this address of this machine alone, or at that of this name of it. [default: at every address]",
)
@click.option("--check", metavar="HOST:PORT", help="Serve nothing; only say whether a rendezvous answers there.")
def rendezvous(port: int, bind: str | None, check: str | None) -> int:
    """Serve the place where the nodes of a launch meet."""
    _quiet()
    from ddp_core.launch import rendezvous

    return rendezvous.check(check) if check else rendezvous.serve(port, bind)


@ddp.command("completion")
@click.argument("shell", type=click.Choice(completion.SHELLS))
def completion_(shell: str) -> int:
    """Print a script that lets a shell complete `ddp`.

    \b
    bash: eval "$(ddp completion bash)"          in ~/.bashrc
    zsh:  eval "$(ddp completion zsh)"           in ~/.zshrc
    fish: ddp completion fish | source           in ~/.config/fish/config.fish
    """
    click.echo(completion.script(ddp, shell))
    return ExitCode.DONE
