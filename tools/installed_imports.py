"""Imports what a project asks for: `python tools/installed_imports.py PROJECT`, by the interpreter that is to be tried.

Prints a JSON object: what could not be imported, and the error of each. Standard library only.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
import sys
from importlib.metadata import packages_distributions, requires


def failed_imports(project: str) -> dict[str, str]:
    """The modules of the packages that `project` asks for and that are installed, where their import fails; and how."""
    asked = {_plain(re.split(r"[^\w.-]", requirement, maxsplit=1)[0]) for requirement in requires(project) or ()}
    failed = {}
    for module, packages in sorted(packages_distributions().items()):
        if module.isidentifier() and not module.startswith("_") and asked & set(map(_plain, packages)):
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    importlib.import_module(module)
            except Exception as error:
                failed[module] = f"{type(error).__name__}: {error}".splitlines()[0]
    return failed


def _plain(package: str) -> str:
    """The name of a package in its normal form (PEP 503)."""
    return re.sub(r"[-_.]+", "-", package).lower()


if __name__ == "__main__":
    print(json.dumps(failed_imports(sys.argv[1])))
