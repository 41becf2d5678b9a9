"""The fleet of other people's code: its lists are whole, its record is good and on the page, and a part of it runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ddp_core.base.errors import ExitCode
from tests.foreign import page, record
from tests.foreign.driver import COLUMNS, SECONDS, Ended, judge
from tests.foreign.experiments import updates
from tests.foreign.fleet import LEFT_OUT, NAMES, SIZES, every_case
from tests.support.commands import command, without_limits

KEPT = record.rows()
ALONE = Ended(ExitCode.DONE, "", ("weights", "state"))


def test_the_page_says_what_is_kept() -> None:
    text = page.PAGE.read_text()
    assert f"{page.BEGIN}\n\n{page.between_marks(KEPT)}\n{page.END}" in text


def test_no_case_is_silent_a_fault_or_without_an_end() -> None:
    good = {*page.OUTCOMES[:3]}
    assert [key for key, row in KEPT.items() if not set(row["outcomes"].values()) <= good] == []


def test_without_shards_at_most_one_result_in_twenty_is_not_identical() -> None:
    plain = [way for way in COLUMNS if way not in page.SHARDED]
    others = [row for row in KEPT.values() for way in plain if row["outcomes"].get(way, "identical") != "identical"]
    assert len(others) <= 0.05 * len(every_case()) * len(plain)


def test_a_strict_guard_refuses_nothing_that_is_identical() -> None:
    rows = [row["outcomes"] for row in KEPT.values() if "ddp x 2, strict" in row["outcomes"]]
    assert len(rows) > 300
    assert [row for row in rows if row["ddp x 2, strict"] != row["ddp x 2"]] == []


@pytest.mark.parametrize(
    ("ended", "outcome"),
    [
        (ALONE, "identical"),
        (Ended(ExitCode.BAD_INPUT, "error: no"), "refused"),
        (Ended(ExitCode.NUMERICS, "error: loss is nan"), "refused"),
        (Ended(ExitCode.DONE, "warning: expect other bits", ("others", "state")), "warned"),
        (Ended(ExitCode.DONE, "", ("others", "state")), "SILENT"),
        (Ended(ExitCode.DONE, "", ("weights", "another")), "SILENT"),
        (Ended(ExitCode.DONE, ""), "FAULT"),
        (Ended(ExitCode.INTERNAL, "KeyError"), "FAULT"),
        (Ended(ExitCode.PEERS_LOST, ""), "FAULT"),
        (Ended(-11, ""), "FAULT"),
        (Ended(None, ""), "HANG"),
    ],
)
def test_only_the_same_bits_are_identical(ended: Ended, outcome: str) -> None:
    assert judge(ended, ALONE) == outcome
    assert judge(ALONE, Ended(ExitCode.BAD_INPUT, "error: no")) == "SILENT", "one process refuses it"


@pytest.mark.extras("pytorch_optimizer")
def test_the_lists_of_optimizers_and_schedules_are_whole() -> None:
    import pytorch_optimizer
    import torch

    kinds = [each for each in vars(torch.optim).values() if isinstance(each, type)]
    assert {kind.__name__ for kind in kinds} - {"Optimizer"} == set(NAMES["rules"]["torch"])
    assert set(torch.optim.lr_scheduler.__all__) - {"LRScheduler"} == set(updates.OF_TORCH)
    left_out = {key.partition(".")[2] for key in LEFT_OUT if key.startswith("pytorch_optimizer.")}
    assert set(pytorch_optimizer.get_supported_optimizers()) == set(NAMES["rules"]["pytorch_optimizer"]) | left_out
    curves = {
        name: pytorch_optimizer.load_lr_scheduler(name) for name in pytorch_optimizer.get_supported_lr_schedulers()
    }
    own = {name for name, kind in curves.items() if kind.__module__.startswith("pytorch_optimizer")}
    assert own == set(updates.OF_PYTORCH_OPTIMIZER)


def test_the_list_of_torchvisions_models_is_whole() -> None:
    from ddp_core.base.torchvision_import import import_torchvision

    models = import_torchvision()
    left_out = {key.partition(".")[2] for key in LEFT_OUT if key.startswith("torchvision.")}
    assert set(models.list_models(module=models)) == set(SIZES["torchvision"]) | left_out


@pytest.mark.slow
@pytest.mark.extras("timm", "transformers", "pytorch_optimizer")
@pytest.mark.timeout(900)
def test_a_part_of_the_fleet_ends_as_it_is_recorded(tmp_path: Path) -> None:
    chosen = [
        *("torchvision.squeezenet1_1", "timm.convnext_zepto_rms", "transformers.gpt2", "transformers.t5"),
        *("pytorch_optimizer.lion", "pytorch_optimizer.lamb", "torch-schedules.OneCycleLR"),
    ]
    kept = tmp_path / "foreign.json"
    words = ["--record", str(kept), "--workers", str(min(2, os.cpu_count() or 1)), "--only", *chosen]
    ended = command(*words, program=("-m", "tests.foreign"), env=without_limits(), timeout=14 * SECONDS)
    assert ended.code == 0, ended.output + ended.errors
    found = {row["case"]: row["outcomes"] for row in json.loads(kept.read_text())}
    assert found == {key: KEPT[key]["outcomes"] for key in chosen}
    again = command(*words, program=("-m", "tests.foreign"), env=without_limits())
    assert f"0 of {len(chosen)} cases to run" in again.output
