"""The command `ddp`. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_core.errors import ExitCode, UserError

if TYPE_CHECKING:
    from ddp_core.spec.experiment import Experiment
    from ddp_core.spec.layout import Layout


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code, having said any error in one line."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = build_parser()
    try:
        offered = _offered()
        if words and words[0] in offered:
            return int(offered[words[0]].load()(words[1:]))
        options = parser.parse_args(words)
        if options.command is None:
            parser.print_help()
            return ExitCode.BAD_INPUT
        return int(options.run(options, words))
    except UserError as error:
        from ddp_core.distributed.world import World

        if World.is_set():
            from ddp_core.launch.worker import report_error

            return report_error(error)
        print(f"ddp: error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        return ExitCode.DONE
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = _Parser(
        prog="ddp",
        description="Data-parallel training in PyTorch: the same weights on every layout.",
        epilog=f"also: {', '.join(sorted(_offered()))} (each with --help)",
    )
    # torch.distributed.launch puts its rank, in either spelling, before all else; the environment says it, too.
    parser.add_argument("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    _add_train(commands.add_parser("train", help="train an experiment on a layout"))
    listing = commands.add_parser("list", help="the experiments and the questions they answer")
    listing.set_defaults(run=_list)
    compare = commands.add_parser("compare", help="runs side by side")
    compare.add_argument(
        "runs", nargs="*", metavar="RUN|DIR", help="run directories, or folders of them (default: outputs)"
    )
    compare.set_defaults(run=_compare)
    verify = commands.add_parser(
        "verify", help="train a run again from its record and judge whether the weights are the same"
    )
    verify.add_argument("path", metavar="RUN")
    verify.add_argument("--layout", choices=["single", "dp", "ddp"])
    verify.add_argument("--device", choices=["cpu", "cuda"])
    verify.add_argument("--nproc-per-node", type=_count)
    verify.set_defaults(run=_verify)
    layouts = commands.add_parser(
        "verify-layouts", help="one experiment on every layout that runs here, and the digests"
    )
    layouts.add_argument("experiment", nargs="?", default="digits")
    layouts.add_argument("--output", default=_environment("DDP_OUTPUT", "outputs"), metavar="DIR")
    layouts.add_argument("--set", action="append", default=[], dest="settings", metavar="NAME=VALUE")
    layouts.set_defaults(run=_verify_layouts)
    ledger = commands.add_parser("ledger", help="was each sample of a run trained exactly once")
    ledger.add_argument("path", metavar="RUN")
    ledger.set_defaults(run=_ledger)
    health = commands.add_parser("health", help="0 while training makes progress here; for container health checks")
    health.add_argument("--output", default=_environment("DDP_OUTPUT", "outputs"), metavar="DIR")
    health.add_argument("--within", type=float, default=60.0, metavar="SECONDS")
    health.set_defaults(run=_health)
    data = commands.add_parser("data", help="fetch a data set")
    actions = data.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=_Parser)
    fetch = actions.add_parser("fetch", help="download a data set, checked and resumable")
    fetch.add_argument("name")
    fetch.add_argument("--data-dir", default=_environment("DDP_DATA", "data"), metavar="DIR")
    fetch.set_defaults(run=_fetch)
    doctor = commands.add_parser("doctor", help="what is here: devices, versions, what would run")
    doctor.add_argument("experiment", nargs="?", help="estimate the memory that training it takes")
    doctor.add_argument("--set", action="append", default=[], dest="settings", metavar="NAME=VALUE")
    doctor.add_argument("--data-dir", default=_environment("DDP_DATA", "data"), metavar="DIR")
    doctor.set_defaults(run=_doctor)
    rendezvous = commands.add_parser("rendezvous", help="where the nodes of a launch meet")
    rendezvous.add_argument("--port", type=int, default=29400)
    rendezvous.add_argument("--check", metavar="HOST:PORT", help="only say whether one answers there")
    rendezvous.set_defaults(run=_rendezvous)
    return parser


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiment", help="a name from `ddp list`, or a path to your own file")
    parser.add_argument("--layout", choices=["single", "dp", "ddp"], default="single")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--nnodes", type=_node_range, default=(1, 1), metavar="N|MIN:MAX")
    parser.add_argument(
        "--nproc-per-node", type=_count, metavar="N", help="processes (ddp) or replicas (dp) on each node"
    )
    parser.add_argument("--reduction", choices=["plain", "exact"], help="default: the experiment's own")
    parser.add_argument("--launcher", choices=["torchrun", "spawn"], default="torchrun")
    parser.add_argument(
        "--backend", choices=["auto", "gloo", "nccl"], default="auto", help="gloo lets processes share a GPU"
    )
    parser.add_argument("--output", default=_environment("DDP_OUTPUT", "outputs"), metavar="DIR")
    parser.add_argument("--data-dir", default=_environment("DDP_DATA", "data"), metavar="DIR")
    parser.add_argument("--resume", default="never", metavar="auto|never|RUN", help="continue an unfinished run")
    parser.add_argument(
        "--set", action="append", default=[], dest="settings", metavar="NAME=VALUE", help="change the experiment"
    )
    parser.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="where several nodes meet (see `ddp rendezvous`)")
    parser.add_argument("--rdzv-id", metavar="ID", help="the same, fresh one on every node of a launch")
    parser.add_argument("--max-restarts", type=int, default=3, metavar="N")
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="a peer silent for longer is lost"
    )
    parser.add_argument("--checkpoint-every", type=_count, metavar="STEPS", help="default: at the end of each epoch")
    parser.add_argument("--keep-last", type=_count, default=2, metavar="K")
    parser.add_argument("--keep-every", type=_count, metavar="STEPS")
    parser.add_argument("--synchronous-save", action="store_true", help="write checkpoints before training goes on")
    parser.add_argument("--log-every", type=_count, default=10, metavar="STEPS")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="loader processes per rank")
    parser.add_argument("--on-nan", choices=["stop", "skip"], default="stop")
    parser.add_argument("--max-seconds", type=float, metavar="S", help="stop and save after this time")
    parser.add_argument("--stop-signal", metavar="NAME", help="an early signal of a scheduler, for example USR1")
    parser.add_argument("--tensorboard", action="store_true")
    parser.add_argument("--profile", metavar="FIRST:LAST", help="trace these steps on every rank, for Perfetto")
    parser.add_argument(
        "--ledger", action="store_true", help="note the ids that each rank trains; judged by `ddp ledger RUN`"
    )
    parser.add_argument(
        "--digest-every", type=_count, metavar="STEPS", help="weight digests in the metrics between epochs"
    )
    parser.add_argument(
        "--fault", action="append", default=[], dest="faults", metavar="KIND@STEP[:RANK]", help="scripted, for drills"
    )
    parser.add_argument("--record", metavar="RUN.JSON", help=argparse.SUPPRESS)
    parser.add_argument("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)
    parser.set_defaults(run=_train)


def _train(options: argparse.Namespace, words: list[str]) -> int:
    _quiet()
    from ddp_core.distributed.world import World
    from ddp_core.launch.launch import Meeting, launch
    from ddp_core.run.prepare import choose_layout, load_with_settings
    from ddp_core.run.request import Request
    from ddp_core.spec.options import Options

    loaded = load_with_settings(options.experiment, options.settings, Path(options.record) if options.record else None)
    low, high = options.nnodes
    external = World.is_set()
    world = World.from_environment()
    # The replicas of dp are threads of one process; a launcher outside does not count them.
    counted = external and (options.layout != "dp" or world.world_size > 1)
    nnodes, nproc = (world.nnodes, world.nproc_per_node) if counted else (high, options.nproc_per_node)
    if high > 1 and not external and options.layout == "ddp" and not (options.rdzv_endpoint and options.rdzv_id):
        raise UserError(
            f"--nnodes {high} needs --rdzv-endpoint HOST:PORT (start `ddp rendezvous` there) "
            "and the same fresh --rdzv-id on every node"
        )
    if external and low == high and options.layout == "ddp" and "--nnodes" in words and high != nnodes:
        raise UserError(
            f"asked for {high} nodes, but the launcher started {nnodes}: some did not come in time", ExitCode.PEERS_LOST
        )
    layout = choose_layout(options.layout, options.device, nnodes, nproc, options.backend)
    launcher = (
        "in-process" if layout.kind != "ddp" else "external" if external and not world.report_dir else options.launcher
    )
    run_options = Options.checked(
        {
            "reduction": options.reduction or _default_reduction(loaded.experiment, layout),
            "launcher": launcher,
            "backend": options.backend,
            "output": options.output,
            "data_dir": options.data_dir,
            "workers": options.workers,
            "checkpoint_every": options.checkpoint_every,
            "keep_last": options.keep_last,
            "keep_every": options.keep_every,
            "asynchronous_save": not options.synchronous_save,
            "log_every": options.log_every,
            "timeout": options.timeout,
            "on_nan": options.on_nan,
            "max_seconds": options.max_seconds,
            "stop_signal": options.stop_signal,
            "max_restarts": options.max_restarts,
            "tensorboard": options.tensorboard,
            "ledger": options.ledger,
            "profile": options.profile,
            "digest_every": options.digest_every,
            "faults": options.faults,
        }
    )
    command = shlex.join(["ddp", *words])
    request = Request(loaded, layout, run_options, options.resume, command)
    return launch(request, Meeting(low, high, options.rdzv_endpoint, options.rdzv_id), words, main)


def _default_reduction(experiment: Experiment, layout: Layout) -> str:
    """The experiment's own, or plain, said aloud, where exact cannot be had."""
    from ddp_core.distributed.world import World
    from ddp_core.run.request import promise_broken_by

    reason = promise_broken_by(experiment, layout) if experiment.reduction == "exact" else None
    if reason is None:
        return experiment.reduction
    if not World.is_set() or World.from_environment().is_first:
        print(f"plain reduction instead of exact: {reason}", file=sys.stderr)
    return "plain"


