"""The report: run directories, claims and drills on one page (`ddp report`).

`reading` turns files into records, `charts` turns records into plots, `sections` decides what each section shows,
`contents` puts the sections together, `page` fills in `templates`, and `serving` serves the result.
Only what works on files belongs here: the report never looks at a live run.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Turn all runs into one page, and show it."""
    from ddp_lab.report.command import main as command

    return command(arguments)
