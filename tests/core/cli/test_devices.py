"""Which devices a request takes on machines with no, too few and enough GPUs, and what is said about it."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_core.cli.devices import check_gpus, choose_layout
from ddp_core.config.layout import Layout
from ddp_core.config.options import Asked
from ddp_core.distributed.world import World
from tests.support.wording import refusing


def layout_on(monkeypatch: pytest.MonkeyPatch, gpus: int, **asked: Any) -> Layout:
    monkeypatch.setattr("ddp_core.cli.devices.gpus_here", lambda: gpus)
    return choose_layout(Asked(experiment="digits", **asked), World.from_environment())


@pytest.mark.parametrize(
    ("gpus", "asked", "label"),
    [
        (0, {}, "single-cpu"),
        (1, {}, "single-cuda"),
        (0, {"layout": "ddp"}, "ddp-1x2-cpu"),
        (1, {"layout": "ddp"}, "ddp-1x1-cuda"),
        (4, {"layout": "ddp"}, "ddp-1x4-cuda"),
        (4, {"layout": "dp", "nproc_per_node": 2}, "dp-2-cuda"),
        (4, {"layout": "ddp", "device": "cpu"}, "ddp-1x2-cpu"),
        (1, {"layout": "ddp", "nproc_per_node": 4, "device": "cuda"}, "ddp-1x4-cuda"),
    ],
)
def test_gpus_are_taken_where_there_is_one_for_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], gpus: int, asked: dict[str, Any], label: str
) -> None:
    assert layout_on(monkeypatch, gpus, **asked).label == label
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("kind", "what"), [("ddp", "ranks"), ("dp", "replicas")])
def test_too_few_gpus_are_left_alone_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str, what: str
) -> None:
    assert layout_on(monkeypatch, 1, layout=kind, nproc_per_node=4).device == "cpu"
    said = f"on the CPU: 4 {what}, but 1 GPU is here; with --device cuda they share it\n"
    assert capsys.readouterr().err == said


def test_a_launcher_outside_may_show_each_rank_one_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in World(1, 4, 1, 4, store_host="here", store_port=1).to_environment().items():
        monkeypatch.setenv(name, value)
    assert layout_on(monkeypatch, 1, layout="ddp").device == "cuda"
    assert capsys.readouterr().err == ""
    check_gpus(Layout(kind="ddp", device="cuda", nproc_per_node=4), "exact", "auto", World.from_environment())


def test_what_a_launchers_variables_change_is_not_done_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in World().to_environment().items():
        monkeypatch.setenv(name, value)
    assert layout_on(monkeypatch, 0, layout="dp", nproc_per_node=2).nproc_per_node == 2
    with refusing():
        layout_on(monkeypatch, 0, layout="ddp", nproc_per_node=2)


@pytest.mark.parametrize(
    ("gpus", "kind", "reduction", "backend"),
    [
        (0, "single", "exact", "auto"),
        (0, "ddp", "exact", "gloo"),
        (1, "dp", "plain", "auto"),
        (2, "ddp", "exact", "nccl"),
    ],
)
def test_what_cannot_run_is_refused_with_what_would(
    monkeypatch: pytest.MonkeyPatch, gpus: int, kind: Any, reduction: Any, backend: str
) -> None:
    monkeypatch.setattr("ddp_core.cli.devices.gpus_here", lambda: gpus)
    layout = Layout(kind=kind, device="cuda", nproc_per_node=1 if kind == "single" else 4)
    with refusing():
        check_gpus(layout, reduction, backend, World())


def test_replicas_that_share_gpus_are_said_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ddp_core.cli.devices.gpus_here", lambda: 2)
    check_gpus(Layout(kind="dp", device="cuda", nproc_per_node=4), "exact", "auto", World())
    said = "4 replicas, but 2 GPUs are here: they are shared, which is no faster than --nproc-per-node 2\n"
    assert capsys.readouterr().err == said