def _list(options: argparse.Namespace, words: list[str]) -> int:
    from ddp_core.run.experiment_file import list_experiments

    found = list_experiments()
    width = max((len(entry.name) for entry in found), default=0)
    for entry in found:
        print(f"{entry.name:{width}}  {entry.question}")
    return ExitCode.DONE


def _compare(options: argparse.Namespace, words: list[str]) -> int:
    from ddp_core.commands.compare import compare

    return compare([Path(run) for run in options.runs or [_environment("DDP_OUTPUT", "outputs")]])


def _verify(options: argparse.Namespace, words: list[str]) -> int:
    _quiet()
    from ddp_core.commands.verify import verify

    return verify(Path(options.path), options.layout, options.device, options.nproc_per_node)


def _verify_layouts(options: argparse.Namespace, words: list[str]) -> int:
    from ddp_core.commands.verify import verify_layouts

    return verify_layouts(options.experiment, Path(options.output), options.settings)


def _ledger(options: argparse.Namespace, words: list[str]) -> int:
    from ddp_core.observe.ledger import audit

    print(audit(Path(options.path)))
    return ExitCode.DONE


def _health(options: argparse.Namespace, words: list[str]) -> int:
    from ddp_core.observe.heartbeat import check_health

    print(check_health(Path(options.output), options.within))
    return ExitCode.DONE


