"""How both distributions are built, beyond what their pyproject.toml can say.

Where the repository can be read, and whom to write to, is not known here: whoever publishes says so, by
REPOSITORY_URL=https://HOST/OWNER/NAME and CONTACT_EMAIL. The page on the package index then links to the files of that
version; without them, links into the repository are text.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

REPOSITORY = Path(__file__).resolve().parent.parent

LAB_FILES = {
    "ddp_lab": "ddp_lab",
    "launch": "ddp_lab/launch",
    # A package called `experiments` could be anybody's.
    "experiments": "ddp_experiments",
}
"""What the laboratory's wheel holds, and where."""

_COPIED = ("version", "requires-python", "keywords", "classifiers")
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)")


class Metadata(MetadataHookInterface):
    """What is said of a distribution and not written into its pyproject.toml."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Complete the metadata."""
        library = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
        place = os.environ.get("REPOSITORY_URL", "").rstrip("/")
        metadata["urls"] = _urls(place, library["version"]) if place else {}
        email = os.environ.get("CONTACT_EMAIL")
        metadata["authors"] = [{"name": "The samebits developers", **({"email": email} if email else {})}]
        if metadata["name"] == library["name"]:
            text = _page((REPOSITORY / "README.md").read_text(), f"{place}/blob/v{library['version']}" if place else "")
            metadata["readme"] = {"content-type": "text/markdown", "text": text}
        else:
            metadata |= {name: library[name] for name in _COPIED}
            # The same version exactly: the laboratory uses what is private in the library.
            metadata["dependencies"] = [f"{library['name']}[lab]=={library['version']}"]


class LabFiles(BuildHookInterface):
    """The laboratory's files, which lie outside the folder of its pyproject.toml."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name them. Raises ValueError for a source distribution: that of the library holds both."""
        if self.target_name == "sdist":
            raise ValueError("the source of samebits-lab is in the sdist of samebits; build a wheel: --wheel")
        if version == "standard":  # what is editable is read where it lies
            build_data["force_include"] |= {str(REPOSITORY / source): target for source, target in LAB_FILES.items()}


def _urls(place: str, version: str) -> dict[str, str]:
    return {
        "Homepage": place,
        "Documentation": f"{place}/blob/v{version}/docs/README.md",
        "Changelog": f"{place}/blob/v{version}/CHANGELOG.md",
        "Issues": f"{place}/issues",
    }


def _page(text: str, files: str) -> str:
    """README for a place where its neighbours are not: absolute links below `files`, or none."""

    def link(found: re.Match[str]) -> str:
        mark, name, target = found.groups()
        if files:
            return f"{mark}[{name}]({files}/{target}{'?raw=true' if mark else ''})"
        return "" if mark else name

    return _LINK.sub(link, text)
