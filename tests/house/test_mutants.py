"""What `make mutants` makes, runs anew, keeps and says: mutants, the score, the page, and the survivors argued away."""

from __future__ import annotations

import gc
import re
from collections import Counter, defaultdict

import pytest

from benchmarks import mutants_page, mutations
from benchmarks.mutant_outcomes import Accepted, Judged, Kept, Outcome
from benchmarks.mutations import Function, Mutant, functions_of, text_of
from tests.support.processes import ask

CUT = "ddp_core/config/cut.py"
NAMED = "tests/house/test_mutants.py::test_what_is_kept_is_read_back"


def test_the_page_says_what_was_measured() -> None:
    page = mutants_page.PAGE.read_text()
    now = mutants_page.between_marks(mutants_page.read(), Accepted.read())
    assert f"{mutants_page.BEGIN}\n\n{now}\n{mutants_page.END}" in page, "python -m benchmarks.mutants_page"


def test_a_function_that_has_changed_since_its_mutants_were_run_is_stale() -> None:
    functions = functions_of(CUT)
    kept = Kept({(CUT, name): Judged(function.sha, []) for name, function in functions.items()})
    assert mutants_page.stale(kept) == {}
    kept.functions[CUT, "BatchCut.of"] = Judged("other", [])
    kept.functions[CUT, "gone"] = Judged("other", [])
    del kept.functions[CUT, "BatchCut.parts"]
    assert mutants_page.stale(kept) == {CUT: ["BatchCut.of", "BatchCut.parts", "gone"]}


def test_the_mutations_made_by_hand_name_files_and_tests_that_exist() -> None:
    tables = mutants_page.PAGE.read_text().partition("## Mutations made by hand")[2]
    rows = [line.split(" | ") for line in tables.splitlines() if line.startswith("| ") and "`" in line]
    assert len(rows) >= 23
    texts: dict[str, str] = defaultdict(str)
    for path in (mutants_page.ROOT / "tests").rglob("test_*.py"):
        texts[path.name] += path.read_text()  # two folders may have files of one name
    test_file = ""
    for _, files, tests in rows:
        for file in re.findall(r"`(\S+\.py)`", files):
            assert any((mutants_page.ROOT / place / file).exists() for place in (".", "ddp_core")), file
        for found, test in re.findall(r"`(?:\S*/)?(\w*(?:\.py)?)::(\w+)`", tests):
            test_file = found or test_file
            assert f"def {test}(" in texts[test_file], f"{test_file}::{test}"


def test_what_is_kept_is_read_back() -> None:
    outcomes = [
        Outcome("killed", NAMED),
        Outcome("timeout", NAMED),
        Outcome("survived", None, (3, "a + b -> c", "a - b -> c")),
        Outcome("not covered", None, (0, "x", "")),
        Outcome(),
    ]
    kept = Kept({(CUT, "f"): Judged("sha", outcomes), (CUT, "without"): Judged("other", [])}, {NAMED: "digest"})
    assert Kept.read(kept.plain()) == kept


def test_only_what_is_new_or_changed_is_run_again() -> None:
    function = Function(CUT, "f", 1, 2, "sha")
    accepted = Accepted({"ddp_core.config.cut.f: argued -> too": "a reason"})
    outcomes = [
        Outcome("killed", NAMED),
        Outcome("survived", None, (1, "argued", "too")),
        Outcome("survived", None, (1, "argued", "not")),
        Outcome(),
    ]
    digest = mutations.test_digest(NAMED)
    assert digest

    def plan(sha: str, test: str) -> list[int] | None:
        return Kept({(CUT, "f"): Judged(sha, outcomes)}, {NAMED: test}).plan(function, accepted)

    assert plan("sha", digest) == [2, 3]
    assert plan("sha", "of the test as it was") == [0, 2, 3]
    assert plan("of the function as it was", digest) is None
    assert Kept().plan(function, accepted) is None


def test_two_records_are_put_together() -> None:
    sha, change = functions_of(CUT)["BatchCut.of"].sha, (0, "a", "b")
    now = mutations.test_digest(NAMED) or ""
    ours = Kept(
        {
            (CUT, "BatchCut.of"): Judged(sha, [Outcome("survived", None, change), Outcome("killed", NAMED), Outcome()]),
            (CUT, "BatchCut.parts"): Judged("earlier", [Outcome("killed", NAMED)]),
            (CUT, "ours"): Judged("x", [Outcome()]),
        },
        {NAMED: now},
    )
    theirs = Kept(
        {
            (CUT, "BatchCut.of"): Judged(sha, [Outcome("killed", "t"), Outcome(), Outcome("survived", None, change)]),
            (CUT, "BatchCut.parts"): Judged(functions_of(CUT)["BatchCut.parts"].sha, [Outcome("killed", NAMED)]),
            (CUT, "theirs"): Judged("y", [Outcome()]),
        },
        {NAMED: "earlier", "t": "digest"},
    )
    both = ours.with_other(theirs)
    assert both.plain() == theirs.with_other(ours).plain()
    assert both.tests == {NAMED: now, "t": "digest"}
    told = {name: [(each.kind, each.test) for each in judged.outcomes] for (_, name), judged in both.functions.items()}
    assert told["BatchCut.of"] == [("killed", "t"), ("killed", NAMED), ("survived", None)]
    assert told["BatchCut.parts"] == [(None, None)], "of the present source, but by an earlier state of the test"
    assert told.keys() == {"BatchCut.of", "BatchCut.parts", "ours", "theirs"}


