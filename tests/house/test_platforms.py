"""Where ddp cannot run it says so in one line; played by a Python without the modules that Windows lacks."""

from __future__ import annotations

from tests.support.commands import Ended, command

# torch is not there either, since it would not believe that this is Windows.
AS_ON_WINDOWS = "import sys; sys.platform = 'win32'; sys.modules |= dict.fromkeys(('fcntl', 'resource', 'torch')); "


def on_windows(program: str) -> Ended:
    return command(program=("-c", AS_ON_WINDOWS + program))


def test_windows_is_refused_in_one_line_that_names_the_way_out() -> None:
    ended = on_windows("from ddp_core.cli import main; sys.exit(main(['train', 'digits']))")
    assert (ended.code, ended.output) == (2, "")
    (line,) = ended.errors.splitlines()
    assert line.startswith("ddp: error: ddp does not run on Windows itself")
    assert "WSL2" in line


def test_a_name_that_windows_cannot_load_says_why() -> None:
    ended = on_windows("from ddp_core import Run")
    assert ended.errors.splitlines()[-1].startswith("ImportError: ddp does not run on Windows itself")
    assert "import of fcntl" not in ended.errors


def test_without_torch_one_line_says_that_its_build_is_the_users_to_choose() -> None:
    program = (
        "import sys; sys.modules['torch'] = None; from ddp_core.cli import main; sys.exit(main(['train', 'digits']))"
    )
    ended = command(program=("-c", program))
    assert (ended.code, ended.output, ended.errors.count("\n")) == (2, "", 1)
    assert "torch is not installed in this environment" in ended.errors
    assert "docs/how-to/install.md" in ended.errors
