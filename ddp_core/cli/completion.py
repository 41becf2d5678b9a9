"""What a shell is told when the user presses the tab key: names of experiments and settings, files and folders."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem, get_completion_class, shell_complete

from ddp_core.base.errors import UserError

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_DDP_COMPLETE"
"""The environment variable by which a shell's script asks `ddp` for completions."""

Items = list[CompletionItem[str]]


def script(commands: click.Command, shell: str) -> str:
    """The script with which `shell` learns to complete `ddp`. Raises UserError where click has none for it."""
    kind = get_completion_class(shell)
    if kind is None:
        raise UserError(f"no completion for {shell}; known: {', '.join(SHELLS)}")
    return kind(commands, {}, "ddp", VARIABLE).source()


def answer(commands: click.Command, asked: str) -> int:
    """Print what the shell's script asks for, and return the exit code."""
    return int(shell_complete(commands, {}, "ddp", VARIABLE, asked))


def complete_experiment(_: click.Context, __: click.Parameter, begun: str) -> Items:
    """The experiments that have a name, else files."""
    from ddp_core.experiment.file import list_experiments

    found = [entry for entry in list_experiments() if entry.name.startswith(begun)]
    return [CompletionItem(entry.name, help=entry.question) for entry in found] or [CompletionItem(begun, type="file")]


def complete_setting(_: click.Context, __: click.Parameter, begun: str) -> Items:
    """The names that every experiment has; those of its model and data are not known without running its file."""
    from ddp_core.config.experiment import common_settings

    return [CompletionItem(f"{name}=") for name in common_settings() if name.startswith(begun)]


def complete_value(_: click.Context, option: click.Parameter, begun: str) -> Items:
    """Folders and files for an option that takes one."""
    kind = {"DIR": "dir", "FILE": "file", "never|auto|RUN": "dir"}.get(option.metavar or "")
    return [CompletionItem(begun, type=kind)] if kind else []
