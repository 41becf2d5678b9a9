"""TensorBoard: event files in the run directory's `tensorboard/`."""

from __future__ import annotations

from collections.abc import Mapping

from torch.utils.tensorboard.writer import SummaryWriter

from ddp_core.base.beneath import make_folder_beneath
from ddp_core.observe.loggers.logged import Ending, LoggedRun


class RunLogger:
    """Scalars at each step; at the end the hyper-parameters beside the result, for TensorBoard's table."""

    def __init__(self, run: LoggedRun) -> None:
        self._run, self._folder = run, str(run.directory / "tensorboard")
        make_folder_beneath(run.directory / "tensorboard")
        self._writer = SummaryWriter(self._folder)

    def record(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        if kind == "resume":
            # A writer that begins with this step makes TensorBoard drop the later steps of the attempts before.
            self._writer.close()
            self._writer = SummaryWriter(self._folder, purge_step=step + 1)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, figures: Mapping[str, float], weights_sha256: str) -> None:
        self._writer.add_text("weights_sha256", weights_sha256)
        results = {f"result/{name}": value for name, value in figures.items()}
        self._writer.add_hparams(dict(self._run.settings), results, run_name=".")

    def close(self, ending: Ending) -> None:
        self._writer.close()
