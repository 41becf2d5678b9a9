"""What `make sbom` and `make sbom-cpu` do: list an image's Python packages, by CycloneDX, and its Debian packages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

ROOT = Path(__file__).resolve().parent.parent


def main(service: str) -> int:
    """Build the service's image, run it, and write outputs/SERVICE.json; exit code 4 where no engine answers."""
    target = ROOT / "outputs" / f"{service}.json"
    build = subprocess.run(["docker", "compose", "build", "--quiet", service], cwd=ROOT, check=False)
    if build.returncode:
        print("sbom: the image could not be built; is a Docker Engine running?", file=sys.stderr)
        return 4
    record = json.loads(inside(service))
    distribution = inside(service, "sh", "-c", ". /etc/os-release && echo $ID-$VERSION_ID").strip()
    listing = ("dpkg-query", "-W", "-f", "${Package} ${Version}\\n")
    debian = [component(line, distribution) for line in inside(service, *listing).splitlines()]
    record["components"] = [*record.get("components", []), *debian]
    target.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{target.relative_to(ROOT)}: {len(record['components'])} components, {len(debian)} of them Debian packages")
    return 0


def component(line: str, distribution: str) -> dict[str, Any]:
    """A Debian package as a CycloneDX component; `distribution` is such as ubuntu-24.04, whose flaws are other ones."""
    name, _, version = line.partition(" ")
    url = f"pkg:deb/{distribution.partition('-')[0]}/{name}@{quote(version)}?distro={distribution}"
    return {"type": "library", "name": name, "version": version, "purl": url, "bom-ref": url}


def inside(service: str, *command: str) -> str:
    """What a command prints in the service's container; without one, the service's own command."""
    words = ["docker", "compose", "run", "--rm", "-T", service, *command]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
