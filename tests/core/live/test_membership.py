"""The protocol of live recovery, in every sequence of losses, arrivals and requests to leave of a small launch.

The model has what the product has around the functions of membership.py: nodes, each with a launcher that knows of its
own processes and sees another launcher end, a store with notes and compare-and-set, a run directory with a fence. A
move is whatever one of them can do next, in any order; a loss can come between any two. A node can also be unplugged,
so that no launcher sees its end, or be silent for a while, so that another launcher takes it for lost though it lives.
An exchange is the place where ranks depend on each other: a rank finishes a step when all ranks of its group have sent
their part, also one that has died since.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import pytest

from ddp_core.live import membership
from ddp_core.live.membership import Membership, Progress

A, B, C, LATE = "0.0@0", "1.0@0", "0.0@1", "1.0@1"
"""Three processes on two nodes, and one that comes later."""
NODES = ((A, B), (C, LATE))
SAVED = 1
"""The step after which a checkpoint is saved."""

Doing = Literal["absent", "waits", "meets", "trains", "done", "out", "dead"]
Launcher = Literal["lives", "ended", "unplugged"]
"""The others see that a launcher has ended, but not that its node was unplugged."""


class Process(NamedTuple):
    """What one process does, and how far it is; of a dead one, how far it was."""

    doing: Doing = "waits"
    number: int = -1
    held: Progress | None = None
    has_sent: bool = False


class World(NamedTuple):
    """The state of everything at one moment."""

    processes: tuple[tuple[str, Process], ...]
    now: Membership
    losses: int
    """How many processes or nodes may still be lost."""
    last: int
    """The steps of the whole run."""
    here: frozenset[tuple[int, str, Progress | None]] = frozenset()
    """Who has come to meet in which group, and what it held then."""
    left: frozenset[tuple[int, str, int]] = frozenset()
    """Who has left which group, and the steps that it held then."""
    asked: frozenset[str] = frozenset()
    room: frozenset[tuple[int, int]] = frozenset()
    """In which groups, after which step, a rank has sent with its part that all are to meet anew."""
    ended: frozenset[str] = frozenset()
    """Whose end a launcher has noted."""
    requests: int = 0
    """How many nodes may still be asked to leave."""
    leaving: frozenset[int] = frozenset()
    mistakes: int = 0
    """How often a rank or a node may still be taken for lost though it lives."""
    launchers: tuple[Launcher, ...] = ("lives", "lives")
    decided: tuple[tuple[Membership, Membership] | None, ...] = (None, None)
    """What each launcher has read and will write next."""
    must_go_on: bool = True
    """Whether nothing has happened that may let all start again: a loss, or a mistake."""
    starts_again: bool = False
    """All start again from the newest checkpoint, which is not part of this model."""
    fence: int = -1
    told: tuple[int, ...] = ()
    """The steps in the metrics, without what was rolled back."""
    saved: int | None = None
    groups: tuple[Membership, ...] = ()
    """Those that somebody may still look at."""

    def of(self, name: str) -> Process:
        return next(process for known, process in self.processes if known == name)

    def put(self, name: str, **changes: Any) -> World:
        changed = self.of(name)._replace(**changes)
        return self._replace(processes=tuple((known, changed if known == name else p) for known, p in self.processes))

    def group(self, number: int) -> Membership:
        return next(each for each in self.groups if each.number == number)

    def without_the_past(self) -> World:
        """The same without what nobody can look at any more: the groups that all have left, and what they knew there.

        A process reads only of the group that it is in, or of the newest one, which it may be about to enter. States
        that differ in nothing else have the same future, and are looked at once.
        """
        present = {process.number for _, process in self.processes if process.doing in ("waits", "meets", "trains")}
        present.add(self.now.number)
        if all(each.number in present for each in self.groups):
            return self
        return self._replace(
            groups=tuple(each for each in self.groups if each.number in present),
            here=frozenset(each for each in self.here if each[0] in present),
            left=frozenset(each for each in self.left if each[0] in present),
            room=frozenset(each for each in self.room if each[0] in present),
        )


def beginning(losses: int, last: int, arrives: bool, leaves: int, mistakes: int) -> World:
    first = Membership(0, (A, B, C))
    processes = [(name, Process("waits")) for name in first.members] + [(LATE, Process("absent"))] * arrives
    return World(tuple(processes), first, losses, last, groups=(first,), requests=leaves, mistakes=mistakes)


def moves(world: World) -> Iterator[World]:
    """Every state that one move leads to; losses are in `losses_from`, requests in `requests_from`."""
    if world.starts_again:
        return
    for node, launcher in enumerate(world.launchers):
        if launcher == "lives":
            yield from decisions(world, node)
    for name, process in world.processes:
        if process.doing == "absent":
            yield world.put(name, doing="waits")._replace(asked=world.asked | {name})
        elif process.doing in ("waits", "meets"):
            yield from meetings(world, name, process)
        elif process.doing == "trains":
            yield from training(world, name, process)


def losses_from(world: World) -> Iterator[World]:
    if not world.losses or world.starts_again:
        return
    fewer = world._replace(losses=world.losses - 1, must_go_on=False)
    for name, process in world.processes:
        if process.doing in ("waits", "meets", "trains"):
            yield fewer.put(name, doing="dead")
    for node, names in enumerate(NODES):
        if all(launcher == "lives" for launcher in world.launchers):
            # The kernel ends the workers of a launcher that dies. With the last one, all end.
            after = fewer
            for name in names:
                after = after.put(name, doing="dead") if name in dict(world.processes) else after
            for end in ("ended", "unplugged"):
                launchers = tuple(end if n == node else each for n, each in enumerate(world.launchers))
                yield after._replace(launchers=launchers)


def requests_from(world: World) -> Iterator[World]:
    """A node is asked to leave."""
    if world.requests and not world.starts_again:
        for node, launcher in enumerate(world.launchers):
            if launcher == "lives" and node not in world.leaving:
                yield world._replace(requests=world.requests - 1, leaving=world.leaving | {node})


def start_again(world: World) -> World:
    assert not world.must_go_on, "all start again, though the group could have trained on"
    return world._replace(starts_again=True)


def decisions(world: World, node: int) -> Iterator[World]:
    """A launcher notes who has ended, or looks, or writes what it has decided; between the two, another may write."""
    pending = world.decided[node]
    if pending is not None:
        yield written(world, node, *pending)
        return
    if any(process.doing == "done" for _, process in world.processes):
        return
    left = {name: step for number, name, step in world.left if number == world.now.number}
    own = {name for name in NODES[node] if is_dead(world, name)}
    out = {name for name in NODES[node] if name in world.now.members and world.of(name).doing == "out"}
    if out and node not in world.leaving:
        yield start_again(world)
        return
    gone = [other for other, launcher in enumerate(world.launchers) if launcher == "ended"]
    found = own | membership.ended_with({*world.now.members, *world.asked}, gone)
    if not found <= world.ended:
        yield world._replace(ended=world.ended | found)
        return
    for other, launcher in enumerate(world.launchers):
        if other != node and (launcher == "unplugged" or world.mistakes):
            lost = membership.lost_in_silence(world.now, {other}, world.ended, left)
            if lost:
                mistakes = world.mistakes - (launcher == "lives")
                must_go_on = world.must_go_on and mistakes == world.mistakes
                yield world._replace(ended=world.ended | lost, mistakes=mistakes, must_go_on=must_go_on)
    following = membership.next_membership(world.now, world.ended, left, world.asked, world.leaving)
    if following is not None:
        made = (world.now, following)
        yield world._replace(decided=tuple(made if n == node else each for n, each in enumerate(world.decided)))


def written(world: World, node: int, before: Membership, new: Membership) -> World:
    """The compare-and-set of a launcher."""
    world = world._replace(decided=tuple(None if n == node else each for n, each in enumerate(world.decided)))
    if world.now != before:
        return world
    held = {name: step for number, name, step in world.left if number == before.number}
    gone = [name for name in before.members if name not in new.members and name not in world.ended]
    if gone:
        kept = max(held.get(name, -1) for name in before.members if name in new.members)
        assert max(held[name] for name in gone) <= kept, "a node has left with the only copy of the newest state"
    assert new.number == before.number + 1, "two memberships have the same number"
    return world._replace(now=new, groups=(*world.groups, new))


def meetings(world: World, name: str, process: Process) -> Iterator[World]:
    if membership.must_leave(process.number, world.now):
        if name in world.now.members:
            here = world.here | {(world.now.number, name, process.held)}
            yield world.put(name, doing="meets", number=world.now.number)._replace(here=here)
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


def entering(world: World, name: str, offered: list[Progress | None]) -> World:
    """All have met, and this process has taken the newest state; its donor may have died since."""
    holder = membership.newest_holder(offered)
    newest, mine = None if holder is None else offered[holder], world.of(name)
    if newest is None or membership.goes_back_to_checkpoint(newest, world.saved):
        newest = Progress(world.saved or 0, True)
    kept = max(world.saved or 0, mine.held.step if mine.held is not None else 0)
    assert newest.step >= kept, "a step is done again though its state lives, or is in a checkpoint"
    world = world.put(name, doing="trains", held=newest, has_sent=False)
    if name == world.group(mine.number).members[0]:
        told = tuple(step for step in world.told if step <= newest.step)
        world = world._replace(fence=mine.number, told=told)
    return world


def training(world: World, name: str, process: Process) -> Iterator[World]:
    members, held = world.group(process.number).members, process.held
    if name == members[0] and not held.is_settled:
        yield settled(world, name, held)
    elif held.step == world.last:
        if held.is_settled or world.of(members[0]).doing == "done":
            yield world.put(name, doing="done")
    elif not process.has_sent:
        sent = world.put(name, has_sent=True)
        yield sent._replace(room=sent.room | {(process.number, held.step)}) if makes_room(world) else sent
    elif all(has_sent(world, member, process) for member in members):
        done = world.put(name, held=Progress(held.step + 1, False), has_sent=False)
        yield leaving(done, name, done.of(name)) if (process.number, held.step) in world.room else done
    elif world.mistakes:
        # Another rank is silent for too long, though it lives.
        yield leaving(world._replace(mistakes=world.mistakes - 1, must_go_on=False), name, process)
    if any(is_gone(world, member, process.number) for member in members if member != name):
        yield leaving(world, name, process)


def settled(world: World, name: str, held: Progress) -> World:
    """What follows an update on rank 0, which tells and saves, unless a newer rank 0 has taken the fence."""
    if world.fence != world.of(name).number:
        return world.put(name, doing="out")
    if held.step not in world.told:
        world = world._replace(told=(*world.told, held.step))
    if held.step == SAVED:
        world = world._replace(saved=held.step)
    return world.put(name, held=Progress(held.step, True))


def makes_room(world: World) -> bool:
    """Whether a launcher asks the ranks to meet anew: for a new process, or without a node that is to leave."""
    stays = [membership.node_of(name) not in world.leaving for name in world.now.members]
    return bool(world.asked - world.ended - set(world.now.members)) or (any(stays) and not all(stays))


def leaving(world: World, name: str, process: Process) -> World:
    held = -1 if process.held is None else process.held.step
    return world.put(name, doing="waits", has_sent=False)._replace(left=world.left | {(process.number, name, held)})


def is_dead(world: World, name: str) -> bool:
    return any(known == name and process.doing == "dead" for known, process in world.processes)


def is_gone(world: World, name: str, number: int) -> bool:
    """Whether an exchange with this member of a group fails."""
    return world.of(name).doing in ("dead", "out") or any(left[:2] == (number, name) for left in world.left)


def has_sent(world: World, name: str, process: Process) -> bool:
    """Whether this member has sent its part of the step that `process` is in."""
    other = world.of(name)
    if other.number != process.number or other.held is None or process.held is None:
        return False
    return other.held.step > process.held.step or (other.held.step == process.held.step and other.has_sent)


def check(world: World) -> None:
    """What holds in every state."""
    assert world.told == tuple(range(1, len(world.told) + 1)), "a step was told twice, or left out"


def check_end(world: World, mistakes: int) -> None:
    """What holds where nothing can happen any more.

    `mistakes`: how many there might have been. After one, all members may be noted as ended though some live; then the
    product starts all again from the newest checkpoint, which is not part of this model.
    """
    if world.starts_again or (world.mistakes < mistakes and world.ended.issuperset(world.now.members)):
        return
    doing = {process.doing for _, process in world.processes}
    if "done" in doing:
        # Whoever is left when rank 0 is done is started again by its launcher, and finds the run completed.
        assert world.told == tuple(range(1, world.last + 1)), "the run is done, but not all of it was told"
    else:
        assert all(world.of(name).doing == "dead" for name in world.now.members), "a member waits for ever"


def explore(losses: int, last: int, arrives: bool = False, leaves: int = 0, mistakes: int = 0) -> int:
    """Run through everything that can happen; the number of states."""
    first = beginning(losses, last, arrives, leaves, mistakes)
    seen, waiting = {first}, [first]
    while waiting:
        world = waiting.pop()
        check(world)
        following = list(moves(world))
        if not following:
            check_end(world, mistakes)
        for after in (*following, *losses_from(world), *requests_from(world)):
            known, brief = len(seen), after.without_the_past()
            seen.add(brief)
            if len(seen) > known:
                waiting.append(brief)
    return len(seen)


@pytest.mark.full
@pytest.mark.parametrize(
    "happens",
    [
        pytest.param({"losses": 1, "last": 2}, id="a-loss"),
        pytest.param({"losses": 0, "last": 1, "arrives": True}, id="an-arrival"),
        pytest.param({"losses": 0, "last": 2, "leaves": 1}, id="a-node-leaves"),
        pytest.param({"losses": 0, "last": 1, "mistakes": 2}, id="a-node-is-taken-for-lost"),
        pytest.param({"losses": 1, "last": 1, "arrives": True}, id="a-loss-and-an-arrival", marks=pytest.mark.slow),
        pytest.param({"losses": 1, "last": 1, "mistakes": 2}, id="a-loss-and-a-mistake", marks=pytest.mark.slow),
        pytest.param({"losses": 1, "last": 1, "leaves": 2}, id="a-loss-while-nodes-leave", marks=pytest.mark.slow),
        pytest.param({"losses": 2, "last": 1}, id="two-losses", marks=pytest.mark.slow),
    ],
)
def test_every_sequence(happens: dict[str, Any]) -> None:
    assert explore(**happens) > 1000


def _lets_go_of_a_leaving_node(
    now: Membership, ended: Collection[str], left: Mapping[str, int], waiting: Collection[str], leaving: Collection[int]
) -> Membership | None:
    """As the true rule, but it does not look at what a node holds that leaves."""
    return RULE(now, ended, dict.fromkeys(left, 0), waiting, leaving)


RULE = membership.next_membership


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "wrong", "happens"),
    [
        ("newest_holder", lambda held: next((rank for rank, each in enumerate(held) if each is not None), None), {}),
        *(("must_leave", lambda mine, now: mine < 0, {}), ("ended_with", lambda names, nodes: set(), {})),
        ("next_membership", lambda now, ended, left, waiting, leaving: None, {}),
        ("goes_back_to_checkpoint", lambda newest, checkpoint: newest is None, {}),
        ("lost_in_silence", lambda now, silent, ended, left: set(), {}),
        ("next_membership", _lets_go_of_a_leaving_node, {"leaves": 1}),
    ],
)
def test_a_wrong_rule_is_found(
    name: str, wrong: object, happens: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, name, wrong)
    with pytest.raises(AssertionError):
        explore(**{"losses": 1, "last": 2, **happens})


def test_of_groups_in_a_new_store_the_newest_counts() -> None:
    first, one, other = Membership(0, ("0.0@0", "0.0@1")), Membership(1, ("0.0@0",)), Membership(1, ("0.0@1",))
    assert membership.renewed(None, first) == membership.renewed(first, first) == first
    assert membership.renewed(first, one) == membership.renewed(one, first) == one
    assert membership.renewed(one, other) is None


def test_ranks_of_a_node_are_beside_each_other() -> None:
    now = Membership(0, ("0.0@0", "1.0@0", "0.0@1", "1.0@1"))
    after = membership.next_membership(now, {"0.0@0"}, {}, {"0.1@0", "0.0@2"})
    assert after == Membership(1, ("1.0@0", "0.1@0", "0.0@1", "1.0@1", "0.0@2"))
    assert [membership.place_among(*each) for each in ((after, "0.0@2"), (now, "1.0@1"))] == [(1, 0), (2, 1)]


def test_of_the_ranks_with_the_newest_state_the_lowest_one_gives_it() -> None:
    assert membership.newest_holder([None, Progress(3, True), Progress(4, False), Progress(4, False)]) == 2
    assert membership.newest_holder([None, None]) is None
