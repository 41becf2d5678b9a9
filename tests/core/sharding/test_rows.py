"""Parameters in rows on two ranks: state, names, groups and memory of the parts, and what is refused."""

from __future__ import annotations

from tests.distributed import rows_cases as cases
from tests.support.processes import run_processes


def test_a_training_in_rows_is_that_of_one_process_and_mixes_with_nothing() -> None:
    run_processes(cases.trains_as_one_process, 2)


def test_parts_have_names_kinds_and_memory_of_their_own() -> None:
    run_processes(cases.is_seen_by_its_parts, 2)


def test_what_does_not_fit_is_refused_on_all_ranks() -> None:
    run_processes(cases.refuses, 2)
