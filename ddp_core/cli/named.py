"""What commands take where a run or a folder of runs is named: a path, or an address in a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


class Named(click.Path):
    """A path, or an address in a store; what lies there is brought here, and its path given."""

    def __init__(self, records_only: bool = False) -> None:
        super().__init__(path_type=Path)
        self._records_only = records_only

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path. Raises UserError."""
        if isinstance(value, str) and "://" in value:
            from ddp_core.remote.asking import local

            return local(value, records_only=self._records_only)
        return super().convert(value, param, ctx)


def trained_at(output: str) -> Path:
    """The folder on this machine in which runs for this output, a folder or an address, are trained."""
    if "://" not in output:
        return Path(output)
    from ddp_core.remote.address import Address

    return Address.of(output).written
