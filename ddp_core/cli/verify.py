"""Train a run again from its record and compare: first the code, then the data, then the bits of the weights."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ddp_core.base.digests import checksum, weights_digest
from ddp_core.base.errors import DIFFERENT, ExitCode, UserError
from ddp_core.base.extras import needs
from ddp_core.base.files import is_file
from ddp_core.base.fingerprint import fingerprint_differences
from ddp_core.base.shown import shown
from ddp_core.checkpoint import find_checkpoints
from ddp_core.cli.repeating import Different, checked, other_ddp, place_of, run_in, train_silently
from ddp_core.config.options import Asked
from ddp_core.distributed.children import Children, error_of
from ddp_core.observe.metrics import read_metrics
from ddp_core.record.bundles import ChangedBundle, unpack_bundle
from ddp_core.record.continuing import LENGTH, kept_length
from ddp_core.record.data import how_compared
from ddp_core.record.directory import RunDirectory, find_runs
from ddp_core.record.environment import tell_children_of_code
from ddp_core.record.pins import Pin, installed, read_pins, torch_build
from ddp_core.record.recorded import broken_promise, how_it_ended, portable_cpu, what_broke_it
from ddp_core.record.weights import WEIGHTS, exchanged_weights, read_weights
from ddp_core.trainers.noting import first_other, named

_OWN = {"samebits": "ddp_core", "samebits-lab": "ddp_lab"}
"""The two distributions of this project, each with its package."""


def verify(named: Path, rebuild: bool = False, **where: Any) -> int:
    """Repeat a run, or a bundle of one, on its layout or another; returns 0 if all that is compared is the same."""
    # That is the weights, their average, and where the promise covers it the optimizer's state and the last evaluation.
    try:
        if rebuild:
            return _verify_rebuilt(named, where)
        with run_in(named, lambda what, line: print(line if what == "code" else f"{what}: {line}", flush=True)) as path:
            return _verify(path, **where)
    except ChangedBundle as changed:
        different = f"different bundle: {changed}"
    except Different as difference:
        different = str(difference)
    print(f"{shown(different)}. Nothing was trained.")
    return DIFFERENT


def _verify(path: Path, **words: Any) -> int:
    directory = RunDirectory(path)
    record = directory.read()
    if record["status"] != "completed":
        raise UserError(
            f"{path} is {record['status']}, so it has no weights to verify; finish it with `--resume {path}`"
        )
    where = place_of(record, words)
    if record["options"]["reduction"] != "exact" and where["layout"] != record["layout"]["kind"]:
        raise UserError(f"{path} used the plain reduction, whose bits depend on the layout; verify it without --layout")
    if (what := what_broke_it(record)) is not None:
        print(f"note: {what}. The run went on all the same, and its weights are not promised to come out again")
    line = _line_of(directory, record)
    asked = [checked(run, of, where) for run, of in line]
    if (exchanged := exchanged_weights(path, record)) is not None:
        raise Different(f"different file: {exchanged} holds other weights than the record says")
    with Children("ddp-verify-") as children:
        parent: RunDirectory | None = None
        forks = [of["forked_from"] for _, of in line[1:]]
        for number, ((_, of), one, fork) in enumerate(zip(line, asked, [*forks, None], strict=True)):
            count = "1 process" if one.nproc_per_node == 1 else f"{one.nproc_per_node} processes"
            print(f"training {of['experiment']['name']} again on {one.layout}, {count} …", flush=True)
            again = _repeat(children, of, one, children.folder / str(number), parent, fork)
            if fork is not None and not _is_parent(again, fork):
                return DIFFERENT
            parent = again
        return _judge(directory, record, again)


def _line_of(directory: RunDirectory, record: Mapping[str, Any]) -> list[tuple[RunDirectory, Mapping[str, Any]]]:
    """The run's parents and the run, the eldest first. Raises Different where a parent is gone."""
    line = [(directory, record)]
    while (fork := line[0][1].get("forked_from")) is not None:
        parent = RunDirectory(Path(fork["run"]))
        if not is_file(parent.path / "run.json"):
            raise Different(f"different start: {parent.path} is gone, from which the run branched off")
        if any(parent.path.resolve() == run.path.resolve() for run, _ in line):
            raise UserError(f"{parent.path} branches off from itself, as its run.json and those of its parents say")
        line.insert(0, (parent, parent.read()))
    return line


def _is_parent(again: RunDirectory, fork: Mapping[str, Any]) -> bool:
    """Whether the repeated parent has the weights at the fork from which the run branched off; says so."""
    kept = next((each for each in find_checkpoints(again.checkpoints) if each.step == fork["step"]), None)
    repeated = None if kept is None else weights_digest(read_weights(kept.path))
    print(f"recorded  {fork['weights_sha256']}  its parent at step {fork['step']}")
    print(f"repeated  {repeated}  the parent again")
    if repeated == fork["weights_sha256"]:
        return True
    print(f"different start: trained again, the parent {fork['run']} has other weights at step {fork['step']}")
    return False


