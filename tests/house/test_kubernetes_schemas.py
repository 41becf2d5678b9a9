"""Kubernetes' own strict schemas, of every version at hand, and Kubeflow's models take the files as they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.house.kubernetes_files import FILES, documents, job_spec

each_file = pytest.mark.parametrize("name", FILES)
OLDEST = (1, 27)


def validate(document: dict[str, Any]) -> int:
    """Validate against every version from OLDEST on; the number of versions. Raises ValidationError."""
    from kubernetes_validate import validate
    from kubernetes_validate.utils import all_versions

    versions = {version for version in all_versions() if tuple(map(int, version.split(".")[:2])) >= OLDEST}
    for version in versions:
        validate(document, version, strict=True)
    return len(versions)


def models() -> dict[str, Any]:
    """Kubeflow's models, by the kind that they are of."""
    from kubeflow_trainer_api import models

    return {
        "JobSet": models.JobsetV1alpha2JobSet,
        "TrainJob": models.TrainerV1alpha1TrainJob,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    }


@pytest.mark.extras("kubernetes_validate")
@each_file
def test_kubernetes_schemas_take_every_part(name: str) -> None:
    found = documents(name)
    parts = [document for document in found if not document["apiVersion"].startswith(("jobset", "trainer"))]
    if name != "reader":
        # The job that JobSet or Kubeflow makes is one of Kubernetes' own.
        parts.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": job_spec(found)})
    assert parts
    assert all(validate(part) >= 11 for part in parts)


def lost(document: dict[str, Any]) -> bool:
    """Whether something of the document is lost on the way through Kubeflow's model of its kind."""
    model = models()[document["kind"]]
    return bool(model.from_dict(copy.deepcopy(document)).to_dict() != document)


@pytest.mark.extras("kubeflow_trainer_api")
@each_file
def test_nothing_is_lost_in_kubeflows_models(name: str) -> None:
    mine = [document for document in documents(name) if document["kind"] in models()]
    assert len(mine) == {"jobset": 1, "trainjob": 2}.get(name, 0)
    assert not any(lost(document) for document in mine)
