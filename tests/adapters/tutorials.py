"""Runs the scripts of a tutorial as its reader does: the ordinary one, and the one that the page's diff makes of it."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.commands import Ended, command
from tests.support.processes import free_port

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "tutorials"
NO_THREAD_OF_GLOO = """
from pathlib import Path
running = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
assert "pt_gloo_runloop" not in running, running
"""
"""Ends a script: where such a thread is still at work when Python ends, it can abort the process, or not."""


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of one language in a page of the tutorials."""
    return re.findall(rf"```{language}\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)


def changed(script: str, diff: str) -> str:
    """The script after the changes of a diff without line numbers: unchanged lines say where the others stand."""
    old, new = script.splitlines(), list[str]()
    for line in diff.splitlines():
        kind, text = line[:1], line[1:]
        if kind == "+":
            new.append(text)
            continue
        found = old.index(text)
        assert kind != "-" or found == 0, f"the diff takes {text!r} away, but {old[0]!r} comes first"
        new += old[: found + (kind != "-")]
        old = old[found + 1 :]
    return "\n".join([*new, *old, ""])


def run(script: str, ranks: int, folder: Path, *words: str) -> Ended:
    """Run a script under torchrun, or without a launcher where it needs only one process; return how it ended.

    Raises subprocess.TimeoutExpired where it hangs; no process is left.
    """
    (folder / "train.py").write_text(script)
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={free_port()}"]
    return command(
        *("train.py", *words),
        env={"HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"},
        program=launcher if ranks > 1 else [],
        cwd=folder,
    )


def launch(script: str, ranks: int, folder: Path, *words: str) -> list[str]:
    """The digests that the ranks of a script print. Raises AssertionError where it fails."""
    ended = run(script + NO_THREAD_OF_GLOO * ("ddp_core.adapters" in script), ranks, folder, *words)
    assert ended.code == 0, ended.output + ended.errors
    # torchrun starts Python with -u: the words of a print are written one by one, between those of other ranks.
    return re.findall(r"[0-9a-f]{64}", ended.output)


def refused(script: str, folder: Path) -> str:
    """The message of the UserError with which a script ends on one rank."""
    ended = run(script, 1, folder)
    assert ended.code != 0, ended.output
    return "\n".join(re.findall(r"UserError: .*", ended.errors))


def only_digest(digests: list[str], ranks: int) -> str:
    """The one digest that every rank printed."""
    assert len(digests) == ranks
    (digest,) = set(digests)
    return digest
