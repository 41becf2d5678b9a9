"""What docs/how-to/train-from-python.md trains from a script trains from a cell, too, in a real kernel."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ddp_core import Component, Experiment, train
from tests.house.pages import blocks
from tests.support.commands import LAUNCHER_VARIABLES, ROOT
from tests.support.wording import refusing

PAGE = ROOT / "docs" / "how-to" / "train-from-python.md"


@pytest.mark.slow
@pytest.mark.extras("nbclient", "ipykernel")
def test_two_ranks_train_from_a_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
    from nbclient import NotebookClient
    from nbformat.v4 import new_code_cell, new_notebook

    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # Where Jupyter keeps its own files, and the kernel of this very environment.
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    kernel = KernelSpec(argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"], language="python")
    monkeypatch.setattr(KernelSpecManager, "get_kernel_spec", lambda *_: kernel)
    cell = new_code_cell(blocks(PAGE.read_text())[0].content)
    folder = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(new_notebook(cells=[cell]), timeout=240, kernel_name="python3", resources=folder).execute()
    said = "".join(output.get("text", "") for output in cell.outputs)
    assert "digits on single-cpu" in said
    assert "digits on ddp-1x2-cpu" in said
    assert "\nTrue 0.9666\n" in said


def test_an_experiment_that_is_no_file_is_refused_with_the_way_out() -> None:
    experiment = Experiment(
        name="mine", model=Component(name="mlp"), data=Component(name="digits"), global_batch_size=64
    )
    with refusing():
        train(experiment)  # type: ignore[arg-type]
