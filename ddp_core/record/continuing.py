"""Which earlier run a request may continue, why not another one, and the command that continues it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.files import is_there
from ddp_core.base.shown import shown
from ddp_core.checkpoint import find_checkpoints
from ddp_core.config.experiment import UNTRAINED, Experiment
from ddp_core.config.records import dotted, setting_text
from ddp_core.experiment.request import Request
from ddp_core.record.directory import RunDirectory, find_runs, pass_over
from ddp_core.record.lock import require_unlocked
from ddp_core.record.run_json import RecordedRun

LENGTH = ("epochs", "max_steps")
"""The settings by which a finished run may be extended."""
_WOULD_REPEAT = {ExitCode.BAD_INPUT, ExitCode.NUMERICS}
"""The exit codes of runs that would end in the same way again."""
_ORDER = ("seed", "global_batch_size", "last_batch", "data")
_STATE = ("optimizer.name", "optimizer.implementation")
"""Settings that say which samples come when, and those that say what the optimizer's state means."""


Values = tuple[Any, Any]
"""A setting's value there, in a run's record, and here, in the request; Ellipsis where it has no such setting."""


def differing(record: Mapping[str, Any], experiment: Experiment) -> dict[str, Values]:
    """The settings in which a run's record and an experiment train something else, by the names that `--set` knows."""
    there, here = (dotted(part) for part in (record.get("experiment") or {}, experiment.to_json()))
    if there:
        # The record may be older than a setting; the run then had the setting's default.
        later = {name: field.default for name, field in Experiment.model_fields.items() if name in here}
        there = later | there
    names = [name for name in [*here, *(there.keys() - here.keys())] if name != UNTRAINED]
    values = {name: (there.get(name, ...), here.get(name, ...)) for name in names}
    return {name: pair for name, pair in values.items() if pair[0] != pair[1]}


def in_words(changes: Mapping[str, Values]) -> str:
    """Differences in words: `optimizer.lr 0.1 there, 0.05 here`."""
    return shown(
        "; ".join(f"{name} {_value(there)} there, {_value(here)} here" for name, (there, here) in changes.items())
    )


def refused_changes(changes: Mapping[str, Values]) -> str | None:
    """The first of these differences that a fork may not have, in words; None where it may have them all."""
    for name, (there, here) in changes.items():
        if name in _STATE or name.partition(".")[0] in _ORDER:
            what = "what the optimizer's state means" if name in _STATE else "which samples come when"
            return f"{name} is {_value(there)} there and {_value(here)} here, which changes {what}"
        if name == "best":
            return f"best is {_value(there)} there and {_value(here)} here: the best value so far is of another figure"
        if name == "ema_decay" and there is None:
            return "ema_decay is not set there, so its checkpoints hold no averaged weights"
    return None


def find_resumable(request: Request, samples: int) -> RunDirectory | None:
    """The run that `--resume auto` means: the newest unfinished one of this experiment, or a finished one to extend.

    Raises UserError (2) where a process works in that run, which would be trained twice in silence. Raises UserError
    (3) where a run that could be meant has other settings, or checkpoints but no record that says what it is: to start
    anew would lose its work in silence.
    """
    runs = _runs_of(request, partial(_refuse_unrecorded, request))
    unfinished = [directory for directory, record in runs if _is_unfinished(record, request)]
    if unfinished:
        try:
            require_unlocked(unfinished[0].path)
        except UserError as error:
            raise UserError(f"--resume auto: {error}; to train it a second time: --resume never") from None
        return unfinished[0]
    for directory, record in runs:
        if extends(record, request, samples) and not directory.is_worked_in:
            require_continuable(directory, request, samples)
            return directory
        if _could_be_meant(directory, record, request) and not directory.is_worked_in:
            raise UserError(
                f"--resume auto: {directory.path} is an unfinished run of {request.loaded.path.name} with "
                f"{_in_words(record, request)}. To continue it: {_continue_it(directory, record, request)} "
                f"To start anew: {command_for(request, resume='never')}",
                ExitCode.NO_CHECKPOINT,
            )
    return None


def _refuse_unrecorded(request: Request, directory: RunDirectory, problem: str) -> None:
    """Pass over a directory without a readable record, unless it has a checkpoint: UserError (3)."""
    if not (found := find_checkpoints(directory.checkpoints)):
        return pass_over(directory, problem)
    raise UserError(
        f"--resume auto: {directory.path} has a checkpoint of step {found[0].step}, but no record that tells "
        f"whether it is the run to continue ({problem}). Bring its run.json back from a copy; or move the folder "
        f"away and begin with its weights: --init-from {found[0].path}; or leave it there and start anew: "
        f"{command_for(request, resume='never')}",
        ExitCode.NO_CHECKPOINT,
    )


def find_unfinished(request: Request) -> RunDirectory | None:
    """The newest unfinished run of just this experiment in which no process works; None if there is none."""
    runs = [directory for directory, record in _runs_of(request, pass_over) if _is_unfinished(record, request)]
    return next((directory for directory in runs if not directory.is_worked_in), None)


def _is_unfinished(record: Mapping[str, Any], request: Request) -> bool:
    """Whether the run is of just this experiment and has not come to its end."""
    same = not differing(record, request.loaded.experiment) and starts_alike(record, request)
    return same and record.get("status") != "completed"


def _runs_of(request: Request, on_bad: Callable[[RunDirectory, str], None]) -> list[tuple[RunDirectory, RecordedRun]]:
    """The runs of all experiments of the same name, newest first; `on_bad`: as for `find_runs`."""
    return list(find_runs(Path(request.options.output) / request.loaded.experiment.name, on_bad))[::-1]


