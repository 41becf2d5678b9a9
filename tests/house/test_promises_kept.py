"""Each promise and each ratio of the README and of the explanations has a line that says what carries it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from benchmarks.record import results_of
from tests.support.commands import ROOT
from tests.support.tiers import BY_SPEED, tier_of

KEPT = ROOT / "docs" / "evidence" / "promises-kept.md"
SOURCES = [ROOT / "README.md", *sorted((ROOT / "docs" / "explanation").glob("*.md"))]

WORDS = re.compile(r"\b(?:always|never|any|no more than|at most)\b", re.IGNORECASE)
SAME = re.compile(
    r"(?=.*\b(?:every|each|all)\b).*\b(?:same (?:bits|weights)|bit for bit|one digest|identical)\b", re.IGNORECASE
)
NUMBER = r"\d+(?:\.\d+)?"
RATIO = r"\d\.\d\d"
FIGURES = re.compile(
    # Percent, times and the sign of multiplication; several may share it: "10 and 23 %".
    rf"(?<![\w.])(?P<some>(?:{NUMBER}(?:,| and| to| beside) )*{NUMBER}) ?(?P<sign>%|x\b|times\b|\u00d7(?! ?\d))"
    # A ratio such as 1.04, but no version, and nothing with a unit.
    r"|(?<!torch )(?<!NCCL )(?<!Python )(?<!\d to )(?<![\d.=+-])"
    rf"(?P<ratio>(?:{RATIO}(?:,| and| to) )*{RATIO})(?!\.?\d)(?! ?(?:ms|s|GB|million)\b)"
)

NO_PROMISE = {
    "sums, dot products and statistics with the same bits in any order": "what bitrep says of itself",
    "any cut of the batch": "what det-train says of itself",
    "any batch size": "what batch_invariant_ops says of itself",
}
"""Parts of sentences that the rule finds and that promise nothing of this project, and why."""


@dataclass(frozen=True)
class Sentence:
    """A sentence of a page, or a row of a table after the table's head."""

    page: Path
    text: str

    @property
    def says(self) -> str:
        """The words of the sentence, of which a line of docs/evidence/promises-kept.md quotes a part."""
        return plain(self.text)

    @property
    def figures(self) -> list[tuple[str, str]]:
        """Its ratios and percentages with their signs; those of one list are together: `10 and 23`, `%`."""
        row = plain(self.text.rpartition("\n")[2])
        return [(found["some"] or found["ratio"], found["sign"] or "") for found in FIGURES.finditer(row)]

    @property
    def promises(self) -> bool:
        """Whether it has a figure or a word of a promise; words inside backquotes are code, and do not count."""
        words = plain(re.sub(r"`[^`]*`", "", self.text.rpartition("\n")[2]))
        return bool(WORDS.search(words) or SAME.search(words) or self.figures)


def plain(text: str) -> str:
    """The words of a Markdown text in one line, without its marks and without the addresses of its links."""
    return " ".join(
        re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("*", "").replace("`", "").replace(r"\|", "|").split()
    )


def sentences(page: Path) -> Iterator[Sentence]:
    """What a page says, without its headings and blocks of code."""
    text = re.sub(r"^#.*$", "", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), flags=re.MULTILINE)
    for block in re.split(r"\n\s*\n", text):
        if block.lstrip().startswith("|"):
            head, *rows = block.strip().splitlines()
            yield Sentence(page, head)
            yield from (Sentence(page, f"{head}\n{row}") for row in rows[1:])
            continue
        for item in re.split(r"\n *(?:[-*]|\d+\.) ", f"\n{block}"):
            parts = re.split(r"(?<=[.!?])\s+", " ".join(item.split()))
            yield from (Sentence(page, part) for part in parts if part)


PROMISES = [sentence for page in SOURCES for sentence in sentences(page) if sentence.promises]


