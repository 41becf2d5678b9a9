"""What ends a run is one line with what was wrong and where, and the exit code of its cause."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ddp_core.base.errors import ExitCode
from tests.core.run.test_whose_fault import HEAD
from tests.support.commands import Ended, ddp, without_limits
from tests.support.processes import HANG
from tests.support.wording import said_as_before

LATER = """
class Samples:
    def __len__(self):
        return 32

    def __getitem__(self, index):
        if torch.utils.data.get_worker_info() is not None:
            {what}
        return torch.zeros(4), torch.tensor(0)

def data():
    return Splits(Samples())
"""
NO_LOCKS = """
import errno, fcntl

_flock = fcntl.flock

def flock(descriptor, how):
    if os.readlink(f"/proc/self/fd/{descriptor}").endswith("run.lock"):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    return _flock(descriptor, how)

if "RANK" in os.environ:
    fcntl.flock = flock
"""
COMPLEX = """
def model():
    net = nn.Linear(4, 3)
    net.register_buffer("phases", torch.zeros(2, dtype=torch.complex128))
    return net
"""
NO_RECORD = """
experiment = Experiment(name="mine", global_batch_size=8, evaluation="none")
"""


def end_of(folder: Path, text: str, *words: str, begin: str = "") -> Ended:
    (folder / "mine.py").write_text(begin + HEAD + text, encoding="utf-8")
    return ddp("train", folder / "mine.py", "--device", "cpu", *words, "--output", folder / "out")


@pytest.mark.parametrize(
    ("text", "words", "code"),
    [
        (LATER.format(what='raise ValueError("one\\ntwo")'), ("--workers", "1"), 2),
        (LATER.format(what="os.kill(os.getpid(), 9)"), ("--workers", "1"), 4),
        (NO_LOCKS, ("--layout", "ddp", "--nproc-per-node", "2"), 4),
        (COMPLEX, (), 2),
        (NO_RECORD, (), 2),
        ("", ("--set", f"epochs={2**63}"), 2),
        ("", ("--stop-signal", "SIGSTOP"), 2),
    ],
    ids=["loader", "killed loader", "no locks", "complex128", "no record", "2**63", "SIGSTOP"],
)
def test_one_line_says_what_was_wrong(text: str, words: tuple[str, ...], code: int, tmp_path: Path) -> None:
    ended = end_of(tmp_path, text, *words)
    assert ended.code == code
    (line,) = ended.errors.splitlines()
    said_as_before(line)


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    assert end_of(tmp_path, "", "--set", "max_steps=1", begin="\ufeff").code == 0


@pytest.mark.full
def test_where_no_error_can_be_written_the_exit_code_tells_it() -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123
        for words, code in ((["verify", "nothing-here"], ExitCode.BAD_INPUT), (["--help"], ExitCode.RESOURCES)):
            ended = subprocess.run(
                [sys.executable, "-m", "ddp_core", *words],
                stdout=full,
                stderr=full,
                env=without_limits(),
                timeout=HANG,
                check=False,
            )
            assert ended.returncode == code
