"""`python -m ddp_lab.probe.definition`: which published digests follow from the definition alone, without torch."""

from __future__ import annotations

import sys

from ddp_lab.probe.definition.digests import defined_digests
from ddp_lab.probe.published import published


def main() -> int:
    """Compare the digests of all definitions with the published ones; returns 1 where one differs."""
    table, digests = published(), defined_digests()
    wrong = sorted(name for name, digest in digests.items() if table.operations[name] != digest)
    print(f"rules {table.rules}: {len(digests) - len(wrong)} of {len(digests)} definitions give the published digest")
    for name in wrong:
        print(f"  {name}: published {table.operations[name][:12]}, by definition {digests[name][:12]}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
