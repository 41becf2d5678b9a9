"""The formats of an export: what each writes into the folder, and how it is loaded again elsewhere."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddp_core.base.errors import UserError
from ddp_core.base.extras import require
from ddp_core.base.refusals import refusal
from ddp_core.data.trees import Tree
from ddp_core.record.exporting.graphs import exported_program


@dataclass(frozen=True)
class Subject:
    """What is exported."""

    model: nn.Module
    """On the CPU, in eval mode, not compiled."""
    inputs: Callable[[], Tree]
    """Gives the inputs of a few samples of the experiment's data, which are read then."""
    metadata: Mapping[str, str]
    """What the file says of itself, where its format has a place for that."""
    shard_bytes: int
    """The most bytes of weights in one file, where the format has several."""

    @property
    def state(self) -> dict[str, Tensor]:
        """The state dict; tied weights are one tensor under several names."""
        return dict(self.model.state_dict())


class Format(NamedTuple):
    """One format."""

    write: Callable[[Subject, Path], list[str]]
    """Writes into an empty folder; returns what the user must know of it, a line each."""
    about: str
    load: str
    """Python that loads it, for the card; {kind} stands for the model's class."""
    packages: tuple[str, ...] = ()
    """What must be installed, beside what this package needs."""
    part: Callable[[nn.Module], nn.Module] = lambda model: model
    """The part of the experiment's model that the format is for; raises UserError where there is none."""
    has_state: bool = True
    """Whether what is loaded has a state_dict."""
    is_graph: bool = False
    """Whether it holds what the model computes, in the types of its weights."""


def _safetensors(subject: Subject, folder: Path) -> list[str]:
    from safetensors.torch import save_file

    shards = _shards(subject.state, subject.shard_bytes)
    count = len(shards)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    if count == 1:
        names = ["model.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        # Each name has a tensor of its own: the format refuses shared memory, and load_state_dict wants every name.
        own = {key: tensor.detach().contiguous().clone() for key, tensor in shard.items()}
        save_file(own, folder / name, dict(subject.metadata))
    if count > 1:
        places = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
        index = {"metadata": {"total_size": total, **subject.metadata}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return []


def _shards(state: Mapping[str, Tensor], most: int) -> list[dict[str, Tensor]]:
    """The state in parts of at most so many bytes, each of one tensor at least."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in state.items():
        if shards[-1] and size + tensor.nbytes > most:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def _torch(subject: Subject, folder: Path) -> list[str]:
    torch.save(subject.state, folder / "model.pt")
    return []


def _dcp(subject: Subject, folder: Path) -> list[str]:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save({"model": subject.state}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return []


def _onnx(subject: Subject, folder: Path) -> list[str]:
    program, notes = exported_program(subject.model, subject.inputs(), "onnx")
    written = torch.onnx.export(program, dynamo=True, verbose=False)
    assert written is not None
    written.model.metadata_props.update(subject.metadata)
    written.save(folder / "model.onnx")
    return notes


def _torch_export(subject: Subject, folder: Path) -> list[str]:
    program, notes = exported_program(subject.model, subject.inputs(), "torch-export")
    torch.export.save(program, folder / "model.pt2", extra_files={"metadata.json": json.dumps(dict(subject.metadata))})
    return notes


def _hf(subject: Subject, folder: Path) -> list[str]:
    model: Any = subject.model
    model.save_pretrained(folder, max_shard_size=subject.shard_bytes)
    kind = type(model)
    if kind.__module__.startswith("transformers."):
        return []
    return [f"{kind.__name__} is a class of the experiment's own, so only {kind.__name__}.from_pretrained loads it"]


def _pretrained(model: nn.Module) -> nn.Module:
    """The transformers model that this is, or that it only wraps."""
    for part in model.modules():
        kinds = (f"{kind.__module__}.{kind.__name__}" for kind in type(part).__mro__)
        if "transformers.modeling_utils.PreTrainedModel" in kinds and _all_of(model) == _all_of(part):
            return part
    raise UserError(
        f"--to hf: {type(model).__name__} is no transformers.PreTrainedModel and holds none with all of its weights; "
        "--to safetensors holds any model's weights"
    )


def _all_of(model: nn.Module) -> set[int]:
    """Which parameters and saved buffers a model has."""
    return {tensor.data_ptr() for tensor in model.state_dict().values() if tensor.numel()}


FORMATS: Mapping[str, Format] = {
    "safetensors": Format(
        _safetensors,
        "safetensors, tied weights under all their names",
        "from pathlib import Path\n\nfrom safetensors.torch import load_file\n\nstate = {}\n"
        "for file in Path().glob('*.safetensors'):\n    state |= load_file(file)\nmodel.load_state_dict(state)",
    ),
    "torch": Format(
        _torch,
        "a state dict by torch.save",
        "import torch\n\nmodel.load_state_dict(torch.load('model.pt', weights_only=True))",
    ),
    "onnx": Format(
        _onnx,
        "ONNX, a graph with its weights, by torch.onnx",
        "import onnxruntime\n\nsession = onnxruntime.InferenceSession('model.onnx')\n"
        "names = [each.name for each in session.get_inputs()]\n"
        "outputs = session.run(None, dict(zip(names, arrays)))",
        ("onnx", "onnxscript"),
        has_state=False,
        is_graph=True,
    ),
    "torch-export": Format(
        _torch_export,
        "a graph with its weights, by torch.export",
        "import torch\n\nmodel = torch.export.load('model.pt2').module()",
        is_graph=True,
    ),
    "hf": Format(
        _hf,
        "a folder for transformers' from_pretrained",
        "from transformers import {kind}\n\nmodel = {kind}.from_pretrained('.')",
        ("transformers",),
        _pretrained,
    ),
    "dcp": Format(
        _dcp,
        "torch.distributed.checkpoint, the weights under `model`",
        "import torch.distributed.checkpoint as dcp\n\nstate = {'model': model.state_dict()}\n"
        "dcp.load(state, checkpoint_id='.')\nmodel.load_state_dict(state['model'])",
    ),
}
"""All formats, by the word after `--to`."""


def write(name: str, subject: Subject, folder: Path) -> list[str]:
    """Write the format into an empty folder; returns what the user must know of it, a line each.

    Raises UserError, by name, where the format cannot hold this model, and OSError where nothing can be written.
    """
    try:
        return FORMATS[name].write(subject, folder)
    except (UserError, OSError):
        raise
    except Exception as error:
        if (known := refusal(error)) is not None:
            raise known from error
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"--to {name} cannot hold {type(subject.model).__name__} ({type(error).__name__}: {reason}); --to torch "
            "holds the weights of any model"
        ) from error


def require_packages(name: str) -> None:
    """Raises UserError where a package is missing that the format needs."""
    if needed := FORMATS[name].packages:
        require(f"--to {name}", "export", *needed)
