"""The parser of the laboratory's commands."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from ddp_core.base.errors import UserError


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that takes no shortened options and says in one line what it does not understand."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise UserError; argparse would print all options before the message."""
        raise UserError(f"{message} (see `{self.prog} --help`)")
