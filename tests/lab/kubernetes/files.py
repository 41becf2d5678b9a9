"""What the generator prints for Kubernetes, and the parts of it that tests look at."""

from __future__ import annotations

import contextlib
import io
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ddp_lab.kubernetes.__main__ import main
from tests.support.commands import Ended

FOLDER = Path(__file__).parents[3] / "launch" / "kubernetes"
JOBS = ("job", "jobset", "trainjob")
VARIANTS: dict[str, list[str]] = {
    **{kind: ["--kind", kind, "digits"] for kind in (*JOBS, "reader")},
    **{f"{kind} on CUDA": ["--kind", kind, "--device", "cuda", "--nproc-per-node", "8", "digits"] for kind in JOBS},
    "one pod": ["--nnodes", "1", "digits"],
    "pods that go and come": ["--nnodes", "1:4", "digits"],
    "claims of its own": ["--claim", "results", "--data-claim", "photos", "digits"],
    "another class": ["--storage-class", "nfs", "--storage", "1Ti", "--image", "r.example/ddp@sha256:0a", "digits"],
}
"""The words of the generator in all their variety."""


@cache
def run(*words: str) -> Ended:
    """The generator, in this process."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = main(words)
    return Ended(code, output.getvalue(), errors.getvalue())


def documents(*words: str) -> list[dict[str, Any]]:
    """What the generator prints, read. Raises AssertionError where it refuses."""
    printed = run(*words)
    assert printed.code == 0, printed.errors
    return list(yaml.safe_load_all(printed.output))


def job_spec(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The specification of the Job, also of the one that JobSet or Kubeflow makes."""
    named: dict[str, dict[str, Any]] = {document["kind"]: document["spec"] for document in found}
    if "Job" in named:
        return named["Job"]
    jobset = named["JobSet"] if "JobSet" in named else named["TrainingRuntime"]["template"]["spec"]
    (job,) = jobset["replicatedJobs"]
    spec: dict[str, Any] = job["template"]["spec"]
    return spec


def pod_spec(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The specification of the pods."""
    spec: dict[str, Any] = found[0]["spec"] if found[0]["kind"] == "Pod" else job_spec(found)["template"]["spec"]
    return spec
