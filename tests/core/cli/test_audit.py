"""What `ddp audit` says: of an honest run, on any layout, and of runs that something was changed in."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from safetensors.torch import load_file, save_file

from benchmarks.forgeries import edit_record, rewrite
from ddp_core.base.digests import weights_digest
from ddp_core.cli.audit.draw import claims, drawn, needed_draws, passing, segments_of
from ddp_core.observe.chain import CHAIN, each_link
from tests.support.commands import Ended, ddp, train, trained
from tests.support.layout_cases import ADAMW_MLP

# 26 steps, of which every 5th is kept: segments of 5, 5, 5, 5, 5 and 1 steps.
WORDS = (ADAMW_MLP, "--set", "max_steps=26", "--keep-for-audit", "6")


def audit(run: Path, *words: object) -> Ended:
    return ddp("audit", run, *words, module="tests.support.quick")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of one process."""
    output = tmp_path_factory.mktemp("audited")
    train(output, *WORDS)
    return trained(output)[0].path


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def test_an_honest_run_passes_and_the_report_says_what_that_proves(run: Path) -> None:
    ended = audit(run, "--segments", 2, "--seed", 1)
    assert ended.code == 0, ended.output + ended.errors
    record = json.loads((run / "run.json").read_text())
    assert f"head {record['chain']['head']}" in ended.output
    assert "the final weights again: the same figures" in ended.output
    assert ended.output.count(": the same\n") == 2
    assert "2 of 6 segments, seed 1" in ended.output
    assert "with 1 of 6 segments forged it would have passed with probability 66.7 %" in ended.output
    assert ended.output.endswith("passed: what was looked at is what the chain says\n")


def test_it_passes_on_another_layout(run: Path) -> None:
    ended = audit(run, "--segments", 1, "--seed", 4, "--layout", "dp", "--nproc-per-node", 2, "--json")
    assert ended.code == 0, ended.output + ended.errors
    told = json.loads(ended.output)
    assert (told["format"], told["passed"], told["segments"], len(told["drawn"])) == ("ddp-audit/1", True, 6, 1)


@pytest.mark.slow
def test_a_run_of_four_ranks_is_audited_on_one_rank_and_sharded(run: Path, tmp_path: Path) -> None:
    train(tmp_path, *WORDS, ranks=4)
    four = trained(tmp_path)[0].path
    assert ddp("audit", four, "--against", run).output == "identical: 26 steps, line by line\n"
    for words in (("--layout", "single"), ("--layout", "ddp", "--nproc-per-node", 2, "--shard", "parameters")):
        ended = audit(four, *words, "--segments", 3, "--seed", 5)
        assert ended.code == 0, ended.output + ended.errors


def _weights_after_the_end(copy: Path) -> None:
    """Put other weights in the place of the final ones, and let the chain and the record tell of them."""
    file = copy / "model.safetensors"
    state = {name: value + 1e-3 if value.is_floating_point() else value for name, value in load_file(file).items()}
    save_file(state, file)
    digest = weights_digest(state)
    rewrite(
        copy,
        lambda line: (
            line.update(weights_sha256=digest) if line.get("step") == 26 and "weights_sha256" in line else None
        ),
    )
    edit_record(copy, lambda record: record.update(weights_sha256=digest))
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(line for line in lines if '"digest"' not in line))


def _rate_of_step_7(copy: Path) -> None:
    rewrite(copy, lambda line: line.update(lr="3f847ae147ae147b") if line.get("step") == 7 and "lr" in line else None)


def _samples_of_step_7(copy: Path) -> None:
    rewrite(copy, lambda line: line.update(ids="0" * 16) if line.get("step") == 7 and "ids" in line else None)


def _without_step_7(copy: Path) -> None:
    rewrite(copy, lambda line: not (line["kind"] == "step" and line["step"] == 7))


def _a_byte(copy: Path) -> None:
    content = bytearray((copy / CHAIN).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / CHAIN).write_bytes(content)


def _another_accuracy(copy: Path) -> None:
    edit_record(copy, lambda record: record["result"].update(test_accuracy=0.999))