def test_a_test_is_another_one_where_it_or_what_it_shares_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(text: str) -> str | None:
        mutations.test_digest.cache_clear()
        monkeypatch.setattr(mutations, "text_of", lambda file: text)
        return mutations.test_digest("tests/test_x.py::test_one[a]")

    text = "SIZE = 3\n\n@mark\ndef test_one():\n    assert f(SIZE)\n\ndef test_two():\n    assert True\n"
    assert digest(text) == digest(text.replace("True", "1")) == digest(text.replace("\n\n", "\n\n\n"))
    changed = [text.replace("3", "4"), text.replace("@mark", "@other"), text.replace("f(", "g("), "def test_two(): ..."]
    assert len({digest(text), *map(digest, changed)}) == 5
    assert digest(changed[-1]) is None
    mutations.test_digest.cache_clear()


def test_a_mutant_is_argued_away_by_its_name_its_function_or_its_change() -> None:
    reasons = {
        "a.f: x = 1 -> x = 2": "one",
        "a.f: y = 1": "a line",
        "a.g": "all of it",
        "strict=True -> strict=False": "a guard",
    }
    accepted = Accepted({**reasons, r"any: (.*)device=\w+(.*) -> \1device=None\2": "no GPU"})

    def reason(function: str, before: str, after: str) -> str | None:
        return accepted.reason("a.py", function, (0, before, after))

    assert accepted.by_rule((0, "x = 1", "x = 2")) is None
    assert accepted.by_rule((0, "zip(x, strict=True)", "zip(x, strict=False)")) == "a guard"
    assert reason("f", "x = 1", "x = 2") == "one"
    assert reason("f", "x = 1", "x = None") is None
    assert reason("f", "y = 1", "y = None") == "a line"
    assert reason("g", "y = 1", "y = 2") == "all of it"
    assert reason("h", "zip(x, y, strict=True)", "zip(x, y, strict=False)") == "a guard"
    assert reason("h", "zip(zip(x, strict=True), strict=True)", "zip(zip(x, strict=True), strict=False)") == "a guard"
    assert reason("h", "zip(x, y, strict=True)", "zip(x, None, strict=True)") is None
    assert reason("h", "f(device=here, size=2)", "f(device=None, size=2)") == "no GPU"
    assert reason("h", "f(device=here, size=2)", "f(device=None, size=3)") is None


def test_a_reason_for_what_does_not_exist_any_more_is_found() -> None:
    accepted = Accepted(
        {"a.f: x -> y": "one", "a.f": "all", "a.gone": "all", "a.h: x -> y": "not run", "p -> q": "any"}
    )
    left = Outcome("survived", None, (0, "x", "z"))
    kept = Kept({("a.py", "f"): Judged("", [left]), ("a.py", "h"): Judged("", [left, Outcome()])})
    assert accepted.unknown(kept) == ["a.f: x -> y", "a.gone"]


def test_every_reason_says_something() -> None:
    assert all(reason.strip() for reason in Accepted.read().reasons.values())


def test_what_was_not_run_or_is_argued_away_is_no_part_of_the_score() -> None:
    counts = Counter(
        {
            "mutants": 20,
            "left out": 3,
            "run": 12,
            "killed": 6,
            "timeout": 1,
            "survived": 4,
            "argued": 2,
            "not covered": 1,
        }
    )
    *_, total = mutants_page.rows({"one.py": counts, "two.py": counts})
    assert total == ("all", "40", "6", "24", "12", "2", "8", "2", "4", "70.0%")


def _mutant(function: str, old: str, new: str) -> Mutant:
    start = text_of(CUT).index(old)
    return Mutant(functions_of(CUT)[function], 0, start, start + len(old), new)


def test_a_mutant_names_the_lines_that_it_changes() -> None:
    line = functions_of(CUT)["BatchCut.count"].line
    found = text_of(CUT).splitlines()[line + 1]
    assert "samples // self.micro_batch" in found
    mutant = _mutant("BatchCut.count", "-(-samples // self.micro_batch)", "-(-samples / self.micro_batch)")
    assert mutant.change() == (2, found.strip(), found.strip().replace("//", "/"))


def _runs_mutants() -> list[object]:
    """In a process of its own: what the functions of a runner do, mutant by mutant."""
    from ddp_core.checkpoint.fence import Superseded
    from ddp_core.config.cut import BatchCut
    from tests.support.mutant_runner import Runner, functions_in

    gc.unfreeze()  # otherwise what was loaded before is not among the collector's objects
    runner = Runner([], [CUT], {}, print, 1, 1.0, 0.0)
    runner._functions = functions_in([CUT])
    runner._apply(_mutant("BatchCut.count", "-(-samples // self.micro_batch)", "samples"))
    cut = BatchCut(12, 4, 1)
    found: list[object] = [cut.count(12), cut.micro_batches]
    fence = "ddp_core/checkpoint/fence.py"
    old = "exit_code: int = ExitCode.PEERS_LOST"
    start = text_of(fence).index(old) + len("exit_code: int = ")
    runner._functions = functions_in([fence])
    changed = Mutant(functions_of(fence)["Superseded.__init__"], 0, start, start + len("ExitCode.PEERS_LOST"), "5")
    runner._apply(changed)
    return [*found, Superseded("too late").exit_code]


def test_a_mutant_takes_the_place_of_its_function_and_of_default_values() -> None:
    assert ask(_runs_mutants) == [12, 12, 5]
