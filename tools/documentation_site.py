"""What `make site` does: the documentation as a site that needs no network, in build/site/html.

The site has the folders of the repository, so a link between two pages holds there as it does on the forge. The pages
are copied; a link to anything else, such as a program, leads to a page that shows it. Runs become a report. docs/site
has the site's looks and the order of its pages.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from ddp_core.base.ending import said_by
from ddp_core.base.errors import UserError
from ddp_lab.report.page import write_report

ROOT = Path(__file__).resolve().parent.parent
LOOKS = ROOT / "docs" / "site"

LANGUAGES = {".py": "python", ".sbatch": "bash", ".sh": "bash", ".yaml": "yaml", ".diff": "diff", ".cff": "yaml"}
SHOWN_BY_BROWSERS = {".json", ".txt", ".svg", ".png"}

BEFORE_REPORT = """\
# Report of the examples

[Open the report](report/index.html){{ .md-button .md-button--primary }}

`ddp report` has made it of the runs below, and of the [claims](docs/evidence/claims.md) as they were measured last. It
is one file that loads nothing, so that it can be mailed. `make site` trains the runs on the machine that builds the
site, unless it is given others. [What each figure means](docs/how-to/watch-a-run.md#what-the-figures-mean) ·
[a report of your own runs](docs/how-to/watch-a-run.md#the-report)

| experiment | layout | trained | weights |
|---|---|---|---|
{rows}
"""

_LINK = re.compile(r"(?P<code>^```.*?^```|`[^`\n]*`)|\]\((?!\w+:|#)(?P<path>[^)\s#]+)", re.DOTALL | re.MULTILINE)


@said_by("site")
def main(arguments: Sequence[str] | None = None) -> int:
    """Gather the pages, make the report, and build; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.documentation_site", description="Build the site.")
    parser.add_argument("--runs", type=Path, required=True, help="the runs of the report")
    parser.add_argument("--to", type=Path, default=ROOT / "build" / "site", help="the site is built in its folder html")
    known = parser.parse_args(arguments)
    if not known.runs.is_dir():
        raise UserError(f"no folder {known.runs}; without RUNS, `make site` trains some runs for the report")
    pages = known.to / "pages"
    gather(pages)
    report(known.runs, pages)
    for looks in LOOKS.iterdir():
        shutil.copyfile(looks, (known.to if looks.suffix == ".yml" else pages) / looks.name)
    return build(known.to)


def build(folder: Path) -> int:
    """Build the site of the gathered pages in `folder`; returns mkdocs' exit code, 1 for a link that leads nowhere."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    # Material says at each start when its maintenance ends: pyproject.toml has it.
    return subprocess.run(command, cwd=folder, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=False).returncode


def sources() -> list[Path]:
    """The files that are pages of the site."""
    docs = ROOT / "docs"
    return sorted([*ROOT.glob("*.md"), *docs.rglob("*.md"), ROOT / "benchmarks" / "README.md"])


def place(source: Path) -> Path:
    """Where a file or a folder of the repository stands in the folder of the pages."""
    path = source.relative_to(ROOT)
    if source.is_dir():
        return path / "index.md"
    return path if source.suffix in {".md", *SHOWN_BY_BROWSERS} else path.with_name(f"{path.name}.md")


def gather(pages: Path) -> None:
    """Make the folder `pages` anew, with all pages and what they link to."""
    shutil.rmtree(pages, ignore_errors=True)
    waiting, written = sources(), set[Path]()
    while waiting:
        source = waiting.pop()
        if source in written:
            continue
        written.add(source)
        page = pages / place(source)
        page.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix in SHOWN_BY_BROWSERS:
            shutil.copyfile(source, page)
        elif source.suffix == ".md":
            text, linked = mended(source.read_text(), source)
            page.write_text(f"---\ndescription: {json.dumps(description(text), ensure_ascii=False)}\n---\n\n{text}")
            waiting += linked
        else:
            files = sorted(file for file in source.iterdir() if file.is_file()) if source.is_dir() else []
            page.write_text(listing(source, files) if source.is_dir() else program(source))
            waiting += files


def mended(text: str, source: Path) -> tuple[str, list[Path]]:
    """A page whose links lead to where things stand on the site, and the files and folders that it links to."""
    linked: list[Path] = []

    def lead(found: re.Match[str]) -> str:
        if found["code"]:
            return found[0]
        target = Path(os.path.normpath(source.parent / found["path"]))
        # A link that leads nowhere stays as it is; the build then fails with its page and line.
        if not target.exists():
            return found[0]
        linked.append(target)
        return f"]({os.path.relpath(ROOT / place(target), source.parent)}"

    return _LINK.sub(lead, text), linked


def description(text: str) -> str:
    """What search engines and previews show of a page: the first sentence of its first paragraph."""
    paragraphs = re.split(r"\n\s*\n", re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL))
    first = next((each for each in paragraphs if each[:1].isalpha() or each[:1] in "`[*"), "")
    words = " ".join(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", first).replace("*", "").replace("`", "").split())
    return re.split(r"(?<=[.?!:]) ", words)[0].rstrip(":")


def listing(source: Path, files: Sequence[Path]) -> str:
    """A page of links to the files of a folder."""
    lines = [f"- [`{file.name}`]({place(file).name})" for file in files]
    return _aside(f"{source.relative_to(ROOT)}/", "\n".join(lines))


def program(source: Path) -> str:
    """A page that shows a file."""
    language = LANGUAGES.get(source.suffix, "text")
    return _aside(str(source.relative_to(ROOT)), f"````{language}\n{source.read_text()}````")


def _aside(title: str, text: str) -> str:
    """A page that is reached by links alone, not by the search."""
    return f"---\nsearch:\n  exclude: true\n---\n\n# {title}\n\n{text}\n"


def report(runs: Path, pages: Path) -> None:
    """Put the report of these runs among the pages, and a page before it that says what they are."""
    with TemporaryDirectory() as folder:
        made = write_report(runs, Path(folder))
        (pages / "report").mkdir()
        shutil.copyfile(Path(folder, "index.html"), pages / "report" / "index.html")
    rows = []
    for run in made.inventory.runs:
        weights = f"`{run.record['weights_sha256'][:12]}…`" if run.record["weights_sha256"] else run.ended
        rows.append(f"| {run.experiment} | {run.layout.label} | {run.record['started_at'][:10]} | {weights} |")
    (pages / "report.md").write_text(BEFORE_REPORT.format(rows="\n".join(rows)))


if __name__ == "__main__":
    sys.exit(main())
