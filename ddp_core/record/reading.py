"""A run as a user reads it from Python: its record, its figures, its metrics, and its trained model."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.record.directory import RunDirectory
from ddp_core.record.guarded import broken_promise

if TYPE_CHECKING:
    import torch


class Run:
    """A run that `train` has returned, or the one in an existing run directory: `Run("outputs/digits/single-cpu-…")`.

    Everything is read when it is asked for, so that a run which another process trains can be followed. Raises
    UserError (2) where `path` is not a run directory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
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
        status: str = self.record["status"]
        return status

    @property
    def figures(self) -> dict[str, Any]:
        """The figures of the result by name, such as `test_accuracy` or `samples_per_second`.

        Empty until the run has come to its end. `seconds` are seconds, names that end in `_bytes` count bytes.
        """
        figures: dict[str, Any] = self.record["result"]
        return figures

    @property
    def digest(self) -> str | None:
        """SHA-256 of the trained weights and buffers, 64 hexadecimal digits; None until the run has come to its end.

        Two runs with the same digest have the same weights, bit for bit.
        """
        digest: str | None = self.record["weights_sha256"]
        return digest

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

    def load_model(self, device: torch.device | str = "cpu") -> torch.nn.Module:
        """The trained model in eval mode on `device`, with the weights and buffers that the run ended with.

        The model is built by the code that the run has kept, whatever has become of the experiment's file since. That
        code is run, so read it first where the run is a stranger's. The dtypes are those of training (float32 but for
        what the model itself chose). Random generators of this process stay as they are.

        Raises UserError (2) for a run that has not come to its end, or whose kept code was changed; and (3) where the
        weights are not those of the record.
        """
        record = self.record
        if record["status"] != "completed":
            raise UserError(
                f"{self.path} is {record['status']}, so it has no trained model; finish it with --resume {self.path}"
            )
        if "source" not in record:
            raise UserError(f"{self.path} was recorded by an earlier version of ddp, which did not keep the code")
        # These load torch, which takes seconds.
        import torch

        from ddp_core.base.digests import weights_digest
        from ddp_core.base.seeds import generators_kept
        from ddp_core.config.experiment import Experiment
        from ddp_core.experiment.file import Served, load_experiment
        from ddp_core.experiment.fresh_model import lazy_parts
        from ddp_core.experiment.request import build_model
        from ddp_core.experiment.source import kept_modules, read_source
        from ddp_core.record.initial_weights import fill
        from ddp_core.record.weights import WEIGHTS, read_weights

        read_source(self.path, record["source"])
        folder = self.path / record["source"]["folder"]
        served = Served(str(folder), record["source"]["modules"])
        with generators_kept(torch.device(device)), kept_modules(served):
            loaded = load_experiment(str(folder / record["source"]["experiment"]))
            model = build_model(replace(loaded, experiment=Experiment.from_json(record["experiment"])), device)
        file = self.path / WEIGHTS
        if lazy_parts(model):
            # Lazy layers take their shapes from what they load.
            model.load_state_dict(read_weights(file), strict=False)
        fill(model, read_weights(file), str(file))
        if weights_digest(model.state_dict()) != record["weights_sha256"]:
            raise UserError(f"{file} holds other weights than the run ended with", ExitCode.NO_CHECKPOINT)
        return model.eval()
