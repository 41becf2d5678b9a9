"""How much there is to read: the lines of each room, and what a healthy worker loads of them; both only fall."""

from __future__ import annotations

import json
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.commands import ROOT, command

BUDGET = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["size"]


TELLS = """
import json, os, sys
from pathlib import Path
from ddp_core import Callback

class Tells(Callback):
    def on_epoch(self, moment):
        names = [name for name in sys.modules if name.partition(".")[0] == "ddp_core"]
        Path(os.environ["DDP_LOADED"]).write_text(json.dumps(names))

callbacks = [Tells()]
"""
"""What tells after an epoch which modules of ddp_core its process has loaded."""


def lines_of(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("room", BUDGET["rooms"])
def test_a_room_is_no_larger_than_its_budget(room: str) -> None:
    lines = sum(map(lines_of, (ROOT / room).rglob("*.py")))
    allowed = BUDGET["rooms"][room]
    assert lines <= allowed, f"take away {lines - allowed} lines of {room}, or say in the commit why the budget rises"


def test_every_room_has_a_budget() -> None:
    rooms = {f"ddp_core/{each.parent.name}" for each in (ROOT / "ddp_core").glob("*/__init__.py")}
    assert rooms <= BUDGET["rooms"].keys()


@pytest.mark.full
def test_a_healthy_worker_loads_only_what_trains(tmp_path: Path) -> None:
    told = tmp_path / "loaded.json"
    words = ["--layout", "ddp", "--nproc-per-node", "2", "--device", "cpu", "--output", tmp_path]
    file, toy = tmp_path / "mine.py", (ROOT / "experiments" / "toy_mlp.py").read_text()
    file.write_text(toy.replace('numerics="portable",', "") + TELLS)
    ended = command("train", file, *words, env={"DDP_LOADED": str(told)})
    assert ended.code == 0, ended.errors
    loaded = json.loads(told.read_text())
    assert [name for name in loaded if name.startswith("ddp_core.live")] == []
    files = [Path(str(spec.origin)) for name in loaded if (spec := find_spec(name)) is not None]
    assert len(files) <= BUDGET["worker"]["modules"]
    assert sum(map(lines_of, files)) <= BUDGET["worker"]["lines"]
