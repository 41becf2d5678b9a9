"""The chain of a run: a line for each step, which holds what the step was made of and what it has made.

Each line has a `head`, the SHA-256 over the head of the line before and the line itself. So the last head stands for
all of the run: its code, data, environment and start in the first line, then every step. Lines are JSON, a number is
16 hexadecimal digits, and several numbers stand one after the other.

    begin       what the run follows from, and the names of the tensors in `state`
    step        `ids`: SHA-256 (first 16 digits) of the sample ids of the global batch, int64, in their sequence
                `contents`: of each micro-batch, a checksum of the samples as they were trained
                `losses`: of each micro-batch, the bits of the loss, summed over its samples, as float64
                `lr`: of each parameter group, the bits of the rate after the update, as float64: the one that it has
                used, unless the experiment has a schedule of its own, which sets the next one
                `state`: of each tensor of the model, a checksum of it and of the optimizer's state for it; then one
                of all that is left: averaged weights, scaler, schedule
    evaluation  the figures of an evaluation after the step
    kept        SHA-256 of the whole state and of the weights after the step, whose checkpoint is kept

No line depends on the layout, nor on where the run was killed and resumed. Loads no torch, so that commands which only
read chains start quickly. docs/reference/run-directory.md has the fields.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field
from typing_extensions import TypedDict

from ddp_core.base.beneath import each_line, open_beneath
from ddp_core.base.documents import BadDocument, Count, json_text, parse_document
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.files import is_there, naming, replace_file
from ddp_core.base.fingerprint import fingerprint_differences
from ddp_core.base.shown import shown_in

CHAIN = "chain.jsonl"
CHAIN_FORMAT = "ddp-chain/1"
DIGITS = 16
"""Of a number."""
OTHER_STATE = "averaged weights, scaler or schedule"
"""The last name in `tensors`."""
_HEAD = b',"head":"'
_APPEND = os.O_WRONLY | os.O_APPEND
_Hex = Annotated[str, Field(pattern=r"^[0-9a-f]*$")]


class _Line(TypedDict, total=False):
    """A line without its head."""

    kind: Literal["begin", "step", "evaluation", "kept"]
    step: Count
    epoch: Count
    ids: _Hex
    contents: _Hex
    losses: _Hex
    lr: _Hex
    state: _Hex
    figures: dict[str, Any]
    state_sha256: _Hex
    weights_sha256: _Hex
    format: str
    experiment_sha256: str
    code_sha256: str
    data_sha256: str | None
    start_sha256: str
    fingerprint: dict[str, Any]
    from_step: Count
    total_steps: Count
    keep: Count
    every: Annotated[int, Field(gt=0)]
    micro_batches: Count
    tensors: list[str]


_FIELDS: dict[str, set[str]] = {
    "begin": {
        *("format", "experiment_sha256", "code_sha256", "data_sha256", "start_sha256", "fingerprint", "from_step"),
        *("total_steps", "keep", "every", "micro_batches", "tensors"),
    },
    "step": {"step", "epoch", "ids", "contents", "losses", "lr", "state"},
    "evaluation": {"step", "figures"},
    "kept": {"step", "state_sha256", "weights_sha256"},
}
"""What each kind of line has."""


class BrokenChain(ValueError):
    """A line is not what was written; the message says which, and why."""


class Link(NamedTuple):
    """A line of a chain, with its head."""

    line: Mapping[str, Any]
    head: str
    end: int
    """Where it ends in the file, in bytes."""

    @property
    def step(self) -> int:
        """The step after which it stands; of the first line that of the run's start."""
        step: int = self.line["from_step"] if self.line["kind"] == "begin" else self.line["step"]
        return step


@dataclass(frozen=True)
class ChainPlan:
    """How the chain of a run is kept."""

    file: Path
    keep: int
    """How many checkpoints are kept, the last one among them."""
    every: int
    """Steps between two of them."""
    is_new: bool
    """Whether the chain begins with this start of the run."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What its first line tells of the run."""
    may_write: Callable[[], object] = lambda: None
    """Raises where this process may write no more."""


