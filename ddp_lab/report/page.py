"""Writes the report: index.html (one file that loads nothing), report.md, and the plots as SVG."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.files import replace_file
from ddp_core.base.shown import as_code, in_markdown
from ddp_lab.report import values
from ddp_lab.report.charts.plot import standing_alone
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
        (to / "plots").mkdir(parents=True, exist_ok=True)
        for plot in report.plots:
            replace_file(to / "plots" / f"{plot.name}.svg", standing_alone(plot.svg))
        for name, template in (("report.md", "report.md.j2"), ("index.html", "page.html.j2")):
            # Names of files in it may hold bytes that are no UTF-8.
            replace_file(to / name, render(report, template).encode(errors="backslashreplace"))
    except OSError as error:
        reason = f"cannot write {error.filename or to}: {error.strerror}"
        raise UserError(
            f"{reason}; choose another folder with --to DIR, or mend its owner and mode", ExitCode.RESOURCES
        ) from None
    return report


def render(report: Report, template: str) -> str:
    """Return a template filled in: `page.html.j2` or `report.md.j2`."""
    loader = PackageLoader("ddp_lab.report", "templates")
    html = template.endswith(".html.j2")
    surroundings = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=None if html else _in_markdown,
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
    surroundings.filters.update(markup=Markup, code=lambda words: Markup(as_code(words)), sentence=_sentence)
    return surroundings.get_template(template).render(report=report)


def _sentence(words: str) -> str:
    """The words with a capital and a full stop; a name such as torch.distributed keeps its small letter."""
    first = words.split(" ", 1)[0]
    begun = words[:1].upper() + words[1:] if first.isalpha() else words
    return begun + ("" if words.endswith((".", "!", "?", ":")) else ".")


def _in_markdown(value: object) -> Markup:
    """What the Markdown shows of a value; it has no other way in."""
    return value if isinstance(value, Markup) else Markup(in_markdown(str(value)))
