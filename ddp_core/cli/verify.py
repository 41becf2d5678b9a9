"""Train a run again from its record and compare: first the code, then the data, then the bits of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ddp_core.base.digests import weights_digest
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.files import is_file
from ddp_core.base.fingerprint import fingerprint_differences
from ddp_core.checkpoint import find_checkpoints
from ddp_core.cli.prepare import load_with_settings
from ddp_core.cli.training import train_silently
from ddp_core.config.layout import LayoutKind
from ddp_core.config.options import Asked
from ddp_core.data.data_digest import changed_at
from ddp_core.experiment.request import build_splits
from ddp_core.experiment.source import changed_files, read_source
from ddp_core.observe.metrics import read_metrics
from ddp_core.record.continuing import LENGTH, kept_length, recorded_weights
from ddp_core.record.data import digest_data, how_compared, recorded_digest
from ddp_core.record.directory import RunDirectory, find_runs
from ddp_core.record.early import how_it_ended
from ddp_core.record.environment import describe_code, portable_cpu, recorded_numerics
from ddp_core.record.guarded import broken_promise, what_broke_it
from ddp_core.record.weights import WEIGHTS, exchanged_weights, has_weights, read_weights

DIFFERENT = 1
"""Exit code of `ddp verify` where code, data or weights are not those of the record."""


class _Different(Exception):
    """Code, data, initial or final weights are not as recorded, so training again would prove nothing."""


def verify_run(
    path: Path, layout: LayoutKind | None, device: str | None, nproc_per_node: int | None, data_dir: str | None
) -> int:
    """Repeat the run at `path`, on its own layout or another; returns 0 when the weights are the same bits.

    `path`: a directory with a run's run.json, source/ and model.safetensors. Where it also holds metrics.jsonl and
    data.json, a difference is placed: at which step, or in which part of the data. Raises UserError for a run that
    cannot be repeated, or whose repetition fails.
    """
    directory = RunDirectory(path)
    record = directory.read()
    if record["status"] != "completed":
        raise UserError(
            f"{path} is {record['status']}, so it has no weights to verify; finish it with `--resume {path}`"
        )
    where = _place(record, layout, device, nproc_per_node)
    if record["options"]["reduction"] != "exact" and where["layout"] != record["layout"]["kind"]:
        raise UserError(f"{path} used the plain reduction, whose bits depend on the layout; verify it without --layout")
    if (what := what_broke_it(record)) is not None:
        print(f"note: {what}. The run went on all the same, and its weights are not promised to come out again")
    try:
        line = _line_of(directory, record)
        asked = [_checked(run, of, where, data_dir) for run, of in line]
        if (exchanged := exchanged_weights(path, record)) is not None:
            raise _Different(f"different file: {exchanged} holds other weights than the record says")
    except _Different as difference:
        print(f"{difference}. Nothing was trained.")
        return DIFFERENT
    with TemporaryDirectory(prefix="ddp-verify-") as scratch:
        parent = None
        for number, ((_, of), one, child) in enumerate(zip(line, asked, [*line[1:], None], strict=True)):
            count = "1 process" if one.nproc_per_node == 1 else f"{one.nproc_per_node} processes"
            print(f"training {of['experiment']['name']} again on {one.layout}, {count} …", flush=True)
            fork = None if child is None else child[1]["forked_from"]
            again = _repeat(of, one, f"{scratch}/{number}", parent, None if fork is None else fork["step"])
            if fork is not None:
                parent = _parent(again, fork)
                if parent is None:
                    return DIFFERENT
        return _judge(directory, record, again)


def _place(
    record: Mapping[str, Any], layout: LayoutKind | None, device: str | None, nproc_per_node: int | None
) -> dict[str, Any]:
    """The options that say where the run is trained again: as recorded, where nothing else is asked for."""
    recorded = record["layout"]
    kind = layout or recorded["kind"]
    return {
        "layout": kind,
        "device": device or recorded["device"],
        "nproc_per_node": nproc_per_node or _count_for(kind, recorded),
        "shard": recorded.get("shard", "none") if kind == recorded["kind"] else "none",
    }


def _line_of(directory: RunDirectory, record: Mapping[str, Any]) -> list[tuple[RunDirectory, Mapping[str, Any]]]:
    """The run's parents and the run, the eldest first. Raises _Different where a parent is gone."""
    line = [(directory, record)]
    while (fork := line[0][1].get("forked_from")) is not None:
        parent = RunDirectory(Path(fork["run"]))
        if not is_file(parent.path / "run.json"):
            raise _Different(f"different start: {parent.path} is gone, from which the run branched off")
        line.insert(0, (parent, parent.read()))
    return line


