"""Installed packages as pins, and how others differ from them."""

from __future__ import annotations

import platform
from importlib.metadata import version

from ddp_core.record.pins import differences, pins

HERE = {"python": platform.python_version(), "packages": {"torch": version("torch"), "numpy": version("numpy")}}


def test_pins_are_requirements_of_what_is_installed() -> None:
    lines = pins(HERE).splitlines()
    assert f"numpy=={version('numpy')}" in lines
    assert [line for line in lines if line.startswith("torch==")] == [f"torch=={version('torch')}"]
    assert lines[2:] == sorted(lines[2:], key=lambda line: line.removeprefix("# ").partition("==")[0])
    assert differences(pins(HERE), HERE).startswith("all ")


def test_what_pip_could_not_find_stands_in_a_comment() -> None:
    """This project itself is installed from its folder."""
    (own,) = (line for line in pins(HERE).splitlines() if "ddp-core" in line)
    assert own == f"# ddp-core=={version('ddp-core')}"


def test_the_versions_of_the_record_come_first() -> None:
    record = HERE | {"python": "3.11.0", "packages": {"torch": "2.12.0+cu130", "numpy": "2.0.0", "pillow": None}}
    text = pins(record)
    assert text.startswith("# Python 3.11.0: python -m pip install -r pins.txt --extra-index-url ")
    assert "https://download.pytorch.org/whl/cu130\n" in text
    assert "\ntorch==2.12.0+cu130\n" in text
    said = differences(text, record)
    assert f"torch 2.12.0+cu130 there, {version('torch')} here; numpy 2.0.0 there, {version('numpy')} here" in said
    assert "other" not in said


def test_the_rest_is_counted() -> None:
    text = f"# a comment\ntorch=={version('torch')}\nSci_kit.Learn==0.1\nnothing-like-this==1\n# mine==3\n"
    assert differences(text, HERE) == "3 packages of 4 differ or are missing here"
    assert differences(text, HERE | {"python": "3.9.0"}) == (
        f"python 3.9.0 there, {platform.python_version()} here; 3 other packages of 4 differ or are missing here"
    )
