"""A real SLURM on this machine, five nodes with addresses of their own: one training, whatever SLURM starts and ends.

Whatever happens to a job, it ends with the digest of the single process.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddp_core.distributed.world import free_port
from tests.cluster.slurm import COMMANDS, EXPERIMENT, SECONDS, Job, Slurm, started
from tests.faults.scenarios import Event, Place, Scenario, check, on, play
from tests.support.commands import forked, train, trained, wait_until

FILES = "launch/slurm"
BOTH = [f"sbatch {FILES}/task-per-node.sbatch digits", f"sbatch {FILES}/task-per-rank.sbatch digits"]
PER_NODE, PER_RANK = BOTH
AT_WORK = r"epoch +2 "
"""Said by a job that has saved a checkpoint, and has a minute of slow steps before it."""

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(3 * SECONDS),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for network namespaces"),
    pytest.mark.skipif(
        not shutil.which("slurmctld") and "DDP_INSTALL" not in os.environ,
        reason="SLURM is not installed; `make test-cluster` installs Debian's",
    ),
]


@pytest.fixture(autouse=True)
def leaves_no_child() -> None:
    """Jobs are SLURM's and may outlive their test; `leaves_no_stray` looks once the cluster has ended."""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """The cluster, which is started here and ended afterwards."""
    with started(tmp_path_factory.mktemp("cluster"), nodes=5) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the single process."""
    output = tmp_path_factory.mktemp("single")
    train(output, EXPERIMENT)
    return str(trained(output)[1]["weights_sha256"])


@pytest.fixture(scope="module", autouse=True)
def short_of_time(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job on a node of its own that may run for a minute, SLURM's shortest limit; it runs beside all other tests."""
    folder = tmp_path_factory.mktemp("short")
    return slurm.submit(PER_NODE, folder, "--time 1 --signal TERM@10 --nodes 1 --nodelist node5")


def assert_finished(job: Job, expected: str, restarts: int, label: str = "ddp-2x2-cpu") -> None:
    """The job comes to its end after so many restarts, with the expected weights, trained last on this layout."""
    facts, said = job.end(), job.said
    assert (facts["JobState"], facts["ExitCode"], int(facts["Restarts"])) == ("COMPLETED", "0:0", restarts), said
    record = job.record
    assert (record["status"], record["weights_sha256"]) == ("completed", expected), said
    assert record["layout"]["label"] == label


@pytest.mark.parametrize(
    ("line", "label"),
    [
        ("srun --nodes 2 --ntasks-per-node 1 --cpus-per-task 2 ddp train digits", "ddp-2x2-cpu"),
        pytest.param("srun --nodes 3 --ntasks-per-node 2 ddp train digits", "ddp-3x2-cpu", marks=pytest.mark.slow),
    ],
)
def test_what_srun_starts_is_one_training(slurm: Slurm, expected: str, tmp_path: Path, line: str, label: str) -> None:
    ended = slurm.call(line, more=f"--output {tmp_path}")
    assert ended.code == 0, ended.output + ended.errors
    _, record = trained(tmp_path)
    assert (record["weights_sha256"], record["layout"]["label"]) == (expected, label)


@pytest.mark.parametrize("line", BOTH)
def test_a_job_trains(slurm: Slurm, expected: str, tmp_path: Path, line: str) -> None:
    job = slurm.submit(line, tmp_path)
    job.hurry()
    assert_finished(job, expected, restarts=0)


@pytest.mark.slow
def test_a_cancelled_job_stays_so_until_it_is_requeued(slurm: Slurm, expected: str, tmp_path: Path) -> None:
    job = slurm.submit(PER_NODE, tmp_path)
    job.wait_for(AT_WORK)
    assert slurm.call("scancel JOB", job.id).code == 0
    assert job.end()["JobState"] == "CANCELLED"
    job.wait_for("Exited with exit code 75")
    assert (job.record["status"], job.record["exit_code"]) == ("stopped", 75)
    assert slurm.call("scontrol requeue JOB", job.id).code == 0
    job.start_again()
    assert_finished(job, expected, restarts=1)
    assert "resumed at step" in job.said


def test_a_mistake_on_one_rank_ends_the_job(slurm: Slurm, tmp_path: Path) -> None:
    job = slurm.submit(PER_NODE, tmp_path, more="--nproc-per-node 1 --fault raise@3:1")
    facts = job.end()
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("FAILED", "2:0", "0"), job.said


@pytest.fixture
def without_power(slurm: Slurm) -> Iterator[str]:
    """A node whose plug the test pulls; it gets its power back afterwards."""
    yield "node3"
    slurm.power("--on", "node3")


def requeue(slurm: Slurm, job: Job) -> None:
    assert slurm.call("scontrol requeue JOB", job.id).code == 0


def preempt(slurm: Slurm, job: Job) -> None:
    urgent = slurm.shell("srun --partition urgent --nodelist node1 --exclusive true")
    assert urgent.code == 0, urgent.errors


def unplug(slurm: Slurm, job: Job) -> None:
    slurm.power("--off", "node3")


@pytest.mark.parametrize(
    ("hurt", "line", "options", "label"),
    [
        pytest.param(requeue, PER_RANK, "--nodes 1", "ddp-1x2-cpu", id="requeued"),
        pytest.param(
            preempt, PER_RANK, "--nodes 1 --nodelist node1", "ddp-1x2-cpu", id="preempted", marks=pytest.mark.slow
        ),
        pytest.param(
            unplug, PER_NODE, "--nodelist node[2-3]", "ddp-2x2-cpu", id="a node is lost", marks=pytest.mark.slow
        ),
    ],
)
@pytest.mark.usefixtures("without_power")
def test_a_job_that_slurm_starts_again_continues(
    slurm: Slurm, expected: str, tmp_path: Path, hurt: Callable[[Slurm, Job], None], line: str, options: str, label: str
) -> None:
    job = slurm.submit(line, tmp_path, options)
    job.wait_for(AT_WORK)
    hurt(slurm, job)
    job.start_again()
    slurm.power("--on", "node3")
    assert_finished(job, expected, restarts=1, label=label)
    assert "resumed at step" in job.said


