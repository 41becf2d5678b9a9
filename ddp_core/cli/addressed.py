"""`ddp train` with an address (s3://…) among its words: it trains in a local folder, whose runs are copied there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddp_core.base.errors import UserError
from ddp_core.base.files import is_there
from ddp_core.distributed.world import World
from ddp_core.experiment.request import Request
from ddp_core.record.continuing import LENGTH, differing
from ddp_core.record.directory import find_runs
from ddp_core.remote.address import Address
from ddp_core.remote.asking import Copying, local, require_writable, to_continue


def train_at_address(request: Request, world: World, train: Callable[[Request], int]) -> int:
    """Call `train` with local paths in the place of addresses, and copy its run; returns the exit code.

    That is the copier's, where the training ended well. Raises UserError, also where the run could not be copied.
    """
    if request.evaluated is not None:
        return train(request)
    if max(request.asked.nnodes.high, world.nnodes) > 1:
        raise UserError(
            "an address as --output or RUN is for one node, as checkpoints are committed where rank 0 sees every "
            "file: on several nodes, give --output a folder that they share"
        )
    request, folder, address = _with_paths(request)
    if address is None or request.is_tried or not world.is_first:
        return train(request)
    with Copying(folder, address) as copying:
        code = train(request)
    return code or copying.code


def _with_paths(request: Request) -> tuple[Request, Path, str | None]:
    """The request with local paths, the folder of what it trains, and the address of that, if it has any."""
    asked, options, folder, address = request.asked, request.options, Path(), None
    given: dict[str, Any] = {"fork": asked.fork, "init_from": asked.init_from}
    changes = {name: str(local(value)) for name, value in given.items() if value is not None and "://" in value}
    resume = request.resume
    if "://" in options.output:
        name = request.loaded.experiment.name
        output = Address.of(options.output)
        folder, address = output.written / name, (output / name).text
        options = options.model_copy(update={"output": str(output.written)})
        require_writable(address)
        if resume == "auto":
            _bring_candidates(request, address)
    if "://" in resume:
        folder, address = to_continue(resume), resume
        if not is_there(folder / "run.json"):
            raise UserError(f"--resume {resume}: no run is there (no run.json)")
        require_writable(address)
        resume = str(folder)
    request = replace(request, options=options, resume=resume, asked=asked.model_copy(update=changes))
    return request, folder, address


def _bring_candidates(request: Request, address: str) -> None:
    """Bring the runs that `--resume auto` could mean: all their records, and the checkpoints that it may go on from."""
    experiment = request.loaded.experiment
    for directory, record in find_runs(to_continue(address, records_only=True)):
        if record["status"] != "completed" or differing(record, experiment).keys() <= set(LENGTH):
            to_continue(f"{address}/{directory.path.name}")
