"""A run is signed with an ssh key, and the signature is of that run, by that key, and of nothing else."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ddp_core.base.errors import UserError
from ddp_core.record.signing import NAMESPACE, SIGNATURE, STATEMENT, BadSignature, require_signed, sign, statement
from ddp_core.record.weights import WEIGHTS

pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="OpenSSH's client is not installed")

RECORD: dict[str, Any] = {
    "result": {"steps": 9},
    "experiment_sha256": "e",
    "data_sha256": None,
    "weights_sha256": "w",
}


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "key"
    for path in (file, file.with_name("other")):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "ada@example.org", "-f", str(path)]
        subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
    return file


@pytest.fixture
def run(tmp_path: Path, key: Path) -> Path:
    (tmp_path / "run.json").write_bytes(b"a record")
    (tmp_path / WEIGHTS).write_bytes(b"weights")
    for name, content in sign(statement(tmp_path, RECORD), key).items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def test_who_has_signed_is_told(run: Path, key: Path) -> None:
    public = key.with_suffix(".pub")
    assert require_signed(run, RECORD, public) == "the key given"
    allowed = run / "allowed_signers"
    allowed.write_text(f'ada@example.org namespaces="{NAMESPACE}" {public.read_text()}')
    assert require_signed(run, RECORD, allowed) == "ada@example.org"


def test_another_key_another_run_and_no_signature_are_told(run: Path, key: Path) -> None:
    public = key.with_suffix(".pub")
    with pytest.raises(BadSignature, match=r"no key in .*other\.pub has signed it"):
        require_signed(run, RECORD, key.with_name("other.pub"))
    with pytest.raises(BadSignature, match="tells of another run"):
        require_signed(run, RECORD | {"result": {"steps": 8}}, public)
    (run / "run.json").write_bytes(b"another record")
    with pytest.raises(BadSignature, match="tells of another run"):
        require_signed(run, RECORD, public)
    (run / "run.json").write_bytes(b"a record")
    (run / WEIGHTS).write_bytes(b"other weights")
    with pytest.raises(BadSignature, match="tells of another run"):
        require_signed(run, RECORD, public)
    text = (run / STATEMENT).read_text()
    (run / STATEMENT).write_text(text.replace('"steps": 9', '"steps": 8'))
    with pytest.raises(BadSignature, match="does not fit"):
        require_signed(run, RECORD, public)
    (run / SIGNATURE).unlink()
    with pytest.raises(BadSignature, match="it is not signed"):
        require_signed(run, RECORD, public)


def test_what_cannot_be_signed_is_one_line(run: Path) -> None:
    with pytest.raises(UserError, match=r"--sign .*no-key.*give the file of a private ssh key"):
        sign({}, run / "no-key")
    with pytest.raises(UserError, match=r"--signer .*nobody cannot be read"):
        require_signed(run, RECORD, run / "nobody")
