"""`ddp train` with addresses in a store: what goes on is brought before torch is loaded."""

from __future__ import annotations

from ddp_core.base.errors import UserError
from ddp_core.base.files import is_address
from ddp_core.config.options import Asked
from ddp_core.distributed.world import World
from ddp_core.experiment.file import find_experiment
from ddp_core.remote import brought_to_train, local


def in_store(asked: Asked) -> Asked:
    """What was asked, with what it goes on with brought from the store that `--output` or `--resume` names.

    Raises UserError, also where processes that know nothing of each other would each copy the run.
    """
    for option, given in (("--fork", asked.fork), ("--init-from", asked.init_from)):
        if given is not None and is_address(given):
            raise UserError(f"{option} {given}: give a local folder; of a run in a store --output and --resume go on")
    changes, wanted = {}, find_experiment(asked.experiment).name if asked.resume == "auto" else ""
    if is_address(asked.resume):
        place = local(asked.resume)
        folder = asked.resume.rstrip("/").rsplit("/", 2)[0]
        if not is_address(folder) or ("output" in asked.model_fields_set and asked.output.rstrip("/") != folder):
            raise UserError(
                f"--resume {asked.resume}: give --output/EXPERIMENT/RUN, such as s3://bucket/runs/digits/RUN"
            )
        changes, wanted = {"output": folder, "resume": str(place)}, f"{place.parent.name}/{place.name}"
    asked = asked.model_copy(update=changes)
    if is_address(asked.output):
        if World.is_set() or asked.nnodes.high > 1:
            raise UserError(
                f"--output {asked.output}: a run in a store is of one node, and started by ddp itself; give several "
                "nodes a folder that they share"
            )
        brought_to_train(asked.output, wanted)
    return asked
