"""A request as data: what a worker begins with is what the launcher has made; what it builds follows from a seed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np

from ddp_core.cli.prepare import prepare
from ddp_core.config.options import Asked
from ddp_core.experiment.file import load_experiment
from ddp_core.experiment.request import Request, build_model, build_splits
from tests.support.wording import refusing

TEXT = '''"""Does it travel?"""
from ddp_core.config.experiment import Component, Experiment, Optimizer
def twice(rate: float = 0.5) -> float:
    return 2 * rate
experiment = Experiment(
    name="mine", model=Component(name="two_layer"), data=Component(name="toy_data", options={"size": 32}),
    loss="mean_squared_error", optimizer=Optimizer(lr=0.01), global_batch_size=16, micro_batch=4
)
'''


def asked(folder: Path, **more: object) -> Request:
    (folder / "mine.py").write_text(TEXT)
    words = Asked(experiment=str(folder / "mine.py"), settings=("epochs=3",), layout="ddp", device="cpu", **more)
    return prepare(words, "ddp train mine.py")


def test_a_request_is_the_same_after_its_way(tmp_path: Path) -> None:
    nodes = {"nproc_per_node": 3, "nnodes": "1:2", "rdzv_id": "x", "rdzv_endpoint": "here:1"}
    request = asked(tmp_path, checkpoint_every=5, faults=("kill@3:1",), **nodes)
    # What the file says by now is of no account: the launcher's text is run.
    (tmp_path / "mine.py").write_text("raise ValueError")
    there = Request.from_json(request.to_json())
    for name in ("layout", "options", "resume", "command", "asked"):
        assert getattr(there, name) == getattr(request, name), name
    assert there.loaded.experiment == request.loaded.experiment
    assert there.loaded.experiment.epochs == 3
    assert there.loaded.namespace["twice"]() == 1.0
    assert (there.loaded.path, there.loaded.source) == (request.loaded.path, TEXT)
    assert there.loaded.question == "Does it travel?"


def test_a_data_set_that_does_not_know_its_length_is_told_with_its_line(tmp_path: Path) -> None:
    own = """
class Endless:
    def __getitem__(self, index): return 0.0, 0.0
    def __len__(self): return None
def toy_data(): return Endless()
"""
    file = tmp_path / "mine.py"
    file.write_text(TEXT.replace(', options={"size": 32}', "") + own)
    with refusing():
        build_splits(prepare(Asked(experiment=str(file), device="cpu"), "").loaded, tmp_path)


def test_a_request_that_was_changed_on_its_way_is_refused(tmp_path: Path) -> None:
    told = json.loads(asked(tmp_path).to_json())
    told["source"] += "open('/tmp/x')"
    with refusing():
        Request.from_json(json.dumps(told))


def test_a_request_takes_the_number_of_nodes_that_have_come(tmp_path: Path) -> None:
    several = asked(tmp_path, nproc_per_node=1, nnodes="1:4", rdzv_endpoint="here:1", rdzv_id="x")
    assert several.layout.nnodes == 4
    assert several.for_nodes(3).layout.nnodes == 3
    two = asked(tmp_path, nproc_per_node=1, nnodes="2", rdzv_endpoint="here:1", rdzv_id="x")
    assert two.for_nodes(2) == two
    with refusing():
        two.for_nodes(1)


FILE = """
import random

import numpy as np
import torch
from ddp_core import Experiment, InMemory, Splits

{before}

def drawn():
    return random.random() + np.random.rand() + float(torch.rand(()))

def model():
    layer = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(layer.weight, drawn())
    return layer

def data():
    return Splits(InMemory(torch.full((8, 2), drawn()), torch.zeros(8, dtype=torch.long)))

experiment = Experiment(name="mine", global_batch_size=4, seed={seed})
"""


def built(folder: Path, before: str = "", seed: int = 0) -> tuple[float, float]:
    """A weight and a sample, in a process where somebody may have drawn before."""
    file = folder / "mine.py"
    file.write_text(FILE.format(before=before, seed=seed))
    random.seed()
    np.random.seed()
    experiment = load_experiment(str(file))
    weight = build_model(experiment, "cpu").weight.detach()[0, 0]  # type: ignore[index, operator]
    return float(weight), float(build_splits(experiment, Path("data")).train[0][0][0])


def test_weights_follow_from_the_seed_and_data_are_the_same_for_all(tmp_path: Path) -> None:
    weight, sample = built(tmp_path)
    assert built(tmp_path) == (weight, sample)
    other, same = built(tmp_path, seed=1)
    assert (other != weight, same) == (True, sample)


def test_what_the_file_has_seeded_stays_so(tmp_path: Path) -> None:
    before = "random.seed(1); np.random.seed({})"
    one, again, other = (built(tmp_path, before.format(number)) for number in (1, 1, 2))
    assert one == again
    assert one[0] != other[0]
    assert one[1] != other[1]
