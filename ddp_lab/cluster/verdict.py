"""What a cluster's nodes ended with, and what that means for the whole: a pure function, testable without a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddp_core.base.errors import ExitCode

# The most telling first. A cause tells more than its consequence: the node that ran out of memory tells more than
# its peers, which only lost it.
_TELLING = (
    ExitCode.NUMERICS,
    ExitCode.RESOURCES,
    ExitCode.NO_CHECKPOINT,
    ExitCode.BAD_INPUT,
    ExitCode.INTERNAL,
)
_MEANING = {
    ExitCode.DONE: "done",
    ExitCode.BAD_INPUT: "bad input or configuration",
    ExitCode.NO_CHECKPOINT: "no usable checkpoint",
    ExitCode.RESOURCES: "a resource is missing",
    ExitCode.NUMERICS: "NaN or infinity",
    ExitCode.PEERS_LOST: "peers lost",
    ExitCode.INTERNAL: "a fault of ddp itself",
    ExitCode.STOPPED: "stopped on request, resumable",
}


@dataclass(frozen=True)
class NodeResult:
    """How one node ended. `exit_code` is the process's own; 128 + n or -n where signal n killed it."""

    name: str
    exit_code: int
    out_of_memory: bool = False

    @property
    def killed(self) -> bool:
        """Whether a signal ended the node before it could say anything."""
        return self.exit_code < 0 or 128 < self.exit_code < 192

    @property
    def code(self) -> int:
        """The exit code in this project's terms."""
        if self.exit_code != 0 and self.out_of_memory:
            return ExitCode.RESOURCES
        return ExitCode.PEERS_LOST if self.killed else self.exit_code

    @property
    def description(self) -> str:
        """One line, such as 'node-1 exited with 6 (peers lost)'."""
        if self.exit_code != 0 and self.out_of_memory:
            return f"{self.name} ran out of memory (exit code {self.exit_code}): give it more, or a smaller micro_batch"
        if self.killed:
            number = -self.exit_code if self.exit_code < 0 else self.exit_code - 128
            return f"{self.name} was killed by signal {number}"
        meaning = _MEANING.get(self.exit_code, "an unforeseen error, see its output")  # type: ignore[call-overload]
        return f"{self.name} exited with {self.exit_code} ({meaning})"


@dataclass(frozen=True)
class Verdict:
    """The cluster's exit code and one line for each node."""

    exit_code: int
    lines: tuple[str, ...]


def judge(results: Sequence[NodeResult]) -> Verdict:
    """0 only when there are nodes and every one ended with 0; otherwise the most telling code among them."""
    lines = tuple(result.description for result in results)
    if not results:
        return Verdict(ExitCode.PEERS_LOST, ("no node was started",))
    codes = {result.code for result in results} - {int(ExitCode.DONE)}
    if not codes:
        return Verdict(ExitCode.DONE, lines)
    for code in _TELLING:
        if code in codes:
            return Verdict(code, lines)
    unforeseen = codes - {int(ExitCode.PEERS_LOST), int(ExitCode.STOPPED)}
    if unforeseen:
        return Verdict(min(unforeseen), lines)
    return Verdict(ExitCode.PEERS_LOST if ExitCode.PEERS_LOST in codes else ExitCode.STOPPED, lines)