@pytest.mark.slow
def test_a_job_with_no_kill_goes_on_without_a_lost_node(
    slurm: Slurm, expected: str, tmp_path: Path, without_power: str
) -> None:
    line = f"sbatch --nodes 3 --no-kill {FILES}/task-per-node.sbatch digits --nnodes 2:3"
    # By itself, a run whose callback slows its steps would start all again.
    more = "--nproc-per-node 1 --timeout 10 --recovery live"
    job = slurm.submit(line, tmp_path, "--nodelist node[1-3]", more)
    job.wait_for(AT_WORK)
    slurm.power("--off", without_power)
    job.wait_for("lost after step .* 2 ranks go on")
    job.wait_for(f"Node failure on {without_power}")
    job.hurry()
    assert_finished(job, expected, restarts=0, label="ddp-2x1-cpu")


LIVE_NODES = f"MEET=HOST:29400 RUN=my-run sbatch --nodes 3 {FILES}/live.sbatch digits"
ONE_MORE_NODE = f"MEET=HOST:29400 RUN=my-run sbatch --nodes 1 {FILES}/live.sbatch digits"
NODE_EACH = f"MEET=HOST:29400 RUN=my-run sbatch --array=1-3 --nodes 1 {FILES}/live.sbatch digits"


@pytest.fixture
def meet() -> Iterator[str]:
    """Where nodes meet: a rendezvous outside of the jobs, on the controller's machine."""
    line = "ddp rendezvous --port 29400"
    assert line in COMMANDS
    port = free_port()
    with forked(*line.split()[1:-1], str(port)) as rendezvous:
        wait_until(lambda: "listening" in rendezvous.said()[0], SECONDS, "the rendezvous listens")
        yield f"control:{port}"


class Jobs(Place):
    """The place of scenarios where nodes are SLURM's: three of one job and one of another, or a job for each.

    What SLURM does not tell is who the workers are; that no step was done again shows that they were the same.
    """

    def __init__(self, slurm: Slurm, folder: Path, meet: str, has_job_each: bool) -> None:
        self._slurm, self._folder, self._meet, self._asked = slurm, folder, meet, list[Job]()
        if has_job_each:
            array = self._submit(NODE_EACH, "--exclude node5 --exclusive")
            self.jobs = [Job(slurm, f"{array.id}_{task}", array.outputs, folder / "hurry") for task in (1, 2, 3)]
        else:
            self.jobs = [self._submit(LIVE_NODES, "--nodelist node[1-3]")]
        self.output = self.jobs[0].outputs / "my-run"

    def _submit(self, line: str, options: str) -> Job:
        return self._slurm.submit(line, self._folder, f"{options} --export ALL,RANKS=1", "--timeout 10", self._meet)

    def happen(self, event: Event) -> set[int]:
        """Let it happen."""
        if event.what == "kill":
            self._slurm.power("--off", "node3")
        elif event.what == "ask":
            self._asked = [self.jobs[1]]
            assert self._slurm.call("scancel --signal=TERM JOB", self.jobs[1].id).code == 0
        elif self._asked:
            self._asked.pop().start_again()
        else:
            self.jobs.append(self._submit(ONE_MORE_NODE, "--nodelist node4"))
        return set()

    def said(self) -> dict[str, str]:
        """What each job has said."""
        return {job.id: job.said for job in self.jobs}

    def end(self) -> list[str]:
        """Let all jobs come to their end, which must be a good one; what they have said."""
        self.jobs[0].hurry()
        for job in self.jobs:
            facts = job.end()
            assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), job.said
        return [job.said for job in self.jobs]


@pytest.mark.parametrize("scenario", on("slurm"))
@pytest.mark.usefixtures("without_power")
def test_what_must_follow_does(slurm: Slurm, expected: str, tmp_path: Path, meet: str, scenario: Scenario) -> None:
    place = Jobs(slurm, tmp_path, meet, has_job_each=scenario.events[0].what == "ask")
    play(scenario, place)
    check(scenario, place.output, expected, place.end(), always=[])


@pytest.mark.slow
def test_each_task_of_an_array_is_a_run_of_its_own(slurm: Slurm, expected: str, tmp_path: Path) -> None:
    line = f"VARIANTS={FILES}/layouts.txt sbatch --array=1-2 {FILES}/task-per-node.sbatch digits"
    array = slurm.submit(line, tmp_path)
    first, second = (Job(slurm, f"{array.id}_{task}", array.outputs, tmp_path / "hurry") for task in (1, 2))
    first.wait_for(AT_WORK)
    second.wait_for(AT_WORK)
    # SLURM gives the last task of an array the id of the whole array. Even so, only that task must start again.
    assert slurm.call("scancel --signal=TERM JOB", second.id).code == 0
    second.start_again()
    first.hurry()
    assert_finished(first, expected, restarts=0, label="ddp-2x1-cpu")
    assert_finished(second, expected, restarts=1)


@pytest.mark.slow
def test_a_job_at_its_time_limit_saves_and_continues(short_of_time: Job, expected: str) -> None:
    """The last test, because the limit of its job passes while the others run."""
    facts = short_of_time.end()
    assert (facts["JobState"], int(facts["Restarts"]) >= 1) == ("COMPLETED", True), short_of_time.said
    assert short_of_time.record["weights_sha256"] == expected
    assert "resumed at step" in short_of_time.said
