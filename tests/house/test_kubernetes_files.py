"""The files for Kubernetes: confined as compose.yaml is, true to exit codes and their page, valid for Kubernetes."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import yaml

from tests.house.kubernetes_files import FILES, FOLDER, JOBS, documents, job_spec, pod_spec
from tests.house.pages import blocks

ROOT = FOLDER.parents[1]
PAGE = (ROOT / "docs" / "how-to" / "run-on-kubernetes.md").read_text()
each_file = pytest.mark.parametrize("name", FILES)
each_job = pytest.mark.parametrize("name", JOBS)


def job_name(file: str) -> str:
    return "resnet18-synthetic" if file == "job-gpu" else "digits"


@each_file
def test_a_pod_is_confined_as_in_compose(name: str) -> None:
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())["x-confined"]
    spec = pod_spec(documents(name))
    (container,) = spec["containers"]
    pod, confined = spec["securityContext"], container["securityContext"]
    assert (compose["read_only"], compose["security_opt"]) == (True, ["no-new-privileges:true"])
    assert (confined["readOnlyRootFilesystem"], confined["allowPrivilegeEscalation"]) == (True, False)
    assert confined["capabilities"] == {"drop": compose["cap_drop"]}
    assert pod["runAsNonRoot"] is True
    assert pod["runAsUser"] == pod["fsGroup"] == 10001
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert (spec["automountServiceAccountToken"], spec["enableServiceLinks"]) == (False, False)
    assert not {"hostNetwork", "hostPID", "hostIPC", "serviceAccountName"} & set(spec)
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted.keys() == {volume["name"] for volume in spec["volumes"]}
    assert mounted["tmp"] == compose["tmpfs"]
    assert not [volume for volume in spec["volumes"] if "hostPath" in volume]


@each_job
def test_a_pod_has_room_and_time_as_in_compose(name: str) -> None:
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())["x-train"]
    spec = pod_spec(documents(name))
    assert spec["terminationGracePeriodSeconds"] >= int(compose["stop_grace_period"].removesuffix("s"))
    (shm,) = [volume["emptyDir"] for volume in spec["volumes"] if volume["name"] == "shm"]
    assert (shm, compose["shm_size"]) == ({"medium": "Memory", "sizeLimit": "1Gi"}, "1gb")


@each_job
def test_exit_codes_mean_what_their_page_says(name: str) -> None:
    page = (ROOT / "docs" / "reference" / "exit-codes.md").read_text()
    again = {int(code): verdict for code, verdict in re.findall(r"^\| (\d+) \|.*\| ([^|]*) \|$", page, re.MULTILINE)}
    spec = job_spec(documents(name))
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "Kubernetes' condition for a podFailurePolicy"
    by_code: dict[str, set[int]] = {}
    for rule in spec["podFailurePolicy"]["rules"]:
        assert rule["action"] in {"FailJob", "FailIndex", "Ignore", "Count"}
        assert bool(rule.get("onExitCodes")) != bool(rule["onPodConditions"]), "Kubernetes wants one of the two"
        if codes := rule.get("onExitCodes"):
            assert codes["operator"] == "In"
            assert codes["containerName"] == spec["template"]["spec"]["containers"][0]["name"]
            assert codes["values"] == sorted(set(codes["values"])), "Kubernetes takes them in this order only"
            by_code[rule["action"]] = set(codes["values"])
    # `ddp train` never ends with 1, and nobody presses Ctrl-C in a pod.
    never = {0, 1, 130}
    assert by_code == {
        "FailJob": {code for code, verdict in again.items() if verdict.startswith("no")} - never,
        "Ignore": {code for code, verdict in again.items() if verdict.startswith("yes")} - never,
    }


@each_job
def test_only_pods_of_the_job_reach_each_other(name: str) -> None:
    label = "batch.kubernetes.io/job-name" if name in ("job", "job-gpu") else "jobset.sigs.k8s.io/jobset-name"
    own = {"podSelector": {"matchLabels": {label: job_name(name)}}}
    parts = {part["kind"]: part["spec"] for part in documents(name)}
    policy = parts["NetworkPolicy"]
    assert policy["podSelector"] == own["podSelector"]
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    (ingress,) = policy["ingress"]
    to_own, to_name_servers = policy["egress"]
    assert (ingress["from"], to_own["to"]) == ([own], [own])
    assert {port["port"] for port in to_name_servers["ports"]} == {53, 5353}


@each_job
def test_pods_find_the_first_one_and_agree_on_an_id(name: str) -> None:
    found = documents(name)
    (container,) = pod_spec(found)["containers"]
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert "--rdzv-id $(JOB_UID)" in " ".join(container["args"])
    assert (job_spec(found)["completions"], job_spec(found)["parallelism"]) == (2, 2)
    if name == "trainjob":
        # Kubeflow refuses a TrainJob that sets these itself.
        assert not [name for name in variables if name.startswith("PET_")]
        (trainer,) = [part["spec"]["trainer"] for part in found if part["kind"] == "TrainJob"]
        assert trainer == {"numNodes": 2, "numProcPerNode": 2}
    else:
        first = "node-0-0" if name == "jobset" else "0"
        host = f"{job_name(name)}-{first}.{job_name(name)}"
        assert (variables["PET_NNODES"], variables["PET_MASTER_ADDR"]) == ("2", host)


@each_job
def test_several_pods_write_to_a_claim_that_all_machines_can_write_to(name: str) -> None:
    (claim,) = [each for each in documents(name) if each["kind"] == "PersistentVolumeClaim"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def validate(document: dict[str, Any]) -> int:
    """Validate against every version from 1.27 on; the number of versions. Raises ValidationError."""
    from kubernetes_validate import validate
    from kubernetes_validate.utils import all_versions

    versions = {version for version in all_versions() if tuple(map(int, version.split(".")[:2])) >= (1, 27)}
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


def test_the_page_speaks_of_all_files_and_of_names_that_are_there() -> None:
    files = {file.name: file.read_text() for file in FOLDER.glob("*.yaml")}
    names = {document["metadata"]["name"] for text in files.values() for document in yaml.safe_load_all(text)}
    lines = [line for block in blocks(PAGE) if block.kind == "bash" for line in block.lines]
    said = "\n".join(line for line in lines if line.startswith("kubectl"))
    assert set(re.findall(r"-f (\S+)", said)) <= files.keys() == set(re.findall(r"`([a-z-]+\.yaml)`", PAGE))
    called = set(re.findall(r"(?:patch job|pod/|exec|-name=|cp) ?([a-z-]+)", said))
    assert called == {"digits", "digits-reader"} <= names
    assert set(re.findall(r"--selector ([^=\s]+)=", said)) <= set(re.findall(r"matchLabels: {([^:]+):", str(files)))