def _fetch(options: argparse.Namespace, words: list[str]) -> int:
    from ddp_core.data.fetch import fetch

    fetch(options.name, Path(options.data_dir))
    return ExitCode.DONE


def _doctor(options: argparse.Namespace, words: list[str]) -> int:
    from ddp_core.commands.doctor import doctor

    return doctor(options.experiment, options.settings, Path(options.data_dir))


def _rendezvous(options: argparse.Namespace, words: list[str]) -> int:
    _quiet()
    from ddp_core.launch import rendezvous

    return rendezvous.check(options.check) if options.check else rendezvous.serve(options.port)


def _offered() -> dict[str, EntryPoint]:
    """Commands that other packages offer under the entry point group `ddp.commands`: functions of a list of words."""
    return {entry.name: entry for entry in entry_points(group="ddp.commands")}


class _Parser(argparse.ArgumentParser):
    """argparse with one-line errors that name the nearest right word."""

    def __init__(self, *details: object, **settings: object) -> None:
        settings.setdefault("allow_abbrev", False)
        super().__init__(*details, **settings)  # type: ignore[arg-type]

    def error(self, message: str) -> None:  # type: ignore[override]
        from difflib import get_close_matches

        parsers: list[argparse.ArgumentParser] = [self]
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
        known = [word for parser in parsers for action in parser._actions for word in action.option_strings]
        wrong = message.removeprefix("unrecognized arguments: ").split(" ")[0].partition("=")[0]
        near = get_close_matches(wrong, known, n=1) if message.startswith("unrecognized") else []
        raise UserError(f"{message}; did you mean {near[0]}?" if near else f"{message} (see `{self.prog} --help`)")


def _quiet() -> None:
    """No library speaks in a normal run; set before torch is imported."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    warnings.simplefilter("ignore")


def _environment(name: str, default: str) -> str:
    return os.environ.get(name, default)


def _count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1")
    return number


def _node_range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    first = _count(low)
    last = _count(high) if high else first
    if last < first:
        raise argparse.ArgumentTypeError(f"{text}: the first number is the smaller one")
    return first, last
