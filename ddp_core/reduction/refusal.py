"""What a reduction raises where it finds that the result depends on the layout, or that ranks train other models."""

from __future__ import annotations

from ddp_core.base.errors import UserError


class DependsOnLayout(ValueError):
    """The step just computed depends on the layout; says on what, and what to do."""


class OtherWeights(UserError, ValueError):
    """Ranks that should train one model have other weights."""
