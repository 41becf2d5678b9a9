"""Say what has run on a GPU so far and what has not, from the records of `make gpu-check` and `test-gpu`.

`python -m benchmarks.gpu_runs` writes docs/reference/gpu-runs.md.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.gpu import ARTICLE, TRACE, TRACED, summary_of, times_plain
from benchmarks.gpu_lines import COLLECTION, CUT_OFF, NAME, SPEED, Line, newest_first, read
from benchmarks.gpu_trace import idle_in_words
from benchmarks.record import RESULTS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "gpu-runs.md"
BEGIN, END = "<!-- begin: python -m benchmarks.gpu_runs -->", "<!-- end -->"
_PRODUCTS = {"convolutions": "conv", "other products": "matmul"}
_NOT_YET = "has not run on a GPU yet"
_NOT_TIMED = "has timed nothing on a GPU yet"
_CHANGES = {True: ", with changes", False: "", None: ", whether changed is not known"}
_TIMED, _FROM_FILES = "images/s: ", "from files: "

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
        return f"`make gpu-check` {_NOT_YET}."
    groups = len({line["group"] for line in found})
    count = len(found) - groups  # one of each group is what the others are compared with
    alike = f"{count - len(_unlike(lines))} of {count}"
    said = f"{alike} exact trainings in {groups} settings have the digest of one process"
    return f"`make gpu-check` {_on(found)}: {said}."


def _tests(lines: Lines) -> str:
    found = [line for item, line in lines.items() if item.startswith("tests/gpu/")]
    if not found:
        return f"`make test-gpu` {_NOT_YET}."
    outcomes = Counter(line["outcome"] for line in found)
    skipped = Counter(" ".join(line["said"]) for line in found if line["outcome"] == "skipped")
    counts = [f"{outcomes[kind]} {kind}" for kind in ("passed", "failed") if outcomes[kind]]
    counts += [f"{count} skipped ({reason})" for reason, count in sorted(skipped.items())]
    counts += [f"{outcomes[CUT_OFF]} ended by the limit of the time"] if outcomes[CUT_OFF] else []
    counts += [f"of {lines[COLLECTION]['tests']} tests"] if COLLECTION in lines else []
    return f"`make test-gpu` {_on(found)}: {', '.join(counts)}."


def _speeds_said(lines: Lines) -> str:
    timed = [line for line in lines.values() if SPEED in line]
    return f"`make gpu-check` {_on(timed)}: {_timed(lines)}." if timed else f"`make gpu-check` {_NOT_TIMED}."


def _timed(lines: Lines) -> str:
    speeds = _speeds(lines)
    compared = {_TIMED + case for case in speeds if case.startswith("exact") and times_plain(case, speeds)}
    return f"{_rounds({lines[item]['rounds'] for item in compared} or {0})}, {summary_of(speeds)}"


def _rounds(counts: set[int]) -> str:
    few, many = min(counts), max(counts)
    return "one round" if many == 1 else f"median of {many} rounds" if few == many else f"{few} to {many} rounds"


def _on(found: list[Line]) -> str:
    last = max(found, key=lambda line: str(line["date"]))
    on, changed = last["on"], _CHANGES[last["dirty"]]
    machine = f"{on['devices']} x {on['device']}, torch {on['torch']}"
    return f"ran on {machine}, {last['date'][:10]}, commit {str(last['commit'])[:12]}{changed}"


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
    tables = _digest_table(lines), _speed_table(lines), _files_table(lines)
    parts = [_head(lines), *tables, _trace(folder / TRACE), _test_list(lines)]
    return "\n".join([*itertools.chain(*parts), *_earlier(before)]) + "\n"


def _head(lines: Lines) -> Iterator[str]:
    on = next(iter(lines.values()))["on"]
    yield f"What the last recorded commit did: it {_on(list(lines.values()))}."
    yield f"{on['multiprocessors']} multiprocessors, driver {on['driver']}."
    yield from ("", *(f"- {each}" for each in (_digests(lines), _tests(lines), _speeds_said(lines))))


def _digest_table(lines: Lines) -> Iterator[str]:
    unlike = set(_unlike(lines))
    yield from ("", "| training | digest of its weights | |", "|---|---|---|")
    for item, line in lines.items():
        if "digest" in line:
            is_exact = line["group"].startswith("exact")
            said = "other bits" if (line["group"], line["way"]) in unlike else "as one process" if is_exact else "-"
            yield f"| {item} | `{line['digest'][:16]}` | {said} |"


def _speeds(lines: Lines, of: str = _TIMED) -> dict[str, float]:
    """Images per second by contender, of the items whose names begin so and that came to their end."""
    timed = (line for item, line in lines.items() if item.startswith(of) and SPEED in line)
    return {line["case"]: line[SPEED] for line in timed}


def _speed_table(lines: Lines) -> Iterator[str]:
    speeds = _speeds(lines)
    base = speeds.get(ARTICLE)
    yield from ("", "| ResNet-18, 224x224 | rounds | images/s | times as long as plain | of the article's loop |")
    yield "|---|---|---|---|---|"
    for case, speed in speeds.items():
        times = times_plain(case, speeds) if case != ARTICLE else None
        cells = f"{times:.2f}" if times else "-", f"{speed / base:.2f}" if base else "-"
        yield f"| {case} | {lines[_TIMED + case]['rounds']} | {speed:.0f} | {' | '.join(cells)} |"
    yield from ("", "Plain: with any kernel, in the same precision and layout, compiled where the row is.")
    for line in lines.values():
        if tf32 := line.get("switches", {}).get("tf32"):
            kinds = (f"{kind} in {'TF32' if tf32[of] == 'tf32' else 'float32'}" for kind, of in _PRODUCTS.items())
            yield from ("", f"The article's loop has what torch does by default: {', '.join(kinds)}.")


def _files_table(lines: Lines) -> Iterator[str]:
    speeds = _speeds(lines, _FROM_FILES)
    if speeds:
        yield from ("", "| ResNet-18 from JPEG files | rounds | images/s | of the script in float32 |")
        yield "|---|---|---|---|"
    base = speeds.get("script, fp32")
    for case, speed in speeds.items():
        of_base = f"{speed / base:.2f}" if base else "-"
        yield f"| {case} | {lines[_FROM_FILES + case]['rounds']} | {speed:.0f} | {of_base} |"


def _trace(path: Path) -> Iterator[str]:
    if path.exists():
        yield from ("", f"In a trace of three steps ({TRACED}): {idle_in_words(path)}.")


def _earlier(commits: Sequence[Lines]) -> Iterator[str]:
    if commits:
        yield from ("", "Before it:", "")
    for lines in commits:
        yield f"- {_digests(lines)} {_tests(lines)}"


def _test_list(lines: Lines) -> Iterator[str]:
    yield from ("", _tests(lines))
    said = [(item, line) for item, line in lines.items() if line["outcome"] == "failed"]
    yield from ("", f"Failed: {len(said)}.", *([""] if said else []))
    for item, line in said:
        yield f"- {item}: `{(line.get('said') or ['no word'])[-1].replace('`', '')}`"
    if cut_off := [item for item, line in lines.items() if line["outcome"] == CUT_OFF]:
        yield from ("", f"Ended by the limit of the time, so not known: {'; '.join(cut_off)}.")


def write() -> None:
    """Write the page's part that comes from the records."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{between_marks()}\n{END}{after}")


if __name__ == "__main__":
    write()
