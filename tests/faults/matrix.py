"""The fault matrix: the tests that produce each fault of docs/reference/faults.md, and the limits of its times.

`record_row` records what a test has seen, and fails the test where that took longer than the row allows.
`python -m tests.faults.document` writes the records into the table of docs/reference/faults.md.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.faults.scenarios import SCENARIOS

RECORDS = "DDP_FAULT_RECORDS"
"""Environment variable: the folder that records are written to; without it none are."""

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "faults.md"

NOTICED = "noticed"
"""From the fault to the first message of a process that is left."""
AGAIN = "trains again"
"""From the fault to the next step after it."""
LATE = "noticed after --timeout"
"""From the moment at which nothing had been heard for --timeout to the message."""
COMMAND = "command"
"""From the start of the command's Python to its end, without the time in which it waited for a core."""
REFUSAL = "refusal"
"""From the start of `ddp` in a process that has loaded torch to its end."""

LIMITS: dict[int, dict[str, float]] = {
    1: {NOTICED: 1, AGAIN: 10},
    2: {NOTICED: 1, AGAIN: 10},
    3: {NOTICED: 2},
    4: {"workers gone": 2},
    5: {LATE: 1},
    6: {LATE: 1},
    21: {REFUSAL: 5},
    24: {COMMAND: 2},
    26: {LATE: 1},
    30: {COMMAND: 1},
}
"""The most seconds that a time may take, by row and by what is measured."""

IN_CONTAINERS = {2, 3, 5, 6, 7, 8, 16, 22, 23, 28, 31, 32}
"""The rows that drills in containers produce; all but 6 and 16 are produced on processes, too."""

TESTS: dict[str, dict[str, tuple[int, ...]]] = {
    "tests/faults/test_losses.py": {
        "test_a_killed_worker_is_replaced": (1,),
        "test_a_killed_worker_is_named_where_its_peer_left_sooner": (1,),
        "test_twenty_kills_are_twenty_recoveries": (1,),
        "test_workers_leave_with_their_launcher": (4,),
        "test_a_stopped_worker_is_replaced": (5,),
        "test_a_slow_worker_is_named_not_killed": (7,),
        "test_an_exception_is_told_once_by_the_rank_that_raised": (15,),
    },
    "tests/faults/test_nodes.py": {
        "test_a_rendezvous_that_stays_away_ends_in_6": (3,),
        "test_an_exception_on_one_node_ends_both": (15,),
    },
    "tests/faults/test_saves.py": {
        "test_a_full_disk_of_one_rank_ends_the_run_and_loses_one_save": (8,),
        "test_a_damaged_checkpoint_is_passed_over": (10, 11),
        "test_no_valid_checkpoint_is_the_end": (10,),
        "test_a_malicious_checkpoint_is_refused_not_run": (13,),
    },
    "tests/core/checkpoint/test_checkpoint_faults.py": {
        "test_a_file_limit_is_a_full_disk_and_the_checkpoint_before_loads": (8,),
        "test_a_full_disk_is_seen_before_and_during_the_write": (8,),
        "test_a_kill_at_any_point_of_a_save_leaves_the_newest_complete_checkpoint": (9,),
        "test_many_kills_at_random_times_lose_no_committed_checkpoint": (9,),
        "test_a_damaged_checkpoint_falls_back_to_the_one_before_and_says_so": (10,),
        "test_nothing_but_damaged_checkpoints_is_the_end_of_it": (10,),
        "test_any_flipped_bit_of_the_data_is_found_before_it_is_loaded": (11,),
        "test_the_checkpoint_of_another_model_is_refused_with_the_difference": (12,),
        "test_a_malicious_pickle_with_a_valid_manifest_is_refused_not_run": (13,),
        "test_a_read_only_directory_is_met_before_the_first_step": (22,),
    },
    "tests/core/checkpoint/test_parts.py": {
        "test_a_kill_of_either_rank_at_any_point_leaves_the_newest_complete_checkpoint": (9,),
    },
    "tests/core/test_bad_input.py": {
        "test_a_checkpoint_of_another_experiment_is_refused": (12,),
        "test_bad_input_is_refused_before_anything_is_started": (18, 21, 23),
        "test_a_batch_that_does_not_divide_among_ranks_names_the_nearest_that_do": (20,),
        "test_an_output_that_cannot_be_written": (22,),
    },
    "tests/faults/test_numbers.py": {
        "test_a_nan_on_one_rank_stops_all_before_the_update": (14,),
        "test_a_nan_is_skipped_on_all_ranks_when_told_to": (14,),
        "test_uneven_shares_end_together_with_the_same_weights": (17,),
        "test_held_out_samples_count_once_on_every_layout": (19,),
        "test_what_differs_on_one_rank_is_found_before_training": (27,),
    },
    "tests/distributed/test_layouts.py": {
        "test_plain_reduction_with_a_ragged_end_leaves_nobody_waiting": (17,),
    },
    "tests/faults/test_places.py": {
        "test_a_rendezvous_on_a_port_in_use": (24,),
        "test_a_process_group_on_a_port_in_use": (24,),
        "test_a_second_run_in_a_directory_is_told_who_is_there": (30,),
        "test_a_second_launch_beside_a_live_run_trains_only_where_it_is_told_to": (30,),
    },
    "tests/distributed/test_process_group.py": {
        "test_an_interface_that_does_not_exist_is_named_with_those_that_do": (25,),
        "test_a_missing_rank_is_named_within_the_timeout": (26,),
        "test_a_rank_that_is_there_twice_is_named": (26,),
    },
    "tests/faults/test_requests.py": {
        "test_a_stopped_run_has_lost_nothing_and_goes_on_elsewhere": (28, 32),
    },
    "tests/core/distributed/test_stop.py": {
        "test_a_stopped_run_ends_elsewhere_as_if_nothing_had_happened": (28, 29),
        "test_a_schedulers_early_signal_and_a_time_limit_stop_alike": (28,),
        "test_a_signal_to_every_process_at_once_asks_once": (28,),
        "test_a_second_interrupt_leaves_at_once": (29,),
    },
    "tests/core/record/test_run_lock.py": {
        "test_the_second_run_in_a_directory_is_told_who_holds_it": (30,),
    },
    "tests/faults/test_disks.py": {
        "test_a_run_whose_shared_memory_is_filled_by_others_says_so_at_once": (31,),
        "test_a_run_whose_directory_is_removed_says_so": (33,),
        "test_a_run_whose_file_system_is_shut_down_says_so": (34,),
        "test_a_run_whose_file_system_becomes_read_only_says_so": (34,),
        "test_a_disk_without_an_answer_is_told_and_waited_for": (34,),
        "test_too_few_open_files_are_refused_before_they_run_out": (35,),
    },
    "tests/distributed/test_resume.py": {
        "test_killed_three_times_on_other_layouts": (32,),
    },
    "tests/core/base/test_process.py": {
        "test_process_1_waits_for_what_is_orphaned": (36,),
        "test_process_1_passes_signals_on": (36,),
        "test_a_launcher_that_is_process_1_leaves_no_zombie": (36,),
    },
}
"""The tests on processes by file, each with its rows; those of the scenarios of processes come to these."""


