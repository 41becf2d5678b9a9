"""Made here once, when the test server imports this module: what each of its forks would otherwise make anew."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator

from ddp_core.base.documents import BadDocument, require_kind
from ddp_core.config.records import Frozen
from ddp_core.observe.heartbeat import Beat
from ddp_core.observe.metrics import MetricsRecord
from ddp_core.record.directory import RecordedRun


def _records(kind: type[Frozen]) -> Iterator[type[Frozen]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _records(each)


for record in _records(Frozen):
    record.model_rebuild()
for document in (Beat, MetricsRecord, RecordedRun, dict[str, object]):
    with contextlib.suppress(BadDocument):
        require_kind(None, document)
# torch's rendezvous asks for its callers, for which Python finds the file of every module.
inspect.stack()