def _could_be_meant(directory: RunDirectory, record: Mapping[str, Any], request: Request) -> bool:
    """Whether the run is of the same file and holds work that can go on."""
    return (
        Path(str(record.get("experiment_file"))).name == request.loaded.path.name
        and record.get("status") != "completed"
        and record.get("exit_code") not in _WOULD_REPEAT
        and bool(find_checkpoints(directory.checkpoints))
    )


def require_continuable(directory: RunDirectory, request: Request, samples: int) -> None:
    """Raises UserError (3), with the differences, where the run trains another experiment or began elsewhere."""
    record = directory.read()
    if not differing(record, request.loaded.experiment) and starts_alike(record, request):
        return
    if extends(record, request, samples):
        newest = find_checkpoints(directory.checkpoints)[:1]
        steps = record["result"]["steps"]
        if not newest or newest[0].step != steps:
            raise UserError(
                f"{directory.path} has no checkpoint of its last step {steps}, so it cannot be extended; "
                "start anew with --resume never, perhaps from its weights: --init-from RUN",
                ExitCode.NO_CHECKPOINT,
            )
        return
    raise UserError(
        f"{directory.path} is a run of another experiment, with {_in_words(record, request)}. "
        f"To continue it: {_continue_it(directory, record, request)} {_fork_it(directory, record, request)}"
        "To start anew: --resume never",
        ExitCode.NO_CHECKPOINT,
    )


def extends(record: Mapping[str, Any], request: Request, samples: int) -> bool:
    """Whether the run is completed, and the request asks for more steps of it and for nothing else."""
    experiment = request.loaded.experiment
    return (
        record.get("status") == "completed"
        and set() < differing(record, experiment).keys() <= set(LENGTH)
        and starts_alike(record, request)
        and experiment.total_steps(experiment.steps_per_epoch(samples)) > record["result"]["steps"]
    )


def starts_alike(record: Mapping[str, Any], request: Request) -> bool:
    """Whether the run began as the request asks (`--init-from`, `--fork`), or the request names it and does not ask."""
    if not _branches_alike(record, request):
        return False
    given = request.asked.init_from
    recorded = record.get("init_from")
    if given is None:
        return recorded is None or request.resume not in ("auto", "never")
    if recorded is None:
        return False
    from ddp_core.record.weights import find_weights

    if recorded["given"] == given:
        # The weights may be of a run that is still trained, and so has newer ones by now.
        return not is_there(Path(recorded["file"])) or find_weights(recorded["file"])["sha256"] == recorded["sha256"]
    return bool(find_weights(given)["sha256"] == recorded["sha256"])


def _branches_alike(record: Mapping[str, Any], request: Request) -> bool:
    """Whether the run has branched off where the request asks for (`--fork`)."""
    asked, fork = request.asked, record.get("forked_from")
    if asked.fork is None:
        return fork is None or request.resume not in ("auto", "never")
    # The parent may be trained still, and so have newer checkpoints by now.
    return fork is not None and fork["given"] == asked.fork and asked.at in (None, fork["step"])


def _in_words(record: Mapping[str, Any], request: Request) -> str:
    """How the settings of a run and of the request differ, three differences at most."""
    parts = [in_words({name: pair}) for name, pair in differing(record, request.loaded.experiment).items()]
    if not _branches_alike(record, request):
        fork = record.get("forked_from")
        parts.append(f"a fork of {fork['run']} at step {fork['step']}" if fork else "not a fork of another run")
    elif not starts_alike(record, request):
        recorded = record.get("init_from")
        parts.append(f"initial weights from {recorded['file']} there" if recorded else "random initial weights there")
    return f"other settings ({'; '.join(parts[:3])}{'; …' if len(parts) > 3 else ''})"


def _continue_it(directory: RunDirectory, record: Mapping[str, Any], request: Request) -> str:
    """The command that continues the run, with the settings of its record instead of those of the request."""
    other = differing(record, request.loaded.experiment)
    kept = [text for text in request.asked.settings if text.partition("=")[0].strip() not in other]
    theirs = [shown(f"{name}={setting_text(there)}") for name, (there, _) in other.items() if there is not ...]
    return command_for(request, resume=str(directory.path), settings=(*kept, *theirs), init_from=None)


def _fork_it(directory: RunDirectory, record: Mapping[str, Any], request: Request) -> str:
    """The command that goes on from the run's checkpoint with the settings of the request; empty where none can."""
    if refused_changes(differing(record, request.loaded.experiment)) or not starts_alike(record, request):
        return ""
    command = command_for(request, resume="never", fork=str(directory.path))
    return f"To go on from its newest checkpoint with these settings, as a new run: {command} "


def _value(value: Any) -> str:
    return "none" if value is ... else repr(value)


def command_for(request: Request, **changes: Any) -> str:
    """The request's command line with some fields changed, quoted for a shell and set in backticks."""
    asked = request.asked
    changes = {"faults": (), "accept_changed_code": False} | changes
    if changes["resume"] not in ("auto", "never"):
        changes |= {"fork": None, "at": None}
    if asked.rdzv_id is not None:
        # A rendezvous that has ended cannot be met at again.
        changes["rdzv_id"] = f"{asked.rdzv_id}-again"
    words = asked.model_copy(update=changes).to_words()
    return f"`{shlex.join(['ddp', 'train', *words])}`"


def kept_length(record: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a record that say how long the run trains."""
    return {name: record["experiment"][name] for name in LENGTH}
