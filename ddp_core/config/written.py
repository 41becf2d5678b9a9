"""How a field of a record is written on the command line: its option, its default and values in the help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo


@dataclass(frozen=True)
class CommandLine:
    """How a field is written on the command line, where its name and type do not say it."""

    option: str | None = None
    metavar: str | None = None
    variable: str | None = None
    """The environment variable that gives the value where the option is not used."""
    hidden: bool = False


@dataclass(frozen=True)
class ByDefault:
    """The help's words for a field whose default is None."""

    text: str


def command_line(field: FieldInfo) -> CommandLine:
    """The field's CommandLine, also where it belongs to a type that may be None; an empty one if there is none."""
    nested = [note for part in get_args(field.annotation) for note in getattr(part, "__metadata__", ())]
    return next((note for note in (*field.metadata, *nested) if isinstance(note, CommandLine)), CommandLine())


def default_text(field: FieldInfo) -> str:
    """The default in words, for the help: what happens where the option is not used."""
    if field.default is None:
        return next((note.text for note in field.metadata if isinstance(note, ByDefault)), "none")
    if isinstance(field.default, bool):
        return "off"  # of the option: an option that switches its field off is itself off by default
    if isinstance(field.default, float):
        return f"{field.default:g}"
    return str(field.default) if field.default != () else "none"


def option_name(name: str, field: FieldInfo) -> str:
    """The option of a field: `--checkpoint-every` of `checkpoint_every`, if the field names no other."""
    return command_line(field).option or f"--{name.replace('_', '-')}"


def choices(field: FieldInfo) -> list[str]:
    """The values of a field that has a fixed set of them, else nothing."""
    kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if get_origin(kind) is Literal]
    return list(get_args(kinds[0])) if kinds else []


def is_repeated(field: FieldInfo) -> bool:
    """Whether the option may be given several times."""
    return get_origin(field.annotation) is tuple
