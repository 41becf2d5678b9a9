"""The site of the documentation: every page has a place, and no page needs a network."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tools import documentation_site

ROOT = Path(__file__).parents[2]
PLACES = re.findall(r"^ +- (.+): (\S+\.md)$", (ROOT / "docs" / "site" / "mkdocs.yml").read_text(), re.MULTILINE)
LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href", "use": "href"}
"""Elements that load what an attribute of theirs names."""

built = pytest.mark.extras("mkdocs", "material")


class Page(HTMLParser):
    """What a page loads."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [value for name, value in attrs if value and name == LOADING.get(tag)]


def test_every_page_has_one_place_with_a_short_title() -> None:
    pages = {str(documentation_site.place(source)) for source in documentation_site.sources()}
    assert sorted(path for _, path in PLACES) == sorted({*pages, "report.md"}), "see nav in docs/site/mkdocs.yml"
    assert [title for title, _ in PLACES if len(title) > 28] == []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, with a report of no runs."""
    runs, folder = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("site")
    assert documentation_site.main(["--runs", str(runs), "--to", str(folder)]) == 0
    return folder / "html"


@built
def test_nothing_is_loaded_from_a_network(site: Path) -> None:
    loaded = {url for file in site.rglob("*.html") if file.name != "404.html" for url in Page(file).loads}
    assert loaded
    assert {url for url in loaded if re.match(r"(\w+:)?//", url)} == set()
    styles = "".join(file.read_text() for file in site.rglob("*.css"))
    assert re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)]*", styles) == []
