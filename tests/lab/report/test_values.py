"""How the report writes numbers and durations."""

from __future__ import annotations

import pytest

from ddp_lab.report import values


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0, "0"),
        (3, "3"),
        (1234, "1,234"),
        (1.5, "1.50"),
        (0.0123, "0.0123"),
        (1234.5, "1,234"),
        (1e-7, "1.00e-07"),
        (None, values.ABSENT),
    ],
)
def test_numbers_have_three_digits(number: float | None, shown: str) -> None:
    assert values.number(number) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.5, "0.500 s"), (12.34, "12.3 s"), (65, "1 min 05 s"), (7380, "2 h 03 min")]
)
def test_durations(seconds: float, shown: str) -> None:
    assert values.duration(seconds) == shown
