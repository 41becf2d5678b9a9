"""The fields of run.json as they are read back, in records of this version of ddp and of all earlier ones.

A field that is not `NotRequired` was written by every version. A record may have more fields than these.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from ddp_core.base.documents import Count, FilePath
from ddp_core.base.shown import shown
from ddp_core.config.layout import DeviceType, LayoutKind, ShardMode
from ddp_core.config.records import Numerics, ReductionKind

MOST_RECORD_BYTES = 2**23
"""How large a run.json may be: enough for ten thousand attempts. Each command reads it several times."""
_Positive = Annotated[int, Field(gt=0, lt=2**63)]
_Figure = float | None


def _on_one_line(text: str) -> str:
    if text != shown(text):
        raise ValueError("it holds a control character")
    return text


class RecordedExperiment(TypedDict):
    """The settings that are read by name; `Experiment.from_json` checks all of them where the experiment is trained."""

    name: Annotated[str, Field(min_length=1), AfterValidator(_on_one_line)]
    global_batch_size: _Positive
    epochs: _Positive
    max_steps: _Positive | None
    seed: NotRequired[Count]


class AttemptLayout(TypedDict):
    kind: LayoutKind
    device: DeviceType
    nnodes: _Positive
    nproc_per_node: _Positive
    shard: NotRequired[ShardMode]


class RecordedLayout(AttemptLayout):
    """The layout of the newest attempt, as tables show it."""

    label: str


class RecordedOptions(TypedDict):
    """The options that are read by name."""

    reduction: ReductionKind
    launcher: Literal["in-process", "external", "torchrun", "spawn"]  # spawn: by versions before 0.2
    backend: Literal["auto", "gloo", "nccl"]
    workers: Count
    data_dir: FilePath
    digest_every: _Positive | None
    numerics: NotRequired[Numerics]
    deterministic: NotRequired[bool]


class RecordedSource(TypedDict):
    """The user's code: the folder of the copies, and the SHA-256 of each file by its place."""

    folder: FilePath
    experiment: FilePath
    files: dict[FilePath, str]
    modules: dict[str, FilePath]
    unreadable: list[str]


class RecordedWeights(TypedDict):
    given: FilePath
    """The words after `--init-from`."""
    file: FilePath
    """The file that these words mean, as an absolute path."""
    sha256: str
    """The digest of the weights, made as `weights_sha256` is."""


class RecordedFork(TypedDict):
    """Where the run has branched off."""

    given: FilePath
    """The words after `--fork`."""
    run: FilePath
    """The parent's directory, an absolute path."""
    step: _Positive
    """The step of its checkpoint."""
    checkpoint_sha256: str
    """The digest of the checkpoint's manifest, which names the digests of its files."""
    weights_sha256: str
    """The digest of the weights in it, made as the `weights_sha256` of a run is."""
    experiment_sha256: str
    """The digest of the experiment that had trained these weights."""
    hyperparameters: list[str]
    """The optimizer's settings that differ from the parent's, beside the rate, which the schedule sets."""


class RecordedGuard(TypedDict):
    """What the guard of an attempt did."""

    mode: NotRequired[str]
    rehearsal: NotRequired[str | None]
    seconds: NotRequired[dict[str, float]]


class RecordedLength(TypedDict):
    """How long the run was before an attempt extended it."""

    epochs: _Positive
    max_steps: _Positive | None
    step: Count


class RecordedAttempt(TypedDict):
    """One start of the run."""

    layout: AttemptLayout
    started_at: str
    experiment_sha256: NotRequired[str]
    source: NotRequired[FilePath]
    source_diff_sha256: NotRequired[str]
    data_changed: NotRequired[str]
    guard: NotRequired[RecordedGuard | None]
    extended_from: NotRequired[RecordedLength]


class RecordedData(TypedDict):
    """What the digest of the data is over."""

    digest_of: str
    parts: Count
    sampled: NotRequired[bool]


class RecordedResult(TypedDict):
    """The figures that are read by name; an experiment may have further ones of its own."""

    steps: NotRequired[Count]
    seconds: NotRequired[_Figure]
    train_loss: NotRequired[_Figure]
    test_loss: NotRequired[_Figure]
    test_accuracy: NotRequired[_Figure]
    samples_per_second: NotRequired[_Figure]
    data_wait: NotRequired[_Figure]
    peak_memory_bytes: NotRequired[_Figure]
    device_free_bytes: NotRequired[_Figure]
    step_memory_bytes: NotRequired[_Figure]
    cpu_utilisation: NotRequired[_Figure]
    gpu_utilisation: NotRequired[_Figure]
    other_cores_busy: NotRequired[_Figure]
    time_split: NotRequired[dict[str, float] | None]


class RecordedFinding(TypedDict):
    """What the guard found in a run that went on."""

    step: Count
    what: str


class RecordedEarlyEnd(TypedDict):
    """Where a callback has ended the run, of how many steps, and why."""

    step: Count
    of: _Positive
    reason: str


class RecordedState(TypedDict):
    """A state that is kept: the steps done, and SHA-256 digests."""

    step: _Positive
    state_sha256: str
    weights_sha256: str


class RecordedKept(TypedDict):
    """The states that are kept for an audit, and the steps from one to the next."""

    every: _Positive
    states: list[RecordedState]


class RecordedCode(TypedDict):
    version: str | None
    commit: str | None
    dirty: NotRequired[bool | None]


class RecordedEnvironment(TypedDict):
    """The machine and the packages, as far as they are read by name."""

    python: str
    packages: dict[str, str | None]
    code: RecordedCode
    cpu: NotRequired[str | None]
    cores: NotRequired[_Positive | None]
    host: NotRequired[str]


class RecordedRun(TypedDict):
    """The whole of run.json."""

    format: Literal["ddp-run/1"]
    experiment: RecordedExperiment
    experiment_sha256: str
    experiment_file: FilePath
    question: str | None
    settings: NotRequired[list[str]]
    source: NotRequired[RecordedSource]
    init_from: NotRequired[RecordedWeights | None]
    forked_from: NotRequired[RecordedFork | None]
    layout: RecordedLayout
    options: RecordedOptions
    command: str | None
    launch_id: str | None
    total_steps: NotRequired[_Positive]
    status: Literal["running", "completed", "stopped", "failed"]
    exit_code: int | None
    message: str | None
    started_at: str
    attempts: Annotated[list[RecordedAttempt], Field(min_length=1)]
    data_sha256: str | None
    data: NotRequired[RecordedData]
    weights_sha256: str | None
    optimizer_sha256: str | None
    ema_sha256: NotRequired[str | None]
    result: RecordedResult
    promise_broken: NotRequired[RecordedFinding | None]
    ended_early: NotRequired[RecordedEarlyEnd | None]
    kept: NotRequired[RecordedKept | None]
    fingerprint: dict[str, Any]
    fingerprint_changed: bool
    environment: RecordedEnvironment