def _checked(
    directory: RunDirectory, record: Mapping[str, Any], where: Mapping[str, Any], data_dir: str | None
) -> Asked:
    """What trains the run again; `where`: the options that say where. Raises UserError and _Different."""
    path, options = directory.path, record["options"]
    _require_repeatable(path, record)
    asked = Asked(
        experiment=str(path / record["source"]["folder"] / record["source"]["experiment"]),
        record=str(path / "run.json"),
        reduction=options["reduction"],
        numerics=recorded_numerics(record),
        # Runs were always deterministic before there was a choice.
        deterministic="always" if options.get("deterministic", True) else "never",
        data_dir=data_dir or options["data_dir"],
        digest_every=options["digest_every"],
        # Where the run went on after a finding of its guard, its repetition must go on, too.
        on_difference="stop" if broken_promise(record) is None else "warn",
        # The bits of the plain reduction belong to a layout.
        **(where if options["reduction"] == "exact" else _place(record, None, None, None)),
    )
    for line in _check_code(directory, record):
        print(f"note: {line}")
    _check_data(directory, record, asked)
    weights = _initial_weights(directory, record)
    return asked.model_copy(update={"init_from": None if weights is None else str(weights)})


def _parent(again: RunDirectory, fork: Mapping[str, Any]) -> RunDirectory | None:
    """The repeated parent, if its weights at the fork are those from which the run branched off; says so."""
    kept = next((each for each in find_checkpoints(again.checkpoints) if each.step == fork["step"]), None)
    repeated = None if kept is None else weights_digest(read_weights(kept.path))
    print(f"recorded  {fork['weights_sha256']}  its parent at step {fork['step']}")
    print(f"repeated  {repeated}  the parent again")
    if repeated == fork["weights_sha256"]:
        return again
    print(f"different start: trained again, the parent {fork['run']} has other weights at step {fork['step']}")
    return None


def _require_repeatable(path: Path, record: Mapping[str, Any]) -> None:
    """Raises UserError for a run that training cannot repeat."""
    if "source" not in record:
        raise UserError(f"{path} was recorded by an earlier version of ddp, which did not keep the code: train it anew")
    if record["source"]["unreadable"]:
        raise UserError(
            f"{path} cannot be repeated: the source of module {record['source']['unreadable'][0]} was gone when it "
            "was recorded"
        )
    for number, attempt in enumerate(record["attempts"], 1):
        for what, key in (("code", "source_diff_sha256"), ("data", "data_changed")):
            if key in attempt:
                raise UserError(
                    f"{path} cannot be repeated: attempt {number} went on with other {what} than the attempts before, "
                    "so no single training gives these weights"
                )


def _check_code(directory: RunDirectory, record: Mapping[str, Any]) -> list[str]:
    """Notes on code that has changed since, but is not what is trained. Raises _Different where the run's copy has."""
    try:
        kept = read_source(directory.path, record["source"])
    except UserError as error:
        raise _Different(f"different code: {error}") from None
    notes = []
    beside = Path(record["experiment_file"]).parent
    today = {place: (beside / place).read_bytes() for place in kept.texts if is_file(beside / place)}
    edited = changed_files({place: kept.texts[place] for place in today}, today)
    if edited:
        notes.append(
            f"{', '.join(str(beside / place) for place in edited)} changed after the run; "
            f"the run's own copy in {directory.path / record['source']['folder']} is what is trained"
        )
    if (other := _other_ddp(record)) is not None:
        notes.append(other)
    return notes


