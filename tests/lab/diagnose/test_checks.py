"""What is read from traces: each trace is written by hand here, and says one thing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from ddp_core.base.errors import UserError
from ddp_lab.diagnose import across, checks
from ddp_lab.diagnose.differences import not_repeatable, not_restored
from ddp_lab.diagnose.findings import KINDS, Finding, by_harm
from ddp_lab.diagnose.trace import Event, Pass, Rank, Run, Step, read_run
from ddp_lab.diagnose.updates import end_of
from tests.support.wording import refusing


def step(number: int = 1, rank: int = 0, world: int = 1, **changes: Any) -> Step:
    """A step whose gradient is that of its own samples, and in which nothing is wrong."""
    event = {
        **{"event": "step", "step": number, "rank": rank, "world": world, "distributed": True, "site": "train.py:9"},
        **{"gradients": {"w": {"digest": f"g{number}", "own": [1.0, 2.0], "reduced": [1.0, 2.0]}}},
        **{"weights_before": {"w": f"w{number - 1}"}, "weights": {"w": f"w{number}"}, "state": f"s{number}"},
        **{"rates": [0.1], "generators": {}, "seed": 0, "sharded": False, "settings": {}, "optimizer": 0},
    }
    events = {kind: changes.pop(kind) for kind in ("loss", "clip", "schedule") if kind in changes}
    samples = changes.pop("samples", [f"{rank}-{number}-{index}" for index in range(2)])
    forward = {"samples": samples, "sync": None, "draws": {}, "generators": {}, "buffers": {}}
    return Step(event | changes, {"forward": [forward | changes.pop("forward", {})]} | events)


def run(*ranks: Sequence[Step], passes: Sequence[Sequence[Pass]] = ()) -> Run:
    return Run(
        [
            Rank({"seed": 1}, {}, number, list(steps), list(passes[number]) if passes else [])
            for number, steps in enumerate(ranks)
        ]
    )


def names(findings: Iterator[Finding] | list[Finding]) -> list[str]:
    return [each.name for each in findings]


def two(**changes: Any) -> Run:
    """Two ranks of which the second has other values."""
    return run([step(world=2)], [step(rank=1, world=2, **changes)])


def loss(weight: float, elements: int, micro: int = 0) -> dict[str, Any]:
    return {
        **{"site": "train.py:5", "call": 0, "function": "cross_entropy", "micro": micro},
        **{"weight": weight, "elements": elements},
    }


MOVE = {"site": "train.py:12", "kind": "LinearLR"}
OTHER = {"w": {"digest": "other", "own": None, "reduced": None}}
"""Another gradient than that of `step`."""


def test_nothing_is_found_in_a_run_without_a_fault() -> None:
    assert checks.of_run(two()) == []


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"weights_before": {"w": "other"}}, ["weights-start-differently"]),
        ({"gradients": OTHER}, ["gradients-differ"]),
        # What follows from a bug is not named beside it.
        ({"gradients": OTHER, "weights": {"w": "other"}}, ["gradients-differ"]),
        ({"rates": [0.2], "weights": {"w": "other"}}, ["rates-differ"]),
        ({"weights": {"w": "other"}}, ["weights-drift"]),
        ({"rates": [0.2]}, ["rates-differ"]),
        ({"samples": ["0-1-1", "0-1-0"]}, ["same-samples"]),
        ({"weights": {"w": "other"}, "sharded": True}, ["sharded"]),
    ],
)
def test_what_differs_between_ranks_has_a_name(changes: dict[str, Any], found: list[str]) -> None:
    assert names(checks.of_run(two(**changes))) == found


def test_weights_that_are_made_equal_again_are_local_sgd() -> None:
    first = [step(world=2), step(2, world=2)]
    second = [step(rank=1, world=2, gradients=OTHER, weights={"w": "x"}), step(2, rank=1, world=2, gradients=OTHER)]
    assert names(checks.of_run(run(first, second))) == ["local-steps"]


def test_elements_that_weigh_more_on_one_rank() -> None:
    even = run([step(world=2, loss=[loss(0.1, 10)])], [step(rank=1, world=2, loss=[loss(0.1001, 4)])])
    assert checks.of_run(even) == []
    uneven = run([step(world=2, loss=[loss(0.1, 10)])], [step(rank=1, world=2, loss=[loss(0.25, 4)])])
    (found,) = checks.of_run(uneven)
    assert found.name == "unlike-weights"
    assert "weighs 0.25 in micro-batch 1 of rank 1 (4 elements), and 0.1 in micro-batch 1 of rank 0" in found.evidence


def with_one_process(seen: dict[str, list[float]], **changes: Any) -> Finding:
    """What is found of one step; `both` takes the same words."""
    one, *ranks = both(seen, **changes)
    return across.with_one_process(run([one]), run(*([each] for each in ranks)), changes.get("draws", False))


def both(seen: dict[str, list[float]], number: int = 1, **changes: Any) -> list[Step]:
    """The step of one process, then of two ranks that have used these gradients; it has [1, 2] and [3] of them all."""

    def gradients(used: dict[str, list[float]]) -> dict[str, Any]:
        return {
            name: {"digest": str(each), "own": [scale * element for element in each], "reduced": each}
            for name, each in used.items()
        }

    def updates(used: dict[str, list[float]], rate: float) -> dict[str, Any]:
        return {name: [-rate * element for element in each] for name, each in used.items()}

    rate, unseen, _ = changes.pop("rate", 0.1), changes.pop("unseen", []), changes.pop("draws", False)
    used, draws, scale = {"w": [1.0, 2.0], "b": [3.0], "k": [1e-9]}, changes.pop("drawn", {}), changes.pop("scale", 1.0)
    buffers, batches = changes.pop("buffers", {}), changes.pop("batches", [])
    one = step(number, **{"samples": ["a", "b"], "gradients": gradients(used), "updates": updates(used, 0.1)} | changes)
    one.of("forward")[0].update(draws=draws, buffers=buffers)
    did = {"gradients": gradients(seen), "updates": updates(seen, rate)}
    ranks = [step(number, rank=rank, world=2, samples=["ab"[rank]], **did) for rank in range(2)]
    ranks[0].events = {**ranks[0].events, "unseen": unseen, "batch": batches}
    return [one, *ranks]


@pytest.mark.parametrize(
    ("seen", "more", "name", "evidence"),
    [
        ({"w": [1.0, 2.0], "b": [3.0]}, {}, "remains-samples", "to the bit"),
        ({"w": [1.0, 2.001], "b": [3.0]}, {}, "remains-rounding", "up to rounding, 0.0004 of"),
        ({"w": [1.0, 2.0]}, {"draws": True}, "remains-random-numbers", "the gradient without dropout"),
        ({"w": [2.0, 4.0], "b": [6.0]}, {}, "step-grows-with-ranks", "of w is 2 times that"),
        ({"w": [0.5, 1.0], "b": [1.5]}, {}, "step-grows-with-ranks", "of w is 0.5 times that"),
        ({"w": [1.0, 2.0], "b": [6.0]}, {}, "reduced-unlike", "of b is 2 times that"),
        ({"w": [2.0, 1.0], "b": [3.0]}, {}, "other-gradient", "of w is no multiple of that"),
        ({"w": [0.7, 1.4], "b": [2.1]}, {}, "other-gradient", "of w is 0.7 times that"),
        ({"w": [-2.0, -4.0], "b": [-6.0]}, {}, "other-gradient", "of w is -2 times that"),
        ({"w": [0.0, 0.0], "b": [3.0]}, {}, "other-gradient", "of w is no multiple of that"),
        ({"w": [1.0, 2.0]}, {"rate": 0.2}, "other-update", "w moves otherwise"),
        # What moves by design, as the settings of the optimizer say, is said by them.
        ({"w": [1.0, 2.0]}, {"rate": 0.2, "rates": [0.2]}, "remains-samples", ""),
        ({"w": [1.0, 2.0]}, {"buffers": {"n.running_var": "1"}}, "remains-samples", "running statistics"),
        # A gradient that is rounding alone, and own gradients with a scaler's factor in them.
        ({"w": [1.0, 2.0], "k": [-1e-8]}, {}, "remains-rounding", "(2 parameters)"),
        ({"w": [2.0, 1.0], "b": [3.0]}, {"scale": 65536.0}, "other-gradient", "of w is no multiple of that"),
        ({"w": [1.0, 2.001], "b": [3.0]}, {"scale": 65536.0}, "remains-rounding", "up to rounding, 0.0004 of"),
        # A next batch may be drawn between forward and step.
        ({"w": [1.0, 2.0]}, {"generators": {"torch": "moved on"}}, "remains-samples", ""),
        ({"w": [1.0, 2.0]}, {"unseen": [{"site": "train.py:4"}]}, "remains-samples", ""),
        ({"w": [0.5, 1.0]}, {"unseen": [{"site": "train.py:4"}]}, "exchange-without-gradient", ""),
    ],
)
def test_the_step_is_that_of_one_process_with_the_samples_of_all_ranks(
    seen: dict[str, list[float]], more: dict[str, Any], name: str, evidence: str
) -> None:
    found = with_one_process(seen, **more)
    assert found.name == name
    assert evidence in found.evidence
    assert found.name != "exchange-without-gradient" or found.site == "train.py:4"


@pytest.mark.parametrize(
    ("seen", "changes", "said"),
    [
        ([1.0, 2.0], {"weights_before": {"w": "other"}}, "begins with other weights"),
        ([1.0, 2.0], {"samples": ["a", "c"]}, "could not be given the samples"),
        ([1.0, 2.0], {"drawn": {"torch": ("1", "2")}}, "random numbers"),
        ([1.0, 2.0], {"gradients": {}}, "not known"),
        ([2.0, 1.0], {"generators": {"torch": "moved on"}}, "random numbers are drawn between forward and step"),
        ([2.0, 1.0], {"batches": [{"ids": [0, 1], "rows": ["first time"]}]}, "not one row for each sample"),
    ],
)
def test_where_nothing_is_proved_that_is_said(seen: list[float], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=f"not proved: .*{said}"):
        with_one_process({"w": seen}, **changes)


def test_a_later_step_of_which_nothing_is_proved_ends_what_is_proved() -> None:
    doubtful = both({"w": [2.0, 1.0]}, 2, generators={"torch": "moved on"})
    one, *ranks = (run(list(steps)).ranks[0].steps for steps in zip(both({"w": [1.0, 2.0]}), doubtful, strict=True))
    found = across.with_one_process(run(one), run(*ranks), draws=False)
    assert found.name == "remains-samples"
    assert found.evidence.startswith("step 1: ")
    assert "; step 2 is not proved: the gradient is another" in found.evidence


def test_a_schedule_that_counts_samples_is_by_design() -> None:
    """Each rank has a batch as large as that of one alone, and two moves on two ranks are two steps on one."""
    alone = run([step(number, schedule=[MOVE] * (number > 1), rates=[1 / number]) for number in range(1, 5)])
    ranks = [
        [step(1, rank, 2, rates=[1.0]), step(2, rank, 2, schedule=[MOVE, MOVE], rates=[1 / 3])] for rank in range(2)
    ]
    assert "schedule-counts-samples" in names(across.with_ranks(alone, run(*ranks)))
    ranks[0][1].event["rates"] = [1 / 5]
    assert "schedule-steps-with-ranks" in names(across.with_ranks(alone, run(*ranks)))


@pytest.mark.parametrize(("ends", "found"), [((24, 24), ["schedule-too-long"]), ((24, 12), []), ((20, 20), [])])
def test_a_schedule_of_one_ranks_epochs_is_too_long_on_more(ends: tuple[int, int], found: list[str]) -> None:
    runs = []
    for ranks, end in zip((1, 2), ends, strict=True):
        steps = [[step(n, rank, ranks, schedule=[MOVE] * (n > 1)) for n in (1, 2)] for rank in range(ranks)]
        runs.append(run(*steps, passes=[[one_pass(range(8), length=12 // ranks)]] * ranks))
        runs[-1].ranks[0].events["stopped"] = [{"ends": [end]}]
    assert [name for name in names(across.with_ranks(*runs)) if name.startswith("schedule")] == found


@pytest.mark.parametrize(
    ("kind", "words", "end"),
    [
        (lr_scheduler.OneCycleLR, {"max_lr": 0.1, "total_steps": 36}, 36),
        (lr_scheduler.CosineAnnealingLR, {"T_max": 24}, 24),
        (lr_scheduler.LinearLR, {"start_factor": 1.0, "end_factor": 0.1, "total_iters": 24}, 24),
        (lr_scheduler.LambdaLR, {"lr_lambda": lambda step: max(0, 1 - step / 24)}, 24),
        (lr_scheduler.ExponentialLR, {"gamma": 0.9}, 0),
        (lr_scheduler.StepLR, {"step_size": 30}, 0),
    ],
)
def test_a_schedules_end_is_where_its_rate_is_the_lowest(kind: Any, words: dict[str, Any], end: int) -> None:
    schedule = kind(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1, 0.9), **words)
    for _ in range(3):
        schedule.optimizer.step()
        schedule.step()
    assert end_of(schedule) == end
    assert end_of(object()) == 0, "a script's own schedule may have no optimizer"


def test_a_gradient_is_not_finite_where_that_of_one_process_is() -> None:
    assert with_one_process({"w": [1.0, float("inf")], "b": [3.0]}).name == "not-finite"
    infinite = {"w": {"digest": "i", "own": [1.0, 2.0], "reduced": [1.0, float("inf")]}}
    with pytest.raises(UserError, match="not known"):  # one process diverges, too
        with_one_process({"w": [1.0, float("nan")]}, gradients=infinite)


def one_pass(ids: Sequence[int], **changes: Any) -> Pass:
    begin = {
        **{"loader": 0, "pass": 0, "length": 2, "samples": 8, "sampler": "DistributedSampler", "shuffles": True},
        **{"site": "train.py:3", "offered": None},
    }
    batch = {"ids": list(ids), "rows": [f"row-{each}" for each in ids], "worker": 0, "draws": {}}
    return Pass(begin | changes, {"batch": [batch], "end": [{}], "forward": [{}]})


@pytest.mark.parametrize(
    ("samples", "first", "second", "found"),
    [
        (8, [0, 2, 4, 6], [1, 3, 5, 7], []),
        (8, [0, 2, 4, 6], [0, 3, 5, 7], ["samples-twice-or-never"]),
        (8, [0, 2, 4], [1, 3, 5], ["left-out"]),
        (7, [0, 2, 4, 6], [1, 3, 5, 0], ["padding"]),
    ],
)
def test_samples_that_an_epoch_has_twice_or_never(
    samples: int, first: list[int], second: list[int], found: list[str]
) -> None:
    alone = run([step(samples=[])], passes=[[one_pass(range(samples), samples=samples)]])
    passes = [[one_pass(ids, samples=samples)] for ids in (first, second)]
    ranks = run(*([step(rank=rank, samples=[])] for rank in range(2)), passes=passes)
    assert names(across.with_ranks(alone, ranks)) == found


def test_what_a_resume_does_not_bring_back() -> None:
    straight, stopped = run([step(), step(2), step(3)]), run([step()])
    assert list(not_restored(straight, [stopped], run([step(2), step(3)]))) == []
    changed = step(2, weights_before={"w": "x"}, state="x", rates=[0.2], samples=["0-1-0", "0-1-1"])
    found = list(not_restored(straight, [stopped], run([changed])))
    assert names(found) == ["resume-weights", "resume-optimizer", "resume-rate", "resume-samples"]
    assert found[-1].evidence.endswith("has the samples of step 1")


def test_a_resume_that_goes_wrong_on_another_rank_or_a_second_time() -> None:
    straight = run(*[[step(number, rank, 2) for number in (1, 2, 3)] for rank in (0, 1)])
    stopped, resumed = (run(*[[step(number, rank, 2)] for rank in (0, 1)]) for number in (1, 2))
    forgetful = run([step(2, 0, 2)], [step(2, 1, 2, state="x")])
    (found,) = not_restored(straight, [stopped], forgetful)
    assert (found.name, found.evidence.split(": ")[0]) == ("resume-optimizer", "after 1 steps and a resume, on rank 1")
    again = run(*[[step(3, rank, 2, samples=[f"{rank}-2-{index}" for index in range(2)])] for rank in (0, 1)])
    assert list(not_restored(straight, [stopped], resumed)) == []
    (found,) = not_restored(straight, [stopped, resumed], again)
    assert found.evidence == "after 2 steps and 2 resumes: step 3 has the samples of step 2"


def test_settings_of_a_parameter_that_depend_on_ranks() -> None:
    settings = {"w": {"elements": 6, "weight_decay": 0.0}, "b": {"elements": 2, "weight_decay": 0.0}}
    decays = {"w": {"elements": 6, "weight_decay": 0.5}}
    one, two = run([step(settings=settings)]), run([step(world=2, settings=settings | decays)], [step(rank=1, world=2)])
    assert [each for each in across.with_ranks(one, two) if each.name == "settings-depend-on-ranks"] == [
        Finding(
            "settings-depend-on-ranks",
            "w has weight_decay 0.5 on 2 ranks, weight_decay 0.0 on one (1 of 2 parameters, 6 numbers)",
            *(2, "train.py:9"),
        )
    ]


def evaluated(ids: Sequence[int], begin: dict[str, Any] | None = None, **events: list[Event]) -> Pass:
    one = one_pass(ids, loader=1, **(begin or {}))
    one.events.update({"forward": [], "evaluation": [{"site": "train.py:20"}]} | events)
    return one


def offering(samples: int) -> Pass:
    return evaluated([0, 1], {"offered": samples})


def figures(means: Sequence[tuple[float, int]], *printed: str) -> Pass:
    found = [{"site": "train.py:21", "value": value, "elements": elements} for value, elements in means]
    return evaluated([0, 1], figure=found, printed=[{"numbers": list(printed)}])


def drawing(*states: int) -> Pass:
    """A pass of which each worker has loaded a batch, and drawn from a generator that began in a state."""
    one = one_pass([])
    one.events["batch"] = [
        {"ids": [worker], "rows": [str(worker)], "worker": worker, "draws": {"torch": (f"{state}", f"{state} moved")}}
        for worker, state in enumerate(states)
    ]
    return one


FIRST = one_pass([3, 1, 0, 2])
TOGETHER = {"trims": False}
"""Ranks have put their figures together."""


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ([FIRST, one_pass([3, 1, 0, 2], **{"pass": 1})], None, ["same-order-each-epoch"]),
        ([FIRST, one_pass([2, 1, 0, 3], **{"pass": 1})], None, []),
        ([one_pass([0, 1])], [one_pass([2, 3], length=1)], ["unlike-batches"]),
        ([evaluated([0, 2])], [evaluated([1, 3])], ["evaluates-a-share"]),
        ([evaluated([0, 1])], [evaluated([1, 0])], []),
        ([evaluated([0, 2], exchange=[TOGETHER])], [evaluated([1, 3], exchange=[TOGETHER])], []),
        ([evaluated([0, 2], end=[])], [evaluated([1, 3])], []),
        ([evaluated([0, 2], exchange=[TOGETHER])], [evaluated([1, 0], exchange=[TOGETHER])], ["evaluates-twice"]),
        ([evaluated([0, 2], exchange=[TOGETHER])], [evaluated([1, 0], exchange=[{"trims": True}])], []),
        ([evaluated([0, 1], exchange=[TOGETHER])], [evaluated([0, 1])], []),
        ([offering(3)], [offering(2)], ["evaluates-not-all"]),
        ([offering(2)], [offering(2)], []),
        ([figures([(1.0, 8), (2.0, 2)], "1.500")], [figures([(1.0, 8), (2.0, 2)])], ["mean-of-means"]),
        ([figures([(1.0, 8), (2.0, 2)], "150.0")], [figures([(1.0, 8), (2.0, 2)])], ["mean-of-means"]),
        ([figures([(1.0, 8), (2.0, 2)], "1.200")], [figures([(1.0, 8), (2.0, 2)])], []),
        ([figures([(1.0, 8), (2.0, 2)], "1.5")], [figures([(1.0, 8), (2.0, 2)])], []),
        ([figures([(1.0, 8), (2.0, 8)], "1.500")], [figures([(1.0, 8), (2.0, 8)])], []),
        ([figures([(1.0, 8)], "1.500")], [figures([(2.0, 4)])], ["mean-of-means"]),
        ([drawing(0, 1)], [drawing(2, 3)], []),
        ([drawing(0, 0)], [drawing(2, 3)], ["workers-draw-alike"]),
        ([drawing(0, 1)], [drawing(0, 1)], ["same-random-numbers"]),
    ],
)
def test_passes_of_two_ranks(first: list[Pass], second: list[Pass] | None, found: list[str]) -> None:
    """Orders that repeat, unlike numbers of batches, and evaluations of which each rank has a share."""
    passes = [first, second or first]
    assert names(checks.of_run(run([step(world=2)], [step(rank=1, world=2)], passes=passes))) == found


def test_two_equal_runs_that_differ_are_a_bug_only_with_a_seed() -> None:
    one, other = run([step(seed=5)]), run([step(seed=5, samples=["x"])])
    assert names(not_repeatable(one, one)) == []
    assert names(not_repeatable(one, other)) == ["not-repeatable"]
    unseeded = run([step(seed=1)])
    assert names(not_repeatable(unseeded, other)) == ["no-seed"]


def test_findings_come_once_by_harm_from_the_fewest_ranks() -> None:
    found = [Finding("padding", "", 2), Finding("rates-differ", "", 3), Finding("rates-differ", "", 2)]
    assert [(each.name, each.ranks) for each in by_harm(found)] == [("rates-differ", 2), ("padding", 2)]
    bugs = [kind.is_bug for kind in KINDS.values()]
    assert bugs == sorted(bugs, reverse=True), "bugs stand before what is by design"


def test_a_line_that_was_cut_off_is_no_event_and_two_same_ranks_are_told(tmp_path: Path) -> None:
    line = json.dumps(step().event) + "\n"
    (tmp_path / "1.jsonl").write_text(line + '{"event": "st')
    assert len(read_run(tmp_path).ranks[0].steps) == 1
    (tmp_path / "2.jsonl").write_text(line)
    with refusing():
        read_run(tmp_path)
