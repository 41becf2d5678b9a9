"""TensorBoard: event files in the run directory's `tensorboard/`, beside metrics.jsonl."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_core.base.beneath import make_folder_beneath
from ddp_core.config.records import dotted

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter


class TensorBoard:
    """Scalars at each step; at the end the hyper-parameters beside the result, for TensorBoard's table.

    `settings`: those of the run; lists and None, for which TensorBoard has no place, are left out. What fails here
    costs the training one line for `warn`.
    """

    def __init__(self, directory: Path, settings: Mapping[str, Any], warn: Callable[[str], None]) -> None:
        self._folder, self._warn = directory / "tensorboard", warn
        self._settings = {
            name: value for name, value in dotted(settings).items() if isinstance(value, bool | str | float | int)
        }
        self._writer: SummaryWriter | None = None
        with self._or_left_out():
            make_folder_beneath(self._folder)
            self._writer = self._begun()

    def record(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Keep the numbers of a record of metrics.jsonl. Steps after a `resume` record's step will be told again."""
        if self._writer is None:
            return
        with self._or_left_out():
            if kind == "resume":
                # A writer that begins with this step makes TensorBoard drop the later steps of the attempts before.
                self._writer.close()
                self._writer = self._begun(purge_step=step + 1)
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def finish(self, figures: Mapping[str, float], weights_sha256: str) -> None:
        """Keep the figures of the finished run and the digest of its weights."""
        if self._writer is None:
            return
        with self._or_left_out():
            self._writer.add_text("weights_sha256", weights_sha256)
            results = {f"result/{name}": value for name, value in figures.items()}
            self._writer.add_hparams(self._settings, results, run_name=".")

    def close(self) -> None:
        """Write everything out."""
        if self._writer is not None:
            with self._or_left_out():
                self._writer.close()

    def _begun(self, purge_step: int | None = None) -> SummaryWriter:
        # A broken installation fails here.
        from torch.utils.tensorboard.writer import SummaryWriter

        return SummaryWriter(str(self._folder), purge_step=purge_step)

    @contextlib.contextmanager
    def _or_left_out(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._writer = None
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            self._warn(f"tensorboard is left out from here on: {reason}; metrics.jsonl has everything")
