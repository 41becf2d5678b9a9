"""All commands of `ddp` but `train`, each with its options and its help. Each imports what it needs when called."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.cli.click_kinds import Group, RunPath, asked_in, field_options
from ddp_core.cli.train_command import IS_OWN_PROCESS, ddp
from ddp_core.remote import brought, local

if TYPE_CHECKING:
    from ddp_core.config.layout import DeviceType

_run_argument = click.argument("run", metavar="RUN", type=RunPath())
_as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")


@ddp.command("rehearse", options=field_options)
@click.pass_context
def rehearse_(context: click.Context, /, **_: object) -> int:
    """Try a long run in short, before it is submitted.

    It takes the words of `ddp train`: put `rehearse` in the place of `train`. The experiment is trained in miniature on
    one process, and on every layout that fits this machine, where it is killed and resumed; all bits are compared.
    Nothing is written to --output. The exit code is 0 where the long run may be submitted.
    """
    from ddp_core.cli.train import carry_out

    new = asked_in(context).model_copy(update={"resume": "never"})
    return carry_out(new, context.obj, context.meta.get(IS_OWN_PROCESS, False), is_rehearsal=True)


@ddp.command("list")
def list_() -> int:
    """List the experiments and the questions they answer."""
    from ddp_core.experiment.file import NONE, list_experiments

    if not (found := list_experiments()):
        raise UserError(NONE)
    width = max((len(entry.name) for entry in found), default=0)
    for entry in found:
        print(f"{entry.name:{width}}  {entry.question}")
    return ExitCode.DONE


@ddp.command(options=partial(field_options, "output"))
@click.argument("runs", metavar="[RUN|DIR]...", nargs=-1, type=RunPath("--records"))
@click.option("--no-check", "checks", flag_value=False, default=True, help="End with 0 whatever the weights are.")
@_as_json
def compare(runs: tuple[Path, ...], output: str, checks: bool, as_json: bool) -> int:
    """Show runs side by side, and whether the weights agree.

    A name is a run directory or a folder of them. Without any name all runs below --output are shown. The exit code is
    1 where exact runs under one fingerprint have other weights.
    """
    from ddp_core.cli.compare import compare_runs

    return compare_runs(runs or [brought(output, "--records")], as_json, checks)


@ddp.command(options=partial(field_options, "output"))
@click.argument("place", metavar="[RUN|DIR]", required=False, type=click.Path(path_type=Path))
@click.option("--once", is_flag=True, help="Say how it stands, and end.")
@click.option(
    "--every",
    type=click.FloatRange(min=0),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Without a terminal: the least time between two lines of progress of a run.",
)
def watch(place: Path | None, output: str, once: bool, every: float) -> int:
    """Look at runs while they train.

    Shows how far a run is and when it will end, its loss, how long each rank takes and when it was last heard of, the
    last checkpoint and warnings. Without a name, all runs at work below --output. In a pipe it prints a line for each
    change. It ends with the run, and with its exit code; Ctrl-C leaves the run alone.
    """
    from ddp_core.cli.watch import watch_runs

    return watch_runs(place or local(output), once, every)


@ddp.command(
    "verify", options=partial(field_options, "layout", "device", "nproc_per_node", "data_dir", default="as recorded")
)
@_run_argument
@click.option("--rebuild", is_flag=True, help="In a new environment with the packages of the bundle, made by uv.")
@_as_json
def verify_(run: Path, as_json: bool, **changes: Any) -> int:
    """Train RUN again from its record and compare the weights.

    It may be another layout: the exact reduction gives the same weights on all of them. RUN may also be a bundle; this
    runs the code in it.
    """
    from ddp_core.cli.verify import verify

    if not as_json:
        return verify(run, **changes)
    said = io.StringIO()
    with redirect_stdout(said):
        code = verify(run, **changes)
    lines = said.getvalue().splitlines()
    click.echo(json.dumps({"run": str(run), "identical": code == ExitCode.DONE, "verdict": lines[-1], "lines": lines}))
    return code


@ddp.command(
    "audit",
    options=partial(field_options, "layout", "device", "nproc_per_node", "shard", "data_dir", default="as recorded"),
)
@click.argument("run", metavar="RUN|BUNDLE", type=RunPath())
@click.option(
    "--segments", type=click.IntRange(1), default=5, show_default=True, metavar="N", help="Train so many again."
)
@click.option("--seed", type=click.IntRange(0), metavar="N", help="Of the draw. [default: drawn now, and told]")
@click.option("--record-sha256", metavar="SHA256", help="The SHA-256 of run.json that you were given before the draw.")
@_as_json
def audit_(run: Path, as_json: bool, **words: Any) -> int:
    """Check RUN in pieces.

    A few of its segments, drawn by chance, are trained again from kept checkpoints, on any layout. RUN is finished and
    was trained with --keep-for-audit, or is a bundle of such a run; this runs the code in it. The exit code is 1 where
    something is not what the record says.
    """
    from ddp_core.cli.audit import Report, audit

    return audit(run, Report(as_json), **words)


def _step(value: str) -> int | str:
    if value in ("final", "newest", "best"):
        return value
    if not value.isdecimal():
        raise click.BadParameter(f"{value} is no step; give a number, or final, newest or best")
    return int(value)


def _at(usual: str, default: str | None = None) -> Callable[[Any], Any]:
    return click.option(
        "--at",
        default=default,
        metavar="STEP",
        type=_step,
        help=f"The weights after this step, of which there is a checkpoint; or final, newest, best. [default: {usual}]",
    )


def _options_of_eval() -> list[click.Parameter]:
    recorded = field_options("settings", "device", "data_dir", default="as recorded")
    return [*field_options("layout", "nproc_per_node", "shard"), *recorded]


@ddp.command("eval", options=_options_of_eval)
@click.argument("run", metavar="RUN|CHECKPOINT|BUNDLE", type=RunPath())
@_at("those it ended with, else its newest checkpoint")
@_as_json
@click.pass_context
def eval_(context: click.Context, /, run: Path, **changes: Any) -> int:
    """Evaluate weights of RUN, on any layout.

    The figures have the bits that training gave them, in one process or on the layout that is named. Only settings of
    data and evaluation can be changed. This runs the code that the run has kept.
    """
    from ddp_core.cli.evaluate import evaluate

    return evaluate(run, context.obj, context.meta.get(IS_OWN_PROCESS, False), **changes)


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

    It holds record, metrics, weights, code and package versions; `ddp verify FILE` trains it again elsewhere. Of a run
    with --keep-for-audit also the kept checkpoints, for `ddp audit FILE`.
    """
    from ddp_core.cli.bundle import make_bundle

    return make_bundle(run, target)


