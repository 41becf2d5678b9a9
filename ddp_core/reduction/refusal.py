"""What a reduction raises where it finds, in a step, that the result would depend on the layout."""

from __future__ import annotations


class DependsOnLayout(ValueError):
    """The step just computed depends on the layout; says on what, and what to do."""