class ChainFile:
    """Writes a run's chain (rank 0)."""

    def __init__(self, plan: ChainPlan) -> None:
        self.head, self.step = "", 0
        self._file, self._may_write = plan.file, plan.may_write
        self._told: set[tuple[str, int]] = set()
        """The kinds of the lines of the step after which the chain was taken up, with that step."""

    def begin(self, facts: Mapping[str, Any], tensors: Sequence[str]) -> None:
        """Write the first line. Raises OSError."""
        self._may_write()
        body = json_line({"kind": "begin", "format": CHAIN_FORMAT, **facts, "tensors": list(tensors)})
        self.head, self.step = head_of("", body), facts["from_step"]
        replace_file(self._file, sealed(body, self.head))

    def go_on(self, step: int, lines_after: Callable[[int], Sequence[Mapping[str, Any]]] = lambda step: ()) -> None:
        """Take the chain up after `step`, and drop the lines of later steps. Raises OSError.

        `lines_after`: returns the lines after any step that are known without the file. Raises UserError (3) where the
        chain does not reach so far.
        """
        self._may_write()
        end = 0
        try:
            for link in each_link(self._file):
                if link.step > step:
                    break
                if link.step > self.step:
                    self._told.clear()
                self._told.add((link.line["kind"], link.step))
                self.head, self.step, end = link.head, link.step, link.end
        except BrokenChain:
            pass  # what was half written when the run was lost
        if end:
            descriptor = open_beneath(self._file, os.O_WRONLY)
            try:
                os.ftruncate(descriptor, end)
            finally:
                os.close(descriptor)
            self.append(*lines_after(self.step))
        if self.step < step:
            raise UserError(
                f"{self._file} ends with step {self.step}, before the checkpoint of step {step}, so the run cannot be "
                "audited any more: bring the file back from a copy, or remove it, and the run goes on without",
                ExitCode.NO_CHECKPOINT,
            )

    def append(self, *lines: Mapping[str, Any]) -> None:
        """Write these lines to the end of the file, all in one piece. Raises OSError.

        Of the step after which the chain was taken up, no line is written twice.
        """
        self._may_write()
        content = b""
        for line in lines:
            if (line["kind"], line["step"]) in self._told:
                continue
            body = json_line(line)
            self.head, self.step = head_of(self.head, body), line["step"]
            content += sealed(body, self.head)
        with naming(self._file), os.fdopen(open_beneath(self._file, _APPEND), "ab") as file:
            file.write(content)


def json_line(line: Mapping[str, Any]) -> bytes:
    """The bytes of a line without its head."""
    return json.dumps(json.loads(json_text(line)), sort_keys=True, separators=(",", ":")).encode()


def head_of(before: str, body: bytes) -> str:
    """The head of a line, from that of the line before; the first line has an empty one before it."""
    return hashlib.sha256(before.encode() + b"\n" + body).hexdigest()


def sealed(body: bytes, head: str) -> bytes:
    """A line of the file, with its head."""
    return body.removesuffix(b"}") + _HEAD + head.encode() + b'"}\n'


def has_chain(directory: Path) -> bool:
    """Whether a run has a chain."""
    return is_there(directory / CHAIN)


def read_begin(file: Path) -> Mapping[str, Any]:
    """The first line. Raises UserError where it cannot be read."""
    return next(_read(file)).line


def each_link(file: Path) -> Iterator[Link]:
    """The lines of a chain, one after the other, each with the head that follows from all before it.

    Raises BrokenChain at the first line that is damaged or whose head is another one, and OSError.
    """
    head, end = "", 0
    for number, raw in enumerate(each_line(file), 1):
        body, found, seal = raw.rpartition(_HEAD)
        body += b"}"
        head = head_of(head, body)
        if not found or seal != f'{head}"}}\n'.encode():
            raise BrokenChain(f"line {number} was changed, or a line before it (its head does not fit)")
        try:
            line = shown_in(parse_document(body, _Line))
        except BadDocument as error:
            raise BrokenChain(f"line {number} cannot be read: {error}") from None
        kind = line.get("kind", "")
        if not _FIELDS.get(kind, {"kind"}) <= line.keys() or (kind == "begin") != (number == 1):
            raise BrokenChain(f"line {number} has other fields than a chain's ({kind or 'no kind'})")
        if kind == "begin" and line["format"] != CHAIN_FORMAT:
            raise BrokenChain(f"it is not of format {CHAIN_FORMAT}")
        end += len(raw)
        yield Link(line, head, end)


def numbers(text: str) -> list[str]:
    """The numbers of a field."""
    return [text[start : start + DIGITS] for start in range(0, len(text), DIGITS)]


