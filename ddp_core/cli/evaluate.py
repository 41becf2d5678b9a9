"""`ddp eval`: the figures of any checkpoint of a run, on any layout, made as training makes them.

The weights are evaluated by the code that the run has kept and on its own settings; of these only the data and how
they are evaluated can be changed. Loads no torch itself: portable numerics are set before torch is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_core.base.errors import UserError
from ddp_core.cli.train import carry_out
from ddp_core.config.options import Asked
from ddp_core.record.bundles import Place, place_named
from ddp_core.record.recorded import as_recorded

if TYPE_CHECKING:
    from ddp_core.experiment.request import Evaluated
    from ddp_core.record.trained import At

_CHANGEABLE = ("data", "evaluation")


def evaluate(
    named: Path,
    words: Sequence[str],
    is_own_process: bool,
    at: At | None = None,
    settings: Sequence[str] = (),
    as_json: bool = False,
    **layout: Any,
) -> int:
    """Evaluate the weights of a run, a checkpoint of one, or a bundle, and print the figures; returns the exit code.

    `at`: None for those that the run ended with, else its newest. `layout`: the options that say where.
    """
    for setting in settings:
        if setting.partition("=")[0].partition(".")[0].strip() not in _CHANGEABLE:
            raise UserError(
                f"--set {setting}: it would be other weights; ddp eval changes data and evaluation alone, such as "
                "--set evaluation.samples_per_batch=64"
            )
    with place_named(named) as place:
        record = place.run.read()
        # The evaluation runs on the layout that was given, else in one process.
        own = {"device": record["layout"]["device"], "guard": "off", "max_restarts": 0, "settings": tuple(settings)}
        given = {name: value for name, value in layout.items() if value is not None}
        asked = Asked.model_validate(as_recorded(place.run.path, record) | own | given)
        return carry_out(asked, words, is_own_process, evaluated=lambda: _evaluated(named, place, at, as_json))


def _evaluated(named: Path, place: Place, at: At | None, as_json: bool) -> Evaluated:
    from ddp_core.experiment.kept_source import read_source
    from ddp_core.experiment.request import Evaluated
    from ddp_core.record.trained import weights_at

    record = place.run.read()
    read_source(place.run.path, record["source"])
    found = weights_at(place, at or ("final" if record["status"] == "completed" else "newest"))
    manifest = None if found.checkpoint is None else str(found.checkpoint.manifest)
    return Evaluated(str(named), str(found.run.path), found.step, manifest, as_json)
