"""The fault matrix as a table: each fault, what a run must do about it, and the tests that produce it.

`record_row` records what a test has seen, and fails the test where that took longer than the row allows.
`python -m tests.faults.document` writes the records into the table of docs/reference/faults.md.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.faults.scenarios import SCENARIOS

RECORDS = "DDP_FAULT_RECORDS"
"""Environment variable: the folder that records are written to; without it none are."""

_LOSSES = "tests/faults/test_losses.py"
_NODES = "tests/faults/test_nodes.py"
_SAVES = "tests/faults/test_saves.py"
_NUMBERS = "tests/faults/test_numbers.py"
_REQUESTS = "tests/faults/test_requests.py"
_PLACES = "tests/faults/test_places.py"
_DISKS = "tests/faults/test_disks.py"
_CHECKPOINTS = "tests/core/checkpoint/test_checkpoint_faults.py"
_PARTS = "tests/core/checkpoint/test_parts.py"
_PROCESS = "tests/core/base/test_process.py"
_INPUT = "tests/core/test_bad_input.py"
_STOP = "tests/core/distributed/test_stop.py"
_GROUP = "tests/distributed/test_process_group.py"
_LAYOUTS = "tests/distributed/test_layouts.py"


def _scenarios(row: int) -> tuple[str, ...]:
    """The tests of those scenarios of processes that are of this row."""
    return tuple(f"{_NODES}::test_what_must_follow_does[{each.name}]" for each in SCENARIOS if each.row == row)


@dataclass(frozen=True)
class Row:
    """One fault.

    `where`: P if it is tested on processes, D in containers. `tests`: those on processes, as FILE::FUNCTION, or with a
    [PARAMETER]. `limits`: the most seconds that a time may take, by what is measured; `record_row` has these names.
    """

    number: int
    fault: str
    expected: str
    where: str
    tests: tuple[str, ...] = ()
    limits: Mapping[str, float] = field(default_factory=dict)


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


ROWS = (
    Row(
        1,
        "a worker is killed (SIGKILL)",
        "noticed within 1 s, rank and node named; trains again within 10 s, each sample once",
        "P",
        (
            f"{_LOSSES}::test_a_killed_worker_is_replaced",
            f"{_LOSSES}::test_a_killed_worker_is_named_where_its_peer_left_sooner",
            f"{_LOSSES}::test_twenty_kills_are_twenty_recoveries",
            *_scenarios(1),
        ),
        limits={NOTICED: 1, AGAIN: 10},
    ),
    Row(
        2,
        "a node is killed, launcher and workers",
        "noticed within 1 s; the others train again within 10 s on what is left; the node is taken in when it is back",
        "P, D",
        _scenarios(2),
        limits={NOTICED: 1, AGAIN: 10},
    ),
    Row(
        3,
        "the rendezvous is killed",
        "noticed within 2 s; goes on when it is started again, else 6",
        "P, D",
        (*_scenarios(3), f"{_NODES}::test_a_rendezvous_that_stays_away_ends_in_6"),
        limits={NOTICED: 2},
    ),
    Row(
        4,
        "only the launcher is killed",
        "its workers are gone within 2 s",
        "P",
        (f"{_LOSSES}::test_workers_leave_with_their_launcher",),
        limits={"workers gone": 2},
    ),
    Row(
        5,
        "a worker or a node is stopped (SIGSTOP, docker pause)",
        "noticed at --timeout + 1 s; the run goes on; once awake, the stale one can write nothing",
        "P, D",
        (
            f"{_LOSSES}::test_a_stopped_worker_is_replaced",
            *_scenarios(5),
        ),
        limits={LATE: 1},
    ),
    Row(6, "the network is cut in two", "as 5; the minority exits 6 and writes nothing", "D", limits={LATE: 1}),
    Row(
        7,
        "a slow worker, a slow link",
        "nobody is taken for dead; the slowest rank is named with its p95 step time",
        "P, D",
        (
            f"{_LOSSES}::test_a_slow_worker_is_named_not_killed",
            f"{_LOSSES}::test_a_throttled_worker_is_named_not_killed",
        ),
    ),
    Row(
        8,
        "the disk fills up while saving",
        "4, with what is needed and what there is; the checkpoint before loads",
        "P, D",
        (
            f"{_SAVES}::test_a_full_disk_of_one_rank_ends_the_run_and_loses_one_save",
            f"{_CHECKPOINTS}::test_a_file_limit_is_a_full_disk_and_the_checkpoint_before_loads",
            f"{_CHECKPOINTS}::test_a_full_disk_is_seen_before_and_during_the_write",
        ),
    ),
    Row(
        9,
        "SIGKILL at every point of a save",
        "the newest complete checkpoint loads; leftovers are swept",
        "P",
        (
            f"{_CHECKPOINTS}::test_a_kill_at_any_point_of_a_save_leaves_the_newest_complete_checkpoint",
            f"{_CHECKPOINTS}::test_many_kills_at_random_times_lose_no_committed_checkpoint",
            f"{_PARTS}::test_a_kill_of_either_rank_at_any_point_leaves_the_newest_complete_checkpoint",
        ),
    ),
    Row(
        10,
        "a truncated or empty checkpoint",
        "the newest valid one is loaded, and it is said; none valid: 3",
        "P",
        (
            f"{_SAVES}::test_a_damaged_checkpoint_is_passed_over",
            f"{_SAVES}::test_no_valid_checkpoint_is_the_end",
            f"{_CHECKPOINTS}::test_a_damaged_checkpoint_falls_back_to_the_one_before_and_says_so",
            f"{_CHECKPOINTS}::test_nothing_but_damaged_checkpoints_is_the_end_of_it",
        ),
    ),
    Row(
        11,
        "one flipped bit in a checkpoint",
        "found by its digest before anything is loaded, then as 10",
        "P",
        (
            f"{_SAVES}::test_a_damaged_checkpoint_is_passed_over",
            f"{_CHECKPOINTS}::test_any_flipped_bit_of_the_data_is_found_before_it_is_loaded",
        ),
    ),
    Row(
        12,
        "the checkpoint of another model or experiment",
        "3, with the difference, before any tensor is loaded",
        "P",
        (
            f"{_INPUT}::test_a_checkpoint_of_another_experiment_is_refused",
            f"{_CHECKPOINTS}::test_the_checkpoint_of_another_model_is_refused_with_the_difference",
        ),
    ),
    Row(
        13,
        "a malicious pickle as a checkpoint",
        "refused, not run: 3",
        "P",
        (
            f"{_SAVES}::test_a_malicious_checkpoint_is_refused_not_run",
            f"{_CHECKPOINTS}::test_a_malicious_pickle_with_a_valid_manifest_is_refused_not_run",
        ),
    ),
    Row(
        14,
        "a NaN or Inf loss on one rank",
        "all ranks stop before the optimizer step: 5, naming rank, step and sample ids; or skip the step when told to",
        "P",
        (
            f"{_NUMBERS}::test_a_nan_on_one_rank_stops_all_before_the_update",
            f"{_NUMBERS}::test_a_nan_that_is_read_only_later_is_in_no_checkpoint",
            f"{_NUMBERS}::test_a_nan_is_skipped_on_all_ranks_when_told_to",
        ),
    ),
    Row(
        15,
        "an exception on one rank",
        "that rank's traceback once, the others in one line; 2 or 6",
        "P",
        (
            f"{_LOSSES}::test_an_exception_is_told_once_by_the_rank_that_raised",
            f"{_NODES}::test_an_exception_on_one_node_ends_both",
        ),
    ),
    Row(16, "out of memory: the kernel kills", "4, naming the node", "D"),
    Row(
        17,
        "uneven data per rank",
        "equal step counts by construction; nothing hangs",
        "P",
        (
            f"{_NUMBERS}::test_uneven_shares_end_together_with_the_same_weights",
            f"{_LAYOUTS}::test_plain_reduction_with_a_ragged_end_leaves_nobody_waiting",
        ),
    ),
    Row(
        18,
        "fewer samples than the global batch or the ranks need",
        "2, before a process is started",
        "P",
        (f"{_INPUT}::test_bad_input_is_refused_before_anything_is_started",),
    ),
    Row(
        19,
        "a held-out set that does not divide (1, 3, 5, 10, 101 samples)",
        "each sample counted once; the same metric on every layout",
        "P",
        (f"{_NUMBERS}::test_held_out_samples_count_once_on_every_layout",),
    ),
    Row(
        20,
        "a global batch that the ranks cannot share",
        "2, with the nearest sizes that they can",
        "P",
        (f"{_INPUT}::test_a_batch_that_does_not_divide_among_ranks_names_the_nearest_that_do",),
    ),
    Row(
        21,
        "a data set that is missing or incomplete",
        "2 within 5 s, one message, with the command that fetches it",
        "P",
        (f"{_INPUT}::test_bad_input_is_refused_before_anything_is_started",),
        limits={REFUSAL: 5},
    ),
    Row(
        22,
        "an output directory that cannot be written",
        "4 before step 0",
        "P, D",
        (
            f"{_INPUT}::test_an_output_that_cannot_be_written",
            f"{_CHECKPOINTS}::test_a_read_only_directory_is_met_before_the_first_step",
        ),
    ),
    Row(
        23,
        "more GPUs asked for than there are",
        "4, with how many were found and what would run here",
        "P, D",
        (f"{_INPUT}::test_bad_input_is_refused_before_anything_is_started",),
    ),
    Row(
        24,
        "a port in use",
        "4 within 2 s",
        "P",
        (f"{_PLACES}::test_a_rendezvous_on_a_port_in_use", f"{_PLACES}::test_a_process_group_on_a_port_in_use"),
        limits={COMMAND: 2},
    ),
    Row(
        25,
        "a network interface that does not exist",
        "2, listing those that do",
        "P",
        (f"{_GROUP}::test_an_interface_that_does_not_exist_is_named_with_those_that_do",),
    ),
    Row(
        26,
        "a peer missing at the start, or a rank started twice",
        "6 when --timeout has passed (+ 1 s), naming the missing rank; 2 for the one that is there twice",
        "P",
        (
            f"{_GROUP}::test_a_missing_rank_is_named_within_the_timeout",
            f"{_GROUP}::test_a_rank_that_is_there_twice_is_named",
        ),
        limits={LATE: 1},
    ),
    Row(
        27,
        "other code or configuration on one rank",
        "2 before training: digests are compared at the start",
        "P",
        (f"{_NUMBERS}::test_what_differs_on_one_rank_is_found_before_training",),
    ),
    Row(
        28,
        "a request to stop: SIGTERM, docker stop, a scheduler's early signal, a time limit",
        "all ranks finish the step, save and leave with 75; nothing is lost",
        "P, D",
        (
            f"{_REQUESTS}::test_a_stopped_run_has_lost_nothing_and_goes_on_elsewhere",
            *_scenarios(28),
            f"{_STOP}::test_a_stopped_run_ends_elsewhere_as_if_nothing_had_happened",
            f"{_STOP}::test_a_schedulers_early_signal_and_a_time_limit_stop_alike",
            f"{_STOP}::test_a_signal_to_every_process_at_once_asks_once",
        ),
    ),
    Row(
        29,
        "Ctrl-C, once and twice",
        "as 28; at the second all leave at once; no process is left",
        "P",
        (
            f"{_STOP}::test_a_stopped_run_ends_elsewhere_as_if_nothing_had_happened",
            f"{_STOP}::test_a_second_interrupt_leaves_at_once",
        ),
    ),
    Row(
        30,
        "two runs in one directory",
        "the second exits 2 within 1 s and names the holder; a second launch is told so, unless --resume never",
        "P",
        (
            f"{_PLACES}::test_a_second_run_in_a_directory_is_told_who_is_there",
            f"{_PLACES}::test_a_second_launch_beside_a_live_run_trains_only_where_it_is_told_to",
            "tests/core/record/test_run_lock.py::test_the_second_run_in_a_directory_is_told_who_holds_it",
        ),
        limits={COMMAND: 1},
    ),
    Row(
        31,
        "/dev/shm is too small, or filled up while a run trains",
        "4 at once, naming the setting",
        "P, D",
        (f"{_DISKS}::test_a_run_whose_shared_memory_is_filled_by_others_says_so_at_once",),
    ),
    Row(
        32,
        "a resume on another layout",
        "goes on; the same bits in exact mode",
        "P, D",
        (
            f"{_REQUESTS}::test_a_stopped_run_has_lost_nothing_and_goes_on_elsewhere",
            "tests/distributed/test_resume.py::test_killed_three_times_on_other_layouts",
        ),
    ),
    Row(
        33,
        "the run directory is removed or renamed while it trains",
        "4, naming the path and ENOENT",
        "P",
        (f"{_DISKS}::test_a_run_whose_directory_is_removed_says_so",),
    ),
    Row(
        34,
        "the disk fails: its file system is shut down, becomes read-only, or gives no answer",
        "4, naming the path and EIO or EROFS; without an answer, the waiting ranks are named, and go on when it comes",
        "P",
        (
            f"{_DISKS}::test_a_run_whose_file_system_is_shut_down_says_so",
            f"{_DISKS}::test_a_run_whose_file_system_becomes_read_only_says_so",
            f"{_DISKS}::test_a_disk_without_an_answer_is_told_and_waited_for",
        ),
    ),
    Row(
        35,
        "a limit of open files (ulimit -n) that is too low",
        "4 before step 0, with how many are needed and the limit",
        "P",
        (f"{_DISKS}::test_too_few_open_files_are_refused_before_they_run_out",),
    ),
    Row(
        36,
        "`ddp` is process 1 of a container without an init, and processes are orphaned",
        "none stays a zombie; signals reach the run, and its exit code is the container's",
        "P",
        (
            f"{_PROCESS}::test_process_1_waits_for_what_is_orphaned",
            f"{_PROCESS}::test_process_1_passes_signals_on",
            f"{_PROCESS}::test_a_launcher_that_is_process_1_leaves_no_zombie",
        ),
    ),
)


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
