"""What several commands have in common: words of theirs, and what comes before their work."""

from __future__ import annotations

import os
import warnings

import click

IS_OWN_PROCESS = "ddp_core.cli.is_own_process"
"""The key in `Context.meta` that tells whether this process ends with the command."""

as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")


def quiet() -> None:
    """Silence libraries; must be called before torch is imported."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    warnings.simplefilter("ignore")
