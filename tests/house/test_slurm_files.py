"""What SLURM is given in `launch/slurm` holds without a SLURM: programs of a few lines stand for SLURM's own.

The real one runs the same files in `tests/cluster/test_slurm.py`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddp_core.cli.prepare import check_request, prepare
from tests.cluster import slurm
from tests.core.cli.asking import understood
from tests.support.commands import ROOT, ran

FOLDER = ROOT / "launch" / "slurm"
LIVE = FOLDER / "live.sbatch"
TEMPLATES = sorted({*FOLDER.glob("*.sbatch")} - {LIVE})
PROGRAMS = {
    "srun": """printf '%s\\n' "$*" >srun.txt
        until [ "$1" = bash ]; do shift; done
        worst=0 rank=0
        for CODE in $CODES; do
          export CODE; SLURM_PROCID=$rank "$@"
          rank=$((rank + 1)); [ $CODE -gt $worst ] && worst=$CODE
        done
        exit $worst""",
    "ddp": 'exit "$CODE"',
    "squeue": 'echo "$STATE"',
    "scontrol": "printf '%s\\n' \"$*\" >scontrol.txt",
}
"""Each task is run in turn; `CODES` are the tasks' exit codes."""


def run(folder: Path, template: Path, *words: str, **variables: str) -> tuple[int, str, str, str]:
    """Run the template as SLURM does; return its exit code, what srun and scontrol were asked, and its errors."""
    for name, body in PROGRAMS.items():
        program = folder / name
        program.write_text(f"#!/bin/sh\ncd {folder}\n{body}\n")
        program.chmod(0o755)
    usual = {"SLURM_JOB_ID": "7", "CODES": "0 0", "STATE": "RUNNING", "OUTPUT": str(folder / "outputs")}
    usual |= {"MEET": "host:29400", "RUN": "mine"}
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    done = ran("bash", template, *words, env={"PATH": path} | usual | variables, timeout=60)
    files = (folder / "srun.txt", folder / "scontrol.txt")
    srun, scontrol = (file.read_text().strip() if file.exists() else "" for file in files)
    return done.returncode, srun, scontrol, done.stderr


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.stem)
def test_a_job_trains_in_a_folder_of_its_own(template: Path, tmp_path: Path) -> None:
    code, srun, scontrol, errors = run(tmp_path, template, "digits", "--nnodes", "2:3")
    assert (code, scontrol, errors) == (0, "", "")
    assert srun.endswith(f"ddp train --layout ddp --output {tmp_path}/outputs/7 --resume auto digits --nnodes 2:3")


@pytest.mark.parametrize("array", [{}, {"SLURM_ARRAY_JOB_ID": "8", "SLURM_ARRAY_TASK_ID": "2"}])
def test_jobs_of_a_live_run_have_its_folder_in_common(tmp_path: Path, array: dict[str, str]) -> None:
    code, srun, _, errors = run(tmp_path, LIVE, "digits", RANKS="3", **array)
    assert (code, errors) == (0, "")
    where = "--recovery live --nproc-per-node 3 --nnodes 1:4 --rdzv-endpoint host:29400 --rdzv-id mine"
    assert srun.endswith(f"ddp train --layout ddp --output {tmp_path}/outputs/mine --resume auto {where} digits")


@pytest.mark.parametrize("missing", ["MEET", "RUN"])
def test_a_live_run_without_a_name_or_a_place_trains_nothing(tmp_path: Path, missing: str) -> None:
    code, srun, _, errors = run(tmp_path, LIVE, "digits", **{missing: ""})
    assert (code != 0, srun, missing in errors) == (True, "", True)


@pytest.mark.parametrize("template", [*TEMPLATES, LIVE], ids=lambda template: template.stem)
@pytest.mark.parametrize(
    ("codes", "state", "restarts", "code", "again"),
    [
        ("75 75", "RUNNING", "", 75, True),
        ("6 6", "RUNNING", "49", 6, True),
        ("0 75", "RUNNING", "", 75, True),
        ("75 75", "COMPLETING", "", 75, False),
        ("75 75", "", "", 75, False),
        ("6 2", "RUNNING", "", 2, False),
        ("5 75", "RUNNING", "", 5, False),
        *((f"{code} {code}", "RUNNING", "", code, False) for code in (1, 2, 3, 4, 5, 70, 130, 137, 143)),
    ],
)
def test_only_a_job_that_was_stopped_or_lost_peers_asks_to_start_again(
    tmp_path: Path, template: Path, codes: str, state: str, restarts: str, code: int, again: bool
) -> None:
    variables = {"SLURM_RESTART_COUNT": restarts} if restarts else {}
    ended = run(tmp_path, template, "digits", CODES=codes, STATE=state, **variables)
    assert ended[0] == code
    assert ended[2] == ("requeue 7" if again else "")


@pytest.mark.parametrize(("most", "restarts"), [({}, "50"), ({"MAX_REQUEUES": "3"}, "3"), ({"MAX_REQUEUES": "0"}, "")])
def test_a_job_does_not_start_again_for_ever(tmp_path: Path, most: dict[str, str], restarts: str) -> None:
    variables = most | ({"SLURM_RESTART_COUNT": restarts} if restarts else {})
    code, _, scontrol, errors = run(tmp_path, TEMPLATES[0], "digits", CODES="75", **variables)
    assert (code, scontrol) == (75, "")
    assert "MAX_REQUEUES" in errors


def test_a_task_of_an_array_takes_its_line_and_its_own_folder(tmp_path: Path) -> None:
    array = {"SLURM_JOB_ID": "8", "SLURM_ARRAY_JOB_ID": "8", "VARIANTS": "launch/slurm/seeds.txt", "CODES": "75"}
    _, srun, scontrol, _ = run(tmp_path, TEMPLATES[0], "digits", **array, SLURM_ARRAY_TASK_ID="2")
    assert srun.endswith("/outputs/8_2 --resume auto --set seed=1 digits")
    assert scontrol == "requeue 8_2"


@pytest.mark.parametrize(("task", "file"), [("9", "launch/slurm/seeds.txt"), ("1", ""), ("1", "nowhere.txt")])
def test_a_task_of_an_array_without_a_line_trains_nothing(tmp_path: Path, task: str, file: str) -> None:
    array = {"SLURM_ARRAY_JOB_ID": "8", "SLURM_ARRAY_TASK_ID": task, "VARIANTS": file}
    code, srun, _, errors = run(tmp_path, TEMPLATES[0], "digits", **array)
    assert (code, srun) == (2, "")
    assert f"line {task}" in errors


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.txt")), ids=lambda file: file.stem)
def test_the_lines_for_arrays_are_words_of_ddp_train(file: Path, tmp_path: Path) -> None:
    for line in file.read_text().splitlines():
        words = ["--device", "cpu", "--layout", "ddp", "--output", str(tmp_path), *line.split()]
        check_request(prepare(understood("digits", *words), "ddp train"))


def test_a_test_on_a_real_slurm_runs_each_command_of_the_page() -> None:
    tests = (ROOT / "tests" / "cluster" / "test_slurm.py").read_text().replace("{FILES}", "launch/slurm")
    assert {command for command in slurm.COMMANDS if f'"{command}"' not in tests} == set()