@ddp.command("export")
@click.argument("run", metavar="RUN|CHECKPOINT|BUNDLE", type=RunPath())
@click.option(
    "--to",
    required=True,
    type=click.Choice(["safetensors", "torch"]),
    help="How the state dict is written: for safetensors.torch.load_file, or for torch.load.",
)
@_at("final", "final")
@click.option(
    "--weights",
    type=click.Choice(["auto", "trained", "averaged"]),
    default="auto",
    show_default=True,
    help="With ema_decay, the averaged weights or those before averaging. auto: those that evaluated better.",
)
@click.option(
    "--out",
    "target",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="The folder to write, which must not exist. [default: EXPERIMENT-RUN-FORMAT, here]",
)
def export_(run: Path, **choices: Any) -> int:
    """Write the weights of RUN for other programs.

    This runs the code that the run has kept.
    """
    from ddp_core.record.bundles import place_named
    from ddp_core.record.trained import export

    with place_named(run) as place:
        export(place, **choices)
    return ExitCode.DONE


@ddp.command(options=partial(field_options, "settings", "data_dir"))
@click.argument("experiment", default="digits")
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="cuda: on this machine's GPUs; ranks or replicas that have none of their own share one.",
)
def verify_layouts(experiment: str, settings: tuple[str, ...], data_dir: str, device: DeviceType) -> int:
    """Train on every layout that runs here, compare digests.

    EXPERIMENT is digits, if none is named.
    """
    from ddp_core.experiment.file import find_experiment

    find_experiment(experiment)  # a typo is answered before torch is loaded, which takes seconds
    from ddp_core.cli.layouts import compare_layouts

    return compare_layouts(experiment, settings, data_dir, device)


@ddp.command(options=partial(field_options, "output"))
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

    print(check_health(local(output), within))
    return ExitCode.DONE


@ddp.group(cls=Group, no_args_is_help=False)
def data() -> None:
    """Fetch a data set."""


@data.command("fetch", options=partial(field_options, "data_dir"))
@click.argument("name")
def fetch_(name: str, data_dir: str) -> int:
    """Download the data set NAME, and check it."""
    from ddp_core.data.fetch import fetch_data_set

    fetch_data_set(name, Path(data_dir))
    return ExitCode.DONE


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
    from ddp_core.launch import rendezvous

    return rendezvous.check(check) if check else rendezvous.serve(port, bind)
