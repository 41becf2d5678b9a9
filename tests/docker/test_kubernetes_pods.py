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


# Each step of rank 0 takes 0.2 s longer, so that there is time to break something.
SLOWLY = ["--fault", "slow@1"]


def begin(prepare: Start, output: Path) -> tuple[Pods, list[Container]]:
    """Start all pods of a slow training, and wait for the first checkpoint."""
    pods = prepare("job", *SLOWLY, ranks=1)
    nodes = [pods.start(index) for index in range(pods.count)]
    eventually(lambda: any(output.glob("*/*/checkpoints/latest.json")), HANG)
    return pods, nodes


@pytest.mark.parametrize("is_killed", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["drained", "killed"])
def test_a_replacement_joins_the_other_pod(prepare: Start, output: Path, single: str, is_killed: bool) -> None:
    pods, nodes = begin(prepare, output)
    if is_killed:
        nodes[1].kill()
    else:
        pods.stop(nodes[1])
        assert ends(nodes[1]) == [75], said(*nodes)
    replacement = pods.start(1)
    assert ends(nodes[0], replacement) == [0, 0], said(*nodes, replacement)
    assert record_in(output)["weights_sha256"] == single
    assert is_killed or "left after step" in said(nodes[0])


@pytest.mark.slow
def test_the_first_pod_of_a_drained_machine_stops_both_and_their_replacements_go_on(
    prepare: Start, output: Path, single: str
) -> None:
    pods, nodes = begin(prepare, output)
    pods.stop(nodes[0])
    assert ends(*nodes) == [75, 75], said(*nodes)
    assert record_in(output)["status"] == "stopped"
    # The replacement of the second pod looks for the first one before that is there again.
    again = [pods.start(index) for index in reversed(range(pods.count))]
    assert ends(*again) == [0, 0], said(*again)
    record = record_in(output)
    assert (record["status"], record["weights_sha256"]) == ("completed", single)


@pytest.mark.slow
def test_the_first_pod_is_killed_and_both_go_on_as_replacements(prepare: Start, output: Path, single: str) -> None:
    pods, (first, second) = begin(prepare, output)
    first.kill()
    replacement = pods.start(0)
    # The second pod finds the first one's replacement, or ends with 6 and is replaced, too.
    (code,) = ends(second)
    assert code in (0, 6), said(second)
    rest = [replacement, *([pods.start(1)] if code == 6 else [])]
    assert ends(*rest) == [0] * len(rest), said(second, *rest)
    assert record_in(output)["weights_sha256"] == single


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
