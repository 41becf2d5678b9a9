"""The tools that measure claims; and real measurements of claims whose outcome does not depend on the machine."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_lab.claims.c04_overlap import compare_parameters
from ddp_lab.claims.c20_data_wait import leave_alone
from ddp_lab.claims.framework import suite
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.measuring import namespaces
from ddp_lab.claims.measuring.file_watch import watch_files
from ddp_lab.claims.measuring.memory_budget import train_within
from ddp_lab.claims.measuring.ranks import run_ranks
from ddp_lab.claims.measuring.training import run_command
from tests.support.processes import HANG
from tests.support.wording import refusing


def fails_on_rank_one(rank: int, world_size: int) -> int:
    if rank == 1:
        raise ValueError("rank one is unwell\nwith details")
    return rank


def never_ends(rank: int, world_size: int) -> None:
    time.sleep(600)


def test_a_failing_rank_is_named_in_one_line() -> None:
    with refusing() as caught:
        run_ranks(fails_on_rank_one, 2, timeout=HANG)
    assert "\n" not in str(caught.value)


def test_a_hard_time_limit() -> None:
    with refusing():
        run_ranks(never_ends, 1, timeout=1)


def measured(number: str, output: Path) -> dict[str, Any]:
    (known,) = suite.known_claims([number])
    content = suite.measure_one(known, Setting(quick=True, output=output, cores=2), {})
    assert content["measurements"] is not None, content["reason"]
    return content


def figure(content: dict[str, Any], start: str) -> Any:
    (value,) = [figure["value"] for figure in content["figures"] if figure["name"].startswith(start)]
    return value


def test_c03_parameters_once_and_buffers_before_each_forward(tmp_path: Path) -> None:
    content = measured("C03", tmp_path)
    assert [part["verdict"] for part in content["parts"]] == ["confirmed", "confirmed", "confirmed", "refuted"]
    assert content["verdict"] == "confirmed in part"


def test_c09_the_order_repeats_without_set_epoch_but_no_data_are_lost(tmp_path: Path) -> None:
    content = measured("C09", tmp_path)
    assert [part["verdict"] for part in content["parts"]] == ["confirmed", "refuted"]
    assert figure(content, "data that all ranks together see") == pytest.approx(100)
    assert figure(content, "with shuffle=False") is True


@pytest.mark.slow
def test_c10_torchs_sampler_repeats_samples_and_ours_does_not(tmp_path: Path) -> None:
    content = measured("C10", tmp_path)
    assert [part["verdict"] for part in content["parts"]] == ["confirmed", "refuted"]
    most = [each["value"] for each in content["figures"] if each["name"].startswith("samples repeated by torch's")]
    assert most == [0, 2]
    assert figure(content, "samples repeated by ElasticSampler") == 0
    assert figure(content, "samples left out by ElasticSampler") == 0


@pytest.mark.slow
def test_c04_parameters_change_in_the_optimizers_step_alone() -> None:
    for found in run_ranks(compare_parameters, 2, 2, timeout=HANG):
        assert found["looks during backward"] > 40
        assert found["changed during backward"] == 0
        assert found["changed after step"] == found["steps"] == 2


@pytest.mark.slow
def test_c08_ddp_sends_what_the_theory_says_and_no_weights(tmp_path: Path) -> None:
    content = measured("C08", tmp_path)
    assert content["parts"][0]["verdict"] == "confirmed"
    counted, theory = figure(content, "x 4: sent by all ranks"), figure(content, "x 4: gradients and buffers")
    assert theory <= counted <= 1.05 * theory


@pytest.mark.slow
def test_c20_workers_fetch_ahead_as_far_as_they_may() -> None:
    (found,) = run_ranks(leave_alone, 1, 2, 3, 4, timeout=HANG, with_children=True)
    assert found == {
        **{"workers": 2, "prefetch_factor": 3, "processes": 2},
        **{"main_process_fetched": False, "batches_ready": 6},
    }


def send(rank: int, world_size: int, length: int) -> float:
    """Seconds until both ranks know that a message of so many bytes has arrived."""
    message = torch.zeros(length, dtype=torch.uint8)
    dist.all_reduce(torch.zeros(1))
    began = time.perf_counter()
    dist.send(message, 1) if rank == 0 else dist.recv(message, 0)
    dist.all_reduce(torch.zeros(1))
    return time.perf_counter() - began


@pytest.mark.slow
def test_a_node_of_its_own_sends_at_the_rate_of_its_link() -> None:
    if not namespaces.available():
        pytest.skip(f"needs {namespaces.WANTED}")
    with namespaces.joined(2):
        namespaces.slow_down(0, 40)
        first, _ = run_ranks(send, 2, 1_000_000, timeout=HANG, own_nodes=True)
    # 8 Mbit take 0.2 s at 40 Mbit/s; the bucket of 128 KiB passes at once.
    assert first > 0.17
    assert not list(Path("/run/netns").glob("ddp-link-*"))


@pytest.mark.slow
def test_c12_gradients_add_up(tmp_path: Path) -> None:
    content = measured("C12", tmp_path)
    assert [part["verdict"] for part in content["parts"]] == ["confirmed", "confirmed", "refuted"]
    assert figure(content, "gradient too large by") == pytest.approx(4)
    assert figure(content, "relative difference, BatchNorm") > 1e-3


@pytest.mark.slow
def test_c13_all_ranks_give_rank_0s_loss(tmp_path: Path) -> None:
    """Only the agreement of the losses is tested: which way is faster depends on the load of the machine."""
    content = measured("C13", tmp_path)
    assert [part["verdict"] for part in content["parts"][:3]] == ["confirmed", "refuted", "confirmed"]
    differences = [each["value"] for each in content["figures"] if each["name"].startswith("largest relative")]
    assert differences[0] <= 1e-6
    assert differences[1] > 1e-3
    assert differences[2] <= 1e-6


@pytest.mark.slow
def test_c14_resumed_runs_end_with_the_same_bits_and_only_rank_0_writes(tmp_path: Path) -> None:
    content = measured("C14", tmp_path)
    assert [part["verdict"] for part in content["parts"][:3]] == ["confirmed"] * 3
    assert all(case["resumed_at"] == case["newest"] for case in content["measurements"]["cases"])


def test_files_opened_for_writing_are_seen_by_rank(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    program = f"import os; open({str(folder / 'read')!r}); os.open({str(folder / 'new')!r}, os.O_WRONLY | os.O_CREAT)"
    (folder / "read").touch()
    with watch_files("checkpoints") as watch:
        for rank, words in (("0", program), ("1", "open('/dev/null')")):
            environment = {"PYTHONPATH": watch.search_path, "RANK": rank}
            assert run_command([sys.executable, "-c", words], HANG, environment) == (0, "")
        assert watch.opened() == {0: ["new"], 1: []}


@pytest.mark.slow
def test_c15_launchers_are_interchangeable(tmp_path: Path) -> None:
    content = measured("C15", tmp_path)
    assert content["verdict"] == "confirmed"
    assert len(content["measurements"]["cases"]) == 4


@pytest.mark.slow
def test_c19_ddps_ranks_agree_and_only_exact_reduction_is_the_same_everywhere(tmp_path: Path) -> None:
    content = measured("C19", tmp_path)
    verdicts = [part["verdict"] for part in content["parts"]]
    assert verdicts == ["confirmed", "confirmed", "not measurable here", "not measurable here", "confirmed"]
    assert all(len(set(case["digests"])) == 1 for case in content["measurements"]["cases"])


@pytest.mark.slow
def test_c22_halves_train_within_a_limit_that_replicas_break() -> None:
    sizes = {"width": 1024, "steps": 3, "rate": 0.0005}
    assert train_within("whole", 2, 8, 80, **sizes)["out_of_memory"]
    assert train_within("halves", 2, 8, 80, **sizes)["losses"] == train_within("whole", 1, 8, None, **sizes)["losses"]
