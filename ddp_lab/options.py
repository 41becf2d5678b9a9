"""The parser of the laboratory's commands, and how SIGTERM ends them."""

from __future__ import annotations

import argparse
import signal
from types import FrameType
from typing import Any, NoReturn

from ddp_core.base.errors import UserError


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that takes no shortened options and says in one line what it does not understand."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise UserError; argparse would print all options before the message."""
        raise UserError(f"{message} (see `{self.prog} --help`)")


def end_as_by_interrupt() -> None:
    """Let SIGTERM raise KeyboardInterrupt, as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
