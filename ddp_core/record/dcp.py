"""Weights from a folder that torch.distributed.checkpoint has written, as FSDP and torchtitan do; no code in it is run.

The folder's `.metadata` is a pickle, which torch itself would load with whatever it calls. Here it may name the classes
that such a file consists of, and nothing else; the tensors are read with `weights_only=True`.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping, Sequence
from enum import Enum, EnumMeta
from pathlib import Path, PurePosixPath
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from ddp_core.base.beneath import open_file
from ddp_core.base.errors import UserError
from ddp_core.base.shown import shown

_METADATA = ".metadata"
_CLASSES: Mapping[str, frozenset[str]] = {
    "torch.distributed.checkpoint.metadata": frozenset(
        {
            *("Metadata", "MetadataIndex", "StorageMeta", "ChunkStorageMetadata"),
            *("TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        }
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "collections": frozenset({"OrderedDict"}),
    "pathlib": frozenset({"PosixPath", "PurePosixPath"}),
    "pathlib._local": frozenset({"PosixPath", "PurePosixPath"}),  # where Python 3.13 has them
}
"""What a `.metadata` may name, by module; of torch itself `Size` and the dtypes."""


def read_dcp(folder: Path, nested: Sequence[str]) -> dict[str, Tensor]:
    """The weights in the folder, whole and on the CPU, by name.

    `nested`: the keys under which the weights may be; where one of them is there, nothing else is read. Raises
    UserError for a folder that names code, and whatever torch raises for one that is damaged.
    """
    reader = _Reader(folder)
    found = reader.read_metadata()
    paths = {
        name: tuple(map(str, (found.planner_data or {}).get(name, (name,))))
        for name, kept in found.state_dict_metadata.items()
        if isinstance(kept, TensorStorageMetadata)
    }
    for key in nested:
        below = {name: path[1:] for name, path in paths.items() if path[0] == key and len(path) > 1}
        paths = below or paths
    state: dict[str, Any] = {}
    size = sum(file.stat().st_size for file in folder.iterdir())
    for name in paths:
        kept = found.state_dict_metadata[name]
        assert isinstance(kept, TensorStorageMetadata)
        if kept.size.numel() * kept.properties.dtype.itemsize > size:
            raise UserError(f"{folder} holds no weights: {shown(name)} is larger than the folder's files")
        state[name] = torch.empty(kept.size, dtype=kept.properties.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.load(state, storage_reader=reader, no_dist=True)
    return {".".join(path): state[name] for name, path in paths.items()}


class _Reader(dcp.FileSystemReader):
    """torch's own reader, but for the metadata."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The metadata, from a pickle that may name a few classes only."""
        with open_file(self._folder / _METADATA) as file:
            found: Metadata = _Unpickler(file).load()
        for each in (found.storage_data or {}).values():
            path = PurePosixPath(each.relative_path)
            if path.is_absolute() or ".." in path.parts:
                raise UserError(f"{self._folder}/{_METADATA} names a file outside of its folder: {path}")
        meta = getattr(found, "storage_meta", None) or StorageMeta()  # older releases wrote none
        meta.load_id = self.load_id
        found.storage_meta = meta
        return found


def _member(enumeration: Any, name: str) -> Enum:
    if not (isinstance(enumeration, EnumMeta) and name in enumeration.__members__):
        raise pickle.UnpicklingError(f"its {_METADATA} asks {enumeration} for {name}")
    return cast(Enum, enumeration[name])


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        of_torch = module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype))
        if of_torch or name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):  # so Python 3.11.0 to 3.11.3 write a member of an enumeration
            return _member
        raise pickle.UnpicklingError(f"its {_METADATA} names {module}.{name}, which is no part of a checkpoint")
