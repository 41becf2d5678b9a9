"""`python -m ddp_core.remote copy FOLDER ADDRESS`: copy to a store what is in FOLDER and not yet there.

Other words are for `ddp` itself, which starts this as the process that talks to the store.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from ddp_core.base.ending import said_by
from ddp_core.base.errors import UserError
from ddp_core.remote.address import Address, reaching


@said_by("ddp")
def main(words: Sequence[str]) -> int:
    """Do what the words say; returns an exit code."""
    match words:
        case ["copy", folder, address, *more]:
            from ddp_core.remote.copying import main as copy

            return copy(Path(folder), Address.of(address), "--follow" in more)
        case ["bring", address, *how]:
            from ddp_core.remote.bringing import bring

            place = bring(Address.of(address), writes="--to-write" in how, records_only="--records" in how)
            print(place)
            return 0
        case ["check", address]:
            _check(Address.of(address))
            return 0
    raise UserError("say: python -m ddp_core.remote copy FOLDER ADDRESS")


def _check(address: Address) -> None:
    """Raises UserError (4) where the store does not let this process write and remove."""
    with reaching(address):
        store, path = address.store()
        probe = f"{path}/.{secrets.token_hex(6)}.tmp"
        store.pipe_file(probe, b"")
        store.rm_file(probe)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
