"""The findings as one HTML page without any other file."""

from __future__ import annotations

from typing import Any

import jinja2

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>ddp diagnose: {{ script }}</title>
<style>
body { font: 16px/1.5 sans-serif; max-width: 50em; margin: 2em auto; padding: 0 1em }
section { border-left: 6px solid #888; padding-left: 1em; margin: 1.5em 0 }
section.bug { border-color: #b00020 }
dt { font-weight: bold } dd { margin: 0 0 .5em }
</style>
<h1>ddp diagnose: {{ script }} {{ arguments | join(" ") }}</h1>
<p><b>{{ verdict }}</b> (ranks {{ ranks | join(", ") }}; {{ seconds }} s)</p>
{% for each in findings %}
<section class="{{ "bug" if each.severity == "bug" else "design" }}">
<h2>{{ each.title }}</h2>
<dl>
<dt>{{ each.severity }}: {{ each.name }}, on {{ each.ranks }} ranks</dt><dd>{{ each.evidence }}</dd>
{% if each.site %}<dt>where</dt><dd><code>{{ each.site }}</code></dd>{% endif %}
<dt>mend</dt><dd>{{ each.mend }}</dd>
</dl>
</section>
{% endfor %}
{% for note in notes %}<p>{{ note }}</p>{% endfor %}
</html>
"""


def page(told: dict[str, Any]) -> str:
    """The page of what `ddp diagnose --json` writes."""
    return jinja2.Environment(autoescape=True).from_string(_PAGE).render(told)
