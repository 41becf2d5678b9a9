"""Forged runs that `ddp audit` should find: how many it finds, and how many it must find by its formula.

    python -m benchmarks.forgeries [--count 200] [--seed 1] [--draws 4] [--quick] [--json PATH]

A small run (digits, 44 steps) is cut into 22 segments. A forger trains it again and does something else in it, then
writes the chain so that it tells of what should have been done; or changes files of the honest run. Every forgery has
all heads right but where the kind says otherwise. Each is audited with `--draws` segments and a seed of its own.
`expected` is 1 - C(S - F, k) / C(S, k), with F of the S segments forged, where only training again can find it, and 1
where the chain or the final weights tell. Trainings and audits are forks of this process. The honest run is audited
with all of its segments, and must pass.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.record import record
from ddp_core.distributed.children import Ended
from ddp_core.observe.chain import CHAIN, each_link, head_of, json_line, sealed

EVERY, STEPS, PER_EPOCH = 2, 44, 22
SEGMENTS = STEPS // EVERY
WORDS = (
    *("digits", "--set", "model.width=4", "--set", "model.dropout=0.2", "--set", f"max_steps={STEPS}"),
    *("--numerics", "native", "--guard", "off", "--keep-for-audit", str(SEGMENTS), "--device", "cpu"),
)
Change = Callable[[dict[str, Any]], Any]
"""Changes a line of the chain; leaves it out where it returns False."""


def rewrite(run: Path, change: Change) -> None:
    """Write the chain of a run anew with other lines, all heads right, and put its last head into run.json."""
    lines = [dict(link.line) for link in each_link(run / CHAIN)]
    head, content = "", b""
    for line in lines:
        if change(line) is not False:
            body = json_line(line)
            head = head_of(head, body)
            content += sealed(body, head)
    (run / CHAIN).write_bytes(content)
    edit_record(run, lambda record: record["chain"].update(head=head))


def edit_record(run: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a run's run.json."""
    document = json.loads((run / "run.json").read_text())
    change(document)
    (run / "run.json").write_text(json.dumps(document))


def in_fork(function: Callable[[], int]) -> Ended:
    """What the function returns and prints, in a process of its own."""
    with tempfile.NamedTemporaryFile() as output, tempfile.NamedTemporaryFile() as errors:

        def enter() -> None:
            for number, file in ((1, output), (2, errors)):
                os.dup2(os.open(file.name, os.O_WRONLY), number)
            code = function()
            sys.stdout.flush()
            os._exit(code)

        child = multiprocessing.get_context("fork").Process(target=enter)
        child.start()
        child.join()
        assert child.exitcode is not None
        said = [Path(file.name).read_text(errors="replace") for file in (output, errors)]
        return Ended(child.exitcode, *said)


def train(output: Path, *words: str, tamper: Callable[[], None] = lambda: None) -> Path:
    """Train the run, with `tamper` called before in the same process; returns its directory."""

    def forged() -> int:
        from ddp_core import cli

        tamper()
        return int(cli.main(["train", *WORDS, "--output", str(output), *words]))

    ended = in_fork(forged)
    assert ended.code == 0, ended.errors
    (file,) = output.glob("*/*/run.json")
    return file.parent


def audit(run: Path, draws: int, seed: int) -> dict[str, Any]:
    """What the audit of a run tells; `passed` says whether it has passed."""

    def audited() -> int:
        from ddp_core.cli.audit.audit import Report, audit_run
        from ddp_core.distributed.children import Children

        Children.ddp = _run_ddp  # type: ignore[assignment, method-assign]
        return audit_run(run, draws, seed, None, Report(as_json=True))

    ended = in_fork(audited)
    assert ended.code in (0, 1), ended.errors
    told: dict[str, Any] = json.loads(ended.output.strip().rpartition("\n")[2])
    assert told["passed"] == (ended.code == 0)
    return told


def _run_ddp(_: object, words: list[str], limit: float | None = None) -> Ended:
    from ddp_core import cli

    return in_fork(lambda: int(cli.main(words)))


@dataclass(frozen=True)
class Forgery:
    """A kind of forgery: makes one in a folder, and says in how many segments it lies; None: it shows at once."""

    name: str
    make: Callable[[Path, Path, random.Random], tuple[Path, int | None]]


def _later(rates: Mapping[int, str]) -> Change:
    """Let the chain tell of the rates of the honest run, whatever was trained with."""
    return lambda line: line.update(lr=rates[line["step"]]) if line["kind"] == "step" else None


def _rates(honest: Path) -> dict[int, str]:
    return {link.step: link.line["lr"] for link in each_link(honest / CHAIN) if link.line["kind"] == "step"}


