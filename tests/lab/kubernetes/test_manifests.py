"""The files for Kubernetes: printed by the generator, confined as compose.yaml is, and true to the exit codes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddp_lab.kubernetes.manifests import quoted
from tests.lab.kubernetes.files import FOLDER, JOBS, VARIANTS, documents, job_spec, pod_spec, run

ROOT = FOLDER.parents[1]
each_variant = pytest.mark.parametrize("words", VARIANTS.values(), ids=VARIANTS.keys())
each_kind = pytest.mark.parametrize("kind", JOBS)


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.yaml")), ids=lambda file: file.name)
def test_a_file_is_what_its_first_line_prints(file: Path) -> None:
    program, *words = shlex.split(file.read_text().splitlines()[0].removeprefix("# "))
    assert (program, words[:2]) == ("python", ["-m", "ddp_lab.kubernetes"])
    assert file.read_text() == run(*words[2:]).output, f"print it anew: {shlex.join([program, *words])} >{file}"


@each_variant
def test_a_pod_is_confined_as_in_compose(words: list[str]) -> None:
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())["x-confined"]
    spec = pod_spec(documents(*words))
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


@each_kind
def test_a_pod_has_room_and_time(kind: str) -> None:
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())["x-train"]
    spec = pod_spec(documents("--kind", kind, "digits"))
    assert spec["terminationGracePeriodSeconds"] >= int(compose["stop_grace_period"].removesuffix("s"))
    (shm,) = [volume["emptyDir"] for volume in spec["volumes"] if volume["name"] == "shm"]
    assert shm == {"medium": "Memory", "sizeLimit": "1Gi"}
    assert compose["shm_size"] == "1gb"


@each_kind
def test_exit_codes_mean_what_their_page_says(kind: str) -> None:
    page = (ROOT / "docs" / "reference" / "exit-codes.md").read_text()
    again = {int(code): verdict for code, verdict in re.findall(r"^\| (\d+) \|.*\| ([^|]*) \|$", page, re.MULTILINE)}
    spec = job_spec(documents("--kind", kind, "digits"))
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


ENUMERATIONS = {
    "restartPolicy": {"Never"},
    "completionMode": {"Indexed"},
    "imagePullPolicy": {"IfNotPresent"},
    "fsGroupChangePolicy": {"OnRootMismatch"},
    "medium": {"Memory"},
    "effect": {"NoExecute"},
    "accessModes": {"ReadWriteMany", "ReadWriteOnce"},
    "policyTypes": {"Ingress", "Egress"},
    "protocol": {"TCP", "UDP"},
    "clusterIP": {"None"},
}
"""Words that a schema may call mere strings, and of which Kubernetes knows a few only."""


def values(part: Any, key: str) -> list[str]:
    """All values of this key, however deep they stand."""
    if isinstance(part, list):
        return [value for item in part for value in values(item, key)]
    if not isinstance(part, dict):
        return []
    here = part.get(key, [])
    return [*(here if isinstance(here, list) else [here]), *(v for item in part.values() for v in values(item, key))]


@each_variant
def test_words_of_which_kubernetes_knows_a_few_are_among_them(words: list[str]) -> None:
    found = documents(*words)
    for key, known in ENUMERATIONS.items():
        assert set(values(found, key)) <= known, key


@each_kind
def test_only_pods_of_the_job_reach_each_other(kind: str) -> None:
    label = {"job": "batch.kubernetes.io/job-name"}.get(kind, "jobset.sigs.k8s.io/jobset-name")
    own = {"podSelector": {"matchLabels": {label: "mine"}}}
    parts = {part["kind"]: part["spec"] for part in documents("--kind", kind, "--name", "mine", "digits")}
    policy = parts["NetworkPolicy"]
    assert policy["podSelector"] == own["podSelector"]
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    (ingress,) = policy["ingress"]
    to_own, to_name_servers = policy["egress"]
    assert (ingress["from"], to_own["to"]) == ([own], [own])
    assert {port["port"] for port in to_name_servers["ports"]} == {53, 5353}


@each_kind
def test_pods_find_the_first_one_and_agree_on_an_id(kind: str) -> None:
    found = documents("--kind", kind, "--nnodes", "3", "digits")
    (container,) = pod_spec(found)["containers"]
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert "--rdzv-id $(JOB_UID)" in " ".join(container["args"])
    assert (job_spec(found)["completions"], job_spec(found)["parallelism"]) == (3, 3)
    if kind == "trainjob":
        # Kubeflow refuses a TrainJob that sets these itself.
        assert not [name for name in variables if name.startswith("PET_")]
        (trainer,) = [part["spec"]["trainer"] for part in found if part["kind"] == "TrainJob"]
        assert trainer == {"numNodes": 3, "numProcPerNode": 2}
    else:
        first = {"job": "digits-0.digits", "jobset": "digits-node-0-0.digits"}[kind]
        assert (variables["PET_NNODES"], variables["PET_MASTER_ADDR"]) == ("3", first)


def test_gpus_are_asked_for_by_their_number() -> None:
    (container,) = pod_spec(documents("--device", "cuda", "--nproc-per-node", "4", "digits"))["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert "--device cuda --nproc-per-node 4" in " ".join(container["args"])
    (container,) = pod_spec(documents("digits"))["containers"]
    assert "nvidia.com/gpu" not in str(container)


def test_options_of_ddp_train_reach_it_as_they_are() -> None:
    words = ["--set", "model.name=a 'b' \"c\"\n- d", "--fault", "kill@3:1", "--checkpoint-every", "5"]
    found = documents("--nnodes", "1:4", "my_experiment.v2.py", *words)
    (container,) = pod_spec(found)["containers"]
    assert container["args"][-len(words) - 3 :] == ["--nnodes", "1:4", "my_experiment.v2.py", *words]
    assert found[0]["metadata"]["name"] == "my-experiment-v2"


def test_several_pods_need_a_claim_that_all_machines_can_write_to() -> None:
    modes = {nnodes: values(documents("--nnodes", nnodes, "digits"), "accessModes") for nnodes in ("1", "2")}
    assert modes == {"1": ["ReadWriteOnce"], "2": ["ReadWriteMany"]}
    kinds = [part["kind"] for part in documents("--claim", "results", "digits")]
    assert "PersistentVolumeClaim" not in kinds


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "an experiment"),
        (["digits", "--epoch", "3"], "--epoch"),
        (["digits", "--timeout", "soon"], "--timeout"),
        (["--nnodes", "two", "digits"], "--nnodes two"),
        (["--nnodes", "3:2", "digits"], "--nnodes 3:2"),
        (["--nnodes", "0", "digits"], "--nnodes 0"),
        (["--nproc-per-node", "0", "digits"], "--nproc-per-node 0"),
        (["--name", "Mine!", "digits"], "--name Mine!"),
        (["--name", "a" * 41, "digits"], "at most 40"),
        (["--claim", "a_b", "digits"], "--claim a_b"),
        (["--storage-class", "my class", "digits"], "--storage-class my class"),
        (["--memory", "16 GB", "digits"], "--memory 16 GB"),
        (["--storage", "0", "digits"], "--storage 0"),
        (["--cores", "0", "digits"], "--cores 0"),
        (["--user", "0", "digits"], "--user 0"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(words: list[str], said: str) -> None:
    refused = run(*words)
    assert (refused.code, refused.output) == (2, "")
    assert said in refused.errors
    assert refused.errors.count("\n") == 1


TEXTS = ["digits", "--set", "a=1", "2", "on", "No", "null", "~", "a: b", "#a", "- a", "é\n", "'\"\\", "$(A)", "1e3", ""]


@pytest.mark.parametrize("text", TEXTS)
def test_yaml_reads_back_what_was_written(text: str) -> None:
    assert yaml.safe_load(f"[x, {quoted(text)}]") == ["x", text]