def _repeat(
    children: Children,
    record: Mapping[str, Any],
    asked: Asked,
    output: Path,
    parent: RunDirectory | None,
    fork: Mapping[str, Any] | None,
) -> RunDirectory:
    """Train again, and extend again where the run was extended; returns the run.

    `parent`: from where it branches off. `fork`: where the next run of the line does; it is trained so far only, and
    keeps its checkpoint of that step.
    """
    lengths = [attempt["extended_from"] for attempt in record["attempts"] if "extended_from" in attempt]
    lengths.append(kept_length(record))
    until = None if fork is None else fork["step"]
    if until is not None:
        before = [length for length in lengths[:-1] if length["step"] < until]
        lengths = lengths[: len(before) + 1]
    changes: dict[str, Any] = {"output": str(output)}
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
        train_silently(children, asked.model_copy(update=changes))
    again, _ = next(find_runs(output))
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
    ends = [how_it_ended(each) or "was trained to its last step" for each in (record, repeated)]
    if any(record.get(name) != repeated[name] for name in ("weights_sha256", "ema_sha256")):
        causes = {
            f"a {broken}": broken,
            "a data set that gives other items at each read": record["data_sha256"] is None,
            f"another end: the run {ends[0]}; the repetition {ends[1]}. A callback asks by something else than the "
            "figures and weights of the training, such as a clock": ends[0] != ends[1],
            f"other code: {other_ddp(record)}": other_ddp(record),
            f"another fingerprint, which the promise does not cover: {'; '.join(other)}": other,
        }
        under = "; and under ".join(cause for cause, is_so in causes.items() if is_so)
        where = f", under {under}" if under else f" under the same fingerprint: {_first_difference(directory, again)}"
        print(f"different{where}")
        return DIFFERENT
    if repeated.get("ended_early"):
        print(f"both      {ends[1]}")
    is_promised = not other and not broken
    has_optimizer = is_promised and None not in (record["optimizer_sha256"], repeated["optimizer_sha256"])
    if has_optimizer and record["optimizer_sha256"] != repeated["optimizer_sha256"]:
        print("different state of the optimizer, though the weights are identical")
        return DIFFERENT
    there, here = (
        {name: value for name, value in each["result"].items() if name.startswith(("test_", "ema_test_"))}
        for each in (record, repeated)
    )
    figures = [name for name in there.keys() & here.keys() if is_promised and there[name] != here[name]]
    if figures:
        was = f"{figures[0]} is {here[figures[0]]} here, and was {there[figures[0]]}"
        print(f"different figures, though the weights are identical: {was}")
        return DIFFERENT
    covered = {
        "weights and buffers": True,
        "their average": record.get("ema_sha256") is not None,
        "optimizer's state": has_optimizer,
        "last evaluation": is_promised and there,
    }
    print(f"compared  {', '.join(what for what, is_so in covered.items() if is_so)}")
    differs = f" (although the fingerprint differs: {other[0]})" if other else ""
    if not other and (cpus := [portable_cpu(each) for each in (repeated, record)])[0] != cpus[1]:
        differs = f", on another kind of CPU: here {cpus[0]}, there {cpus[1]}"
    print(f"identical{differs}{f', but {broken}' if broken else ''}")
    return ExitCode.DONE


def _first_difference(ours: RunDirectory, theirs: RunDirectory) -> str:
    """In words: the first step at which the recorded digests differ, and what differs in the final weights."""
    here, there = (
        {entry["step"]: entry.get("weights_sha256") for entry in read_metrics(run.metrics, "digest")}
        for run in (ours, theirs)
    )
    parted = [step for step in sorted(here.keys() & there.keys()) if here[step] != there[step]]
    sums = [{name: checksum(each) for name, each in read_weights(run.path / WEIGHTS).items()} for run in (ours, theirs)]
    first = f"the weights part at or before step {parted[0]}" if parted else "the digests of all steps recorded agree"
    other = first_other({0: sums[0]}, {0: sums[1]}, is_part=False)
    return first + (f"; at the end {named(other[1])} differ" if other else "")


