"""Each word of the glossary is used in the documentation, and a reader who meets it there finds the way to it."""

from __future__ import annotations

import re

import pytest

from tests.support.commands import ROOT

GLOSSARY = ROOT / "docs" / "reference" / "glossary.md"
PAGES = [page.read_text() for page in sorted((ROOT / "docs").rglob("*.md")) if page != GLOSSARY]
TERMS = re.findall(r"^### (.*)$", GLOSSARY.read_text(), re.MULTILINE)


@pytest.mark.parametrize("term", TERMS)
def test_a_term_is_used_and_linked(term: str) -> None:
    linked = f"glossary.md#{term.replace(' ', '-')})"
    assert any(linked in page for page in PAGES), f"no page links to {linked[:-1]}"
    prose = [re.sub(r"```.*?```|\]\([^)]*\)", "", page, flags=re.DOTALL) for page in PAGES]
    assert sum(term in page.lower() for page in prose) > 1, f"{term} stands on one page or none: leave it out"
