"""The files for Kubernetes, and the parts of them that tests look at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "launch" / "kubernetes"
JOBS = ("job", "job-gpu", "jobset", "trainjob")
FILES = (*JOBS, "reader")


def documents(name: str) -> list[dict[str, Any]]:
    """What the file says."""
    return list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text()))


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