def put(kind: type, name: str, method: Callable[..., Any]) -> None:
    """Put a method in the place of another, in this process."""
    setattr(kind, name, method)


def _swapped_sample(honest: Path, folder: Path, draws: random.Random) -> tuple[Path, int]:
    step, part, shift = draws.randrange(STEPS), draws.randrange(8), draws.randrange(1, 1000)

    def tamper() -> None:
        from ddp_core.trainers.batches import Batches

        true = Batches.ids

        def ids(self: Any, at: int, micro_batch: Any) -> Any:
            found = true(self, at, micro_batch)
            if at == step and micro_batch.index == part:
                found = found.copy()
                found[0] = (found[0] + shift) % self.samples
            return found

        put(Batches, "ids", ids)

    return train(folder, tamper=tamper), 1


def _with_rate(factor: Callable[[int], float]) -> Callable[[], None]:
    def tamper() -> None:
        from ddp_core.config.experiment import Schedule

        true = Schedule.rate

        def rate(self: Schedule, base: float, step: int, *rest: int) -> float:
            return true(self, base, step, *rest) * factor(step)

        put(Schedule, "rate", rate)

    return tamper


def _changed_rate(honest: Path, folder: Path, draws: random.Random) -> tuple[Path, int]:
    at, factor = draws.randrange(STEPS), draws.choice([0.5, 1.01, 2.0])
    run = train(folder, tamper=_with_rate(lambda step: factor if step == at else 1.0))
    rewrite(run, _later(_rates(honest)))
    return run, 1


