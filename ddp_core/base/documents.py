"""JSON documents that are read back: limited in size and depth, and checked against the type that names their fields.

A document may be damaged, or come from a stranger. Nothing in it may end a command with an exception other than
BadDocument, or hold it up.
"""

from __future__ import annotations

import errno
import json
import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from ddp_core.base.beneath import MOST_BYTES, NotAFile, read_file

_Kind = TypeVar("_Kind")

MOST_DEPTH = 100
"""Far below the depth at which Python's own recursion ends."""
_TOO_DEEP = f"nested deeper than {MOST_DEPTH} levels"
_LONGEST_NUMBER = 300
_HALF = re.compile("[\\ud800-\\udc7f\\udd00-\\udfff]")
_SHOWN = 60
_VALIDATOR = cache(TypeAdapter)
"""The validator of a kind, made once."""


class BadDocument(ValueError):
    """A document is not what was written, or not what is read here; the message says why in a few words."""


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("a path holds no NUL")
    return text


Count = Annotated[int, Field(ge=0, lt=2**63)]
"""A number of things, or the number of a step, a rank or a process."""
FilePath = Annotated[str, AfterValidator(_without_nul)]
"""A path or a part of one, which the operating system accepts as such; it may lead anywhere."""


def read_document(path: Path, kind: type[_Kind], form: str | None = None, most_bytes: int = MOST_BYTES) -> _Kind:
    """The content of a JSON file, as it stands there, once it is known to be of this kind: a TypedDict, a dict, a list.

    Fields that the kind does not name are left in. `form`: the `format` that the document must name. Raises
    BadDocument, also for a file with more than `most_bytes`, and OSError where it cannot be read.
    """
    try:
        content = read_file(path, most_bytes)
    except NotAFile:
        raise BadDocument("not a file") from None
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise BadDocument(str(error.strerror)) from None
        raise
    return parse_document(content, kind, form)


def parse_document(content: bytes | str, kind: type[_Kind], form: str | None = None) -> _Kind:
    """What `read_document` returns for a file with this content. Raises BadDocument."""
    try:
        text = content.decode() if isinstance(content, bytes) else content
        document = _DECODER.decode(text)
    except UnicodeDecodeError as error:
        raise BadDocument(f"not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise BadDocument(_TOO_DEEP) from None
    except ValueError as error:
        raise BadDocument(f"not JSON ({error})") from None
    if form is not None and (not isinstance(document, dict) or document.get("format") != form):
        raise BadDocument(f"not of format {form}")
    _require_shallow(document)
    if "\\u" in text:
        # Halves of surrogate pairs, which no stream can write, are left out, unless they stand for a byte.
        written = json.dumps(document, ensure_ascii=False)
        document = _DECODER.decode(_HALF.sub("\N{REPLACEMENT CHARACTER}", written))
    return require_kind(document, kind)


def require_kind(document: Any, kind: type[_Kind]) -> _Kind:
    """The document itself, if it is of the kind. Raises BadDocument, which names the first field that is not."""
    try:
        _VALIDATOR(kind).validate_python(document, strict=True)  # type: ignore[arg-type]  # classes are hashable
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        # Names come from the document, too.
        place = " ".join(".".join(str(part) for part in first["loc"]).split())
        words = place if len(place) <= _SHOWN else f"{place[:_SHOWN]}…"
        raise BadDocument(f"{words}: {first['msg']}" if words else first["msg"]) from None
    found: _Kind = document
    return found


def json_text(document: Any, indent: int | None = None) -> str:
    """The document as JSON, in which NaN and infinities are null, as they are read back. Raises TypeError."""
    return json.dumps(_without_gaps(document), indent=indent, allow_nan=False)


def _without_gaps(document: Any) -> Any:
    if isinstance(document, Mapping):
        return {name: _without_gaps(value) for name, value in document.items()}
    if isinstance(document, list | tuple):
        return [_without_gaps(value) for value in document]
    return None if isinstance(document, float) and not math.isfinite(document) else document


def _finite(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


# NaN, infinities and numbers that a float cannot hold count as null, as they are written in metrics.jsonl: a run whose
# test loss was infinite has a record. Where a number is needed, null is none.
_DECODER = json.JSONDecoder(
    parse_float=_finite,
    parse_int=lambda text: int(text) if len(text) <= _LONGEST_NUMBER else None,
    parse_constant=lambda _: None,
)


def _require_shallow(document: Any) -> None:
    level = [document]
    for _ in range(MOST_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise BadDocument(_TOO_DEEP)
