"""Type checkers over every Python example of README and docs: `python -m tools.typed_examples`.

mypy --strict and pyright (of the wheel basedpyright, which brings its Node.js along) see them as a user's files, in a
folder of their own, and ddp_core as an installed package. What they find is printed with the page and its line. Exit
code 1: an example is red. What an example imports may be missing here; such an example is left out, and named.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
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
"""
PYRIGHT = {"typeCheckingMode": "standard", "pythonPlatform": "Linux"}


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
    """Every example of README and docs, but those that nobody wrote with us. The page of the API shows signatures."""
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    found: list[Example] = []
    for page in pages:
        if page.name != "api.md":
            found += _blocks(page.relative_to(root).as_posix(), page.read_text(), {each.module for each in found})
    for file in sorted((root / "docs" / "tutorials").rglob("*.py")):
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
    """What mypy and pyright find wrong in the examples, a line each, with the place in the documentation."""
    with TemporaryDirectory(prefix="ddp-examples-") as name:
        folder = Path(name).resolve()
        for example in shown:
            (folder / f"{example.module}.py").write_text(example.above + example.code)
        (folder / "mypy.ini").write_text(MYPY)
        (folder / "pyrightconfig.json").write_text(json.dumps(PYRIGHT))
        found = [*_mypy(folder), *_pyright(folder)]
    by_module = {example.module: example for example in shown}
    return [f"{by_module[module].place(line)}: {checker}: {text}" for checker, module, line, text in found]


Finding = tuple[str, str, int, str]
"""Who has found it, the module, its line, and the message."""


def _mypy(folder: Path) -> Iterator[Finding]:
    words = ["-m", "mypy", "--config-file", "mypy.ini", "--python-executable", sys.executable, "."]
    words += ["--output", "json", "--no-error-summary"]
    for line in _said(folder, *words).splitlines():
        finding = json.loads(line)
        if finding["severity"] == "error":
            text = f"{finding['message']} [{finding['code']}]"
            yield "mypy", Path(finding["file"]).stem, finding["line"], text


def _pyright(folder: Path) -> Iterator[Finding]:
    said = _said(folder, "-m", "basedpyright", "--pythonpath", sys.executable, "--outputjson")
    for finding in json.loads(said)["generalDiagnostics"]:
        if finding["severity"] == "error":
            line = finding["range"]["start"]["line"] + 1
            text = f"{' '.join(finding['message'].split())} [{finding.get('rule', 'syntax')}]"
            yield "pyright", Path(finding["file"]).stem, line, text


def _said(folder: Path, *words: str) -> str:
    """What a type checker prints. Raises RuntimeError where it fails itself."""
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(words[:2])} ended with {done.returncode}: {done.stderr or done.stdout}")
    return done.stdout


def main() -> int:
    """Check them all; prints what is red and what was left out."""
    everything = examples()
    modules = {example.module for example in everything}
    left_out = {example: example.missing - modules for example in everything}
    shown = [example for example in everything if not left_out[example]]
    for example, missing in left_out.items():
        if missing:
            print(f"left out: {example.place(1)} needs {', '.join(sorted(missing))} (make test-extras installs it)")
    findings = red(shown)
    print("\n".join(findings) if findings else f"mypy and pyright: no issues in {len(shown)} examples")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
