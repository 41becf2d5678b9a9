"""Makes click's options from the fields of `Asked`, and finds the option or setting that a wrong one was meant for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any

import click
from click.core import ParameterSource

from ddp_core.base.errors import near_names
from ddp_core.cli.completion import complete_experiment, complete_setting, complete_value
from ddp_core.cli.config import add_to_config
from ddp_core.cli.kinds import TitledOption

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from ddp_core.config.options import Asked


def from_fields(*names: str, default: str | None = None) -> Callable[[], list[click.Parameter]]:
    """A function that makes the options of these fields of `Asked`, or of all fields where none is named.

    The options are made only when that function is called, because pydantic, which `Asked` needs, takes a moment to
    load. With `default`, no option has a default value, and the help shows this text in its place.
    """

    def make() -> list[click.Parameter]:
        from ddp_core.config.options import groups

        return [
            _parameter(name, field, default, None if names else title)
            for title, fields in groups()
            for name, field in fields.items()
            if name in names or not names
        ]

    return make


def asked_in(context: click.Context) -> Asked:
    """What the command line, the environment or the file of --config asks for; other fields keep their defaults."""
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
        return click.Argument([name], shell_complete=complete_experiment)
    written, values = command_line(field), choices(field)
    usual = default or default_text(field) + (f", or ${written.variable}" if written.variable else "")
    details: dict[str, Any] = {"metavar": written.metavar, "envvar": written.variable, "hidden": written.hidden}
    if name == "settings":
        details |= {"callback": add_to_config, "shell_complete": complete_setting}
    elif not values:
        details |= {"shell_complete": complete_value}
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
    """A function that turns what the user wrote into the field's type; for a wrong value click prints the reason."""

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
    """What an unknown option of `ddp train` was meant for: another option, or a setting; None where nothing is near."""
    from ddp_core.config.experiment import common_settings

    meanings = {option.lstrip("-").replace("-", "_"): option for option in options}
    for name in common_settings():
        meanings |= {word: f"--set {name}=VALUE" for word in (name, name.rpartition(".")[2]) if word not in meanings}
    near = near_names(wrong.lstrip("-").replace("-", "_"), list(meanings), likeness=0.6)
    return meanings[near[0]] if near else None
