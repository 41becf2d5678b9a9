"""What `make sbom` does: the image's Python packages by CycloneDX's own tool, and its Debian packages, in one file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "outputs" / "sbom.json"


def main() -> int:
    """Build the image's listing stage, run it, and write the file; exit code 4 where no engine answers."""
    build = subprocess.run(["docker", "compose", "build", "--quiet", "sbom"], cwd=ROOT, check=False)
    if build.returncode:
        print("sbom: the image could not be built; is a Docker Engine running?", file=sys.stderr)
        return 4
    record = json.loads(inside())
    debian = [component(line) for line in inside("dpkg-query", "-W", "-f", "${Package} ${Version}\\n").splitlines()]
    record["components"] = [*record.get("components", []), *debian]
    TARGET.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{TARGET.relative_to(ROOT)}: {len(record['components'])} components, {len(debian)} of them Debian packages")
    return 0


def component(line: str) -> dict[str, Any]:
    """A Debian package as a CycloneDX component."""
    name, _, version = line.partition(" ")
    url = f"pkg:deb/debian/{name}@{version}"
    return {"type": "library", "name": name, "version": version, "purl": url, "bom-ref": url}


def inside(*command: str) -> str:
    """What a command prints in the container; without one, the stage's own command."""
    words = ["docker", "compose", "run", "--rm", "-T", "sbom", *command]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main())
