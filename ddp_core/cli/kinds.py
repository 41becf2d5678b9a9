"""The kinds of click command and group that `ddp` uses: options made late, an error that names what was meant."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from ddp_core.base.errors import UserError, nearest_name


class TitledOption(click.Option):
    """An option with the title of the group that it stands under in the help."""

    def __init__(self, *details: Any, title: str | None = None, **more: Any) -> None:
        super().__init__(*details, **more)
        self.title = title


class Command(click.Command):
    """A command whose options are made by the function `options` when they are first needed."""

    def __init__(self, *details: Any, options: Callable[[], list[click.Parameter]] | None = None, **more: Any) -> None:
        super().__init__(*details, **more)
        self._make_options = options

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """All parameters, as click asks for them."""
        if self._make_options is not None:
            self.params, self._make_options = [*self._make_options(), *self.params], None
        return super().get_params(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options into the help, by group."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if isinstance(parameter, click.Option) and (row := parameter.get_help_record(ctx)) is not None:
                groups.setdefault(getattr(parameter, "title", None) or "Options", []).append(row)
        for title, rows in groups.items():
            with formatter.section(title):
                formatter.write_dl(rows)


class Group(click.Group):
    """Commands in the order of the code; an unknown command gets an error with the nearest known name."""

    command_class = Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names for the help."""
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command of that name. Raises UserError for an unknown name."""
        if not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None:
            hint = nearest_name(args[0], self.list_commands(ctx))
            raise UserError(f"{ctx.command_path} has no command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)


class OpenGroup(Group):
    """A group with the commands of other packages beside its own.

    They are offered under the entry point group `ddp.commands`: functions of a list of words that return an exit code.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names for the help: the own commands first."""
        return [*self.commands, *sorted(_offered().keys() - self.commands.keys())]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, None for an unknown one."""
        own = super().get_command(ctx, cmd_name)
        if own is None and (entry := _offered().get(cmd_name)) is not None:
            return _Offered(cmd_name, entry)
        return own


class _Offered(click.Command):
    """A command of another package: all words go to its function, which is imported only when it is called."""

    def __init__(self, name: str, entry: EntryPoint) -> None:
        super().__init__(name, add_help_option=False)
        self._entry = entry

    def get_short_help_str(self, limit: int = 45) -> str:
        """The first line of the function's docstring, read from its file without running it."""
        return _summary(self._entry)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Leave the words as they are."""
        ctx.args = args
        return args

    def invoke(self, ctx: click.Context) -> int:
        """Call the function; returns its exit code."""
        return int(self._entry.load()(ctx.args))


@cache
def _offered() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group="ddp.commands")}


def _summary(entry: EntryPoint) -> str:
    try:
        spec = find_spec(entry.module)
        tree = ast.parse(Path(spec.origin).read_bytes()) if spec is not None and spec.origin is not None else None
    except (ImportError, OSError, SyntaxError, ValueError):
        return f"(cannot be read: {entry.value})"
    for statement in tree.body if tree is not None else []:
        if isinstance(statement, ast.FunctionDef) and statement.name == entry.attr:
            return (ast.get_docstring(statement) or "").partition("\n")[0]
    return ""
