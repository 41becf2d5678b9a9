"""JSON documents read back: what is refused, in which words, and that nothing else is raised.

Tests base/beneath.py, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import NotRequired

import pytest
from typing_extensions import TypedDict

from ddp_core.base.documents import MOST_DEPTH, BadDocument, Count, FilePath, json_text, parse_document, read_document
from tests.support.wording import refusing


class Item(TypedDict):
    number: Count
    name: NotRequired[FilePath]
    share: NotRequired[float | None]


def test_a_document_is_given_as_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"number": 3, "name": "caf\\u00e9-\\udcff", "later": {"x": [1, 2.5]}}')
    assert read_document(file, Item) == {"number": 3, "name": "café-\udcff", "later": {"x": [1, 2.5]}}


def test_what_it_is_not_is_said_in_a_few_words() -> None:
    no_json = (b"", b"{", b'{"number": 1} x', b'{"number": \xff}', b"[" * 100_000)
    numbers = (b'"1"', b"true", b"1.0", b"-1", b"9223372036854775808", b"NaN", b"1e400", b"9" * 5000)
    others = (b"[]", b"{}", b'{"number": 1, "name": "a\\u0000b"}', b'{"number": 1, "share": "x"}')
    deep = b'{"number": 1, "more": ' + b"[" * 100 + b"]" * 100 + b"}"
    for content in (*no_json, *(b'{"number": ' + each + b"}" for each in numbers), *others, deep):
        with refusing(BadDocument) as refused:
            parse_document(content, Item)
        assert "\n" not in str(refused.value)
        assert len(str(refused.value)) < 200
    with pytest.raises(BadDocument, match=r"^[^\n]{,200}$"):  # names from the document do not fill the line
        parse_document('{"' + "x\\n" * 5000 + '": []}', dict[str, str])


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e400", "-1e400", "9" * 400])
def test_what_no_float_can_hold_is_null(number: str) -> None:
    assert parse_document(f'{{"number": 1, "share": {number}}}', Item) == {"number": 1, "share": None}


def test_text_that_no_stream_can_write_is_replaced() -> None:
    found = parse_document('{"number": 1, "\\ud800": "a\\udfffb", "whole": "\\ud83d\\ude00", "byte": "\\udcff"}', Item)
    assert found == {"number": 1, "\ufffd": "a\ufffdb", "whole": "\U0001f600", "byte": "\udcff"}


def test_as_many_levels_as_allowed_are_read() -> None:
    deep = "[" * MOST_DEPTH + "]" * MOST_DEPTH
    assert parse_document(deep, list) is not None
    with pytest.raises(BadDocument):
        parse_document(f"[{deep}]", list)


def test_a_format_is_asked_for() -> None:
    assert parse_document('{"format": "a/1", "number": 1}', Item, "a/1")["number"] == 1
    for other in ('{"format": "a/2", "number": 1}', '{"number": 1}', "[]", '{"format": ["a/1"]}'):
        with refusing(BadDocument):
            parse_document(other, Item, "a/1")


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("[" + " " * 998 + "]")
    assert read_document(file, list, most_bytes=1000) == []
    with refusing(BadDocument):
        read_document(file, list, most_bytes=999)


def test_what_json_has_no_word_for_is_written_as_null() -> None:
    document = {"a": float("nan"), "b": [1, (float("inf"), 2.5)], 3: {"c": -float("inf")}, "d": True}
    assert json_text(document) == '{"a": null, "b": [1, [null, 2.5]], "3": {"c": null}, "d": true}'
    with pytest.raises(TypeError):
        json_text({"a": object()})
