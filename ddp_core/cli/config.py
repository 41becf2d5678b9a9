"""Reads the file of `--config`: settings as after `--set`, and a table `[train]` with the options of `ddp train`.

In TOML, for example:

    optimizer.lr = 0.05             # the same names as with --set; tables and dotted names mean the same
    epochs = 3

    [train]                         # the same names as on the command line
    experiment = "digits"
    layout = "ddp"
    nproc-per-node = 4
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ddp_core.base.errors import UserError, nearest_name
from ddp_core.base.extras import require

DEFAULT_MAP = ParameterSource.DEFAULT_MAP
"""The source that click names for a value of the file."""

_TABLE = "train"
_META = "ddp_core.cli.config"


@dataclass(frozen=True)
class Config:
    """What a file asks for: settings as `--set` takes them, and values of options by the names of click's parameters.

    What stands on the command line overrides both.
    """

    path: Path
    settings: tuple[str, ...] = ()
    options: Mapping[str, Any] | None = None

    @contextlib.contextmanager
    def blamed(self) -> Iterator[None]:
        """Within the block, a UserError about a setting of the file names the file."""
        try:
            yield
        except UserError as error:
            text = str(error).removeprefix("--set ")
            names = [setting.partition("=")[0] for setting in self.settings]
            if any(re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", text) for name in names):
                raise UserError(f"{self.path}: {text}", error.exit_code) from None
            raise


def config_of(context: click.Context) -> Config:
    """The file that `--config` named; an empty one where it named none."""
    found = context.meta.get(_META, Config(Path()))
    assert isinstance(found, Config)
    return found


def take_config(context: click.Context, _: click.Parameter, value: str | None) -> None:
    """click's callback of `--config`: the file's values become the defaults of the options. Raises UserError."""
    if value is not None and not context.resilient_parsing:
        config = read_config(Path(value))
        context.meta[_META] = config
        context.default_map = {**(config.options or {}), "settings": config.settings}


def add_to_config(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """click's callback of `--set`: these settings follow those of the file, and so override them."""
    if context.get_parameter_source(parameter.name or "") is DEFAULT_MAP:
        return value
    return (*config_of(context).settings, *value)


def read_config(path: Path) -> Config:
    """Read a TOML, YAML or JSON file; its ending tells which. Raises UserError, with the nearest known name."""
    content = _parse_file(path)
    options = content.pop(_TABLE, {})
    if not isinstance(options, dict):
        raise UserError(f"{path}: {_TABLE} is a table of options, for example `layout` with the value `ddp`")
    return Config(path, tuple(_settings(path, content)), dict(_options(path, options)))


def _parse_file(path: Path) -> dict[str, Any]:
    """The content of a TOML, YAML or JSON file. Raises UserError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"--config {path} is not UTF-8 text; give a TOML, YAML or JSON file") from None
    try:
        match path.suffix:
            case ".toml":
                import tomllib

                content: Any = tomllib.loads(text)
            case ".json":
                content = json.loads(text)
            case ".yaml" | ".yml":
                content = _read_yaml(text)
            case _:
                raise UserError(
                    f"--config {path}: its name must end in .toml, .yaml or .json, which says how to read it"
                )
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise UserError(f"{path} holds no names with values; write, for example, `optimizer.lr = 0.05`")
    return content


def _read_yaml(text: str) -> Any:
    """The content of a YAML text. Raises ValueError where it is none."""
    require("a YAML file, unlike TOML,", "yaml")
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(error) from None


def _settings(path: Path, content: Mapping[str, Any]) -> Iterator[str]:
    """The settings in the order of the file. Names within a section are checked later, when the experiment is known."""
    from ddp_core.config.experiment import common_settings

    known = common_settings()
    sections = {name.partition(".")[0] for name in known if "." in name}
    fields = sections | {name for name in known if "." not in name}
    for name, value in content.items():
        if name.partition(".")[0] not in fields:
            raise UserError(f"{path}: there is no setting {name}; {nearest_name(name, [*known, _TABLE])}")
        parts = value if isinstance(value, dict) and name in sections else {"": value}
        for key, inner in parts.items():
            full = f"{name}.{key}" if key else name
            yield f"{full}={_written(path, full, inner)}"


def _written(path: Path, name: str, value: Any) -> str:
    from ddp_core.config.records import setting_text

    try:
        return setting_text(value)
    except (TypeError, ValueError):
        raise UserError(f"{path}: {name} = {value}: a setting is a number, a text, true or false, or a list") from None


def _options(path: Path, table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The options of `[train]` by the names of click's parameters, written as on the command line."""
    from ddp_core.config.options import groups
    from ddp_core.config.records import command_line, is_repeated, option_name

    known = {
        "experiment" if field.is_required() else option_name(name, field).removeprefix("--"): (name, field)
        for _, fields in groups()
        for name, field in fields.items()
        if not command_line(field).hidden and name != "settings"
    }
    for key, value in table.items():
        option = key.replace("_", "-")
        if option not in known:
            raise UserError(f"{path}: [{_TABLE}] {key}: `ddp train` has no such option; {nearest_name(option, known)}")
        name, field = known[option]
        if isinstance(field.default, bool):
            if not isinstance(value, bool):
                raise UserError(f"{path}: [{_TABLE}] {key} is true or false, not {value}")
            yield name, field.default ^ value
        elif is_repeated(field):
            yield name, [str(item) for item in (value if isinstance(value, list) else [value])]
        else:
            yield name, str(value)
