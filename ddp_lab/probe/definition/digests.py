"""Digests of what the definitions give, as the published table has them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from ddp_lab.probe.definition.inputs import Array
from ddp_lab.probe.definition.operations import WITHOUT_PRODUCTS
from ddp_lab.probe.definition.products import IN_CHAINS


def defined_digests() -> Mapping[str, str]:
    """By name of an operation, its digest."""
    return {name: digest_of(definition()) for name, definition in {**WITHOUT_PRODUCTS, **IN_CHAINS}.items()}


def digest_of(results: list[Array] | Array) -> str:
    """SHA-256 over an array, or a list of arrays, as over torch's tensors: `ddp_core.base.digests.tree_digest`."""
    digest = hashlib.sha256()
    if isinstance(results, list):
        digest.update(f"sequence\0{len(results)}\0".encode())
    for array in results if isinstance(results, list) else [results]:
        shape = ",".join(map(str, array.shape))
        digest.update(f"tensor\0{array.dtype}\0{shape}\0".encode() + array.tobytes())
    return digest.hexdigest()
