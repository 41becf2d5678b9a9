"""What the records of this package share: base class, common types, and how they are written.

A record's values are written under dotted names, as `--set` takes them; the fields of the options are written as
options of the command line; and what is wrong in a record is written in one line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator
from pydantic.fields import FieldInfo

from ddp_core.base.errors import near_names, nearest_name

ReductionKind = Literal["exact", "plain"]
Numerics = Literal["native", "portable"]
MemoryFormat = Literal["contiguous", "channels_last"]


_LONGEST_VALUE = 60


class Frozen(BaseModel):
    """A record that cannot change and accepts no unknown field."""

    # Validators are built when they are first needed: `ddp train --help` reads the fields, and needs none.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    @field_validator("*")
    @classmethod
    def _fits(cls, value: Any) -> Any:
        """Refuse a whole number that no record of a run can hold."""
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ValueError(f"{value} is too large: whole numbers end at 2**63 - 1")
        return value


def explain(error: ValidationError) -> str:
    """Pydantic's findings in one line."""
    findings = []
    for item in error.errors():
        place = ".".join(str(part) for part in item["loc"])
        text = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden" and (known := _fields_at(error.title, item["loc"][:-1])):
            wrong = str(item["loc"][-1])
            nested = [
                f"{name}.{inner}" for name, kinds in known.items() for kind in kinds for inner in kind.model_fields
            ]
            near = near_names(wrong, [*known, *nested])
            text = f"there is no such field; {nearest_name(wrong, near or known)}"
        elif item["type"] == "model_type" and (known := _fields_at(error.title, item["loc"])):
            text = f"{item['input']!r} is none; give its fields by name: {', '.join(known)}"
        elif item["type"] not in ("extra_forbidden", "missing", "value_error"):
            given = repr(item["input"])
            is_shown = not isinstance(item["input"], BaseModel | dict) and len(given) <= _LONGEST_VALUE
            text += f", not {given}" if is_shown else ""
        findings.append(f"{place}: {text}" if place else text)
    return "; ".join(findings)


def _fields_at(title: str, place: Sequence[int | str]) -> dict[str, list[type[Frozen]]]:
    """The fields of the record called `title`, or of the one at `place` in it, with the records that each holds."""
    found = [kind for kind in kinds_of(Frozen) if kind.__name__ == title]
    for name in place:
        found = [inner for kind in found for inner in _records_in(kind.model_fields.get(str(name)))]
    return {name: _records_in(field) for kind in found for name, field in kind.model_fields.items()}


def kinds_of(record: type[Frozen]) -> list[type[Frozen]]:
    """The classes derived from `record`."""
    return [each for kind in record.__subclasses__() for each in (kind, *kinds_of(kind))]


def _records_in(field: FieldInfo | None) -> list[type[Frozen]]:
    """The kinds of record that may be the value of the field."""
    if field is None:
        return []
    kinds = (field.annotation, *get_args(field.annotation))
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Frozen)]


def dotted(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A record's nested values under dotted names, as `--set` takes them: `model.options.width` is `model.width`."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            flat |= dotted(value, prefix if prefix and name == "options" else f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def setting_text(value: Any) -> str:
    """The value as `--set` reads it: JSON, but a text that is no JSON value stands without quotation marks.

    Raises TypeError or ValueError for what JSON does not have: NaN, infinity, dates.
    """
    if isinstance(value, str) and value.lower() not in ("none", "true", "false"):
        try:
            json.loads(value)
        except ValueError:
            return value
    return json.dumps(value, allow_nan=False)


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
    """Says in the help what happens where an option whose default is None is not used."""

    text: str


def command_line(field: FieldInfo) -> CommandLine:
    """The CommandLine in the field's annotation or in one of the types that it joins; an empty one if there is none."""
    nested = [note for part in get_args(field.annotation) for note in getattr(part, "__metadata__", ())]
    return next((note for note in (*field.metadata, *nested) if isinstance(note, CommandLine)), CommandLine())


def default_text(field: FieldInfo) -> str:
    """The default in words, for the help: what happens where the option is not used."""
    if field.default is None:
        return next((note.text for note in field.metadata if isinstance(note, ByDefault)), "none")
    if isinstance(field.default, bool):
        return "off"  # the option, also where it is one that switches its field off
    if isinstance(field.default, float):
        return f"{field.default:g}"
    return str(field.default) if field.default != () else "none"


def option_name(name: str, field: FieldInfo) -> str:
    """The option of a field: the one that its CommandLine names, else `--checkpoint-every` for `checkpoint_every`."""
    return command_line(field).option or f"--{name.replace('_', '-')}"


def choices(field: FieldInfo) -> list[str]:
    """The values of a field that has a fixed set of them, else nothing."""
    kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if get_origin(kind) is Literal]
    return list(get_args(kinds[0])) if kinds else []


def is_repeated(field: FieldInfo) -> bool:
    """Whether the option may be given several times."""
    return get_origin(field.annotation) is tuple