@pytest.mark.parametrize(
    ("forge", "verdict"),
    [
        (_a_byte, "different chain: line "),
        (_without_step_7, "different chain: after step 6 it tells of step 8"),
        (_samples_of_step_7, "different samples: step 7 has trained others"),
        (_rate_of_step_7, "different rate: step 7 was trained with the rates [0.01]"),
        (_another_accuracy, "different figures: test_accuracy is 0.999 in run.json"),
        (_weights_after_the_end, "different figures: evaluated again, test_"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_what_shows_without_training_is_named(copy: Path, forge: Callable[[Path], Any], verdict: str) -> None:
    forge(copy)
    ended = audit(copy, "--segments", 1)
    assert ended.code == 1, ended.output + ended.errors
    assert verdict in ended.output
    assert "replayed" not in ended.output


def test_a_forged_step_is_found_where_its_segment_is_drawn(copy: Path) -> None:
    def forge(line: dict[str, Any]) -> None:
        if line.get("step") == 12 and "losses" in line:
            line["losses"] = line["losses"][:16] + "0" * 16 + line["losses"][32:]

    rewrite(copy, forge)
    ended = audit(copy, "--segments", 6)
    assert ended.code == 1, ended.output + ended.errors
    assert ended.output.endswith("different at step 12: the loss of micro-batch 1\n")


def test_a_checkpoint_that_is_gone_or_another_one_is_named(copy: Path) -> None:
    (copy / "checkpoints" / "step-000000005.pt").unlink()
    ended = audit(copy, "--segments", 6)
    assert ended.code == 1, ended.output + ended.errors
    assert "different checkpoint: segment 2 cannot begin" in ended.output


def test_a_head_that_was_given_before_the_draw_is_compared(run: Path) -> None:
    ended = audit(run, "--head", "ab" * 32)
    assert ended.code == 1, ended.output + ended.errors
    assert f"and not {'ab' * 32}, which was given before" in ended.output


def test_two_runs_are_bisected_by_their_chains_alone(run: Path, tmp_path: Path) -> None:
    train(tmp_path, *WORDS, "--fault", "flipweight@12", "--guard", "off")
    other = trained(tmp_path)[0].path
    ended = ddp("audit", run, "--against", other)
    assert ended.code == 1, ended.output + ended.errors
    assert "different from step 13 on: the loss of micro-batch" in ended.output
    same = ddp("audit", run, "--against", run)
    assert (same.code, same.output) == (0, "identical: 26 steps, line by line\n")


def test_a_run_without_a_chain_is_refused_in_one_line(run: Path, copy: Path) -> None:
    (copy / CHAIN).unlink()
    ended = audit(copy)
    assert ended.code == 2, ended.output + ended.errors
    assert "has no chain (chain.jsonl), so it can only be checked whole: ddp verify" in ended.errors
    ended = ddp("train", *WORDS, "--reduction", "plain", "--device", "cpu", "--output", copy / "out")
    assert ended.code == 2
    assert "--keep-for-audit: the bits of the plain reduction belong to one layout" in ended.errors


def test_a_chain_has_a_line_for_each_step_and_is_kept_evenly(run: Path) -> None:
    links = list(each_link(run / CHAIN))
    kinds = [link.line["kind"] for link in links]
    assert (kinds[0], kinds.count("step"), kinds.count("kept")) == ("begin", 26, 6)
    assert [link.step for link in links if link.line["kind"] == "kept"] == [5, 10, 15, 20, 25, 26]
    record = json.loads((run / "run.json").read_text())
    assert record["chain"] == {"head": links[-1].head, "step": 26}
    kept = {int(file.stem.removeprefix("step-")) for file in (run / "checkpoints").glob("step-*.json")}
    assert {5, 10, 15, 20, 25, 26} <= kept


def test_draws_are_even_and_the_formula_is_that_of_drawing_without_putting_back() -> None:
    segments = segments_of(5, 26)
    assert [(each.start, each.stop) for each in segments[-2:]] == [(20, 25), (25, 26)]
    assert drawn(segments, 3, 1, "head") == drawn(segments, 3, 1, "head")
    found = [each.number for seed in range(600) for each in drawn(segments, 2, seed, "head")]
    assert all(150 < found.count(number) < 250 for number in range(1, 7))
    assert passing(100, 1, 5) == pytest.approx(0.95)
    assert (needed_draws(100, 1), needed_draws(100, 10), needed_draws(100, 50)) == (95, 25, 5)
    assert (claims(100), claims(1)) == ([1, 10, 50], [1])
    assert len(drawn(segments, 9, 1, "head")) == 6


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="OpenSSH's client is not installed")
def test_a_signed_bundle_is_audited_elsewhere(run: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    assert ddp("bundle", run, "-o", tmp_path / "signed.zip", "--sign", key).code == 0
    assert ddp("bundle", run, "-o", tmp_path / "plain.zip").code == 0
    with ZipFile(tmp_path / "plain.zip") as archive:
        kept = sorted(name for name in archive.namelist() if name.endswith(".pt"))
    assert kept == [f"checkpoints/step-{step:09d}.pt" for step in (5, 10, 15, 20, 25)]
    ended = audit(tmp_path / "signed.zip", "--signer", key.with_suffix(".pub"), "--segments", 1, "--seed", 2)
    assert ended.code == 0, ended.output + ended.errors
    assert "by the key given, over the head of the chain and the weights" in ended.output
    ended = audit(tmp_path / "plain.zip", "--signer", key.with_suffix(".pub"))
    assert ended.code == 1, ended.output + ended.errors
    assert ended.output.endswith(
        "different signer: it is not signed (it has no statement.json.sig). Nothing was trained.\n"
    )
