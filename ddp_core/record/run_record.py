"""Keeps run.json from the start of a run to its end: what the run is, what each attempt changes, and how it ended."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_core.base.beneath import read_file
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.files import replace_file
from ddp_core.base.user_code import no_silent_end, no_way_out
from ddp_core.checkpoint import Fence, Superseded
from ddp_core.data.data_digest import DataDigest
from ddp_core.distributed.process_group import Collectives
from ddp_core.distributed.stop import Regroup, Stopped
from ddp_core.experiment.blame import shortage, unforeseen
from ddp_core.experiment.request import Request
from ddp_core.experiment.source import FOLDER, Source, collect
from ddp_core.observe.lost_peers import is_peer_loss, peers_lost
from ddp_core.observe.usage import Usage
from ddp_core.record.continuing import command_for
from ddp_core.record.data import keep_digest
from ddp_core.record.directory import RECORD_FORMAT, RunDirectory
from ddp_core.record.environment import describe_environment
from ddp_core.record.recorded import broken_promise, how_it_ended, not_promised
from ddp_core.record.result import early_end, gather_ends, result_of, save_weights, summary
from ddp_core.record.run_json import RecordedFork, RecordedWeights
from ddp_core.trainers import Trainer
from ddp_core.trainers.train_state import TrainState

_ENDED = "this rank ended with exit code"
"""Begins the last line of a rank's `error-rank-N.txt`."""


@dataclass(frozen=True)
class Origin:
    """What the result follows from, beside the settings of the experiment."""

    source: Source
    data: DataDigest
    fingerprint: Mapping[str, Any]
    """What the bits depend on, on all ranks."""
    weights: RecordedWeights | None = None
    """The initial weights; None for random ones, drawn from the experiment's seed."""
    fork: RecordedFork | None = None
    """Where the run branches off; None for one that begins at step 0, and for one that is continued."""


@dataclass(frozen=True)
class Begun:
    """What rank 0 has begun, and all ranks know."""

    attempt: int = 0
    """The number of this attempt."""
    token: int = 0
    """The token of rank 0's fence."""
    kept_every: int | None = None
    """The steps from one state that is kept for an audit to the next; None where none is."""


