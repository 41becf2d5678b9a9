"""A run as a user reads it from Python: its record, its figures, its metrics, and its trained model."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ddp_core.record.directory import RunDirectory
from ddp_core.record.recorded import broken_promise

if TYPE_CHECKING:
    import torch

    from ddp_core.record.trained import At, Choice


class Run:
    """A run that `train` has returned, or the one in an existing run directory: `Run("outputs/digits/single-cpu-…")`.

    Everything is read when it is asked for, so that a run which another process trains can be followed. Raises
    UserError (2) where `path` is not a run directory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        from ddp_core.remote import brought

        self.path = brought(path).absolute()
        """The run directory, an absolute path."""
        self._directory = RunDirectory(self.path)
        self._directory.read()

    def __repr__(self) -> str:
        digest = f", weights {self.digest[:12]}" if self.digest else ""
        broken = broken_promise(self.record)
        return f"Run({str(self.path)!r}: {self.status}{digest}{f', {broken}' if broken else ''})"

    def __fspath__(self) -> str:
        """The run directory, so that a run can be given as a path: `train(…, init_from=run)`."""
        return str(self.path)

    @property
    def record(self) -> dict[str, Any]:
        """The whole content of run.json, as docs/reference/run-directory.md describes it."""
        return dict[str, Any](self._directory.read())

    @property
    def status(self) -> str:
        """`running`, `completed`, `stopped` or `failed`. A run that was killed still says `running`."""
        return self._directory.read()["status"]

    @property
    def figures(self) -> dict[str, Any]:
        """The figures of the result by name, such as `test_accuracy` or `samples_per_second`.

        Empty until the run has come to its end. `seconds` are seconds, names that end in `_bytes` count bytes.
        """
        return dict(self.record["result"])

    @property
    def digest(self) -> str | None:
        """SHA-256 of the trained weights and buffers, 64 hexadecimal digits; None until the run has come to its end.

        Two runs with the same digest have the same weights, bit for bit.
        """
        return self._directory.read()["weights_sha256"]

    @property
    def ended_early(self) -> dict[str, Any] | None:
        """The `step`, `of` how many, and the `reason`, where a callback has ended the completed run; else None."""
        early: dict[str, Any] | None = self.record.get("ended_early")
        return early

    @property
    def promise_broken(self) -> dict[str, Any] | None:
        """The `step`, the `attempt`, and `what` was found, where the guard found other bits; None where it did not.

        A run goes on after that with `on_difference="warn"` alone. Its digest is then no reference for other runs.
        """
        broken: dict[str, Any] | None = self.record.get("promise_broken")
        return broken

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl, oldest first, without steps that were trained again after a resume.

        Each has a `kind`: "step" (with `step`, `epoch`, `loss`, `lr`), "evaluation", "digest", "checkpoint" or
        "resume".
        """
        from ddp_core.observe.metrics import read_metrics

        return read_metrics(self._directory.metrics)

    def load_model(
        self, device: torch.device | str = "cpu", *, at: At = "final", weights: Choice = "auto"
    ) -> torch.nn.Module:
        """What `ddp_core.load_model` gives for this run."""
        from ddp_core.record.trained import load_model  # loads torch, which takes seconds

        return load_model(self.path, device, at=at, weights=weights)