def _other_rate_from_a_step_on(honest: Path, folder: Path, draws: random.Random) -> tuple[Path, int]:
    first = draws.randrange(STEPS // 2, STEPS)
    run = train(folder, tamper=_with_rate(lambda step: 1.5 if step >= first else 1.0))
    rewrite(run, _later(_rates(honest)))
    return run, SEGMENTS - first // EVERY


def _flipped_bit(honest: Path, folder: Path, draws: random.Random) -> tuple[Path, int]:
    return train(folder, "--fault", f"flipweight@{draws.randrange(1, STEPS)}"), 1


def _after_update(at: int, change: Callable[[Any], None], skips: bool = False) -> Callable[[], None]:
    def tamper() -> None:
        from ddp_core.trainers.passes import WeightUpdate

        true = WeightUpdate.make

        def make(self: Any, step: int) -> None:
            if step != at or not skips:
                true(self, step)
            if step == at:
                change(self._state)

        put(WeightUpdate, "make", make)

    return tamper


def _skipped_step(honest: Path, folder: Path, draws: random.Random) -> tuple[Path, int]:
    run = train(folder, tamper=_after_update(draws.randrange(1, STEPS), lambda state: None, skips=True))
    rewrite(run, _later(_rates(honest)))
    return run, 1


def _other_seed(honest: Path, folder: Path, draws: random.Random) -> tuple[Path, int]:
    epoch, other = draws.randrange(2), draws.randrange(1, 1000)

    def tamper() -> None:
        from ddp_core.base.seeds import MicroBatchSeed

        true = MicroBatchSeed.__call__

        def call(self: MicroBatchSeed, step: int, micro_batch: int) -> None:
            true(self, step + (1000 * other if step // PER_EPOCH == epoch else 0), micro_batch)

        put(MicroBatchSeed, "__call__", call)

    return train(folder, tamper=tamper), PER_EPOCH // EVERY


def _shifted(state: Any) -> None:
    import torch

    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.add_(1e-3)


def _tuned_after_the_end(honest: Path, folder: Path, draws: random.Random) -> tuple[Path, int]:
    return train(folder, tamper=_after_update(STEPS - 1, _shifted)), 1


def _other_weights(honest: Path, folder: Path, draws: random.Random) -> tuple[Path, int]:
    return train(folder, tamper=_after_update(draws.randrange(STEPS - 1), _shifted)), 1


def _copied(honest: Path, folder: Path) -> Path:
    return Path(shutil.copytree(honest, folder / "digits" / honest.name))


def _accuracy(honest: Path, folder: Path, draws: random.Random) -> tuple[Path, None]:
    run, wanted = _copied(honest, folder), round(draws.uniform(0.97, 1.0), 4)

    def lie(line: dict[str, Any]) -> None:
        if line["kind"] == "evaluation" and line["step"] == STEPS:
            line["figures"]["test_accuracy"] = wanted

    rewrite(run, lie)
    edit_record(run, lambda record: record["result"].update(test_accuracy=wanted))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["kind"] == "evaluation" and line["step"] == STEPS:
            line["test_accuracy"] = wanted
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run, None


def _edited_record(honest: Path, folder: Path, draws: random.Random) -> tuple[Path, None]:
    run = _copied(honest, folder)
    what = draws.choice(["a byte of the chain", "a line of the chain", "the result", "the weights' digest", "a file"])
    if what == "a byte of the chain":
        content = bytearray((run / CHAIN).read_bytes())
        content[draws.randrange(len(content))] ^= 1
        (run / CHAIN).write_bytes(content)
    elif what == "a line of the chain":
        gone = draws.randrange(1, STEPS)
        rewrite(run, lambda line: not (line["kind"] == "step" and line["step"] == gone))
    elif what == "the result":
        edit_record(run, lambda record: record["result"].update(test_loss=0.5 * record["result"]["test_loss"]))
    elif what == "the weights' digest":
        edit_record(run, lambda record: record.update(weights_sha256=f"{draws.getrandbits(256):064x}"))
    else:
        content = bytearray((run / "model.safetensors").read_bytes())
        content[-draws.randrange(1, 200)] ^= 1
        (run / "model.safetensors").write_bytes(content)
    return run, None


FORGERIES = (
    Forgery("a sample of one step exchanged for another", _swapped_sample),
    Forgery("another learning rate in one step, the chain tells the right one", _changed_rate),
    Forgery("another learning rate from a step on, the chain tells the right one", _other_rate_from_a_step_on),
    Forgery("a bit of a weight flipped after a step", _flipped_bit),
    Forgery("the update of a step left out", _skipped_step),
    Forgery("another seed of dropout in an epoch", _other_seed),
    Forgery("other weights put in after a step, the chain computed over them", _other_weights),
    Forgery("weights tuned after the end, evaluated and chained as they are", _tuned_after_the_end),
    Forgery("an accuracy that was never reached, in the chain and all files", _accuracy),
    Forgery("an edited record: the chain, a figure, a digest or the weights' file", _edited_record),
)


def measure(count: int, seed: int, draws: int) -> dict[str, Any]:
    """All figures; prints the table."""
    from ddp_core.cli.audit.draw import passing

    kinds: dict[str, dict[str, Any]] = {
        each.name: {"made": 0, "found": 0, "expected": 0.0, "variance": 0.0, "said": {}} for each in FORGERIES
    }
    with tempfile.TemporaryDirectory() as place:
        honest = train(Path(place) / "honest")
        passed = audit(honest, SEGMENTS, seed)
        assert passed["passed"], passed["verdict"]
        for number in range(count):
            forgery = FORGERIES[number % len(FORGERIES)]
            lots = random.Random(f"{seed} {number}")
            folder = Path(place) / str(number)
            with _removed(folder):
                run, forged = forgery.make(honest, folder, lots)
                told = audit(run, draws, lots.getrandbits(32))
            found = kinds[forgery.name]
            chance = 1.0 if forged is None else 1 - passing(SEGMENTS, forged, draws)
            found["made"] += 1
            found["found"] += not told["passed"]
            found["expected"] += chance
            found["variance"] += chance * (1 - chance)
            said = told["verdict"].partition(":")[0].partition(" at step")[0]
            found["said"][said] = found["said"].get(said, 0) + 1
            print(f"{number + 1:4} {forgery.name}: {told['verdict']}", flush=True)
    total = {name: sum(each[name] for each in kinds.values()) for name in ("made", "found", "expected", "variance")}
    print(
        f"{total['found']} of {total['made']} found, {total['expected']:.1f} expected ± {total['variance'] ** 0.5:.1f}"
    )
    return {"segments": SEGMENTS, "draws": draws, "seed": seed, "kinds": kinds, "total": total, "honest": "passed"}


@contextlib.contextmanager
def _removed(folder: Path) -> Iterator[None]:
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Forge, audit and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="two forgeries; recorded with --json only")
    parser.add_argument("--json", type=Path, help="where to record the results (default: benchmarks/results)")
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    with contextlib.redirect_stderr(io.StringIO()):
        from ddp_core.cli.audit import audit as _  # noqa: F401  # loaded once, before the forks
        from ddp_core.run import run as _run  # noqa: F401
    count = 2 if arguments.quick else arguments.count
    results = measure(count, arguments.seed, arguments.draws)
    if arguments.json or not arguments.quick:
        command = f"python -m benchmarks.forgeries --count {count} --seed {arguments.seed} --draws {arguments.draws}"
        print(f"recorded in {record('forgeries', command, results, arguments.json, count)}")


if __name__ == "__main__":
    main()
