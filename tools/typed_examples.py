"""mypy --strict over every Python example of README and docs: `python -m tools.typed_examples`.

It sees them as a user's files, in a folder of their own, and ddp_core as an installed package. What it finds is printed
with the page and its line. Exit code 1: an example is red. What an example imports may be missing here; such an example
is left out, and named.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent

FOREIGN = {"docs/tutorials/port-your-script/before.py": "the script as somebody else wrote it"}
"""Examples that nobody wrote with us, and why."""

MYPY = f"""
[mypy]
strict = true
cache_dir = {ROOT / ".mypy_cache" / "examples"}
# torch leaves much of itself without annotations. Other libraries have none at all.
untyped_calls_exclude = torch
disable_error_code = import-untyped
disallow_subclassing_any = false
# Minutes of reading.
[mypy-lightning.*,accelerate.*,transformers.*,torchdata.*,torchmetrics.*]
follow_imports = skip
"""


@dataclass(frozen=True)
class Example:
    """A block of Python in a page, or a file beside it."""

    page: str
    """The path of the page or file, from the root of the project."""
    line: int
    """The line of the page at which `code` begins."""
    code: str
    module: str
    """The name of its file, without .py: what the page calls it, where that is one's own."""
    above: str = ""
    """The imports of the page's first block, for a block that has none."""

    @property
    def missing(self) -> set[str]:
        """What it imports and is not installed here, by its first name."""
        return {name for name in _imported(self.code) if find_spec(name) is None}

    def place(self, line: int) -> str:
        """Where in the documentation the line of its file stands."""
        return f"{self.page}:{max(self.line, self.line + line - 1 - self.above.count(chr(10)))}"


def examples(root: Path = ROOT) -> list[Example]:
    """Every example of README and docs, but those that nobody wrote with us."""
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    found: list[Example] = []
    for page in pages:
        found += _blocks(page.relative_to(root).as_posix(), page.read_text(), {each.module for each in found})
    shown = {each.code for each in found}
    for file in sorted((root / "docs").glob("*/*/*.py")):
        if file.read_text() not in shown or file.relative_to(root).as_posix() in FOREIGN:
            found.append(Example(file.relative_to(root).as_posix(), 1, file.read_text(), file.stem))
    foreign = {example.code for example in found if example.page in FOREIGN}
    return [example for example in found if example.code not in foreign]


def _blocks(name: str, page: str, taken: set[str]) -> Iterator[Example]:
    imports, before = "", 0
    for number, block in enumerate(re.finditer(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)):
        code = block[1]
        own = "".join(
            f"{ast.unparse(node)}\n" for node in ast.parse(code).body if isinstance(node, ast.Import | ast.ImportFrom)
        )
        imports = imports or own
        called = re.findall(r"`(\w+)\.py`", page[before : block.start()])
        own_name = f"{re.sub('[^a-z]', '_', name.lower())}_{number}"
        module = called[-1] if called and called[-1] not in taken else own_name
        taken.add(module)
        before = block.end()
        yield Example(name, page.count("\n", 0, block.start(1)) + 1, code, module, "" if own else imports)


def _imported(code: str) -> set[str]:
    """The packages and modules that the code imports, by their first name."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


def red(shown: list[Example]) -> list[str]:
    """What mypy finds wrong in the examples, a line each, with the place in the documentation."""
    with TemporaryDirectory(prefix="ddp-examples-") as name:
        folder = Path(name).resolve()
        for example in shown:
            (folder / f"{example.module}.py").write_text(example.above + example.code)
        (folder / "mypy.ini").write_text(MYPY)
        found = list(_mypy(folder))
    by_module = {example.module: example for example in shown}
    return [f"{by_module[module].place(line)}: {text}" for module, line, text in found]


def checkable(everything: Sequence[Example]) -> tuple[list[Example], dict[Example, set[str]]]:
    """Those of the examples that have here what they import, and of the others what they lack."""
    modules = {example.module for example in everything}
    lacking = {example: lacks for example in everything if (lacks := example.missing - modules)}
    return [example for example in everything if example not in lacking], lacking


def _mypy(folder: Path) -> Iterator[tuple[str, int, str]]:
    """Module, line and message of each finding. Raises RuntimeError where mypy fails itself."""
    words = ["-m", "mypy", "--config-file", "mypy.ini", "--python-executable", sys.executable, "."]
    words += ["--output", "json", "--no-error-summary"]
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"mypy ended with {done.returncode}: {done.stderr or done.stdout}")
    for line in done.stdout.splitlines():
        finding = json.loads(line)
        if finding["severity"] == "error":
            text = f"{finding['message']} [{finding['code']}]"
            yield Path(finding["file"]).stem, finding["line"], text


def main() -> int:
    """Check them all; prints what is red and what was left out."""
    shown, left_out = checkable(examples())
    for example, missing in left_out.items():
        print(f"left out: {example.place(1)} needs {', '.join(sorted(missing))}, an extra package")
    findings = red(shown)
    print("\n".join(findings) if findings else f"mypy: no issues in {len(shown)} examples")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