@dataclass(frozen=True)
class Row:
    """One fault, in the words of the page.

    `where`: P if it is tested on processes, D in containers. `tests`: those on processes, as FILE::FUNCTION, or with a
    [PARAMETER]. `limits`: the most seconds that a time may take, by what is measured; `record_row` has these names.
    """

    number: int
    fault: str
    expected: str

    @property
    def limits(self) -> Mapping[str, float]:
        return LIMITS.get(self.number, {})

    @property
    def tests(self) -> list[str]:
        named = [f"{file}::{name}" for file, tests in TESTS.items() for name in tests if self.number in tests[name]]
        follows = "tests/faults/test_nodes.py::test_what_must_follow_does"
        return named + [f"{follows}[{each.name}]" for each in SCENARIOS if each.row == self.number]

    @property
    def where(self) -> str:
        return ", ".join(["P"] * bool(self.tests) + ["D"] * (self.number in IN_CONTAINERS))


def _rows() -> tuple[Row, ...]:
    lines = re.findall(r"^\| (\d+) \| (.*?) \| (.*?) \|", PAGE.read_text(), re.MULTILINE)
    return tuple(Row(int(number), fault, expected) for number, fault, expected in lines)


ROWS = _rows()


def record_row(row: int, outcome: str, times: Mapping[str, float] | None = None, by: str | None = None) -> None:
    """Record in a few words what a run has done about fault number `row`, and how many seconds what took.

    `by`: the test or drill that has seen the outcome; by default the test that runs now.

    Raises AssertionError where a time is above its limit in the row. Without a folder for the records nothing is done:
    seconds tell something about the program only on a machine with little else to do, where they are recorded.
    """
    if folder := os.environ.get(RECORDS):
        test = by or os.environ.get("PYTEST_CURRENT_TEST", "").partition(" (")[0]
        seconds = {what: round(took, 3) for what, took in (times or {}).items()}
        record = {"row": row, "outcome": outcome, "seconds": seconds, "test": test, "measured": here_and_now()}
        Path(folder).mkdir(parents=True, exist_ok=True)
        name = re.sub(r"\W+", "-", test.rpartition("::")[2]) or uuid.uuid4().hex
        (Path(folder) / f"row-{row:02d}-{name}.json").write_text(json.dumps(record) + "\n")
        assert not (late := above_limits(row, seconds)), f"row {row}: {late}"


def rows_of(test: str) -> list[int]:
    """The rows that name this test, whose name may have parameters."""
    return [row.number for row in ROWS if {test, test.partition("[")[0]} & set(row.tests)]


def above_limits(row: int, seconds: Mapping[str, float]) -> dict[str, float]:
    """Those of the times that are above their limits in the row."""
    limits = ROWS[row - 1].limits
    return {what: took for what, took in seconds.items() if took > limits.get(what, float("inf"))}


def here_and_now() -> dict[str, Any]:
    """The date, this machine, how busy it is, and which commit was tried."""
    from benchmarks.record import machine
    from ddp_core.record.environment import describe_code

    about, code = machine(), describe_code()
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    return {
        "date": day,
        **{name: about[name] for name in ("cores", "cpu", "torch")},
        "load": round(os.getloadavg()[0], 1),
        "commit": f"{str(code['commit'])[:7]}{', changed since' if code['dirty'] else ''}",
    }
