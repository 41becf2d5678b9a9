"""Writes the report: index.html, one file that loads nothing."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.files import replace_file
from ddp_lab.report import values
from ddp_lab.report.charts.style import DARK, LIGHT
from ddp_lab.report.contents import Report, build_report
from ddp_lab.report.sections.claims import interval
from ddp_lab.report.sections.runs import run_anchor


def write_report(output: Path, to: Path) -> Report:
    """Read the runs, claims and drills below `output`, write the report into the folder `to`, and return it.

    Raises UserError (2) where there is no such folder, (4) where `to` cannot be written.
    """
    if not output.is_dir():
        raise UserError(f"no folder {output}; train something first (ddp train digits), or name another with --output")
    report = build_report(output)
    try:
        to.mkdir(parents=True, exist_ok=True)
        # Names of files in the report may hold bytes that are no UTF-8.
        replace_file(to / "index.html", render(report).encode(errors="backslashreplace"))
    except OSError as error:
        reason = f"cannot write {error.filename or to}: {error.strerror}"
        raise UserError(
            f"{reason}; choose another folder with --to DIR, or mend its owner and mode", ExitCode.RESOURCES
        ) from None
    return report


def render(report: Report) -> str:
    """Return the page."""
    surroundings = Environment(
        loader=PackageLoader("ddp_lab.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    surroundings.globals.update(
        plural=values.plural,
        number=values.number,
        duration=values.duration,
        tone=lambda word: values.TONES.get(str(word), "quiet"),
        light=LIGHT,
        dark=DARK,
        anchor=run_anchor,
        interval=interval,
    )
    surroundings.filters.update(markup=Markup, sentence=_sentence)
    return surroundings.get_template("page.html.j2").render(report=report)


def _sentence(words: str) -> str:
    """The words with a capital and a full stop; a name such as torch.distributed keeps its small letter."""
    first = words.split(" ", 1)[0]
    begun = words[:1].upper() + words[1:] if first.isalpha() else words
    return begun + ("" if words.endswith((".", "!", "?", ":")) else ".")
