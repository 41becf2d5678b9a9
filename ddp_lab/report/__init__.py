"""Run directories, claims and drills become one page: `python -m ddp_lab.report`.

Files are read, never live objects: `reading` and `claims` turn them into records, `families` sets runs side by side,
the `…_charts`, `plots` and `drawing` make plots, `sections` puts it together, `page` writes HTML and Markdown, and
`serving` shows them.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report, and serve it if asked to; returns the exit code."""
    from ddp_lab.report.command import main as command

    return command(arguments)
