"""Say what has run on a GPU so far and what has not, from the records of `make gpu-check` and `test-gpu`.

`python -m benchmarks.gpu_runs` writes the part of docs/evidence/machines.md that is about GPUs.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.gpu import ARTICLE, times_plain
from benchmarks.gpu_lines import COLLECTION, CUT_OFF, NAME, SPEED, Line, newest_first, read
from benchmarks.record import RESULTS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "evidence" / "machines.md"
BEGIN, END = "<!-- begin: python -m benchmarks.gpu_runs -->", "<!-- end -->"
_PRODUCTS = {"convolutions": "conv", "other products": "matmul"}
_NOT_YET = "has not run on a GPU yet"
_CHANGES = {True: ", with changes", False: "", None: ", perhaps changed"}
_KINDS = {"images/s: ": "", "from files: ": "JPEG files: "}
"""How the names of timed items begin, and what stands for that in the table."""

Lines = Mapping[str, Line]
"""The last line of each item, of one commit on one machine."""


def failures(lines: Lines) -> list[str]:
    """What has failed, and the exact trainings that have other bits than `single`."""
    failed = [item for item, line in lines.items() if line["outcome"] == "failed"]
    return failed + [f"{group}: {way} has another digest" for group, way in _unlike(lines)]


def in_words(lines: Lines) -> list[str]:
    """A summary for a terminal."""
    outcomes = Counter(line["outcome"] for line in lines.values())
    counted = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    return [f"gpu-check: {counted}", *(f"  {each}" for each in failures(lines))]


def _digests(lines: Lines) -> str:
    found = _exact(lines)
    if not found:
        return f"`make gpu-check` {_NOT_YET}"
    # One of each group is what the others are compared with.
    count = len(found) - len({line["group"] for line in found})
    return f"{count - len(_unlike(lines))} of {count} exact trainings have the digest of one process"


def _tests(lines: Lines) -> str:
    found = [line for item, line in lines.items() if item.startswith("tests/gpu/")]
    if not found:
        return f"`make test-gpu` {_NOT_YET}"
    outcomes = Counter(line["outcome"] for line in found)
    skipped = Counter(" ".join(line["said"]) for line in found if line["outcome"] == "skipped")
    counts = [f"{outcomes[kind]} {kind}" for kind in ("passed", "failed") if outcomes[kind]]
    counts += [f"{count} skipped ({reason})" for reason, count in sorted(skipped.items())]
    counts += [f"{outcomes[CUT_OFF]} cut off by the time limit"] if outcomes[CUT_OFF] else []
    counts += [f"of {lines[COLLECTION]['tests']} tests"] if COLLECTION in lines else []
    return f"tests: {', '.join(counts)}"


def _on(lines: Lines) -> str:
    last = max(lines.values(), key=lambda line: str(line["date"]))
    on, commit = last["on"], f"commit {str(last['commit'])[:12]}{_CHANGES[last['dirty']]}"
    return f"{last['date'][:10]}, {commit}, {on['devices']} x {on['device']}, torch {on['torch']}"


def _exact(lines: Lines) -> list[Line]:
    return [line for line in lines.values() if "digest" in line and line["group"].startswith("exact")]


def _unlike(lines: Lines) -> list[tuple[str, str]]:
    """Exact trainings with another digest than `single` of their group, or than the first where that is missing."""
    wanted: dict[str, str] = {}
    for line in _exact(lines):
        if line["way"] == "single" or line["group"] not in wanted:
            wanted[line["group"]] = line["digest"]
    return [(line["group"], line["way"]) for line in _exact(lines) if line["digest"] != wanted[line["group"]]]


def between_marks(folder: Path = RESULTS) -> str:
    """What stands between the marks of the page, from the records in `folder`."""
    lines, *before = newest_first(read(folder / NAME)) or [{}]
    if not lines:
        return "Nothing has run on a GPU yet.\n"
    parts = [_head(lines, before), _digest_table(lines), _speed_table(lines), _test_list(lines)]
    return "\n".join(itertools.chain(*parts)) + "\n"


def _head(lines: Lines, before: Sequence[Lines]) -> Iterator[str]:
    yield from (f"- {_on(each)}: {_digests(each)}; {_tests(each)}" for each in (lines, *before))


def _digest_table(lines: Lines) -> Iterator[str]:
    unlike, rows = set(_unlike(lines)), dict[tuple[str, str], list[str]]()
    for line in _exact(lines):
        mark = ", **other bits**" if (line["group"], line["way"]) in unlike else ""
        rows.setdefault((line["group"], f"`{line['digest'][:16]}`{mark}"), []).append(line["way"])
    yield from ("", "| training | digest | ended with it |", "|---|---|---|")
    yield from (f"| {group} | {digest} | {'; '.join(ways)} |" for (group, digest), ways in rows.items())


def _speed_table(lines: Lines) -> Iterator[str]:
    rounds = [line["rounds"] for line in lines.values() if SPEED in line]
    said = f"{min(rounds)} to {max(rounds)} rounds" if rounds else "not timed yet"
    yield from ("", f"| ResNet-18, 224x224, {said} | images/s | times as long as plain |", "|---|---|---|")
    for begins, words in _KINDS.items():
        timed = [line for item, line in lines.items() if item.startswith(begins) and SPEED in line]
        speeds = {line["case"]: line[SPEED] for line in timed}
        for case, speed in speeds.items():
            if case.startswith("plain"):
                continue
            times = times_plain(case, speeds) if case != ARTICLE else None
            yield f"| {words}{case} | {speed:.0f} | {f'{times:.2f}' if times else ''} |".replace("|  |", "| |")
    yield from ("", "Plain has any kernel, the same precision and layout, and is compiled where the row is.")
    for line in lines.values():
        if tf32 := line.get("switches", {}).get("tf32"):
            kinds = (f"{kind} in {'TF32' if tf32[of] == 'tf32' else 'float32'}" for kind, of in _PRODUCTS.items())
            yield f"The article's loop (`python -m benchmarks.gpu`) has torch's defaults: {', '.join(kinds)}."


def _test_list(lines: Lines) -> Iterator[str]:
    failed = [(item, line) for item, line in lines.items() if line["outcome"] == "failed"]
    yield from ([""] if failed else [])
    for item, line in failed:
        yield f"- {item} failed: `{(line.get('said') or ['no word'])[-1].replace('`', '')}`"
    if cut_off := {item.partition("[")[0]: None for item, line in lines.items() if line["outcome"] == CUT_OFF}:
        yield from ("", f"Cut off by the time limit, at least in part: {'; '.join(cut_off)}.")


def write() -> None:
    """Write the page's part that comes from the records."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{between_marks()}\n{END}{after}")


if __name__ == "__main__":
    write()
