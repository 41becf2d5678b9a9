"""Starts the pods of a job's YAML as containers, with what a cluster's control plane fills in.

That is: the job's unique id and the pod's index, the pods' names in DNS, Kubeflow's variables, and the contents of
volumes. Command, environment, user, rights and times are the YAML's own. Nothing here knows NetworkPolicy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import docker
from docker.models.containers import Container
from docker.models.networks import Network

UID, INDEX = (
    "metadata.labels['batch.kubernetes.io/controller-uid']",
    "metadata.annotations['batch.kubernetes.io/job-completion-index']",
)
KUBEFLOWS_PORT = 29500


class Pods:
    """The pods of one job, each a container in a network of the job's own."""

    def __init__(self, engine: docker.DockerClient, documents: Sequence[Mapping[str, Any]], uid: str, output: Path):
        self._engine, self._uid, self._output = engine, uid, output
        named = {str(document["kind"]): document for document in documents}
        self._trainer: Mapping[str, Any] = {}
        if "Job" in named:
            self._name, spec = named["Job"]["metadata"]["name"], named["Job"]["spec"]
            self._host = str(self._name)
            assert spec["template"]["spec"]["subdomain"] == named["Service"]["metadata"]["name"] == self._name
        else:
            if "JobSet" in named:
                owner, jobset = named["JobSet"], named["JobSet"]["spec"]
            else:
                owner, jobset = named["TrainJob"], named["TrainingRuntime"]["spec"]["template"]["spec"]
                assert owner["spec"]["runtimeRef"]["name"] == named["TrainingRuntime"]["metadata"]["name"]
                self._trainer = owner["spec"]["trainer"]
            (job,) = jobset["replicatedJobs"]
            self._name, spec = owner["metadata"]["name"], job["template"]["spec"]
            self._host = f"{self._name}-{job['name']}-0"
        self.count: int = spec["completions"]
        self._spec = spec["template"]["spec"]
        self._network: Network = engine.networks.create(f"ddp-test-{uid}", internal=True)
        self._containers: list[Container] = []

    def start(self, index: int) -> Container:
        """Start the pod of this index, or its replacement after the pod has ended."""
        (of_pod,) = self._spec["containers"]
        host = f"{self._host}-{index}"
        container = create(self._engine, self._spec, self._output, host, self._environment(of_pod["env"], index))
        self._containers.append(container)
        self._engine.networks.get("none").disconnect(container)
        self._network.connect(container, aliases=[f"{host}.{self._name}"])
        container.start()
        return container

    def stop(self, container: Container) -> None:
        """End the pod as a drain of its machine does: SIGTERM, the grace period, SIGKILL."""
        container.stop(timeout=self._spec["terminationGracePeriodSeconds"])

    def remove(self) -> None:
        """Remove all containers and the network."""
        for container in self._containers:
            container.remove(force=True)
        self._network.remove()

    def _environment(self, listed: Sequence[Mapping[str, Any]], index: int) -> dict[str, str]:
        filled_in = {UID: self._uid, INDEX: str(index)}
        environment = {"JOB_COMPLETION_INDEX": str(index)}
        for variable in listed:
            source = variable.get("valueFrom")
            environment[variable["name"]] = filled_in[source["fieldRef"]["fieldPath"]] if source else variable["value"]
        if self._trainer:
            environment |= {
                "PET_NNODES": str(self._trainer["numNodes"]),
                "PET_NPROC_PER_NODE": str(self._trainer["numProcPerNode"]),
                "PET_NODE_RANK": str(index),
                "PET_MASTER_ADDR": f"{self._host}-0.{self._name}",
                "PET_MASTER_PORT": str(KUBEFLOWS_PORT),
            }
        return environment


def create(
    engine: docker.DockerClient, spec: Mapping[str, Any], output: Path, host: str, environment: Mapping[str, str]
) -> Container:
    """A container as the pod of this specification, not started, in no network, with `output` in the pod's claim."""
    (of_pod,) = spec["containers"]
    confined, pod = of_pod["securityContext"], spec["securityContext"]
    assert not confined["allowPrivilegeEscalation"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounts = {mount["name"]: mount for mount in of_pod["volumeMounts"]}
    assert mounts.keys() == volumes.keys() <= {"outputs", "tmp", "shm"}
    return engine.containers.create(
        of_pod["image"],
        entrypoint=of_pod["command"],
        command=[_expanded(word, environment) for word in of_pod["args"]],
        environment=dict(environment),
        hostname=host,
        user=f"{pod['runAsUser']}:{pod['runAsGroup']}",
        group_add=[str(pod["fsGroup"])],
        read_only=confined["readOnlyRootFilesystem"],
        cap_drop=confined["capabilities"]["drop"],
        security_opt=["no-new-privileges:true"],
        shm_size=_size(volumes["shm"]["emptyDir"]["sizeLimit"]) if "shm" in volumes else None,
        mem_limit=_size(of_pod["resources"]["limits"]["memory"]),
        tmpfs={mounts["tmp"]["mountPath"]: ""},
        volumes=[f"{output}:{mounts['outputs']['mountPath']}:{'ro' if mounts['outputs'].get('readOnly') else 'rw'}"],
        network="none",
    )


def _expanded(word: str, environment: Mapping[str, str]) -> str:
    """The word with $(NAME) replaced, as Kubernetes does it."""
    return re.sub(r"\$\((\w+)\)", lambda match: environment.get(match[1], match[0]), word)


def _size(quantity: str) -> int:
    assert quantity.endswith("Gi")
    return int(quantity.removesuffix("Gi")) * 2**30
