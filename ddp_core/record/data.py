"""The digest of a run's data: computed at the start, the same on every rank, and kept in the run's directory.

run.json holds the digest and says what was digested; data.json beside it holds the digests of the parts.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from ddp_core.base.documents import BadDocument, read_document
from ddp_core.base.errors import UserError
from ddp_core.base.files import replace_file
from ddp_core.base.refusals import refused
from ddp_core.config.options import Options
from ddp_core.data.data_digest import ADVICE, DataDigest, changed_at, digest_files, digest_items
from ddp_core.data.splits import Splits
from ddp_core.distributed.process_group import Collectives
from ddp_core.record.guarded import not_promised

FILE = "data.json"
MOST_DATA_BYTES = 2**29
"""How large a data.json may be: enough for some four million files."""
_ROUND_SECONDS = 1.0


def digest_data(splits: Splits) -> DataDigest:
    """The digest of the data, in one process. Raises UserError (4) where a file cannot be read."""
    return digest_files(splits.files) if splits.files and not splits.digest else digest_items(splits)


def agreed_digest(
    splits: Splits,
    collectives: Collectives,
    tell: Callable[[str], None],
    options: Options,
    known: DataDigest | None = None,
) -> DataDigest:
    """The digest of the data, the same on all ranks; `tell` gets a line where the builder gave none.

    Files are read by one rank of each node. `known`: what this process has read before. Raises UserError on every rank
    where a rank has other data, and with `--guard strict` where items differ from one read to the next.
    """
    started = time.monotonic()
    if splits.files and not splits.digest:
        found = _on_one_rank_of_each_node(lambda: known or digest_files(splits.files), collectives)
    else:
        found = known or digest_items(splits)
    seen = collectives.gather(None if found is None else (found.sha256, found.digest_of, found.sampled))
    told = [part for part in seen if part is not None]
    if any(sha256 is None for sha256, *_ in told):
        unsteady = next(words for sha256, words, _ in told if sha256 is None)
        text = "the data set gives other items at each read, so no result can be repeated to the bit; " + ADVICE
        tell(not_promised(text, options))
        return DataDigest(None, unsteady)
    if len(set(told)) > 1:
        _refuse(found, seen, collectives)
    # Only rank 0 keeps the parts, which it writes: those of a million files would take 200 MB on each rank.
    sha256, digest_of, sampled = seen[0]
    digest = DataDigest(sha256, digest_of, sampled=sampled)
    if found is not None and collectives.world.is_first:
        digest = found
    if known is None and not splits.digest:
        seconds = time.monotonic() - started
        tell(f"data: digested {digest.digest_of} in {seconds:.1f} s, as the builder gives no digest")
    return digest


def _on_one_rank_of_each_node(read: Callable[[], DataDigest], collectives: Collectives) -> DataDigest | None:
    """The digest that local rank 0 has read, None on the other ranks.

    Meanwhile all ranks take part in short collectives, because none may take longer than `--timeout`.
    """
    with ThreadPoolExecutor(1) as thread:
        reading: Future[DataDigest] | None = thread.submit(read) if collectives.world.local_rank == 0 else None
        while True:
            if reading is not None:
                wait([reading], _ROUND_SECONDS)
            if all(collectives.gather(reading is None or reading.done())):
                break
        failures = [failure for failure in collectives.gather(reading and reading.exception()) if failure is not None]
        if failures:
            raise failures[0]
        return None if reading is None else reading.result()


def _refuse(found: DataDigest | None, seen: list[Any], collectives: Collectives) -> None:
    """Raise UserError on every rank; it says where the data of the first rank with other data differ from rank 0's."""
    other = [rank for rank, part in enumerate(seen) if part is not None and part != seen[0]]
    everywhere = collectives.gather(found)
    where = changed_at(everywhere[0], everywhere[other[0]])
    raise UserError(
        f"ranks {', '.join(map(str, other))} have other data than rank 0 ({where}): copy the same files to every node; "
        "where equal data are read in another way on purpose, let the builder give Splits.digest"
    )


def keep_digest(directory: Path, before: Mapping[str, Any], digest: DataDigest) -> dict[str, Any]:
    """The fields of run.json that tell of the data; writes data.json where the digest has parts. Raises UserError (4).

    `before`: run.json as it was, empty for a new run. Data that were the same then are told of as then, since a rank
    need not have the parts of their digest; and what is random stays so.
    """
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
