"""The protocol of live recovery, in every sequence of losses and arrivals of a small launch.

The model has what the product has around the functions of membership.py: processes that train in groups, launchers that
each know of their own processes, a store with compare-and-set, a run directory with a fence. A move is whatever one of
them can do next, in any order; a loss can come between any two. An exchange is the place where ranks depend on each
other: a rank finishes a step when all ranks of its group have sent their part, also one that has died since.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import pytest

from ddp_core.distributed import membership
from ddp_core.distributed.membership import Held, Membership

NODES = (("a", "b"), ("c", "n"))
"""The processes of each launcher; n comes later."""
SAVED = 1
"""The step after which a checkpoint is saved."""

Doing = Literal["absent", "waits", "meets", "trains", "done", "out", "dead"]


@dataclass(frozen=True)
class Process:
    """What one process does, and how far it is; of a dead one, how far it was."""

    doing: Doing = "waits"
    number: int = -1
    held: Held | None = None
    has_sent: bool = False


@dataclass(frozen=True)
class World:
    """The state of everything at one moment."""

    processes: tuple[tuple[str, Process], ...]
    now: Membership
    losses: int
    """How many processes or launchers may still be lost."""
    last: int
    """The steps of the whole run."""
    here: frozenset[tuple[int, str, Held | None]] = frozenset()
    """Who has come to meet in which group, and what it held then."""
    left: frozenset[tuple[int, str]] = frozenset()
    asked: frozenset[str] = frozenset()
    launchers: tuple[bool, ...] = (True, True)
    decided: tuple[tuple[Membership, Membership] | None, ...] = (None, None)
    """What each launcher has read and will write next."""
    fence: int = -1
    told: tuple[int, ...] = ()
    """The steps in the metrics, without what was rolled back."""
    saved: int | None = None
    groups: tuple[Membership, ...] = field(default=())

    def of(self, name: str) -> Process:
        return dict(self.processes)[name]

    def put(self, name: str, **changes: object) -> World:
        processes = dict(self.processes)
        processes[name] = replace(processes[name], **changes)  # type: ignore[arg-type]
        return replace(self, processes=tuple(processes.items()))

    def group(self, number: int) -> Membership:
        return self.groups[number]


def beginning(losses: int, last: int, arrives: bool) -> World:
    first = Membership(0, ("a", "b", "c"))
    processes = {name: Process("waits") for name in first.members}
    if arrives:
        processes["n"] = Process("absent")
    return World(tuple(processes.items()), first, losses, last, groups=(first,))


def moves(world: World) -> Iterator[World]:
    """Every state that one move leads to; losses are in `losses_from`."""
    for launcher, lives in enumerate(world.launchers):
        if lives:
            yield from decisions(world, launcher)
    for name, process in world.processes:
        if process.doing == "absent":
            yield replace(world.put(name, doing="waits"), asked=world.asked | {name})
        elif process.doing in ("waits", "meets"):
            yield from meetings(world, name, process)
        elif process.doing == "trains":
            yield from training(world, name, process)


def losses_from(world: World) -> Iterator[World]:
    if not world.losses:
        return
    fewer = replace(world, losses=world.losses - 1)
    for name, process in world.processes:
        if process.doing in ("waits", "meets", "trains"):
            yield fewer.put(name, doing="dead")
    for launcher, names in enumerate(NODES):
        if all(world.launchers):
            # The kernel ends the workers of a launcher that dies. With the last one, all end.
            after = fewer
            for name in names:
                after = after.put(name, doing="dead") if name in dict(world.processes) else after
            alive = tuple(lives and number != launcher for number, lives in enumerate(world.launchers))
            yield replace(after, launchers=alive)


def decisions(world: World, launcher: int) -> Iterator[World]:
    """A launcher looks, or writes what it has decided; between the two, another may write."""
    pending = world.decided[launcher]
    if pending is not None:
        before, new = pending
        world = replace(world, decided=tuple(None if n == launcher else each for n, each in enumerate(world.decided)))
        if world.now == before:
            world = replace(world, now=new, groups=(*world.groups, new))
        yield world
        return
    known = [names for number, names in enumerate(NODES) if number == launcher or not world.launchers[number]]
    ended = {name for names in known for name in names if is_dead(world, name)}
    left = {name for number, name in world.left if number == world.now.number}
    if any(process.doing == "done" for _, process in world.processes):
        return
    if ended & world.asked:
        yield replace(world, asked=world.asked - ended)
        return
    following = membership.next_membership(world.now, ended, left, world.asked)
    if following is not None:
        made = (world.now, following)
        yield replace(world, decided=tuple(made if n == launcher else each for n, each in enumerate(world.decided)))


def meetings(world: World, name: str, process: Process) -> Iterator[World]:
    if membership.must_leave(process.number, world.now):
        if name in world.now.members:
            here = world.here | {(world.now.number, name, process.held)}
            yield replace(world.put(name, doing="meets", number=world.now.number), here=here)
        elif process.number >= 0:
            yield world.put(name, doing="out")
        return
    if process.doing != "meets":
        return
    members = world.group(process.number).members
    offered = {member: held for number, member, held in world.here if number == process.number}
    if len(offered) == len(members):
        yield entering(world, name, [offered[member] for member in members])
    if any(is_gone(world, member, process.number) for member in members):
        yield leaving(world, name, process)


def entering(world: World, name: str, offered: list[Held | None]) -> World:
    """All have met, and this process has taken the newest state; its donor may have died since."""
    holder = membership.newest_holder(offered)
    newest, mine = None if holder is None else offered[holder], world.of(name)
    if newest is None or membership.goes_back_to_checkpoint(newest, world.saved):
        newest = Held(world.saved or 0, True)
    kept = max(world.saved or 0, mine.held.step if mine.held is not None else 0)
    assert newest.step >= kept, "a step is done again though its state lives, or is in a checkpoint"
    world = world.put(name, doing="trains", held=newest, has_sent=False)
    if name == world.group(mine.number).members[0]:
        told = tuple(step for step in world.told if step <= newest.step)
        world = replace(world, fence=mine.number, told=told)
    return world


def training(world: World, name: str, process: Process) -> Iterator[World]:
    members, held = world.group(process.number).members, process.held
    assert held is not None
    if name == members[0] and not held.is_settled:
        yield settled(world, name, held)
    elif held.step == world.last:
        if held.is_settled or world.of(members[0]).doing == "done":
            yield world.put(name, doing="done")
    elif not process.has_sent:
        yield world.put(name, has_sent=True)
        if world.asked - set(world.now.members):
            yield leaving(world, name, process)  # it makes room
    elif all(has_sent(world, member, process) for member in members):
        yield world.put(name, held=Held(held.step + 1, False), has_sent=False)
    if any(is_gone(world, member, process.number) for member in members if member != name):
        yield leaving(world, name, process)


def settled(world: World, name: str, held: Held) -> World:
    """What follows an update on rank 0, which tells and saves, unless a newer rank 0 has taken the fence."""
    if world.fence != world.of(name).number:
        return world.put(name, doing="out")
    if held.step not in world.told:
        world = replace(world, told=(*world.told, held.step))
    if held.step == SAVED:
        world = replace(world, saved=held.step)
    return world.put(name, held=Held(held.step, True))


def leaving(world: World, name: str, process: Process) -> World:
    return replace(world.put(name, doing="waits", has_sent=False), left=world.left | {(process.number, name)})


def is_dead(world: World, name: str) -> bool:
    return any(known == name and process.doing == "dead" for known, process in world.processes)


def is_gone(world: World, name: str, number: int) -> bool:
    """Whether an exchange with this member of a group fails."""
    return world.of(name).doing in ("dead", "out") or (number, name) in world.left


def has_sent(world: World, name: str, process: Process) -> bool:
    """Whether this member has sent its part of the step that `process` is in."""
    other = world.of(name)
    if other.number != process.number or other.held is None or process.held is None:
        return False
    return other.held.step > process.held.step or (other.held.step == process.held.step and other.has_sent)


def check(world: World) -> None:
    """What holds in every state."""
    assert world.told == tuple(range(1, len(world.told) + 1)), "a step was told twice, or left out"
    numbers = [each.number for each in world.groups]
    assert numbers == list(range(len(numbers))), "two memberships have the same number"


def check_end(world: World) -> None:
    """What holds where nothing can happen any more."""
    doing = {process.doing for _, process in world.processes}
    if "done" in doing:
        # Whoever is left when rank 0 is done is started again by its launcher, and finds the run completed.
        assert world.told == tuple(range(1, world.last + 1)), "the run is done, but not all of it was told"
    else:
        assert all(world.of(name).doing == "dead" for name in world.now.members), "a member waits for ever"


def explore(losses: int, last: int, arrives: bool = False, launchers: int = 2) -> int:
    """Run through everything that can happen; the number of states."""
    # A single launcher knows of all processes, as one does that outlives the other.
    first = replace(beginning(losses, last, arrives), launchers=(True, launchers == 2))
    seen, waiting = {first}, [first]
    while waiting:
        world = waiting.pop()
        check(world)
        following = list(moves(world))
        if not following:
            check_end(world)
        for after in (*following, *losses_from(world)):
            if after not in seen:
                seen.add(after)
                waiting.append(after)
    return len(seen)


@pytest.mark.parametrize(
    ("losses", "last", "arrives", "launchers"),
    [
        pytest.param(1, 2, False, 2, id="a-loss"),
        pytest.param(0, 1, True, 2, id="an-arrival"),
        pytest.param(1, 1, True, 1, id="a-loss-and-an-arrival", marks=pytest.mark.slow),
        pytest.param(2, 1, False, 2, id="two-losses", marks=pytest.mark.slow),
    ],
)
def test_every_sequence(losses: int, last: int, arrives: bool, launchers: int) -> None:
    assert explore(losses, last, arrives, launchers) > 1000


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("newest_holder", lambda held: next((rank for rank, each in enumerate(held) if each is not None), None)),
        ("must_leave", lambda mine, now: mine < 0),
        ("next_membership", lambda now, ended, left, waiting: None),
        ("goes_back_to_checkpoint", lambda newest, checkpoint: newest is None),
    ],
)
def test_a_wrong_rule_is_found(name: str, wrong: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, name, wrong)
    with pytest.raises(AssertionError):
        explore(losses=1, last=2)


def test_a_membership_is_read_back() -> None:
    made = Membership(3, ("0.0", "1.2"))
    assert Membership.from_text(made.to_text()) == made