def _other_ddp(record: Mapping[str, Any]) -> str | None:
    """A line on the versions of ddp_core, where the run was made with another one than this; else None."""
    there, here = record["environment"]["code"], describe_code()
    if (there["version"], there["commit"]) == (here["version"], here["commit"]):
        return None
    return f"ddp_core is {_version(here)} here, and the run was made with {_version(there)}"


def _version(code: Mapping[str, Any]) -> str:
    return f"{code['version']}" + (f" at commit {code['commit'][:12]}" if code["commit"] else "")


def _check_data(directory: RunDirectory, record: Mapping[str, Any], asked: Asked) -> None:
    """Raises _Different where the data have changed, and UserError where they cannot be built."""
    loaded = load_with_settings(asked.experiment, (), Path(asked.record or ""))
    now = digest_data(build_splits(loaded, Path(asked.data_dir)))
    where = changed_at(recorded_digest(directory.path, record), now)
    if where is not None:
        raise _Different(f"different data: {where}; the run trained on other data than these")


def _initial_weights(directory: RunDirectory, record: Mapping[str, Any]) -> Path | None:
    """The file with the weights that the run began with, or its copy in the directory; None for random weights.

    Raises _Different where both are gone, or the file holds other weights.
    """
    weights = recorded_weights(record)
    if weights is None:
        return None
    # A bundle holds what lay in a folder as one safetensors file.
    suffix = Path(weights.file).suffix or ".safetensors"
    places = [Path(weights.file), directory.path / f"init_from{suffix}"]
    file = next((place for place in places if has_weights(place)), None)
    if file is None:
        raise _Different(f"different start: {weights.file} is gone, whose weights the run began with")
    if weights_digest(read_weights(file)) != weights.sha256:
        raise _Different(f"different start: {file} holds other weights than those that the run began with")
    return file


def _count_for(kind: LayoutKind, recorded: Mapping[str, Any]) -> int:
    """The number of processes or replicas: 1 for single, else the recorded number, and at least 2 on another layout."""
    if kind == "single":
        return 1
    count: int = recorded["nnodes"] * recorded["nproc_per_node"]
    return count if kind == recorded["kind"] else max(2, count)


def _repeat(
    record: Mapping[str, Any], asked: Asked, output: str, parent: RunDirectory | None, until: int | None
) -> RunDirectory:
    """Train again, and extend again where the run was extended; returns the run.

    `parent`: from where it branches off. With `until` it is trained so far only, and keeps its checkpoint of that step.
    """
    lengths = [attempt["extended_from"] for attempt in record["attempts"] if "extended_from" in attempt]
    lengths.append(kept_length(record))
    if until is not None:
        before = [length for length in lengths[:-1] if length["step"] < until]
        lengths = lengths[: len(before) + 1]
    changes: dict[str, Any] = {"output": output}
    if parent is not None:
        changes |= {"fork": str(parent.path), "at": record["forked_from"]["step"]}
    for number, length in enumerate(lengths, 1):
        changes["settings"] = tuple(f"{name}={'null' if length[name] is None else length[name]}" for name in LENGTH)
        if number > 1:
            changes["resume"] = "auto"
        if number == len(lengths) and until is not None:
            changes |= {"checkpoint_every": until, "keep_every": until, "asynchronous_save": False}
            # Steps after the fork are not of its line. A run that ends at the fork ends before this.
            changes |= {"faults": (f"kill@{until + 1}",), "max_restarts": 0}
        train_silently(asked.model_copy(update=changes))
    again, _ = next(find_runs(Path(output)))
    return again