def _verify_rebuilt(bundle: Path, where: Mapping[str, Any]) -> int:
    """Verify the bundle in a new environment, made by uv from its pins; returns what `ddp verify` ended with there."""
    # What is installed must be what was there: each package in its version, with the files of its wheel. The package
    # samebits itself, where the run had it from no index, is lent by the environment that this is called in.
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if uv is None:
        raise UserError(needs("--rebuild", "uv", "uv"))
    if not is_file(bundle):
        raise UserError(f"{bundle} is no bundle, and --rebuild needs its pins; `ddp bundle RUN` makes one")
    with Children("ddp-rebuild-") as children:
        unpacked = unpack_bundle(bundle, children.folder / "bundle")
        wanted = read_pins(unpacked.pins)
        named = [line for line in unpacked.pins.splitlines() if line and line[0] not in "#-"]
        if "samebits" not in wanted or len(named) != sum(not pin.is_local for pin in wanted.values()):
            raise UserError(f"{bundle}: its pins do not name samebits, or not each package in one version")
        # Of a stranger's record, a version alone: uv also takes a path.
        if (version := re.match(r"\d+\.\d+", unpacked.record["environment"]["python"])) is None:
            raise UserError(f"{bundle} does not say which Python its run had")
        print(f"making Python {version[0]} with the {len(wanted)} packages of the bundle …", flush=True)
        python = _make(children, uv, version[0], wanted)
        words = [word for name, value in where.items() if value for word in (f"--{name.replace('_', '-')}", str(value))]
        command = [python, "-m", "ddp_core", "verify", str(bundle.absolute()), *words]
        return _verify_there(children, command, _lend(children, wanted))


def _make(children: Children, uv: str, version: str, wanted: Mapping[str, Pin]) -> str:
    """Make the environment of the pins, no more and no less; returns its Python. Raises UserError (4)."""
    venv = children.folder / "venv"
    python = str(venv / "bin" / "python")
    _uv(children, uv, f"Python {version}", "venv", "--quiet", "--python", version, str(venv))
    if lost := [f"{name} {pin.version}" for name, pin in wanted.items() if pin.is_local and name not in _OWN]:
        raise _cannot_have(f"{', '.join(lost)}, which the run had from a folder, a file or a repository")
    pins = children.folder / "wanted.txt"
    pins.write_text("".join(f"{name}=={pin.version}\n" for name, pin in wanted.items() if not pin.is_local))
    # A folder that the user names holds torch, too; else it comes from its own index, and nothing else does.
    build = None if "UV_FIND_LINKS" in os.environ else torch_build(wanted)
    words = [*(["--torch-backend", build] if build else []), "--no-deps", "--no-build", "--requirement", str(pins)]
    _uv(children, uv, "the packages", "pip", "install", "--quiet", "--python", python, *words)
    (site,) = (venv / "lib").glob("python*/site-packages")
    found = {name: pin for name, pin in installed([str(site)]).items() if name in wanted}
    for name, pin in found.items():
        if wanted[name].files not in (None, pin.files):
            raise _cannot_have(f"{name} {pin.version} as it was: another build of it has other files")
    if unknown := sum(wanted[name].files is None for name in found):
        print(f"of {unknown} packages the pins do not say which files they had", flush=True)
    return python


def _uv(children: Children, uv: str, what: str, *words: str) -> None:
    # In its own folder, because the settings of a project that lies around this one are not the run's.
    process = children.start([uv, *words], cwd=children.folder, stderr=subprocess.PIPE, text=True, errors="replace")
    said = process.communicate()[1]
    children.end(process)
    if process.returncode != 0:
        lines = [line.strip().removeprefix("error: ") for line in said.splitlines() if line.strip()]
        raise _cannot_have(f"{what}: {shown('; '.join(lines[:2]))}")


def _cannot_have(what: str) -> UserError:
    return UserError(f"--rebuild cannot have {what}", ExitCode.RESOURCES)


def _lend(children: Children, wanted: Mapping[str, Pin]) -> Path:
    """A folder with this project's packages and their metadata, and nothing that lies beside them."""
    lent = children.folder / "lent"
    lent.mkdir()
    for name, package in _OWN.items():
        spec = find_spec(package)
        if name in wanted and wanted[name].is_local and spec is not None and spec.origin is not None:
            (lent / package).symlink_to(Path(spec.origin).parent)
            for told in metadata.distribution(name).files or []:
                if told.name == "METADATA":
                    (lent / Path(told).parent.name).symlink_to(Path(str(told.locate())).parent)
    if any(lent.iterdir()):
        tell_children_of_code()
    return lent


def _verify_there(children: Children, command: list[str], path: Path) -> int:
    """Run the command, whose Python finds what is lent at `path`; print each of its lines at once, return its code."""
    # The folder that this is called in may have a ddp_core, too, as a clone has.
    ours = {"PYTHONPATH": str(path), "PYTHONSAFEPATH": "1", "TMPDIR": str(children.folder)}
    process = children.start(command, env={**os.environ, **ours}, stdout=subprocess.PIPE, text=True, errors="replace")
    assert process.stdout is not None
    has_verdict = False
    for line in process.stdout:
        has_verdict |= line.startswith("different")
        print(line, end="", flush=True)
    code = process.wait()
    children.end(process)
    if code < 0 or (code == 1 and not has_verdict):  # Python itself ends with 1 where it cannot begin
        raise error_of(code if code < 0 else ExitCode.INTERNAL, (), command[2:])
    return code
