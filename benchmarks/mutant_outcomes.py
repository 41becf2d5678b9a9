"""What became of the mutants of each function, as it is kept, and the reasons why some may survive."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.mutations import ROOT, Function, functions_of, test_digest

ACCEPTED = ROOT / "benchmarks" / "accepted_mutants.toml"
LETTERS = {"s": "survived", "n": "not covered", "o": "left out", "e": "error", "-": None}
"""How an outcome is kept; of a killed mutant it is the number of the test, after a `t` where that ran out of time."""


@dataclass
class Outcome:
    """What became of a mutant."""

    kind: str | None = None
    """killed, timeout, survived, not covered (no test calls the function), left out (a rule argues it away without a
    run), error; None: not run yet."""
    test: str | None = None
    """The test that decided."""
    change: tuple[int, str, str] | None = None
    """Of one that was not noticed: how many lines below the function's first, and the lines before and after."""

    @property
    def noticed(self) -> bool:
        """Whether a test failed."""
        return self.kind in ("killed", "timeout")


@dataclass
class Judged:
    """A function as it was when its mutants were run, and the outcome of each."""

    sha: str
    outcomes: list[Outcome]


@dataclass
class Kept:
    """The outcomes of all mutants."""

    functions: dict[tuple[str, str], Judged] = field(default_factory=dict)
    """By file and function."""
    tests: dict[str, str] = field(default_factory=dict)
    """The digest of each test that decided, when it did."""

    @classmethod
    def read(cls, results: dict[str, Any]) -> Kept:
        """From the plain values of `plain`."""
        names = list(results["tests"])
        kept = cls(tests=dict(results["tests"]))
        for file, functions in results["functions"].items():
            for name, line in functions.items():
                sha, *words = line.split()
                changes = dict(map(_change, results["unnoticed"].get(file, {}).get(name, {}).items()))
                outcomes = [_outcome(word, names, changes.get(at)) for at, word in enumerate(words)]
                kept.functions[file, name] = Judged(sha, outcomes)
        return kept

    def plain(self) -> dict[str, Any]:
        """Values for JSON: of each function one line."""
        used = {outcome.test for judged in self.functions.values() for outcome in judged.outcomes if outcome.test}
        numbers = {name: number for number, name in enumerate(sorted(used))}
        letters = {kind: letter for letter, kind in LETTERS.items()}
        functions: dict[str, dict[str, str]] = {}
        unnoticed: dict[str, dict[str, dict[str, str]]] = {}
        for (file, name), judged in sorted(self.functions.items(), key=lambda item: item[0]):
            words = [judged.sha]
            for number, outcome in enumerate(judged.outcomes):
                if outcome.test:
                    words.append("t" * (outcome.kind == "timeout") + str(numbers[outcome.test]))
                else:
                    words.append(letters[outcome.kind])
                if outcome.change:
                    line, before, after = outcome.change
                    unnoticed.setdefault(file, {}).setdefault(name, {})[f"{number}+{line}"] = f"{before}\n{after}"
            functions.setdefault(file, {})[name] = " ".join(words)
        return {"functions": functions, "unnoticed": unnoticed, "tests": {name: self.tests[name] for name in numbers}}

    def plan(self, function: Function, accepted: Accepted) -> list[int] | None:
        """Which of the function's mutants are to be run; None: all of them, for the function is new or has changed."""
        judged = self.functions.get((function.file, function.name))
        if judged is None or judged.sha != function.sha:
            return None
        return [at for at, each in enumerate(judged.outcomes) if not self._stands(function, each, accepted)]

    def with_other(self, other: Kept) -> Kept:
        """What both records know, such as those of two branches: of each function what holds of its present source.

        Of each mutant that both have run, the outcome that tells more. What an earlier state of a test has decided is
        to be run again.
        """
        tests = self.tests | other.tests
        tests |= {name: digest for name, digest in self.tests.items() if digest == test_digest(name)}
        functions: dict[tuple[str, str], Judged] = {}
        for place in self.functions | other.functions:
            found = [each for kept in (self, other) if (each := kept._decided_by(tests, place)) is not None]
            function = functions_of(place[0]).get(place[1])
            present = [each for each in found if function is not None and each.sha == function.sha]
            functions[place] = (present or found)[0]
            if len(present) > 1:
                both = zip(*(each.outcomes for each in present), strict=True)
                functions[place] = Judged(present[0].sha, [max(pair, key=_told) for pair in both])
        return Kept(functions, tests)

    def _decided_by(self, tests: dict[str, str], place: tuple[str, str]) -> Judged | None:
        """What this record has of a function, without what other states of these tests have decided."""
        if (judged := self.functions.get(place)) is None:
            return None
        is_other = [each.test is not None and self.tests[each.test] != tests[each.test] for each in judged.outcomes]
        return Judged(
            judged.sha, [Outcome() if other else each for each, other in zip(judged.outcomes, is_other, strict=True)]
        )

    def _stands(self, function: Function, outcome: Outcome, accepted: Accepted) -> bool:
        if outcome.test:
            return test_digest(outcome.test) == self.tests[outcome.test]
        return outcome.change is not None and accepted.reason(function.file, function.name, outcome.change) is not None


