"""Who vouches for a run: a statement over its record and its weights, signed with an ssh key.

The statement is one of in-toto (Statement v1, https://github.com/in-toto/attestation): its subjects are run.json and
the file of the weights, and its predicate says of which training. The signature is that of `ssh-keygen -Y sign`, so
that no other program is needed, nor a key of another kind than those that people have: see ssh-keygen(1).
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from typing_extensions import TypedDict

from ddp_core.base.beneath import read_file
from ddp_core.base.documents import BadDocument, read_document
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.files import sha256_of
from ddp_core.record.weights import WEIGHTS

STATEMENT, SIGNATURE = "statement.json", "statement.json.sig"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:samebits:training:1"
NAMESPACE = "samebits"
"""Of the signature, so that it is taken for nothing else."""
_SUBJECTS = ("run.json", WEIGHTS)
_PREDICATE = ("experiment_sha256", "data_sha256", "weights_sha256")
_KEY_TYPES = ("ssh-", "ecdsa-", "sk-")
_GIVEN = "given"
"""The name of whoever has a key that was given alone."""


class BadSignature(Exception):
    """A run is not signed by whom it should be; the message says why."""


class _Statement(TypedDict):
    _type: str
    subject: list[dict[str, Any]]
    predicateType: str
    predicate: dict[str, Any]


def statement(directory: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """What is signed of the finished run in `directory`. Raises OSError."""
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": sha256_of(directory / name)}} for name in _SUBJECTS],
        "predicateType": PREDICATE_TYPE,
        "predicate": {"steps": record["result"]["steps"], **{name: record[name] for name in _PREDICATE}},
    }


def sign(content: Mapping[str, Any], key: Path) -> dict[str, bytes]:
    """The statement and its signature with the private ssh key in the file `key`, by the names of their files.

    Raises UserError where ssh-keygen is missing, or cannot sign with the key.
    """
    text = json.dumps(content, indent=1, sort_keys=True).encode() + b"\n"
    with TemporaryDirectory(prefix="ddp-sign-") as folder:
        file = Path(folder) / STATEMENT
        file.write_bytes(text)
        done = _ssh_keygen("sign", "-f", str(key), "-n", NAMESPACE, str(file))
        if done.returncode:
            raise UserError(f"--sign {key}: {_said(done)}; give the file of a private ssh key")
        return {STATEMENT: text, SIGNATURE: (Path(folder) / SIGNATURE).read_bytes()}


def require_signed(directory: Path, record: Mapping[str, Any], signers: Path) -> str:
    """Who has signed the run in `directory`, of those in the file `signers`.

    `signers`: allowed signers as ssh-keygen(1) has them, or one public key. Raises BadSignature where the run is not
    signed, by another key, or the signature is of another run; UserError for a file that cannot be read.
    """
    files = directory / STATEMENT, directory / SIGNATURE
    if not all(file.is_file() for file in files):
        raise BadSignature(f"it is not signed (it has no {SIGNATURE})")
    with TemporaryDirectory(prefix="ddp-signer-") as folder:
        allowed = _allowed(signers, Path(folder))
        found = _ssh_keygen("find-principals", "-s", str(files[1]), "-f", str(allowed))
        if found.returncode:
            raise BadSignature(f"no key in {signers} has signed it ({_said(found)})")
        who = found.stdout.decode(errors="replace").splitlines()[0]
        words = ("-f", str(allowed), "-I", who, "-n", NAMESPACE, "-s", str(files[1]))
        checked = _ssh_keygen("verify", *words, content=read_file(files[0]))
        if checked.returncode:
            raise BadSignature(f"its signature does not fit ({_said(checked)})")
    try:
        told = read_document(files[0], _Statement)
    except BadDocument as error:
        raise BadSignature(f"{STATEMENT} is no statement ({error})") from None
    if told != statement(directory, record):
        raise BadSignature(f"{STATEMENT} was signed, but tells of another run than this one")
    return "the key given" if who == _GIVEN else who


def _allowed(signers: Path, folder: Path) -> Path:
    """The file itself; for one with a public key alone, a file that allows this key to whoever has it."""
    try:
        words = signers.read_text(encoding="utf-8", errors="replace").split()
    except OSError as error:
        raise UserError(f"--signer {signers} cannot be read: {error.strerror}") from None
    if not words or not words[0].startswith(_KEY_TYPES):
        return signers
    file = folder / "allowed"
    file.write_text(f"{_GIVEN} {' '.join(words[:2])}\n", encoding="utf-8")
    return file


def _ssh_keygen(action: str, *words: str, content: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            ["ssh-keygen", "-Y", action, *words],
            input=content or b"",
            capture_output=True,
            check=False,
        )
    except FileNotFoundError:
        raise UserError(
            "ssh-keygen is missing, which makes and checks signatures: install OpenSSH's client", ExitCode.RESOURCES
        ) from None


def _said(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = done.stderr.decode(errors="replace").split("\n")
    return next((" ".join(line.split()) for line in reversed(lines) if line.strip()), "no message").rstrip(".")
