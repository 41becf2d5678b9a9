"""A segment is trained again: from its kept checkpoint, or from the start that is built anew, on any layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_core.base.beneath import read_file
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.fingerprint import fingerprint_differences
from ddp_core.checkpoint import Checkpoint, load, read_checkpoint
from ddp_core.checkpoint.manifest import manifest_at
from ddp_core.cli.audit.draw import Segment
from ddp_core.cli.audit.whole_chain import WholeChain
from ddp_core.cli.repeating import Different
from ddp_core.config.options import Asked
from ddp_core.distributed.children import Children
from ddp_core.experiment.source import read_source
from ddp_core.observe.chain import CHAIN, BrokenChain, Link, difference, each_link, other_begin
from ddp_core.record.data import MOST_DATA_BYTES
from ddp_core.record.directory import RunDirectory
from ddp_core.trainers.step_chain import state_digests

_ENDS = (ExitCode.DONE, ExitCode.STOPPED)
_SEQUENCE = ("step", "evaluation", "kept")


def replay(
    directory: RunDirectory, record: Mapping[str, Any], chain: WholeChain, segment: Segment, asked: Asked
) -> None:
    """Train the segment again and compare it with the chain, line by line. Raises Different, and UserError.

    `asked`: what trains the run again, and where.
    """
    with Children("ddp-audit-") as children:
        again = children.folder / "run"
        if segment.start:
            _bring(_kept(directory, chain, segment), again)
        _copy_record(directory, record, asked, again)
        is_last = segment.stop == record["result"]["steps"]
        changes: dict[str, Any] = {
            "resume": str(again),
            "accept_changed_code": True,  # the copies that are trained were compared with the record
            "init_from": None,
            "output": str(children.folder),
            "keep_for_audit": chain.begin["keep"],
            "checkpoint_every": chain.begin["every"],
            "keep_last": 1,
            "guard": "off",
            "max_restarts": 0,
            "faults": () if is_last else (f"stop@{segment.stop}",),
        }
        ended = children.ddp(["train", *_given(asked, changes).to_words()])
        if ended.code not in _ENDS:
            raise UserError(
                f"segment {segment.number} cannot be trained again (exit code {ended.code}): {ended.error()}"
            )
        _compare(again / CHAIN, chain, segment)


def _given(asked: Asked, changes: Mapping[str, Any]) -> Asked:
    kept = {**asked.model_dump(exclude_unset=True), **changes}
    return Asked.model_validate({name: value for name, value in kept.items() if value is not None})


def _kept(directory: RunDirectory, chain: WholeChain, segment: Segment) -> Checkpoint:
    """The checkpoint with which the segment begins. Raises Different where it is gone, or holds another state."""
    try:
        checkpoint = read_checkpoint(manifest_at(directory.checkpoints, segment.start))
        digests = state_digests(load(checkpoint))
    except UserError as error:
        raise Different(f"different checkpoint: segment {segment.number} cannot begin, {error}") from None
    if any(chain.kept[segment.start][name] != digest for name, digest in digests.items()):
        raise Different(f"different checkpoint: that of step {segment.start} is not the one that the chain tells of")
    return checkpoint


def _bring(checkpoint: Checkpoint, again: Path) -> None:
    """Let the scratch run begin with the checkpoint: it gets links to the files, no copies."""
    (again / "checkpoints").mkdir(parents=True)
    for name in checkpoint.file_names:
        (again / "checkpoints" / name).symlink_to((checkpoint.directory / name).absolute())


def _copy_record(directory: RunDirectory, record: Mapping[str, Any], asked: Asked, again: Path) -> None:
    """The record of a run that was stopped, which can be continued."""
    again.mkdir(exist_ok=True)
    initial = record.get("init_from")
    if initial is not None:
        initial = {**initial, "file": asked.init_from}  # where the file is now
    stopped = {**record, "status": "stopped", "exit_code": int(ExitCode.STOPPED), "chain": None, "init_from": initial}
    (again / "run.json").write_text(json.dumps(stopped), encoding="utf-8", errors="surrogateescape")
    read_source(directory.path, record["source"]).write(again / record["source"]["folder"])
    with suppress(OSError):
        (again / "data.json").write_bytes(read_file(directory.path / "data.json", MOST_DATA_BYTES))


def _compare(file: Path, chain: WholeChain, segment: Segment) -> None:
    """Compare the chain that was made again with the run's. Raises Different at the first step that differs."""
    try:
        begin, *lines = each_link(file)
    except (OSError, ValueError, BrokenChain) as error:
        raise UserError(f"segment {segment.number} was trained again, but left no chain ({error})") from None
    # Code and fingerprint were compared before, and a segment begins where it is told to.
    told = {name: chain.begin[name] for name in ("fingerprint", "code_sha256", "from_step")}
    other = other_begin({**begin.line, **told}, chain.begin)
    if other:
        raise Different(f"different start: built anew, {other[0]} is another one")
    made = {(link.line["kind"], link.step): link for link in lines}
    for step in range(segment.start + 1, segment.stop + 1):
        for kind in _SEQUENCE:
            what = _other(made.get((kind, step)), chain.wanted.get((kind, step)), begin.line)
            if what is not None:
                raise Different(f"different at step {step}: {what}{_under(begin, chain)}")


def _other(here: Link | None, there: Mapping[str, Any] | None, begin: Mapping[str, Any]) -> str | None:
    """What differs between a line that was made again and the run's, in words."""
    if here is None or there is None:
        line = here.line if here is not None else there
        which = "only in the run" if here is None else "not in the run"
        return None if line is None else f"its {line['kind']} is {which}"
    return difference(begin, here.line, there)


def _under(begin: Link, chain: WholeChain) -> str:
    """The end of a verdict of difference, which names what of this machine is another one, where something is."""
    other = fingerprint_differences(begin.line["fingerprint"], chain.begin["fingerprint"])
    return f" (under another fingerprint, which the promise does not cover: {'; '.join(other)})" if other else ""
