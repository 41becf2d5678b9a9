"""The notebooks of the documentation run from an empty folder in a real kernel, and say what their text says."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ddp_core import Component, Experiment, train
from tests.support.commands import LAUNCHER_VARIABLES, ROOT
from tests.support.wording import refusing

NOTEBOOK = ROOT / "docs" / "tutorials" / "train-in-a-notebook.ipynb"


@pytest.mark.slow
@pytest.mark.extras("nbclient", "ipykernel")
def test_two_ranks_train_from_a_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
    from nbclient import NotebookClient

    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # Where Jupyter keeps its own files, and the kernel of this very environment.
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    kernel = KernelSpec(argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"], language="python")
    monkeypatch.setattr(KernelSpecManager, "get_kernel_spec", lambda *_: kernel)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    folder = tmp_path / "here"
    folder.mkdir()
    NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()

    said = ["".join(output.get("text", "") for output in cell.outputs) for cell in notebook.cells if "outputs" in cell]
    _, training, compared, _, predicted, refused = said
    assert "spirals on single-cpu" in training
    assert "spirals on ddp-1x2-cpu" in training
    assert compared.startswith("the same weights: True\n")
    assert float(compared.split()[-1]) > 0.9
    assert predicted.strip() == "[1, 0]"
    assert "%%writefile" in refused


def test_an_experiment_that_is_no_file_is_refused_with_the_way_out() -> None:
    experiment = Experiment(
        name="mine", model=Component(name="mlp"), data=Component(name="digits"), global_batch_size=64
    )
    with refusing():
        train(experiment)  # type: ignore[arg-type]
