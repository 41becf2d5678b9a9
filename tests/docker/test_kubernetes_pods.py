"""The pods of the files for Kubernetes, run as containers: one training, the same weights, stopped with 75, resumed."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
from docker.models.containers import Container

from ddp_core.record.directory import find_runs
from tests.docker.pods import Pods, create
from tests.docker.test_confinement import eventually
from tests.house.kubernetes_files import documents, pod_spec
from tests.support.commands import train
from tests.support.processes import HANG

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]

WORDS = ["digits", "--set", "epochs=2", "--set", "model.width=8"]
Start = Callable[..., Pods]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """The claim's directory, which the cluster makes writable for fsGroup."""
    folder = tmp_path / "outputs"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


def edited(file: str, image: str, words: list[str], ranks: int = 2) -> list[dict[str, Any]]:
    """What a file says, edited as its page tells: another image, and other words of `ddp train`."""
    found = documents(file)
    (container,) = pod_spec(found)["containers"]
    container["image"] = image
    args = container["args"]
    if "auto" in args:
        args[args.index("--nproc-per-node") + 1] = str(ranks)
        args[args.index("auto") + 1 :] = words
    return found


@pytest.fixture
def prepare(image: str, engine: docker.DockerClient, output: Path) -> Iterator[Start]:
    """A function that makes the pods of a file that trains with these further words."""
    made: list[Pods] = []

    def make(file: str, *words: str, ranks: int = 2) -> Pods:
        made.append(Pods(engine, edited(file, image, [*WORDS, *words], ranks), secrets.token_hex(8), output))
        return made[-1]

    yield make
    for pods in made:
        pods.remove()


@pytest.fixture(scope="session")
def single(image: str, engine: docker.DockerClient) -> str:
    """The digest of the weights after the same training in one process."""
    words = ["train", *WORDS, "--device", "cpu", "--output", "/tmp"]
    script = ["sh", "-c", '"$0" "$@" >/dev/null && cat /tmp/*/*/run.json', "ddp", *words]
    record = engine.containers.run(image, script, remove=True, network_mode="none")
    return str(json.loads(record)["weights_sha256"])


def ends(*containers: Container) -> list[int]:
    return [container.wait(timeout=HANG)["StatusCode"] for container in containers]


def said(*containers: Container) -> str:
    return "\n".join(container.logs().decode() for container in containers)


def record_in(output: Path) -> dict[str, Any]:
    ((_, record),) = find_runs(output)
    return record


@pytest.mark.parametrize(
    "kind", ["job", *(pytest.param(each, marks=pytest.mark.slow) for each in ("jobset", "trainjob"))]
)
def test_the_pods_are_one_training_with_the_weights_of_one_process(
    prepare: Start, output: Path, single: str, kind: str
) -> None:
    pods = prepare(kind)
    # The first pod may begin last.
    nodes = [pods.start(index) for index in reversed(range(pods.count))]
    assert ends(*nodes) == [0, 0], said(*nodes)
    record = record_in(output)
    assert (record["layout"]["label"], record["weights_sha256"]) == ("ddp-2x2-cpu", single)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drained", "left"),
    # The first pod serves the store, so both stop.
    [pytest.param(0, [75, 75], id="the first"), pytest.param(1, [75], id="the second")],
)
def test_the_replacements_of_a_drained_machines_pods_go_on(
    prepare: Start, output: Path, single: str, drained: int, left: list[int]
) -> None:
    # Each step of rank 0 takes 0.2 s longer, so that there is time to break something.
    pods = prepare("job", "--fault", "slow@1", ranks=1)
    nodes = [pods.start(index) for index in range(pods.count)]
    eventually(lambda: any(output.glob("*/*/checkpoints/latest.json")), HANG)
    pods.stop(nodes[drained])
    gone = nodes[drained:]
    assert ends(*gone) == left, said(*nodes)
    assert drained or record_in(output)["status"] == "stopped"
    # Where both stopped, the replacement of the second one looks for the first one before that is there again.
    again = [pods.start(index) for index in reversed(range(drained, pods.count))]
    assert ends(*nodes[:drained], *again) == [0, 0], said(*nodes, *again)
    record = record_in(output)
    assert (record["status"], record["weights_sha256"]) == ("completed", single)
    assert not drained or "left after step" in said(nodes[0])


def test_a_mistake_ends_with_2_which_fails_the_job(prepare: Start) -> None:
    node = prepare("job", "--set", "nonsense=1").start(0)
    assert ends(node) == [2]
    assert "nonsense" in said(node)


def test_the_reader_serves_the_report_on_what_is_in_the_claim(
    image: str, engine: docker.DockerClient, output: Path
) -> None:
    train(output, "toy_mlp", "--device", "cpu")
    (pod,) = edited("reader", image, [])
    container = create(engine, pod["spec"], output, pod["metadata"]["name"], {})
    try:
        container.start()
        eventually(lambda: "serving" in said(container), HANG)
        script = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:8000').read().decode())"
        assert "toy_mlp" in container.exec_run(["python", "-c", script]).output.decode()
        assert "toy_mlp" in container.exec_run(["tar", "-cf", "-", "/outputs"]).output.decode(errors="ignore")
    finally:
        container.remove(force=True)