class RunRecord:
    """Keeps run.json while a run goes on; only rank 0 writes, and only until a later rank 0 takes over."""

    def __init__(
        self, request: Request, collectives: Collectives, directory: RunDirectory, origin: Origin, steps_per_epoch: int
    ) -> None:
        self.request, self.world, self.directory = request, collectives.world, directory
        self.origin, self.fingerprint, self.steps_per_epoch = origin, origin.fingerprint, steps_per_epoch
        self.begun = Begun()
        self.fence: Fence | None = None
        """The right to write (rank 0)."""
        self.state: TrainState | None = None
        """The trainer's state, once there is a trainer: an error names its step."""
        self.guard: dict[str, Any] | None = None
        """The figures of the trainer's guard, once there is a trainer."""
        self.notes: list[str] = []
        """What has changed since the attempt before, a line each for the user (rank 0)."""
        self.usage = Usage(collectives.device)
        self._errors_before: set[tuple[str, int]] = set()
        """The files with errors of earlier attempts, and when each was written."""
        self.started, self._began = time.time(), time.monotonic()

    def start(self) -> Begun:
        """Write run.json, or take it over (rank 0); from now on no earlier rank 0 can write in this directory."""
        self.fence = Fence.take(self.directory.path)
        self._errors_before = {
            (file.name, file.stat().st_mtime_ns) for file in self.directory.path.glob("error-rank-*.txt")
        }
        request, loaded = self.request, self.request.loaded
        before: Mapping[str, Any] = self.directory.read() if (self.directory.path / "run.json").exists() else {}
        origin, source, of_attempt, is_unlike = self.origin, before.get("source"), dict[str, Any](), False
        if source is None:
            origin.source.write(self.directory.path / FOLDER)
            source, of_attempt = origin.source.to_json(FOLDER), {"source": FOLDER}
        else:
            from ddp_core.record.changes import Changes

            changes = Changes.since(
                before, self.directory, request, origin.source, origin.data, self.fingerprint, self.steps_per_epoch
            )
            source, of_attempt, is_unlike = changes.source, changes.attempt, changes.fingerprint
            self.notes = changes.notes
        if request.options.reduction == "exact":
            self.notes += [
                not_promised(
                    f"rank {rank} computes on something else than rank 0 ({'; '.join(differences)}), so other layouts "
                    "need not end with the same bits",
                    request.options,
                )
                for rank, differences in self.fingerprint.get("unlike_ranks", {}).items()
            ]
        parent: Mapping[str, Any] = {}
        if origin.fork is not None and not before:
            from ddp_core.record.changes import of_fork, unlike_before

            parent = RunDirectory(Path(origin.fork["run"])).read()
            self.notes += of_fork(origin.fork, parent, request, self.fingerprint)
            is_unlike = bool(unlike_before(self.fingerprint, parent["fingerprint"]))
        data = keep_digest(self.directory.path, before, origin.data)
        kept = before.get("kept") or self._kept()
        attempt = {
            "layout": request.layout.model_dump(),
            "started_at": _utc(self.started),
            "restart_count": self.world.restart_count,
            **({} if self.world.membership is None else {"membership": self.world.membership}),
            "experiment_sha256": loaded.experiment.digest(),
            **of_attempt,
        }
        self.directory.write(
            {
                "format": RECORD_FORMAT,
                "experiment": loaded.experiment.to_json(),
                "experiment_sha256": loaded.experiment.digest(),
                "experiment_file": str(loaded.path),
                "question": loaded.question,
                "settings": list(request.asked.settings),
                "source": source,
                "init_from": origin.weights,
                "forked_from": origin.fork if parent else before.get("forked_from"),
                "layout": request.layout.model_dump()
                | {"label": request.layout.label, "description": request.layout.description},
                "options": request.options.model_dump(),
                "command": request.command,
                "launch_id": self.world.launch_id,
                "steps_per_epoch": self.steps_per_epoch,
                "total_steps": loaded.experiment.total_steps(self.steps_per_epoch),
                "status": "running",
                "exit_code": None,
                "message": None,
                "started_at": before.get("started_at", _utc(self.started)),
                "finished_at": None,
                "attempts": [*before.get("attempts", []), attempt],
                **data,
                "weights_sha256": None,
                "optimizer_sha256": None,
                "ema_sha256": None,
                "result": before.get("result", {}),
                "promise_broken": (before or parent).get("promise_broken"),
                "ended_early": None,
                "kept": kept,
                "fingerprint": self.fingerprint,
                "fingerprint_changed": is_unlike or before.get("fingerprint_changed", False),
                "environment": describe_environment(),
            }
        )
        return Begun(len(before.get("attempts", [])), self.fence.token, None if kept is None else kept["every"])

    @contextlib.contextmanager
    def outcome(self) -> Iterator[None]:
        """Record how the run ended; a failed collective becomes PeersLost, which names the lost ranks."""
        try:
            with no_silent_end(self._note_silent_end), no_way_out("your code"):
                yield
        except Regroup:
            raise  # the run goes on
        except Stopped as stopped:
            resume = "auto" if self.request.resume == "never" else self.request.resume
            told = Stopped(stopped.reason, stopped.step, command_for(self.request, resume=resume))
            self._end("stopped", ExitCode.STOPPED, str(told))
            raise told from None
        except UserError as error:
            self._try_to_end(error.exit_code, str(error))
            raise
        except Exception as error:
            known = shortage(error, self.world.place)
            if known is None and is_peer_loss(error):
                lost = peers_lost(error, self.directory.path, self.world, self._step)
                self._try_to_end(*(self._cause_on_another_rank() or (lost.exit_code, str(lost))))
                raise lost from error
            exit_code, message = (known.exit_code, str(known)) if known is not None else unforeseen(error)
            message = message if known is not None else f"{self.world.place}: {message}"
            self._note_error(exit_code, message, traceback.format_exc())
            if known is not None:
                raise known from error
            raise

    @property
    def _step(self) -> int:
        return self.state.step if self.state is not None else 0

    def _note_silent_end(self, line: str) -> None:
        self._note_error(ExitCode.BAD_INPUT, f"{self.world.place}: {line}", "")

    def _note_error(self, exit_code: int, message: str, trace: str) -> None:
        """Write what this rank ended with beside the record, and record the failure."""
        text = f"{self.world.place}, step {self._step + 1}\n{trace}{_ENDED} {int(exit_code)}: {message}\n"
        file = self.directory.path / f"error-rank-{self.world.rank}.txt"
        with contextlib.suppress(OSError):
            replace_file(file, text.encode(errors="backslashreplace"))
        self._try_to_end(exit_code, message)

    def _cause_on_another_rank(self) -> tuple[int, str] | None:
        """Exit code and message of a rank that has left this attempt by an error of its own, where one has said so."""
        if not self.world.is_first:
            return None
        with contextlib.suppress(OSError):
            for file in sorted(self.directory.path.glob("error-rank-*.txt")):
                _, found, end = read_file(file).decode(errors="replace").rpartition(f"\n{_ENDED} ")
                code, _, message = end.partition(": ")
                if found and code.isdecimal() and (file.name, file.stat().st_mtime_ns) not in self._errors_before:
                    return int(code), message.strip()
        return None

    def _try_to_end(self, exit_code: int, message: str) -> None:
        """Record a failure; where the record cannot be read or written, the user is told of the failure itself."""
        try:
            self._end("failed", exit_code, message)
        except Superseded:
            raise
        except (UserError, OSError):
            return

    def _end(self, status: str, exit_code: int, message: str | None, **fields: Any) -> None:
        if not self.world.is_first:
            return
        assert self.fence is not None
        # A former rank 0 that wakes up must not overwrite what its successor wrote.
        with self.fence.holding():
            *earlier, attempt = self.directory.read()["attempts"]
            self.directory.update(
                status=status,
                exit_code=int(exit_code),
                message=message,
                finished_at=_utc(time.time()),
                attempts=[*earlier, attempt | {"guard": self.guard}],
                **fields,
            )

    def _kept(self) -> dict[str, Any] | None:
        """The `kept` of run.json where a run begins to keep states for an audit; None for one that keeps none."""
        keep, experiment = self.request.options.keep_for_audit, self.request.loaded.experiment
        if keep is None or self.request.is_tried:
            return None
        return {"every": -(-experiment.total_steps(self.steps_per_epoch) // keep), "states": []}

    def note_kept(self, step: int, digests: Mapping[str, str]) -> None:
        """Note the digests of the state after `step` steps, which is kept for an audit (rank 0)."""
        assert self.fence is not None
        with self.fence.holding():
            kept = self.directory.read().get("kept")
            assert kept is not None
            # A run that was lost may have gone on from an earlier checkpoint: then it makes the later states anew.
            states = [each for each in kept["states"] if each["step"] < step]
            self.directory.update(kept={**kept, "states": [*states, {"step": step, **digests}]})

    def mark_broken(self, step: int, what: str) -> None:
        """Keep that a check of the guard found other bits after `step` steps, and that the run went on (rank 0)."""
        if self.world.is_first:
            assert self.fence is not None
            with self.fence.holding():
                if self.directory.read().get("promise_broken") is None:  # the first finding counts
                    self.directory.update(promise_broken={"step": step, "what": what, "attempt": self.begun.attempt})

    def finish(self, trainer: Trainer, speed: dict[str, float]) -> None:
        """Gather how all ranks ended, and write result, digests and the final weights (rank 0)."""
        job = trainer.job
        end = gather_ends(trainer, speed, self.usage.totals())
        if not self.world.is_first:
            return
        assert self.fence is not None
        result = result_of(trainer, end.state, self.directory.metrics, time.monotonic() - self._began) | end.usage
        # Before run.json: a record that says "completed" has its weights, whenever the power goes.
        save_weights(end.state, self.directory.path / "model.safetensors", self.fence)
        if (average := trainer.state.average) is not None:
            save_weights(average.module.state_dict(), self.directory.path / "model_ema.safetensors", self.fence)
        digests = {"weights_sha256": end.weights, "optimizer_sha256": end.optimizer, "ema_sha256": end.average}
        early = early_end(trainer)
        self._end("completed", 0, None, **digests, result=result, ended_early=early)
        job.metrics.finish(result, end.weights)
        job.console.end_progress()
        for module in sorted(collect(self.request.loaded).modules.keys() - self.origin.source.modules.keys()):
            job.console.warn(
                f"module {module} was imported while training, so its code is not kept with the run: "
                "import it at the top of the experiment's file"
            )
        if end.slowest is not None:
            job.console.say(end.slowest)
        if (words := how_it_ended({"ended_early": early})) is not None:
            job.console.say(words)
        job.console.say(f"done: {summary(result)}")
        job.console.say(f"weights sha256 {end.weights}")
        if (broken := broken_promise(self.directory.read())) is not None:
            job.console.warn(f"{broken}: these weights are not promised to come out again, on this layout or another")


def _utc(moment: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))
