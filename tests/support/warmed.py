"""Made here once, when the test server imports this module: what each of its forks would otherwise make anew."""

from __future__ import annotations

import contextlib
import inspect

from ddp_core.base.documents import BadDocument, require_kind
from ddp_core.config.records import Frozen, kinds_of
from ddp_core.observe.heartbeat import Beat
from ddp_core.observe.metrics import MetricsRecord
from ddp_core.record.directory import RecordedRun

for record in kinds_of(Frozen):
    record.model_rebuild()
for document in (Beat, MetricsRecord, RecordedRun, dict[str, object]):
    with contextlib.suppress(BadDocument):
        require_kind(None, document)
# torch's rendezvous asks for its callers, for which Python finds the file of every module.
inspect.stack()
