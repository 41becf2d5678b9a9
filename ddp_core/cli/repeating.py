"""What trains a recorded run again, where its code, data and initial weights are still those of the record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ddp_core.base.beneath import read_file
from ddp_core.base.digests import weights_digest
from ddp_core.base.errors import UserError
from ddp_core.base.files import is_file
from ddp_core.cli.prepare import load_with_settings
from ddp_core.config.options import Asked
from ddp_core.data.data_digest import changed_at
from ddp_core.distributed.children import Children, error_of
from ddp_core.experiment.kept_source import changed_files, read_source
from ddp_core.experiment.request import build_splits
from ddp_core.record.bundles import unpack_bundle
from ddp_core.record.data import digest_data, recorded_digest
from ddp_core.record.directory import RunDirectory
from ddp_core.record.environment import describe_code
from ddp_core.record.pins import package_differences
from ddp_core.record.recorded import as_recorded, broken_promise
from ddp_core.record.weights import read_weights


class Different(Exception):
    """Code, data, initial or final weights are not as recorded, so training again would prove nothing."""


@contextmanager
def run_in(named: Path, say: Callable[[str, str], object]) -> Iterator[Path]:
    """The run directory that is named, or that of a bundle, which is checked and unpacked for the block.

    `say` is told of a bundle: what each line is about, and the line. Raises as `unpack_bundle`.
    """
    if not named.is_file():
        yield named
        return
    with TemporaryDirectory(prefix="ddp-bundle-") as folder:
        unpacked = unpack_bundle(named, Path(folder))
        say("bundle", f"{unpacked.files} files, each as MANIFEST says")
        say("packages", package_differences(unpacked.pins, unpacked.record["environment"]))
        say("code", "this runs the code in the bundle")
        yield Path(folder)


def train_silently(children: Children, asked: Asked) -> None:
    """Run `ddp train` to its end, printing nothing. Raises UserError where it fails and no fault was asked for."""
    words = ["train", *asked.to_words()]
    ended = children.ddp(words)
    if ended.code != 0 and not asked.faults:
        raise error_of(ended.code, ended.errors.splitlines(), words)


def place_of(record: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """The options that say where the run is trained again: as recorded, where nothing else is asked for."""
    recorded = record["layout"]
    kind = asked.get("layout") or recorded["kind"]
    count, is_same = recorded["nnodes"] * recorded["nproc_per_node"], kind == recorded["kind"]
    # Another layout has at least two processes or replicas.
    count = 1 if kind == "single" else count if is_same else max(2, count)
    shard = recorded.get("shard", "none") if is_same else "none"
    where = {"layout": kind, "device": recorded["device"], "nproc_per_node": count, "shard": shard}
    return where | {name: value for name, value in asked.items() if value}


def checked(directory: RunDirectory, record: Mapping[str, Any], where: dict[str, Any]) -> Asked:
    """What trains the run again; `where`: the options that say where. Raises UserError and Different."""
    path, options = directory.path, record["options"]
    again = as_recorded(path, record) | {
        "digest_every": options["digest_every"],
        # Where the run went on after a finding of its guard, its repetition must go on, too.
        "on_difference": "stop" if broken_promise(record) is None else "warn",
    }
    _require_repeatable(path, record)
    # The bits of the plain reduction belong to a layout.
    place = where if options["reduction"] == "exact" else place_of(record, {"data_dir": where.get("data_dir")})
    asked = Asked.model_validate(again | place)
    _check_code(directory, record)
    _check_data(directory, record, asked)
    return asked.model_copy(update={"init_from": _initial_weights(directory, record)})


def _require_repeatable(path: Path, record: Mapping[str, Any]) -> None:
    """Raises UserError for a run that training cannot repeat."""
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


def _check_code(directory: RunDirectory, record: Mapping[str, Any]) -> None:
    """Say which code has changed since, but is not what is trained. Raises Different where the run's copy has."""
    try:
        kept = read_source(directory.path, record["source"])
    except UserError as error:
        raise Different(f"different code: {error}") from None
    beside = Path(record["experiment_file"]).parent
    today = {place: read_file(beside / place) for place in kept.texts if is_file(beside / place)}
    edited = changed_files({place: kept.texts[place] for place in today}, today)
    if edited:
        print(
            f"note: {', '.join(str(beside / place) for place in edited)} changed after the run; "
            f"the run's own copy in {directory.path / record['source']['folder']} is what is trained"
        )
    if (other := other_ddp(record)) is not None:
        print(f"note: {other}")


def other_ddp(record: Mapping[str, Any]) -> str | None:
    """A line on the versions of ddp_core, where the run was made with another one than this; else None."""
    there, here = record["environment"]["code"], describe_code()
    if (there["version"], there["commit"]) == (here["version"], here["commit"]):
        return None
    versions = [
        f"{code['version']}" + (f" at commit {code['commit'][:12]}" if code["commit"] else "") for code in (here, there)
    ]
    return f"ddp_core is {versions[0]} here, and the run was made with {versions[1]}"


def _check_data(directory: RunDirectory, record: Mapping[str, Any], asked: Asked) -> None:
    """Raises Different where the data have changed, and UserError where they cannot be built."""
    loaded = load_with_settings(asked.experiment, (), Path(asked.record or ""))
    now = digest_data(build_splits(loaded, Path(asked.data_dir)))
    where = changed_at(recorded_digest(directory.path, record), now)
    if where is not None:
        raise Different(f"different data: {where}; the run trained on other data than these")


def _initial_weights(directory: RunDirectory, record: Mapping[str, Any]) -> str | None:
    """The file with the weights that the run began with, or its copy in the directory; None for random weights."""
    if (weights := record.get("init_from")) is None:
        return None
    places = [Path(weights["file"]), directory.path / f"init_from{Path(weights['file']).suffix}"]
    file = next((place for place in places if is_file(place)), None)
    if file is None:
        raise Different(f"different start: {weights['file']} is gone, whose weights the run began with")
    if weights_digest(read_weights(file)) != weights["sha256"]:
        raise Different(f"different start: {file} holds other weights than those that the run began with")
    return str(file)
