"""Two other tools on the scripts with known bugs, each in an environment of its own.

python -m benchmarks.diagnose_beside guardtower     audits the first step of each script, and of its clean twin
python -m benchmarks.diagnose_beside traincheck     learns from the clean twin, then checks the script

Run it by the Python of an environment that has the tool and torch. Both are given their best: guardtower the script's
own model, optimizer and loss; TrainCheck the clean twin as the good run that it learns from, and that twin again, so
that what it says of a good run is not counted. Scripts run on two ranks; what shows after a resume only is left out.
Writes one JSON line for each script.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

from ddp_core.distributed.world import free_port
from tests.lab.diagnose.cases import CASES, FIXTURES

_SECONDS = 300
_AUDIT = """
def _audited(loss):
    import json, sys
    import guardtower
    import torch.distributed as dist
    from torch import nn
    known = [each for each in (globals().get("ddp"), globals().get("model")) if isinstance(each, nn.Module)]
    report = guardtower.audit(known[0], loss, optimizer=globals().get("optimizer"))
    if dist.get_rank() == 0:
        said = [[each.check, each.message] for each in (*report.errors, *report.warnings)]
        print("audit: " + json.dumps(said), flush=True)
    dist.barrier()
    sys.exit()
"""


class _AuditFirstLoss(ast.NodeTransformer):
    """Hands each cross_entropy of the script to guardtower, as the closure that it wants."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if ast.unparse(node.func) == "F.cross_entropy":
            closure = ast.Lambda(ast.arguments([], [], None, [], [], None, []), node)
            return ast.Call(ast.Name("_audited", ast.Load()), [closure], [])
        return self.generic_visit(node)


def guardtower(name: str, folder: Path) -> dict[str, object]:
    """What guardtower says of the script, and of its twin."""
    tree = ast.fix_missing_locations(_AuditFirstLoss().visit(ast.parse((FIXTURES / f"{name}.py").read_text())))
    lines = ast.unparse(tree).splitlines()
    at = 1 + max(index for index, line in enumerate(lines) if line.startswith(("import ", "from ")))
    shutil.copy(FIXTURES / "usual.py", folder)
    (folder / "audited.py").write_text("\n".join([*lines[:at], _AUDIT, *lines[at:]]))
    found: dict[str, object] = {}
    for kind, words in (("bug", []), ("twin", ["--mended"])):
        port = free_port()
        for pid in [fork(folder, rank, port, words) for rank in range(2)]:
            os.waitpid(pid, 0)
        output = (folder / "0.log").read_text()
        said = [line for line in output.splitlines() if line.startswith("audit: ")]
        found[kind] = json.loads(said[0].removeprefix("audit: ")) if said else f"it has not run: {output[-300:]}"
    return found


def fork(folder: Path, rank: int, port: int, words: list[str]) -> int:
    """Run audited.py as one of two ranks in a fork, which has torch already; the process's number."""
    import guardtower  # type: ignore[import-not-found]  # noqa: F401
    import torch

    if pid := os.fork():
        return pid
    log = os.open(folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.argv = ["audited.py", *words]
    sys.path.insert(0, str(folder))
    torch.set_num_threads(1)
    try:
        runpy.run_path(str(folder / "audited.py"), run_name="__main__")
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(0)


def traincheck(name: str, folder: Path) -> dict[str, object]:
    """How many invariants of the twin the script breaks, and how many another run of the twin."""
    bin_folder = Path(sys.executable).parent
    for file in (name, "usual"):
        shutil.copy(FIXTURES / f"{file}.py", folder)
    for kind, words in (("good", "--mended"), ("twin", "--mended"), ("bug", "")):
        launch = f"{sys.executable} -m torch.distributed.run {' '.join(torchrun())}"
        (folder / f"{kind}.sh").write_text(f"{launch} {name}.py {words}\n")
        collect = ("--pyscript", f"{name}.py", "--shscript", f"{kind}.sh", "--models-to-track", "model")
        output = run(folder, bin_folder / "traincheck-collect", *collect, "--output-dir", kind)
        if not list((folder / kind).glob("*trace*")):
            return {"problem": f"no trace of {kind}: {output[-300:]}"}
    output = run(folder, bin_folder / "traincheck-infer", "-f", "good", "-o", "invariants.json")
    if not (folder / "invariants.json").exists():
        return {"problem": f"no invariants: {output[-300:]}"}
    found: dict[str, object] = {"invariants": len((folder / "invariants.json").read_text().splitlines())}
    broken: dict[str, set[str]] = {}
    for kind in ("twin", "bug"):
        output = run(folder, bin_folder / "traincheck-check", "-f", kind, "-i", "invariants.json", "-o", f"said-{kind}")
        if "Total failed invariants" not in output:
            return found | {"problem": f"{kind} was not checked: {output[-300:]}"}
        broken[kind] = {each for file in folder.glob(f"said-{kind}/**/failed*") for each in invariants(file)}
        found[kind] = len(broken[kind])
    return found | {"only broken with the bug": sorted(broken["bug"] - broken["twin"])}


def invariants(file: Path) -> list[str]:
    """The invariants of a file of traincheck-check: JSON documents, one after the other."""
    text, found = file.read_text(), []
    while text := text.lstrip():
        told, end = json.JSONDecoder().raw_decode(text)
        found.append(json.dumps([told["invariant"]["relation"], told["invariant"]["params"]], sort_keys=True))
        text = text[end:]
    return found


def torchrun() -> list[str]:
    """torchrun's own words: two ranks on this machine."""
    return ["--nproc_per_node", "2", "--master_port", str(free_port())]


def run(folder: Path, *words: str | Path) -> str:
    """Run a command in the folder; what it has printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PATH"] = f"{Path(words[0]).parent}{os.pathsep}{environment['PATH']}"
    try:
        done = subprocess.run(
            [str(word) for word in words],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"not done after {_SECONDS} s"
    return done.stdout


def main() -> None:
    """Run a tool on each script, or on those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=("guardtower", "traincheck"))
    parser.add_argument("names", nargs="*", default=[name for name, case in CASES.items() if not case.resumes])
    options = parser.parse_args()
    for name in options.names:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            tool = guardtower if options.tool == "guardtower" else traincheck
            found = tool(name, Path(folder))
        print(json.dumps({"script": name, "seconds": round(time.monotonic() - began)} | found), flush=True)


if __name__ == "__main__":
    main()