@dataclass(frozen=True)
class Row:
    """A line of promises-kept.md: the page that it quotes, a part of a sentence there, and what carries the promise."""

    page: Path
    quote: str
    carried_by: str

    def fits(self, sentence: Sentence) -> bool:
        """Whether the line quotes this sentence."""
        return self.page == sentence.page and self.quote in sentence.says

    @property
    def tests(self) -> list[tuple[Path, str]]:
        """The named tests: file and function."""
        return [(ROOT / path, name) for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", self.carried_by)]

    @property
    def results(self) -> list[list[float]]:
        """The figures of the named entries of results."""
        named = re.findall(r"\(\S+/results/(\w+)\.json\) `([^`]+)`", self.carried_by)
        found = [(f"{name}.json: {entry}", entries(name, entry)) for name, entry in named]
        assert [entry for entry, values in found if not values] == [], "no such entry"
        return [values for _, values in found]

    @property
    def pages(self) -> list[str]:
        """The texts of the pages that the line links to."""
        links = re.findall(r"\]\(([^)#]+\.md)(?:#[^)]*)?\)", self.carried_by)
        return [" ".join((KEPT.parent / link).read_text().split()) for link in links]

    def missing(self, sentence: Sentence) -> list[str]:
        """The figures of the sentence that are in no named result or page; none where a test asserts them."""
        if self.tests:
            return []
        return [
            f"{some} {sign}".strip()
            for some, sign in sentence.figures
            if not any(lies_in(values, some, sign) for values in self.results)
            and not any(stands_on(page, some, sign) for page in self.pages)
        ]


def entries(name: str, wanted: str) -> list[float]:
    """The numbers of `results/NAME.json` whose path, such as `sum.0.ratio`, fits the pattern."""

    def walk(value: Any, path: str) -> Iterator[tuple[str, float]]:
        if isinstance(value, dict | list):
            for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
                yield from walk(inner, f"{path}.{key}" if path else str(key))
        elif isinstance(value, int | float):
            yield path, value

    return [value for path, value in walk(results_of(name), "") if fnmatchcase(path, wanted)]


def lies_in(values: list[float], some: str, sign: str) -> bool:
    """Whether each figure is a value, rounded; of `a to b`, whether a is the smallest value and b the largest."""
    numbers = re.findall(NUMBER, some)
    if " to " in some:
        return [
            rounded(end, number, sign) for end, number in zip((min(values), max(values)), numbers, strict=True)
        ] == numbers
    return all(number in [rounded(value, number, sign) for value in values] for number in numbers)


def rounded(value: float, like: str, sign: str) -> str:
    """A value written with as many decimals as the figure `like`, and in percent where `sign` is %."""
    return f"{100 * value if sign == '%' else value:.{len(like.partition('.')[2])}f}"


def stands_on(page: str, some: str, sign: str) -> bool:
    """Whether the page has each of these figures, with this sign behind it."""
    return all(re.search(rf"(?<![\d.]){number} {sign}", page) for number in re.findall(NUMBER, some))


def kept() -> list[Row]:
    """The lines of promises-kept.md; the heading above them links to the page that they quote."""
    rows = []
    for section in KEPT.read_text().split("\n## ")[1:]:
        (link,) = re.findall(r"^\[.*\]\((.*)\)$", section.partition("\n")[0])
        page = (KEPT.parent / link).resolve()
        rows += [
            Row(page, plain(quote), carried)
            for quote, carried in re.findall(r"^\| (.+?) \| (.+) \|$", section, re.M)[1:]
        ]
    return rows


ROWS = kept()


def test_each_promise_has_its_line() -> None:
    open_ones = [
        f"{sentence.page.name}: {sentence.says}"
        for sentence in PROMISES
        if not any(row.fits(sentence) for row in ROWS) and not any(part in sentence.says for part in NO_PROMISE)
    ]
    assert open_ones == [], f"give each of them a line in {KEPT.name}, with the test or the figure that carries it"


def test_each_line_has_its_promise() -> None:
    assert [row.quote for row in ROWS if not any(row.fits(sentence) for sentence in PROMISES)] == []
    assert [part for part in NO_PROMISE if not any(part in sentence.says for sentence in PROMISES)] == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.quote[:40])
def test_what_carries_a_promise_is_there(row: Row) -> None:
    assert row.tests or row.results or row.pages, "a line without anything that carries it"
    for path, name in row.tests:
        assert f"def {name}(" in path.read_text(), f"no test {name} in {path.name}"
    tiers = [tier_of(ROOT, str(path.relative_to(ROOT)), name) for path, name in row.tests]
    fastest = min(tiers, key=BY_SPEED.index, default="quick")
    assert fastest in ("quick", "full"), "a promise needs a case that CI runs each time"
    for sentence in PROMISES:
        if row.fits(sentence):
            assert row.missing(sentence) == []