def _judge(directory: RunDirectory, record: Mapping[str, Any], again: RunDirectory) -> int:
    """Print the verdict on the run in `directory` and its repetition `again`; returns the exit code."""
    repeated = again.read()
    print(f"recorded  {record['weights_sha256']}  {record['layout']['label']}")
    print(f"repeated  {repeated['weights_sha256']}  {repeated['layout']['label']}")
    if how_compared(record) == "sample":
        print(f"data      compared by a sample: {record['data']['digest_of']}")
    other = fingerprint_differences(repeated["fingerprint"], record["fingerprint"])
    broken = broken_promise(record) or broken_promise(repeated)
    ends = [how_it_ended(each.get("ended_early")) or "was trained to its last step" for each in (record, repeated)]
    if all(record.get(name) == repeated[name] for name in ("weights_sha256", "ema_sha256")):
        differs = f" (although the fingerprint differs: {other[0]})" if other else _on_another_cpu(record, repeated)
        if repeated.get("ended_early"):
            print(f"both      {ends[1]}")
        figure = None if other or broken else _other_figure(record["result"], repeated["result"])
        if figure is not None:
            print(f"different figures, though the weights are identical: {figure}")
            return DIFFERENT
        print(f"identical{differs}{f', but {broken}' if broken else ''}")
        return ExitCode.DONE
    causes = [f"another fingerprint, which the promise does not cover: {'; '.join(other)}"] if other else []
    if (ddp := _other_ddp(record)) is not None:
        causes.insert(0, f"other code: {ddp}")
    if ends[0] != ends[1]:
        causes.insert(
            0,
            f"another end: the run {ends[0]}; the repetition {ends[1]}. A callback asks by something else than the "
            "figures and weights of the training, such as a clock",
        )
    if record["data_sha256"] is None:
        causes.insert(0, "a data set that gives other items at each read")
    if broken:
        causes.insert(0, f"a {broken}")
    if causes:
        print(f"different, under {'; and under '.join(causes)}")
    else:
        print(f"different under the same fingerprint: {_first_difference(directory, again)}")
    return DIFFERENT


def _other_figure(there: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """The first figure of the last evaluation that the repetition has and the record has not alike, in words."""
    for name in there.keys() & here.keys():
        if name.startswith(("test_", "ema_test_")) and there[name] != here[name]:
            return f"{name} is {here[name]} here, and was {there[name]}"
    return None


def _on_another_cpu(record: Mapping[str, Any], repeated: Mapping[str, Any]) -> str:
    """The end of a verdict that names the CPUs of a run with portable numerics and its repetition, if these differ."""
    there, here = portable_cpu(record), portable_cpu(repeated)
    return f", on another kind of CPU: here {here}, there {there}" if here != there else ""


def _first_difference(ours: RunDirectory, theirs: RunDirectory) -> str:
    """In words: the first step at which the recorded digests differ, the losses there, the gap of the final weights."""
    here, there = ({entry["step"]: entry for entry in read_metrics(run.metrics, "digest")} for run in (ours, theirs))
    for step in sorted(here.keys() & there.keys()):
        if here[step].get("weights_sha256") != there[step].get("weights_sha256"):
            losses = [
                {entry["step"]: entry.get("loss") for entry in read_metrics(run.metrics, "step")}.get(step)
                for run in (ours, theirs)
            ]
            gap = f", loss {losses[0]:.9g} against {losses[1]:.9g}" if None not in losses else ""
            return f"the weights part at or before step {step}{gap}{_weight_gap(ours, theirs)}"
    return f"the digests of all steps recorded agree{_weight_gap(ours, theirs)}"


def _weight_gap(ours: RunDirectory, theirs: RunDirectory) -> str:
    """In words: the parameter or buffer whose final values differ the most, and by how much."""
    here, there = (read_weights(run.path / WEIGHTS) for run in (ours, theirs))
    alike = [
        name for name in here.keys() & there.keys() if here[name].shape == there[name].shape and here[name].numel()
    ]
    gaps = {name: (here[name].double() - there[name].double()).abs().max().item() for name in alike}
    if not gaps:
        return ""
    worst = max(gaps, key=lambda name: gaps[name])
    return f"; at the end {worst} differs by up to {gaps[worst]:.3g}"
