"""The digest of a run's data: computed at the start, the same on every rank, and kept in the run's directory.

run.json holds the digest and says what was digested; data.json beside it holds the digests of the parts.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from ddp_core.base.documents import BadDocument, read_document
from ddp_core.base.errors import UserError
from ddp_core.base.files import replace_file
from ddp_core.base.refusals import refused
from ddp_core.data.data_digest import DataDigest, changed_at, digest_files, digest_items, with_weights
from ddp_core.data.splits import Splits
from ddp_core.distributed.process_group import Collectives

FILE = "data.json"
MOST_DATA_BYTES = 2**29
"""How large a data.json may be: enough for some four million files."""
_ROUND_SECONDS = 1.0


def has_files_to_read(splits: Splits) -> bool:
    """Whether the digest is that of files, which may take minutes to read."""
    return bool(splits.files) and not splits.digest


def digest_data(splits: Splits) -> DataDigest:
    """The digest of the data, in one process. Raises UserError (4) where a file cannot be read."""
    return with_weights(digest_files(splits.files), splits) if has_files_to_read(splits) else digest_items(splits)


def read_on_each_node(
    splits: Splits, collectives: Collectives, known: DataDigest | None
) -> tuple[DataDigest | None, list[DataDigest | None]]:
    """The digest of the files as local rank 0 has read them, and those of all ranks; None for those who read nothing.

    `known`: what this process has read before. Meanwhile all ranks take part in short collectives, because none may
    take longer than `--timeout`. Raises the first rank's error on every rank.
    """
    with ThreadPoolExecutor(1) as thread:
        reads = collectives.world.local_rank == 0
        reading = thread.submit(lambda: known or digest_data(splits) if reads else None)
        while True:
            wait([reading], _ROUND_SECONDS)
            everyones = collectives.gather(_done(reading))
            if all(is_done for is_done, *_ in everyones):
                break
    for _, _, failure in everyones:
        if failure is not None:
            raise failure
    return reading.result(), [digest for _, digest, _ in everyones]


def _done(reading: Future[DataDigest | None]) -> tuple[bool, DataDigest | None, BaseException | None]:
    """Whether all was read that this rank reads, the digest without its parts, and the error."""
    if not reading.done():
        return False, None, None
    failure = reading.exception()
    found = None if failure else reading.result()
    return True, found and found.without_parts(), failure


def agreed_digest(
    found: DataDigest | None, everyones: Sequence[DataDigest | None], collectives: Collectives
) -> DataDigest:
    """The digest of the data, the same on all ranks, of which rank 0 alone has the parts.

    The other two are as `read_on_each_node` returns them. Raises UserError on every rank where a rank has other data.
    """
    first = everyones[0]
    assert first is not None
    if unsteady := next((each for each in everyones if each is not None and each.sha256 is None), None):
        return unsteady
    if other := [rank for rank, each in enumerate(everyones) if each not in (None, first)]:
        everywhere = collectives.gather(found)
        where = changed_at(everywhere[0], everywhere[other[0]])
        raise UserError(
            f"ranks {', '.join(map(str, other))} have other data than rank 0 ({where}): copy the same files to every "
            "node; where equal data are read in another way on purpose, let the builder give Splits.digest"
        )
    # Only rank 0 keeps the parts, which it writes: those of a million files would take 200 MB on each rank.
    return found if found is not None and collectives.world.is_first else first


def keep_digest(directory: Path, before: Mapping[str, Any], digest: DataDigest) -> dict[str, Any]:
    """The fields of run.json that tell of the data; writes data.json where there are parts. Raises UserError (4)."""
    # Data that were the same `before`, in an earlier run.json, are told of as then, since a rank need not have the
    # parts of their digest; and what is random stays so.
    if before and "data" in before and before["data_sha256"] in (None, digest.sha256):
        return {name: before[name] for name in fields_of(digest)}
    if digest.parts:
        try:
            replace_file(directory / FILE, json.dumps(dict(digest.parts), indent=0) + "\n", durable=True)
        except OSError as error:
            raise refused(error, directory / FILE) from None
    return fields_of(digest)


def recorded_digest(directory: Path, record: Mapping[str, Any]) -> DataDigest:
    """The digest in a run's record, with its parts where data.json can still be read."""
    parts: dict[str, str] = {}
    data = record.get("data") or {"digest_of": "what is not known", "parts": 0}
    if data["parts"]:
        with contextlib.suppress(OSError, BadDocument):
            parts = read_document(directory / FILE, dict[str, str], most_bytes=MOST_DATA_BYTES)
    return DataDigest(record["data_sha256"], data["digest_of"], parts, data.get("sampled", False))


def fields_of(digest: DataDigest) -> dict[str, Any]:
    """The fields of run.json that tell of the data."""
    data = {"digest_of": digest.digest_of, "parts": len(digest.parts), "sampled": digest.sampled}
    return {"data_sha256": digest.sha256, "data": data}


def how_compared(record: Mapping[str, Any]) -> str | None:
    """How the data of a run are known, in a word: whole, sample or random; None where its record does not say."""
    data = record.get("data") or {}
    if data and record["data_sha256"] is None:
        return "random"
    if "sampled" not in data:
        return None
    return "sample" if data["sampled"] else "whole"
