"""The model card of an export, README.md: what the weights are, how good, how to load them, and how to verify them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ddp_core.base.files import sha256_of
from ddp_core.record.exporting.formats import FORMATS
from ddp_core.record.guarded import what_broke_it

SUMS = "SHA256SUMS"
"""The file with the SHA-256 of each other file, as `sha256sum --check` reads it."""
CARD = "README.md"
_DIGEST = """\
import hashlib

import torch


def weights_digest(state):
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        shape = ",".join(map(str, tensor.shape))
        digest.update(f"{name}\\0{str(tensor.dtype).removeprefix('torch.')}\\0{shape}\\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
"""

_WEIGHTS = f"""\
- The weights are those of the run: `weights_digest(model.state_dict())` is the SHA-256 above, with

```python
{_DIGEST.rstrip()}
```

"""


def card(
    to: str,
    record: Mapping[str, Any],
    kind: str,
    metadata: Mapping[str, str],
    evaluation: Mapping[str, Any],
    notes: Iterable[str],
) -> str:
    """The card's text, without a path of this machine. `kind`: the class of the model that is in the export."""
    experiment, result, form = record["experiment"], record["result"], FORMATS[to]
    start = ("test_", "ema_test_")
    figures = {
        name: value
        for name, value in evaluation.items()
        if name.startswith(start) and isinstance(value, int | float) and math.isfinite(value)
    }
    table = "\n".join(f"| {name} | {value:.6g} |" for name, value in figures.items())
    measured = f"| figure | value |\n|---|---|\n{table}" if figures else "The run has no figures on held-out samples."
    broken = what_broke_it(record)
    warnings = [*notes, *([f"{broken}: these weights are not promised to come out again"] if broken else [])]
    warned = "".join(f"\nNote: {line}.\n" for line in warnings)
    return f"""\
---
library_name: {"transformers" if to == "hf" else "pytorch"}
tags:
- samebits
---

# {experiment["name"]}

{record["question"]}

The {metadata["weights"]} weights of step {metadata["step"]} of the run `{metadata["run"]}`:
{form.about}.
{warned}
## What they are

- weights: SHA-256 `{metadata["digest"]}`{_in_record(record, metadata)}
- model: `{experiment["model"]["name"]}` with {_options(experiment["model"])}
- data: `{experiment["data"]["name"]}` with {_options(experiment["data"])}, SHA-256 `{record["data_sha256"]}`
- experiment: SHA-256 `{record["experiment_sha256"]}`, seed {experiment.get("seed", 0)}, global batch of
  {experiment["global_batch_size"]} samples, precision {experiment.get("precision", "fp32")}
- run: {record["status"]}{_steps(result)}, on {record["layout"]["label"]} with torch
  {record["environment"]["packages"].get("torch")}

## How good they are

On held-out samples, as the last evaluation of the run until that step measured it; names that begin with `ema_` are of
the averaged weights:

{measured}

## Load them

```python
{form.load.replace("{kind}", kind)}
```

## Verify them

- No file has changed: `sha256sum --check {SUMS}`
{_WEIGHTS if form.has_state else ""}- The run comes out again, bit for bit: `ddp verify RUN`, of the run directory or
  its bundle
"""


def _in_record(record: Mapping[str, Any], metadata: Mapping[str, str]) -> str:
    """What run.json calls this digest, where these are the weights that the run ended with."""
    if metadata["step"] != str(record["result"].get("steps")):
        return ""
    field = "ema_sha256" if metadata["weights"] == "averaged" else "weights_sha256"
    digest = record.get(field)
    same = digest == metadata["digest"]
    return f", the run's `{field}`" if same else f"; the run's `{field}`, over other names, is `{digest}`"


def _options(component: Mapping[str, Any]) -> str:
    options = component.get("options") or {}
    return ", ".join(f"`{name}={value!r}`" for name, value in options.items()) or "no options"


def _steps(result: Mapping[str, Any]) -> str:
    return f", {result['steps']} steps" if "steps" in result else ""


def sums(folder: Path) -> str:
    """The lines of SHA256SUMS for all files in the folder, by name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return "".join(f"{sha256_of(file)}  {file.relative_to(folder).as_posix()}\n" for file in files)
