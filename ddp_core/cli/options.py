"""Makes click's options from the fields of `Asked`, and holds the kinds of click command and group that `ddp` uses."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import click
from click.core import ParameterSource

from ddp_core.errors import UserError, nearest_name

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from ddp_core.spec.options import Asked


def from_fields(*names: str, default: str | None = None) -> Callable[[], list[click.Parameter]]:
    """A function that makes the options of these fields of `Asked`, or of all fields where none is named.

    The options are made only when that function is called, because pydantic, which `Asked` needs, takes a moment to
    load. With `default`, no option has a default value, and the help shows this text in its place.
    """

    def make() -> list[click.Parameter]:
        from ddp_core.spec.options import groups

        return [
            _parameter(name, field, default, None if names else title)
            for title, fields in groups()
            for name, field in fields.items()
            if name in names or not names
        ]

    return make


def asked_in(context: click.Context) -> Asked:
    """What the command line or the environment asks for; fields that neither gives are left to their defaults."""
    from ddp_core.spec.options import Asked

    return Asked(
        **{
            name: value
            for name, value in context.params.items()
            if context.get_parameter_source(name) is not ParameterSource.DEFAULT
        }
    )


class Command(click.Command):
    """A command whose options are made by the function `options` when they are first needed."""

    def __init__(self, *details: Any, options: Callable[[], list[click.Parameter]] | None = None, **more: Any) -> None:
        super().__init__(*details, **more)
        self._make_options = options

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """All parameters, as click asks for them."""
        if self._make_options is not None:
            self.params, self._make_options = [*self.params, *self._make_options()], None
        return super().get_params(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options into the help, by group."""
        options = [parameter for parameter in self.get_params(ctx) if isinstance(parameter, click.Option)]
        for title, group in groupby(options, lambda option: getattr(option, "title", None)):
            rows = [row for option in group if (row := option.get_help_record(ctx)) is not None]
            if rows:
                with formatter.section(title or "Options"):
                    formatter.write_dl(rows)


class Group(click.Group):
    """Commands in the order of the code; an unknown command gets an error with the nearest known name."""

    command_class = Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names for the help."""
        return list(self.commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        """The command of that name. Raises UserError for an unknown name."""
        command = super().get_command(ctx, cmd_name)
        if command is None:
            known = [*self.commands, *self.offered()]
            raise UserError(f"{ctx.command_path} has no command {cmd_name!r}; {nearest_name(cmd_name, known)}")
        return command

    def offered(self) -> list[str]:
        """Names of commands that click does not know; none by default."""
        return []

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the names of `offered` at the end of the help."""
        if names := self.offered():
            formatter.write(f"\nAlso, each with a --help of its own: {', '.join(names)}\n")


class _Option(click.Option):
    """An option with the title of the group that it stands under in the help."""

    def __init__(self, *details: Any, title: str | None, **more: Any) -> None:
        super().__init__(*details, **more)
        self.title = title


def _parameter(name: str, field: FieldInfo, default: str | None, title: str | None) -> click.Parameter:
    from ddp_core.spec.options import choices, command_line, default_text, is_repeated, option_name

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
    return _Option(
        [option_name(name, field), name], help=f"{field.description} [default: {usual}]", title=title, **details
    )


def _reader(field: FieldInfo) -> Callable[[Any], Any]:
    """A function that turns what the user wrote into the field's type; for a wrong value click prints the reason."""

    def read(value: Any) -> Any:
        from pydantic import TypeAdapter, ValidationError

        from ddp_core.spec.records import Frozen, explain

        kind = Annotated[field.annotation, *field.metadata]  # type: ignore[name-defined]
        try:
            return TypeAdapter(kind, config=Frozen.model_config).validate_python(value)
        except ValidationError as error:
            raise click.BadParameter(f"{value}: {explain(error)}") from None

    return read
