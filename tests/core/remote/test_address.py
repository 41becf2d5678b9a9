"""Which address is accepted, which local folders stand for it, and what is said of a store that does not answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.remote.address import Address, reaching


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("outputs", "is no address"),
        ("s3://", "is no address"),
        ("simplecache::s3://bucket/runs", "is no address"),
        ("s3://key:secret@bucket/runs", "no password"),
        ("s3://bucket/runs?token=secret", "no query"),
        ("s3://bucket/../runs", "may not have . or .."),
    ],
)
def test_what_is_no_address_is_refused_without_its_secret(text: str, named: str) -> None:
    with pytest.raises(UserError, match=named) as refused:
        Address.of(text)
    assert "secret" not in str(refused.value)


def test_local_folders_stand_for_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Address.of("s3://bucket/runs/") / "digits"
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert runs.copied == Path("/cache/samebits/s3/bucket/runs/digits")
    for output, folder in [("/elsewhere", "/elsewhere"), ("s3://other/place", "outputs")]:
        monkeypatch.setenv("DDP_OUTPUT", output)
        assert runs.written == Path(folder, "s3/bucket/runs/digits")
        assert runs.superseded.parent == Path(folder, "superseded/s3/bucket/runs")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gs://bucket/runs", "gs://bucket/runs needs gcsfs: pip install gcsfs"),
        ("ss3://bucket", "no store is known as ss3"),
    ],
)
def test_a_store_that_cannot_be_had_is_named(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Address.of(text).store()


@pytest.mark.parametrize(
    ("error", "todo"),
    [
        (PermissionError("Forbidden"), "give this machine credentials"),
        (FileNotFoundError("The specified bucket does not exist"), "make the bucket"),
        (OSError(5, "InternalError"), "can be reached from here"),
    ],
)
def test_what_a_store_refuses_is_one_line_with_what_to_do(error: Exception, todo: str) -> None:
    address = Address.of("s3://bucket/runs")
    with (
        pytest.raises(UserError, match=f"^s3://bucket/runs: {type(error).__name__}: .*; .*{todo}") as refused,
        reaching(address),
    ):
        raise error
    assert refused.value.exit_code == ExitCode.RESOURCES
