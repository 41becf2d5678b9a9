"""The files of one training on Kubernetes, from a few values and the templates beside this module."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Literal, get_args

from jinja2 import Environment, PackageLoader, StrictUndefined

from ddp_core.base.errors import ExitCode, UserError

Kind = Literal["job", "jobset", "trainjob", "reader"]
KINDS: tuple[Kind, ...] = get_args(Kind)

FAIL_AT_ONCE = (ExitCode.BAD_INPUT, ExitCode.NO_CHECKPOINT, ExitCode.NUMERICS, ExitCode.INTERNAL)
"""Exit codes after which another try ends the same: the whole job fails."""
NO_FAILURE = (ExitCode.PEERS_LOST, ExitCode.STOPPED)
"""Exit codes after which the pod is replaced as often as needed, and continues."""

_NAME = re.compile(r"(?=.{1,40}$)[a-z]([-a-z0-9]*[a-z0-9])?")
"""The name of a service and part of host names: these have 63 letters at most, and JobSet adds `-node-0-NUMBER`."""
_OTHERS_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9]([-.a-z0-9]*[a-z0-9])?")
_QUANTITY = re.compile(r"[1-9]\d*(\.\d+)?([KMGTPE]i|[kMGTPE])?")
_PLAIN = re.compile(r"(?:[A-Za-z/$]|--)[\w./$()=-]*")
_WORDS_OF_YAML = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}


@dataclass(frozen=True)
class Wanted:
    """What a user chooses of a training on Kubernetes. Raises UserError for what no cluster would take."""

    kind: Kind
    name: str
    train: tuple[str, ...]
    """Words of `ddp train`, beside those that say where it runs."""
    nnodes: int
    nproc_per_node: int
    device: Literal["cpu", "cuda"]
    image: str
    cores: int | None = None
    memory: str | None = None
    claim: str | None = None
    storage: str = "10Gi"
    storage_class: str | None = None
    data_claim: str | None = None
    user: int = 10001
    grace_seconds: int = 120
    printed_by: str = ""

    def __post_init__(self) -> None:
        texts = {
            "--name": (self.name, _NAME, "small letters, digits and '-', a letter first, at most 40"),
            "--claim": (self.claim, _OTHERS_NAME, "the name of a claim"),
            "--data-claim": (self.data_claim, _OTHERS_NAME, "the name of a claim"),
            "--storage-class": (self.storage_class, _OTHERS_NAME, "the name of a storage class"),
            "--memory": (self.memory, _QUANTITY, "a quantity such as 16Gi"),
            "--storage": (self.storage, _QUANTITY, "a quantity such as 50Gi"),
        }
        for option, (text, pattern, expected) in texts.items():
            if text is not None and not pattern.fullmatch(text):
                raise UserError(f"{option} {text}: expected {expected}")
        if self.user < 1:
            raise UserError(f"--user {self.user}: the pods run without root's rights; give another user's id")
        numbers = {
            "--nproc-per-node": self.nproc_per_node,
            "--cores": self.cores,
            "--grace-seconds": self.grace_seconds,
        }
        for option, number in numbers.items():
            if number is not None and number < 1:
                raise UserError(f"{option} {number}: expected 1 or more")

    @property
    def first_host(self) -> str:
        """The name of the first pod, under which the other pods of this job find it."""
        return f"{self.name}-0.{self.name}" if self.kind == "job" else f"{self.name}-node-0-0.{self.name}"

    @property
    def own_pods(self) -> tuple[str, str]:
        """The label by which the cluster itself marks the pods of this job, and its value."""
        name = "batch.kubernetes.io/job-name" if self.kind == "job" else "jobset.sigs.k8s.io/jobset-name"
        return name, self.name

    @property
    def command(self) -> tuple[str, ...]:
        """What each pod runs; Kubernetes fills in $(JOB_UID)."""
        where = ("--layout", "ddp", "--device", self.device, "--nproc-per-node", str(self.nproc_per_node))
        return ("ddp", "train", *where, "--rdzv-id", "$(JOB_UID)", "--resume", "auto", *self.train)


def manifests(wanted: Wanted) -> str:
    """What `kubectl apply -f -` reads: all parts of one training, as YAML with comments."""
    on_cuda = wanted.device == "cuda"
    return (
        _templates()
        .get_template(f"{wanted.kind}.yaml")
        .render(
            job=wanted,
            cores=wanted.cores or wanted.nproc_per_node * (4 if on_cuda else 1),
            memory=wanted.memory or f"{wanted.nproc_per_node * (16 if on_cuda else 2)}Gi",
            claim=wanted.claim or f"{wanted.name}-outputs",
            fail_at_once=[int(code) for code in FAIL_AT_ONCE],
            no_failure=[int(code) for code in NO_FAILURE],
        )
    )


def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("ddp_lab.kubernetes"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["quoted"] = quoted
    return environment


def quoted(text: str) -> str:
    """The text as YAML reads it back: as it is where that is unmistakable, else in quotation marks."""
    plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS_OF_YAML
    return text if plain else json.dumps(text, ensure_ascii=False)
