"""Experiment files: those of the package, those of users, and every way in which a file can be wrong."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.cli import main
from ddp_core.config.cut import BatchCut
from ddp_core.config.experiment import Component
from ddp_core.config.layout import Layout
from ddp_core.experiment.building import build, complete_options, resolve
from ddp_core.experiment.file import INSTALLED, list_experiments, load_experiment
from ddp_core.experiment.request import build_parts
from tests.support.wording import refusing

HEAD = "from ddp_core.config.experiment import Component, Experiment\n"
PLAIN = (
    'experiment = Experiment(name="mine", model=Component(name="{model}"), data=Component(name="toy_data"), '
    'loss="{loss}", global_batch_size=8, micro_batch=4)\n'
)


def mine(folder: Path, text: str = "", model: str = "two_layer", loss: str = "mean_squared_error") -> Path:
    path = folder / "mine.py"
    path.write_text(HEAD + text + PLAIN.format(model=model, loss=loss))
    return path


def refusal(path: Path | str) -> str:
    """The one-line error with which loading the file fails."""
    with pytest.raises(UserError) as failure:
        load_experiment(str(path))
    assert failure.value.exit_code == ExitCode.BAD_INPUT
    assert "\n" not in str(failure.value)
    return str(failure.value)


def test_listing_runs_no_file_skips_what_is_no_experiment_and_notes_what_is_broken(tmp_path: Path) -> None:
    mine(tmp_path)
    (tmp_path / "trap.py").write_text('"""Is it run?"""\nraise SystemExit(9)\nexperiment = 1\n')
    (tmp_path / "other.py").write_text("x = 1\n")
    (tmp_path / "broken.py").write_text("a = 1\nexperiment = (\n")
    (tmp_path / "typed.py").write_text('"""\n    Does it work?\n\nMore.\n"""\nexperiment: object = 1\n')
    (tmp_path / "folder").mkdir()
    mine(tmp_path / "folder").rename(tmp_path / "folder" / "hidden.py")
    listed = {entry.name: entry.question for entry in list_experiments([tmp_path])}
    assert listed == {
        "broken": "(cannot be read: SyntaxError in line 2)",
        "mine": "(no question: add a docstring)",
        "trap": "Is it run?",
        "typed": "Does it work?",
    }


@pytest.mark.parametrize("name", [entry.name for entry in list_experiments([INSTALLED])])
def test_each_loads_and_names_functions_that_exist(name: str) -> None:
    loaded = load_experiment(name, [INSTALLED])
    experiment = loaded.experiment
    assert experiment.name == name
    assert loaded.question.endswith("?")
    for component, kind in ((experiment.model, "model"), (experiment.data, "data")):
        function = resolve(loaded, kind, component.name)  # type: ignore[arg-type]
        completed = complete_options(component, function, kind)  # type: ignore[arg-type]
        assert completed.options.items() >= component.options.items()
        assert "root" not in completed.options
    resolve(loaded, "loss", experiment.loss)
    for shares in (1, 2, 4):
        layout = Layout(kind="ddp", nproc_per_node=shares) if shares > 1 else Layout()
        assert BatchCut.of(experiment, layout).micro_batches >= shares
    if name != "resnet18_synthetic":
        BatchCut.of(experiment, Layout(kind="ddp", nnodes=3))


def test_accuracy_belongs_to_the_loss_or_to_the_file(tmp_path: Path) -> None:
    assert build_parts(load_experiment("digits", [INSTALLED]), Path("data")).hits is not None
    assert build_parts(load_experiment("linear_regression", [INSTALLED]), Path("data")).hits is None
    own = load_experiment(str(mine(tmp_path, "def hits(outputs, targets):\n    return 5\n\n\n")))
    counter = build_parts(own, Path("data")).hits
    assert counter is not None
    assert counter(1, 2) == 5


def test_an_object_of_a_class_in_the_file_can_be_pickled(tmp_path: Path) -> None:
    path = mine(tmp_path, "from dataclasses import dataclass\n\n\n@dataclass\nclass Size:\n    width: int = 3\n\n\n")
    size = load_experiment(str(path)).namespace["Size"]()
    assert pickle.loads(pickle.dumps(size)) == size


def test_unknown_names_and_unreadable_files_get_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "did you mean digits?" in refusal("digit")
    assert "does not exist" in refusal(tmp_path / "nothing.py")
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read: UnicodeDecodeError" in refusal(tmp_path / "binary.py")
    monkeypatch.chdir(tmp_path)
    mine(tmp_path)
    assert "did you mean mine.py?" in refusal("./mine")
    assert "unknown experiment" in refusal("../mine")
    assert "unknown experiment" in refusal("")


def test_without_the_laboratory_experiments_and_commands_name_what_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    brings = "samebits-lab: pip install 'samebits[lab]'"
    with pytest.raises(UserError, match=re.escape(brings)):
        load_experiment("digits", [tmp_path / "none"])
    monkeypatch.setattr("ddp_core.cli.click_kinds._offered", dict)
    monkeypatch.setattr("ddp_core.base.extras.find_spec", lambda _: None)
    assert main(["report"]) == ExitCode.BAD_INPUT
    assert brings in capsys.readouterr().err


def test_a_folder_experiments_here_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiments").mkdir()
    mine(tmp_path / "experiments")
    assert load_experiment("mine").experiment.name == "mine"
    assert load_experiment("digits").experiment.name == "digits"
    mine(tmp_path / "experiments").rename(tmp_path / "experiments" / "digits.py")
    assert load_experiment("digits").experiment.name == "mine"
    folders = [tmp_path / "experiments", INSTALLED]
    assert {entry.name: entry.question for entry in list_experiments(folders)}["digits"].startswith("(no question")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a = 1\nb = 1 / 0\n", "mine.py:2: ZeroDivisionError: division by zero"),
        ("def f():\n    raise ValueError('two\\nlines')\n\n\nf()\n", "mine.py:2: ValueError: two lines"),
        ("import no_such_module_here\n", "mine.py:1: ModuleNotFoundError: No module named 'no_such_module_here'"),
        ("a = 1\nb = (\n", "mine.py:2: SyntaxError: '(' was never closed"),
        ("raise SystemExit(3)\n", "mine.py:1: SystemExit: 3"),
        (HEAD + "experiment = Experiment(name='x')\n", "mine.py:2: Experiment: global_batch_size: Field required"),
        ("x = 1\n", "mine.py defines no `experiment`"),
        ("experiment = {'name': 'x'}\n", "mine.py has an `experiment` that is a dict"),
    ],
)
def test_wrong_files_are_explained_in_one_line(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    assert expected in refusal(path)


def test_unknown_functions_get_the_nearest(tmp_path: Path) -> None:
    loaded = load_experiment(str(mine(tmp_path)))
    for kind, name in (("model", "smal_cnn"), ("data", "digit"), ("loss", "crossentropy")):
        with refusing():
            resolve(loaded, kind, name)  # type: ignore[arg-type]
    averages = mine(tmp_path, "from torch.nn.functional import cross_entropy\n\n", loss="cross_entropy")
    with refusing():
        resolve(load_experiment(str(averages)), "loss", "cross_entropy")


def test_options_are_checked_against_the_function(tmp_path: Path) -> None:
    def model(width: int = 3, *, root: Path = Path("data"), shape: tuple[int, int] = (1, 2), kind: object = int) -> str:
        return f"{width} {root} {shape}"

    def needs(width: int) -> int:
        return 12 // width

    assert build(model, {"width": 5}, {"root": Path("elsewhere"), "other": 1}) == "5 elsewhere (1, 2)"
    assert complete_options(Component(name="data"), model, "data").options == {"width": 3, "shape": [1, 2]}
    with refusing():
        build(model, {"widht": 1})
    with refusing():
        build(model, {"root": "x"}, {"root": Path("y")})
    with refusing():
        build(needs, {})
    with pytest.raises(UserError, match="takes none"):
        build(lambda: 1, {"a": 1})
    assert build(lambda **options: options, {"a": 1}) == {"a": 1}
