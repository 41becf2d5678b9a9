"""The files of one training on Kubernetes, from a few values and the templates beside this module."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Literal, get_args

from jinja2 import Environment, PackageLoader, StrictUndefined

from ddp_core.errors import ExitCode, UserError

Kind = Literal["job", "jobset", "trainjob", "reader"]
KINDS: tuple[Kind, ...] = get_args(Kind)

FAIL_AT_ONCE = (ExitCode.BAD_INPUT, ExitCode.NO_CHECKPOINT, ExitCode.NUMERICS, ExitCode.INTERNAL)
"""Exit codes after which another try ends the same: the whole job fails."""
NO_FAILURE = (ExitCode.PEERS_LOST, ExitCode.STOPPED)
"""Exit codes after which the pod is replaced as often as needed, and continues."""

_DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LONGEST_NAME = 40
"""Host names have 63 letters at most, and JobSet adds `-node-0-` and a pod's number."""
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
        names = {"--name": self.name, "--claim": self.claim, "--data-claim": self.data_claim}
        for option, name in names.items():
            if name is not None and not (_DNS_LABEL.fullmatch(name) and len(name) <= _LONGEST_NAME):
                raise UserError(
                    f"{option} {name}: Kubernetes wants small letters, digits and '-', a letter first, and here at "
                    f"most {_LONGEST_NAME} of them"
                )
        if self.user < 1:
            raise UserError(f"--user {self.user}: the pods run without root's rights; give another user's id")
        for option, number in {"--nproc-per-node": self.nproc_per_node, "--grace-seconds": self.grace_seconds}.items():
            if number < 1:
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
