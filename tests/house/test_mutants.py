"""What `make mutants` says of its results: the score, the page, and the survivors that are argued away."""

from __future__ import annotations

import json
import re
import signal
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

from benchmarks import mutants_page
from benchmarks.mutants import ACCEPTED, Accepted, Mutant, outcome_of

KEPT = json.loads(mutants_page.KEPT.read_text())


def test_the_page_says_what_was_measured() -> None:
    page = mutants_page.PAGE.read_text()
    assert f"{mutants_page.BEGIN}\n\n{mutants_page.between_marks(KEPT)}\n{mutants_page.END}" in page


def test_a_module_that_has_changed_since_its_mutants_were_run_is_stale() -> None:
    module = "ddp_core/config/cut.py"
    counts = dict.fromkeys(mutants_page.COLUMNS, 0)
    digests = (mutants_page.digest_of(module), "0" * 64, None)
    found = [mutants_page.stale({"modules": {module: counts | {"sha256": digest}}}) for digest in digests]
    assert found == [[], [module], [module]]


def test_the_mutations_made_by_hand_name_files_and_tests_that_exist() -> None:
    tables = mutants_page.PAGE.read_text().partition("## Mutations made by hand")[2]
    rows = [line.split(" | ") for line in tables.splitlines() if line.startswith("| ") and "`" in line]
    assert len(rows) >= 23
    texts: dict[str, str] = defaultdict(str)
    for path in (mutants_page.ROOT / "tests").rglob("test_*.py"):
        texts[path.name] += path.read_text()  # two folders may have files of one name
    test_file = ""
    for _, files, tests in rows:
        for file in re.findall(r"`(\S+\.py)`", files):
            assert any((mutants_page.ROOT / place / file).exists() for place in (".", "ddp_core")), file
        for found, test in re.findall(r"`(?:\S*/)?(\w*(?:\.py)?)::(\w+)`", tests):
            test_file = found or test_file
            assert f"def {test}(" in texts[test_file], f"{test_file}::{test}"


def test_the_record_has_the_reasons_of_the_file_of_accepted_mutants() -> None:
    accepted = Accepted(tomllib.loads(ACCEPTED.read_text()))
    assert all(reason.strip() for reason in accepted.reasons.values())
    survivors = KEPT["results"]["survivors"]
    assert [one["accepted"] for one in survivors] == [accepted.reason(one) for one in survivors]


def test_a_mutant_is_accepted_by_its_name_its_function_or_its_change() -> None:
    accepted = Accepted({"a.f: x = 1 -> x = 2": "one", "a.g": "all of it", "strict=True -> strict=False": "a guard"})

    def reason(function: str, before: str, after: str) -> str | None:
        name = f"{function}: {before} -> {after}"
        return accepted.reason({"name": name, "before": before, "after": after})

    assert reason("a.f", "x = 1", "x = 2") == "one"
    assert reason("a.f", "x = 1", "x = None") is None
    assert reason("a.g", "y = 1", "y = 2") == "all of it"
    assert reason("b.h", "zip(x, y, strict=True)", "zip(x, y, strict=False)") == "a guard"
    assert reason("b.h", "zip(x, y, strict=True)", "zip(x, None, strict=True)") is None
    assert Accepted({"a.g": "all of it", "p -> q": "a change"}).unknown([]) == ["a.g"]


def test_what_was_not_run_or_is_accepted_is_no_part_of_the_score() -> None:
    counts = {"mutants": 20, "run": 12, "killed": 6, "timeout": 1, "survived": 4, "accepted": 2, "not covered": 1}
    *_, total = mutants_page.rows({"modules": {"one.py": counts, "two.py": counts}})
    assert total == ("all", "40", "24", "12", "2", "8", "4", "2", "70.0%")


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (None, None),
        (0, "survived"),
        (1, "killed"),
        (-signal.SIGSEGV, "killed"),
        (-signal.SIGXCPU, "timeout"),
        (33, "not covered"),
        # What mutmut's worker ends with where pytest could not be run at all.
        (255, "error"),
    ],
)
def test_only_a_failing_test_kills(code: int | None, outcome: str | None) -> None:
    assert outcome_of(code) == outcome


def test_a_mutant_knows_its_function() -> None:
    for key, function in {
        "ddp_core.reduction.tree.x_fold__mutmut_7": "fold",
        "ddp_core.reduction.exact.x__own_node__mutmut_1": "_own_node",
        "ddp_core.reduction.tree.xǁGradientTreeǁpush__mutmut_2": "GradientTree.push",
        "ddp_core.reduction.tree.xǁGradientTreeǁ__init____mutmut_12": "GradientTree.__init__",
    }.items():
        assert Mutant(key, Path("ddp_core/reduction/tree.py"), None).function == function