def difference(begin: Mapping[str, Any], ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """What two lines of one kind and step do not have alike, in words: what comes first in a step; None if nothing.

    `begin`: the first line of ours, which names the tensors.
    """
    if ours["kind"] == "evaluation":
        return _other_figure(ours["figures"], theirs["figures"])
    if ours["kind"] == "kept":
        if ours["weights_sha256"] != theirs["weights_sha256"]:
            return "the SHA-256 of the weights"
        return None if ours["state_sha256"] == theirs["state_sha256"] else "the SHA-256 of the whole state"
    if ours["ids"] != theirs["ids"] or ours["epoch"] != theirs["epoch"]:
        return "the ids of its samples"
    for name, what in (("contents", "the samples"), ("losses", "the loss")):
        if (other := _first_other(ours[name], theirs[name])) is not None:
            return f"{what} of micro-batch {other}"
    if ours["lr"] != theirs["lr"]:
        return "the learning rate"
    if (other := _first_other(ours["state"], theirs["state"])) is None:
        return None
    names = begin["tensors"]
    count = sum(one != another for one, another in zip_longest(numbers(ours["state"]), numbers(theirs["state"])))
    more = f" (and {count - 1} more)" if count > 1 else ""
    name = names[other] if other < len(names) else f"number {other}"
    return f"after the update, {name}{'' if name == OTHER_STATE else ', or the optimizer state of it'}{more}"


def other_begin(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """What two chains do not follow from alike, in words."""
    named = {
        "experiment_sha256": "the experiment",
        "code_sha256": "the code",
        "data_sha256": "the data",
        "start_sha256": "the weights at the start",
        "from_step": "the step at which the chain begins",
        "micro_batches": "the number of micro-batches",
        "tensors": "the tensors of the model",
    }
    found = [words for name, words in named.items() if ours[name] != theirs[name]]
    return found + [
        f"fingerprint, {each}" for each in fingerprint_differences(ours["fingerprint"], theirs["fingerprint"])
    ]


class Parting(NamedTuple):
    """Where two chains part."""

    step: int
    what: str


def compare_chains(ours: Path, theirs: Path) -> tuple[list[str], Parting | None, int]:
    """What two chains do not follow from alike, where they part, and how many steps they have alike.

    A checkpoint that only one of the runs has kept does not count. Raises UserError where one cannot be read.
    """
    here, there = _read(ours), _read(theirs)
    begin, other = next(here).line, next(there).line
    kept: tuple[dict[int, Link], dict[int, Link]] = ({}, {})
    alike, parting = begin["from_step"], None
    for one, another in zip_longest(_unkept(here, kept[0]), _unkept(there, kept[1])):
        if one is None or another is None:
            parting = Parting(max(link.step for link in (one, another) if link), "only one of them goes on")
        elif (one.step, one.line["kind"]) != (another.step, another.line["kind"]):
            parting = Parting(min(one.step, another.step), "only one of them evaluates, or has this step")
        elif (what := difference(begin, one.line, another.line)) is not None:
            parting = Parting(one.step, what)
        if parting is not None:
            break
        assert one is not None
        alike = one.step
    for step in sorted(kept[0].keys() & kept[1].keys()):
        what = difference(begin, kept[0][step].line, kept[1][step].line)
        if what is not None and (parting is None or step < parting.step):
            return other_begin(begin, other), Parting(step, what), min(step - 1, alike)
    return other_begin(begin, other), parting, alike


def _unkept(links: Iterator[Link], kept: dict[int, Link]) -> Iterator[Link]:
    """The lines but those of checkpoints, which go into `kept` by their step."""
    for link in links:
        if link.line["kind"] == "kept":
            kept[link.step] = link
        else:
            yield link


def _read(file: Path) -> Iterator[Link]:
    """The lines of a chain; what is wrong with it is a UserError."""
    links = 0
    try:
        for links, link in enumerate(each_link(file), 1):  # noqa: B007
            yield link
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    except BrokenChain as error:
        raise UserError(f"{file}: {error}") from None
    if not links:
        raise UserError(f"{file} is empty")


def _first_other(ours: str, theirs: str) -> int | None:
    pairs = enumerate(zip_longest(numbers(ours), numbers(theirs)))
    return next((index for index, (one, another) in pairs if one != another), None)


def _other_figure(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    for name in {**ours, **theirs}:
        if ours.get(name) != theirs.get(name):
            return f"the evaluation's {name} ({ours.get(name)} against {theirs.get(name)})"
    return None
