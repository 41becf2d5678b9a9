"""Carries a drill out: waits for each fault's moment, strikes, mends, and times what the run does about it."""

from __future__ import annotations

import time
from collections.abc import Callable

from ddp_core.base.errors import ExitCode, UserError
from ddp_lab.chaos.drill import Drill, Planned, plan
from ddp_lab.chaos.faults import Action, Breakable, action
from ddp_lab.chaos.judge import DrillReport, FaultReport
from ddp_lab.chaos.watch import Progress, Words, recovery
from ddp_lab.cluster.cluster import Spec

Say = Callable[[str], None]

_POLL_SECONDS = 0.1
_BACK_SECONDS = 1.0
_START_LIMIT = 15
# A node that ended with one of these would end with it again.
_MISTAKES = {ExitCode.BAD_INPUT, ExitCode.NO_CHECKPOINT, ExitCode.NUMERICS, ExitCode.INTERNAL, 1}


class DrillFailed(Exception):
    """The run did not survive, or not in time; the drill ends here."""


class Runner:
    """One drill on one cluster. `patience`: seconds without a new step after which the drill gives the run up."""

    def __init__(
        self, drill: Drill, seed: int, cluster: Breakable, spec: Spec, say: Say, patience: float = 180
    ) -> None:
        self.drill, self.cluster, self.spec, self.say = drill, cluster, spec, say
        self.patience = patience
        self.report = DrillReport(drill.name, cluster.name, seed)
        self.progress = Progress(spec.output, spec.launch_id)
        self.words = Words()
        self._plan = plan(drill, seed)
        self._held: frozenset[str] = frozenset()
        self._ended_at: dict[str, float] = {}
        self._starts: dict[str, int] = {}

    def run(self, hear: Callable[[str, str], None] = lambda node, line: None) -> DrillReport:
        """Start the cluster, carry out each fault and wait for the end; returns the report, not yet judged.

        `hear` gets every line of every node. The caller stops the cluster. Raises UserError where it cannot be started.
        """

        def write(node: str, line: str) -> None:
            self.words.hear(node, line)
            hear(node, line)

        self.cluster.start(self.spec)
        self.cluster.follow(write)
        self._began = time.time()
        try:
            for fault in self._plan:
                self._carry_out(fault)
            self._until(lambda: self.progress.completed, "the run to complete")
            self._until(self._all_ended, "the nodes to end")
        except DrillFailed as failure:
            self.report.remarks.append(str(failure))
            self.say(str(failure))
        self.cluster.settle()
        self.progress.look()
        return self.report

    def _carry_out(self, fault: Planned) -> None:
        if fault.kind not in self.cluster.kinds:
            line = f"{fault.kind} {fault.node}: cannot be made on {self.cluster.name}"
            self.report.skipped.append(line)
            self.say(f"skipped: {line}")
            return
        self._until(lambda: self._is_due(fault) and self._is_whole(), f"{self._moment(fault)} with all nodes training")
        node = self._name(fault)
        deed = action(fault, node, self.cluster, self.drill.recovery == "live")
        entry = FaultReport(deed.name, self.progress.step)
        self.report.faults.append(entry)
        self.say(f"{deed.name} at step {self.progress.step}")
        self._held = deed.holds_back
        asked = time.time()
        try:
            moment = deed.begin() or asked
            self.progress.look()
            entry.at_step = self.progress.step_at(moment)
            self._measure(deed, node, entry, moment)
        finally:
            self._held = frozenset()

    def _measure(self, deed: Action, node: str, entry: FaultReport, moment: float) -> None:
        """Wait until the fault is over and the run is whole again; fill in the report's times."""
        before = self.progress.step
        over = False

        def goes_on() -> bool:
            nonlocal over
            self._note(deed, node, entry, moment)
            if not over and time.time() - moment >= deed.duration and self._may_end(deed):
                deed.end()
                over, self._held = True, frozenset()
            if not over:
                return False
            if deed.harmless:
                return self.progress.step > before + 5
            return entry.resumed_seconds is not None and (self._is_whole() or self.progress.completed)

        entry.outcome = "not recovered"
        self._until(goes_on, f"the run to recover from {deed.name}")
        self._note(deed, node, entry, moment)
        repeated = recovery(self.progress.records, moment)
        entry.outcome = "a false alarm: steps were repeated" if deed.harmless and repeated else "recovered"
        if not deed.repeats and (entry.steps_lost or 0) > 1:
            entry.outcome = "steps were repeated"
        seen = "-" if entry.noticed_seconds is None else f"{entry.noticed_seconds:.1f} s"
        self.say(f"{deed.name}: {entry.outcome}, noticed after {seen}, steps lost {entry.steps_lost}")

    def _note(self, deed: Action, node: str, entry: FaultReport, moment: float) -> None:
        if entry.noticed_seconds is None and not deed.harmless:
            notice = self.words.first_notice(moment, not_from=node)
            if notice is not None:
                entry.noticed_seconds = round(notice.time - moment, 2)
                self.say(f"{deed.name}: {notice.node} says: {notice.line}")
        found = recovery(self.progress.records, moment)
        if found is not None and entry.resumed_seconds is None:
            entry.resumed_seconds, entry.steps_lost = round(found.resumed_seconds, 2), found.steps_lost
        if deed.harmless:
            entry.steps_lost = 0

    def _may_end(self, deed: Action) -> bool:
        """Whether the fault may end now: a full disk is freed only when the run has ended because of it."""
        if deed.name.startswith("disk-full"):
            return set(self.cluster.exit_codes()) == set(self.cluster.nodes())
        return True

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        """Watch the run, and start nodes again, until `condition` holds.

        Raises DrillFailed where no step is made for too long, or the run is over and the condition can no longer come.
        """
        last_step, moved = -1, time.monotonic()
        while True:
            self.progress.look()
            self._tend()
            if condition():
                return
            if self.progress.step != last_step:
                last_step, moved = self.progress.step, time.monotonic()
            if time.monotonic() - moved > self.patience:
                raise DrillFailed(f"waited {self.patience:.0f} s for {what}: no new step since {last_step}")
            if self.progress.completed and self._all_ended() and not condition():
                raise DrillFailed(f"the run ended while the drill waited for {what}")
            time.sleep(_POLL_SECONDS)

    def _tend(self) -> None:
        """Start nodes again that have ended, as a scheduler or a restart policy does, unless the run is complete.

        Raises DrillFailed where a node ended in a way that a new start would repeat, or was started too often.
        """
        if self.progress.completed:
            return
        codes = self.cluster.exit_codes()
        if self.report.faults:
            self.report.faults[-1].exit_codes |= codes
        wrong = {name: code for name, code in codes.items() if code in _MISTAKES}
        if wrong:
            name, code = next(iter(wrong.items()))
            last = [said.line for said in self.words.since(0) if said.node == name][-1:]
            raise DrillFailed(f"{name} ended with {code}, which a new start would repeat: {' '.join(last)}")
        ended = [name for name, code in codes.items() if code != 0]
        if "rendezvous" not in self._held and not self.cluster.is_running("rendezvous"):
            ended.append("rendezvous")
        for name in ended:
            if name in self._held:
                continue
            since = self._ended_at.setdefault(name, time.monotonic())
            if time.monotonic() - since < _BACK_SECONDS:
                continue
            del self._ended_at[name]
            self._starts[name] = self._starts.get(name, 0) + 1
            if self._starts[name] > _START_LIMIT:
                raise DrillFailed(f"{name} was started {_START_LIMIT} times and ended each time")
            self.say(f"starting {name} again")
            self.cluster.start_again(name)

    def _is_due(self, fault: Planned) -> bool:
        if fault.at_step is not None:
            return self.progress.step >= fault.at_step
        return time.time() - self._began >= (fault.at_seconds or 0)

    @staticmethod
    def _moment(fault: Planned) -> str:
        return f"step {fault.at_step}" if fault.at_step is not None else f"second {fault.at_seconds}"

    def _is_whole(self) -> bool:
        """Whether all nodes are up and the newest attempt, on all of them, has made a step."""
        return (
            self.progress.nnodes == self.spec.nnodes
            and self.progress.trains
            and not self.cluster.exit_codes()
            and self.cluster.is_running("rendezvous")
        )

    def _all_ended(self) -> bool:
        return set(self.cluster.exit_codes()) == set(self.cluster.nodes())

    def _name(self, fault: Planned) -> str:
        """The name of the node that the fault hits; for `rank-0` it is looked up."""
        if fault.node != "rank-0":
            return fault.node
        found = self.progress.first_rank_host()
        names = [name for name in self.cluster.nodes() if found is not None and self.cluster.holds(name, *found)]
        if not names:
            raise UserError("no node holds rank 0", ExitCode.PEERS_LOST)
        return names[0]
