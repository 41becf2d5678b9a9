"""`ddp diagnose` on whole scripts: what it says, writes and leaves behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddp_core.distributed.children import Children
from ddp_lab.diagnose import runs
from ddp_lab.diagnose.silence import SECONDS
from tests.lab.diagnose.cases import FIXTURES
from tests.support.commands import Ended, command
from tests.support.wording import refusing

TRAINS = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
STEP = """
model(torch.ones(3, 2)).mean().backward()
optimizer.step()
"""


def diagnose(folder: Path, *words: str) -> Ended:
    return command("diagnose", *words, cwd=folder)


def write(folder: Path, text: str) -> str:
    shutil.copy(FIXTURES / "usual.py", folder)
    (folder / "train.py").write_text(text)
    return "train.py"


def test_a_bug_is_told_with_its_evidence_its_line_and_its_mend(tmp_path: Path) -> None:
    # As datasets, evaluate and accelerate do when they are imported, it asks for torch before it loads it.
    asks = "import importlib.util\nimportlib.util.find_spec('torch')\n"
    script = write(tmp_path, asks + (FIXTURES / "around_ddp.py").read_text())
    ended = diagnose(tmp_path, "--ranks", "2", "--json", "a/found.json", "--", script)
    assert (ended.code, ended.errors) == (1, "")
    line = 1 + (tmp_path / script).read_text().splitlines().index("    optimizer.step()")
    lines = ended.output.splitlines()
    assert lines[2] == "BUG: Ranks step with different gradients (gradients-differ)"
    assert "step 1: the gradient of 0.weight differs between rank 0 and another (4 of 4 parameters)" in lines[3]
    assert lines[4] == f"  where: train.py:{line}"
    assert lines[5].startswith("  mend: let DDP wrap the whole model")
    assert lines[-1] == "verdict: gradients-differ: mend this first, then look again"
    told = json.loads((tmp_path / "a" / "found.json").read_text())
    assert told["findings"][0]["site"] == f"train.py:{line}"
    assert {file.name for file in tmp_path.iterdir()} == {"train.py", "usual.py", "a"}


def test_a_script_without_a_step_cannot_be_diagnosed(tmp_path: Path) -> None:
    ended = diagnose(tmp_path, "--ranks", "1", "--", write(tmp_path, "print('nothing to do')"))
    assert (ended.code, ended.errors) == (
        2,
        "ddp: error: on 1 rank no optimizer step was seen: it came to its end without one (it prints: nothing to do)\n",
    )


def test_no_run_can_write_to_a_large_file_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "here").mkdir()
    (folder / "data.bin").write_bytes(b"measured once")
    monkeypatch.setattr(runs, "_LARGEST_COPIED", 4)
    with Children("ddp-test-") as children, Children("ddp-test-") as others:
        runner = runs.Runner(runs.Script(folder / "train.py", (), folder), children, 0.0)
        copies = [runner.folder() / "data.bin" for _ in range(2)]
        assert len({copy.resolve() for copy in copies}) == 1, "one copy for all runs"
        assert all(copy.resolve().is_relative_to(children.folder) for copy in copies)
        assert copies[0].stat().st_mode & 0o222 == 0
        monkeypatch.setattr(runs.shutil, "disk_usage", lambda path: SimpleNamespace(free=20))
        full = runs.Runner(runs.Script(folder / "train.py", (), folder), others, 0.0)
        with refusing() as refused:
            full.folder()
    assert refused.value.exit_code == 4


def test_a_linked_folder_is_copied_but_for_one_that_holds_itself(tmp_path: Path) -> None:
    (folder := tmp_path / "here").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.csv").write_text("1,2")
    for name, target in {"linked": tmp_path / "data", "around": tmp_path, "gone": tmp_path / "gone"}.items():
        (folder / name).symlink_to(target)
    with Children("ddp-test-") as children:
        copy = runs.Runner(runs.Script(folder / "train.py", (), folder), children, 0.0).folder()
        assert (copy / "linked" / "rows.csv").read_text() == "1,2"
        assert not (copy / "linked").is_symlink()
        assert not (copy / "around").exists()


@pytest.mark.slow
def test_a_script_that_hangs_is_ended_with_all_that_it_has_started(tmp_path: Path) -> None:
    script = write(tmp_path, "import subprocess, time\nsubprocess.Popen(['sleep', '600'])\ntime.sleep(600)")
    ended = diagnose(tmp_path, "--ranks", "1", "--seconds", "3", "--", script)  # checks that no process is left
    assert ended.code == 2
    assert "rank 0 had not ended when the time was up" in ended.errors


@pytest.mark.slow
def test_a_script_for_one_process_is_not_taken_for_one_of_several(tmp_path: Path) -> None:
    ended = diagnose(tmp_path, "--ranks", "2", "--", write(tmp_path, TRAINS + STEP))
    assert ended.code == 2
    assert "makes no process group" in ended.errors


@pytest.mark.slow
def test_a_script_reads_beside_its_folder_what_a_copy_of_the_one_around_it_holds(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("3")
    (inner := tmp_path / "inner").mkdir()
    script = write(inner, f"rows = int(open('../data').read())\nopen('../new', 'w')\n{TRAINS}{STEP}")
    assert "No such file or directory: '../data'" in diagnose(inner, "--ranks", "1", "--", script).errors
    ended = diagnose(inner, "--ranks", "1", "--folder", "..", "--", script)
    assert (ended.code, ended.errors) == (0, ""), ended.output
    assert not (tmp_path / "new").exists()
    ended = diagnose(inner, "--folder", "/usr", "--", script)
    assert (ended.code, f"name one around {inner}\n" in ended.errors) == (2, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gone.py", "--batch-size", "8"], "gone.py: no such file"),
        (["--rank", "2", "train.py"], "unrecognized arguments: --rank (see `ddp diagnose --help`)"),
        ([], "no script is given; write it and its arguments last: ddp diagnose -- train.py --epochs 3"),
        (["--", "gone.py"], "gone.py: no such file"),
        (["--ranks", "0", "--", "gone.py"], "argument --ranks: 0 is not a whole number from 1 to 100000"),
    ],
)
def test_wrong_words_are_told_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from ddp_lab.diagnose import main

    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ddp: error: {message}")


@pytest.mark.slow
def test_a_first_checkpoint_may_come_late_and_the_script_needs_no_dashes_before_it(tmp_path: Path) -> None:
    """Its first torch.save is after step 32; with --steps 1 a fixed multiple of the steps would not reach it."""
    text = (FIXTURES / "resume_without_optimizer.py").read_text()
    text = text.replace("torch.randn(48, 8), torch.randint(4, (48,))", "torch.randn(160, 8), torch.randint(4, (160,))")
    script = write(tmp_path, text.replace("    state = ", "    if step != 31:\n        continue\n    state = "))
    ended = diagnose(tmp_path, "--ranks", "1", "--steps", "1", "--resume-args=--resume", script)
    assert ended.code == 1, ended.output + ended.errors
    assert "BUG: " in ended.output
    assert "after 32 steps and a resume: the optimizer's state is another" in ended.output


@pytest.mark.slow
def test_the_rank_that_has_failed_is_named_and_not_those_that_wait_for_it(tmp_path: Path) -> None:
    script = f"""
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    raise ValueError("only here")
{TRAINS}
dist.barrier()
{STEP}
"""
    ended = diagnose(tmp_path, "--ranks", "1,2", "--", write(tmp_path, script))
    assert ended.code == 1, ended.errors
    assert "BUG: The script fails on several ranks, though not on one (fails-on-more-ranks)" in ended.output
    assert "no optimizer step was seen: rank 1 ended with 1: [rank1]: ValueError: only here\n" in ended.output


@pytest.mark.slow
def test_ranks_that_wait_for_one_that_is_not_at_work_are_waited_for(tmp_path: Path) -> None:
    """Rank 0 sleeps, as one that downloads a data set does, longer than the silence of ranks that hang."""
    script = f"""
