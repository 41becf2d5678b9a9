"""The commands for the weights of a run, each with its options and its help: `ddp eval` and `ddp export`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ddp_core.base.errors import ExitCode
from ddp_core.cli.click_kinds import Command, RunPath, field_options
from ddp_core.cli.words import IS_OWN_PROCESS, as_json, quiet


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


@click.command("eval", cls=Command, options=_options_of_eval)
@click.argument("run", metavar="RUN|CHECKPOINT|BUNDLE", type=RunPath())
@_at("those it ended with, else its newest checkpoint")
@as_json
@click.pass_context
def eval_(context: click.Context, /, run: Path, **changes: Any) -> int:
    """Evaluate weights of RUN, on any layout.

    The figures have the bits that training gave them, in one process or on the layout that is named. Only settings of
    data and evaluation can be changed. This runs the code that the run has kept.
    """
    quiet()
    from ddp_core.cli.evaluate import evaluate

    return evaluate(run, context.find_root().obj, context.meta.get(IS_OWN_PROCESS, False), **changes)


@click.command("export", cls=Command)
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
    quiet()
    from ddp_core.record.exporting import export
    from ddp_core.record.places import place_named

    with place_named(run) as place:
        done = export(place, **choices)
    for line in done.notes:
        print(f"note: {line}")
    print(f"{done.file}: {done.file.stat().st_size:,} bytes")
    print(f"weights sha256 {done.digest}")
    return ExitCode.DONE
