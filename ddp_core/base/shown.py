"""Text from files as people are shown it: in a terminal nothing of it acts.

A name or a message in a record may come from a stranger. An escape sequence in it would act on the terminal, and a line
break would forge a line of ours.
"""

from __future__ import annotations

import re
from typing import Any

_ACTS = re.compile("[\\0-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069]")
"""Control characters, line breaks, and what turns the direction of text."""
_ACTS_IN_LINES = re.compile(f"(?![\\n\\t]){_ACTS.pattern}")


def shown(text: str, *, lines: bool = False) -> str:
    """The text with control characters as Python writes them: `\\x1b`; with `lines`, its line breaks and tabs stay."""
    return (_ACTS_IN_LINES if lines else _ACTS).sub(lambda found: ascii(found[0])[1:-1], text)


def shown_in(document: Any) -> Any:
    """The JSON document with each text and each name in it as `shown` gives it."""
    if isinstance(document, str):
        return shown(document)
    if isinstance(document, dict):
        return {shown(name): shown_in(value) for name, value in document.items()}
    return [shown_in(value) for value in document] if isinstance(document, list) else document