import time
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    time.sleep({SECONDS + 10})
dist.barrier()
{TRAINS}
dist.broadcast(model.weight.data, 0)
{STEP}
"""
    ended = diagnose(tmp_path, "--ranks", "2", "--", write(tmp_path, script))
    assert "hangs" not in ended.output, ended.output


@pytest.mark.slow
def test_what_could_not_be_looked_at_is_said(tmp_path: Path) -> None:
    script = write(tmp_path, "import torch\ntorch.manual_seed(0)\n" + TRAINS + STEP)
    ended = diagnose(tmp_path, "--ranks", "1", "--resume-args=", "--", script)
    assert ended.code == 0, ended.errors
    assert "note: the resume was not looked at: 1 steps, in " in ended.output
    assert "without a torch.save; give more time (--seconds), or the script arguments with which it" in ended.output
    assert ended.output.endswith("verdict: no bug found on 1 rank; not all was seen, as the notes say\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "is_told"), [("sys.at_the_end = Killer()", False), ("os.kill(os.getpid(), signal.SIGABRT)", True)]
)
def test_a_signal_while_the_interpreter_ends_is_no_fault_of_the_script(tmp_path: Path, end: str, is_told: bool) -> None:
    killer = "class Killer:\n    def __del__(self, kill=os.kill):\n        kill(os.getpid(), signal.SIGABRT)\n"
    begins = "import os, signal, sys, torch\ntorch.manual_seed(0)\n" + killer
    ended = diagnose(tmp_path, "--ranks", "1", "--", write(tmp_path, begins + TRAINS + STEP + f"{end}\n"))
    assert ended.code == 0, ended.errors
    assert ("rank 0 was killed by SIGABRT" in ended.output) is is_told


@pytest.mark.slow
def test_a_loader_without_a_hash_and_an_auxiliary_loss_beside_logits_are_no_fault(tmp_path: Path) -> None:
    """Ranks draw their own samples, so that one process has other targets; the auxiliary loss is not the model's."""
    script = """
from usual import DataLoader, DistributedDataParallel, F, TensorDataset, nn, rank, torch

class Loader(DataLoader):
    __hash__ = None

    def __eq__(self, other):
        raise RuntimeError("loaders are not compared")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.out, self.gate = nn.Linear(8, 4), nn.Linear(8, 2)

    def forward(self, rows):
        return self.out(rows), self.gate(rows).softmax(1).square().mean()

data, targets = torch.randn(96, 8), torch.randint(4, (96,))
next(iter(Loader(TensorDataset(data), batch_size=4)))
model = DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
drawn = torch.Generator().manual_seed(rank)
for step in range(6):
    rows = torch.randperm(96, generator=drawn)[:4]
    logits, balance = model(data[rows])
    (F.cross_entropy(logits, targets[rows]) + 0.1 * balance).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    ended = diagnose(tmp_path, "--ranks", "1,2", "--", write(tmp_path, script))
    assert ended.code == 0, ended.output + ended.errors
    assert "Traceback" not in ended.output + ended.errors
