"""The kinds of click option, command and group that `ddp` uses.

Options are made from the fields of `Asked`, and only when they are needed. A group may hold commands of other packages.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
from click.core import ParameterSource
from click.exceptions import NoSuchCommand

from ddp_core.base.errors import near_names
from ddp_core.base.extras import missing
from ddp_core.base.files import is_address

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from ddp_core.config.options import Asked


class RunPath(click.Path):
    """A path of a run, or its address in a store, from which it is brought; `options`: those of `brought`."""

    def __init__(self, *options: str) -> None:
        super().__init__(path_type=Path)
        self._options = options

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not is_address(value):
            return super().convert(value, param, ctx)
        from ddp_core.remote import brought

        return brought(value, *self._options)


class TitledOption(click.Option):
    """An option with the title of the group under which the help shows it."""

    def __init__(self, *details: Any, title: str | None = None, **more: Any) -> None:
        super().__init__(*details, **more)
        self.title = title


def field_options(*names: str, default: str | None = None) -> list[click.Parameter]:
    """The options of these fields of `Asked`, or of all fields where none is named.

    With `default`, no option has a default value, and the help shows this text in its place.
    """
    # Pydantic, which `Asked` needs, takes a moment to load.
    from ddp_core.config.options import groups

    return [
        _parameter(name, field, default, None if names else title)
        for title, fields in groups()
        for name, field in fields.items()
        if name in names or not names
    ]


def asked_in(context: click.Context) -> Asked:
    """What the command line or the environment asks for; other fields keep their defaults."""
    from ddp_core.config.options import Asked

    return Asked(
        **{
            name: value
            for name, value in context.params.items()
            if name in Asked.model_fields and context.get_parameter_source(name) is not ParameterSource.DEFAULT
        }
    )


def _parameter(name: str, field: FieldInfo, default: str | None, title: str | None) -> click.Parameter:
    from ddp_core.config.records import choices, command_line, default_text, is_repeated, option_name

    if field.is_required():
        return click.Argument([name])
    written, values = command_line(field), choices(field)
    usual = default or default_text(field) + (f", or ${written.variable}" if written.variable else "")
    details: dict[str, Any] = {"metavar": written.metavar, "envvar": written.variable, "hidden": written.hidden}
    if isinstance(field.default, bool):
        # The option gives the opposite of the default: --synchronous-save turns asynchronous_save off.
        details |= {"is_flag": True, "flag_value": not field.default}
    elif is_repeated(field):
        details |= {"multiple": True, "type": click.Choice(values) if values else None}
    else:
        details |= {"type": click.Choice(values) if values else _reader(field)}
        details |= {"default": None if default else field.default}
    return TitledOption(
        [option_name(name, field), name], help=f"{field.description} [default: {usual}]", title=title, **details
    )


def _reader(field: FieldInfo) -> Callable[[Any], Any]:
    """A function that reads the user's text as the field's type; for a wrong text click prints the reason."""

    def read(value: Any) -> Any:
        from pydantic import TypeAdapter, ValidationError

        from ddp_core.config.records import Frozen, explain

        kind = Annotated[field.annotation, *field.metadata]  # type: ignore[name-defined]
        try:
            return TypeAdapter(kind, config=Frozen.model_config).validate_python(value)
        except ValidationError as error:
            raise click.BadParameter(f"{value}: {explain(error)}") from None

    return read


def meant_by(wrong: str, options: Iterable[str]) -> str | None:
    """The option of `ddp train`, or the setting, that an unknown option is most like; None where none is like it."""
    from ddp_core.config.experiment import common_settings

    meanings = {option.lstrip("-").replace("-", "_"): option for option in options}
    for name in common_settings():
        meanings |= {word: f"--set {name}=VALUE" for word in (name, name.rpartition(".")[2]) if word not in meanings}
    near = near_names(wrong.lstrip("-").replace("-", "_"), list(meanings), likeness=0.6)
    return meanings[near[0]] if near else None


class Command(click.Command):
    """A command whose options the function `options` makes when they are first needed."""

    def __init__(self, *details: Any, options: Callable[[], list[click.Parameter]] | None = None, **more: Any) -> None:
        super().__init__(*details, **more)
        self._make_options = options

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        if self._make_options is not None:
            self.params, self._make_options = [*self._make_options(), *self.params], None
        return super().get_params(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if isinstance(parameter, click.Option) and (row := parameter.get_help_record(ctx)) is not None:
                groups.setdefault(getattr(parameter, "title", None) or "Options", []).append(row)
        for title, rows in groups.items():
            with formatter.section(title):
                formatter.write_dl(rows)


class Group(click.Group):
    """Commands in the order of the code."""

    command_class = Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


class OpenGroup(Group):
    """A group with the commands of other packages beside its own.

    A package offers a command as an entry point of the group `ddp.commands`: a function that takes a list of words and
    returns an exit code.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names for the help: the own commands first."""
        return [*self.commands, *sorted(_offered().keys() - self.commands.keys())]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command of that name; without the laboratory, an unknown one may be one of its commands."""
        try:
            return super().resolve_command(ctx, args)
        except NoSuchCommand as error:
            near = NoSuchCommand(error.command_name, possibilities=self.list_commands(ctx), ctx=ctx)
            lab = missing("It may be one of the laboratory's, which", "lab", "ddp_lab")
            raise click.UsageError(f"{near.format_message()} {lab}", ctx) if lab else near from None

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
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
        ctx.args = args
        return args

    def invoke(self, ctx: click.Context) -> int:
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