def _told(outcome: Outcome) -> int:
    return 2 if outcome.noticed else int(outcome.kind is not None)


def _change(kept: tuple[str, str]) -> tuple[int, tuple[int, str, str]]:
    (number, _, line), (before, _, after) = kept[0].partition("+"), kept[1].partition("\n")
    return int(number), (int(line), before, after)


def _outcome(word: str, names: Sequence[str], change: tuple[int, str, str] | None) -> Outcome:
    if word in LETTERS:
        return Outcome(LETTERS[word], None, change)
    return Outcome("timeout" if word.startswith("t") else "killed", names[int(word.removeprefix("t"))])


class Accepted:
    """The reasons in benchmarks/accepted_mutants.toml.

    A key is the name of a mutant, or a line of a function, or a whole function, or a change that is accepted wherever
    it is made (`strict=True -> strict=False`), or `any: ` and a regular expression of all that the lines before and
    after may be.
    """

    def __init__(self, reasons: dict[str, str]) -> None:
        self.reasons = reasons
        changes = [key for key in reasons if " -> " in key and ": " not in key]
        self._changes = {key: tuple(key.split(" -> ")) for key in changes}
        self._patterns = {key: re.compile(key.removeprefix("any: ")) for key in reasons if key.startswith("any: ")}

    @classmethod
    def read(cls) -> Accepted:
        """From the file."""
        return cls(tomllib.loads(ACCEPTED.read_text()))

    def reason(self, file: str, function: str, change: tuple[int, str, str]) -> str | None:
        """Why this mutant may survive; None where nobody has said."""
        _, before, after = change
        place = place_of(file, function)
        names = (f"{place}: {before} -> {after}", f"{place}: {before}", place)
        return next((self.reasons[name] for name in names if name in self.reasons), self.by_rule(change))

    def by_rule(self, change: tuple[int, str, str]) -> str | None:
        """The reason that holds wherever this change is made, if there is one."""
        _, before, after = change
        for key, (old, new) in self._changes.items():
            if any(before[:at] + new + before[at + len(old) :] == after for at in _places(old, before)):
                return self.reasons[key]
        for key, pattern in self._patterns.items():
            if pattern.fullmatch(f"{before} -> {after}"):
                return self.reasons[key]
        return None

    def unknown(self, kept: Kept) -> list[str]:
        """The keys that name no function, or in a function whose mutants were all run none that nobody noticed."""
        there, functions = set(), set()
        for (file, name), judged in kept.functions.items():
            place = place_of(file, name)
            functions |= {place} if all(each.kind for each in judged.outcomes) else {place, f"{place}: "}
            changes = [each.change for each in judged.outcomes if each.change]
            there |= {f"{place}: {before} -> {after}" for _, before, after in changes}
            there |= {f"{place}: {before}" for _, before, _ in changes}
        return sorted(
            key
            for key in self.reasons.keys() - self._changes.keys() - self._patterns.keys() - there
            if key not in functions and f"{key.partition(': ')[0]}: " not in functions
        )


def _places(part: str, text: str) -> Iterator[int]:
    at = text.find(part)
    while at >= 0:
        yield at
        at = text.find(part, at + 1)


def place_of(file: str, function: str) -> str:
    """A function's full name: `ddp_core.reduction.tree.GradientTree.push`."""
    return f"{file.removesuffix('.py').replace('/', '.')}.{function}"
