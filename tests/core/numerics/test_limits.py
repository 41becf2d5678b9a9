"""What records say of numerics: fingerprints without a CPU, old records, and what compare and resume make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from ddp_core.base import fingerprint as module
from ddp_core.base.errors import UserError
from ddp_core.base.fingerprint import fingerprint, fingerprint_differences
from ddp_core.cli.compare import verdict
from ddp_core.config.experiment import Component, Experiment
from ddp_core.config.records import Numerics
from ddp_core.numerics.limits import RULES, rules_of
from ddp_core.record.recorded import recorded_experiment, recorded_numerics
from tests.support.commands import ddp, trained
from tests.support.wording import refusing

CPU = torch.device("cpu")
EXPERIMENT = Experiment(name="mine", model=Component(name="m"), data=Component(name="d"), global_batch_size=8)


def test_a_portable_fingerprint_names_the_rules_and_no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    here, native = fingerprint(CPU, RULES), fingerprint(CPU)
    facts = {"torch", "cpu_capability", "threads", "mkldnn", "deterministic", "device", "cpu"}
    assert facts <= native.keys()
    assert len(fingerprint_differences(native, {})) == len(native.keys() - {"torch_files", "libm"})
    monkeypatch.setattr(module, "cpu_model", lambda: "another")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    monkeypatch.setenv("MKL_CBWR", "another")
    assert fingerprint_differences(fingerprint(CPU, RULES), here) == []
    assert len(fingerprint_differences(fingerprint(CPU), native)) == 4
    assert fingerprint_differences(native, here) == ["numerics: here native, there portable"]
    assert (here["numerics"], here["numerics_rules"]) == ("portable", RULES)
    assert fingerprint_differences(fingerprint(CPU, RULES + 1), here) == [
        f"numerics_rules: here {RULES + 1}, there {RULES}"
    ]


def record(weights: str, rules: int | None, cpu: str = "A") -> dict[str, Any]:
    return {
        "status": "completed",
        "options": {"reduction": "exact"},
        "weights_sha256": weights * 64,
        "fingerprint": fingerprint(CPU, rules),
        "environment": {"cpu": cpu},
    }


def test_compare_says_where_numerics_differ() -> None:
    assert verdict([record("a", RULES), record("a", RULES)]).endswith("2 exact runs, identical (aaaaaaaaaaaaaaaa…)")
    assert verdict([record("a", RULES), record("a", RULES, "B")]).endswith("…), portable on 2 kinds of CPU: A, B")
    said = verdict([record("a", RULES), record("b", None)])
    assert "under other fingerprints (numerics: here portable, there native)" in said
    assert "under one fingerprint" in verdict([record("a", RULES), record("b", RULES)])


def test_a_run_that_goes_on_with_other_numerics_is_warned_of(tmp_path: Path) -> None:
    words = ("train", "toy_mlp", "--device", "cpu", "--output", tmp_path)
    halted = ddp(*words, "--numerics", "portable", "--checkpoint-every", "1", "--fault", "kill@2")
    assert halted.code != 0
    ended = ddp(*words, "--numerics", "native", "--resume", "auto")
    assert ended.code == 0, ended.errors
    warning = "warning: bit-identity with the steps before is not promised, numerics: here native, there portable"
    assert warning in ended.output + ended.errors
    assert json.loads((trained(tmp_path)[0].path / "run.json").read_text())["fingerprint_changed"] is True


def test_a_run_is_repeated_by_the_rules_that_its_fingerprint_names() -> None:
    assert (recorded_numerics(record("a", RULES)), recorded_numerics(record("a", None))) == ("portable", "native")
    for rules in (1, RULES + 1):
        with refusing():
            recorded_numerics(record("a", rules))
    assert [rules_of(numerics) for numerics in get_args(Numerics)] == [None, RULES]


def test_experiments_without_numerics_or_with_a_version_of_the_rules_are_read() -> None:
    portable, old = EXPERIMENT.with_settings(["numerics=portable"]), EXPERIMENT.to_json()
    for named in ("portable-1", "portable-2"):
        assert recorded_experiment({"experiment": portable.to_json() | {"numerics": named}}) == portable
        with pytest.raises(UserError, match="numerics"):
            EXPERIMENT.with_settings([f"numerics={named}"])
    del old["numerics"]
    assert Experiment.from_json(old) == EXPERIMENT
    assert EXPERIMENT.with_settings(["numerics=native"]).digest() == EXPERIMENT.digest() != portable.digest()


@pytest.mark.slow
def test_verify_says_that_another_kind_of_cpu_had_the_same_bits(tmp_path: Path) -> None:
    assert ddp("train", "toy_mlp", "--device", "cpu", "--numerics", "portable", "--output", tmp_path).code == 0
    directory, made = trained(tmp_path)
    here = made["environment"]["cpu"]
    directory.update(environment=made["environment"] | {"cpu": "another"})
    ended = ddp("verify", directory.path)
    assert ended.code == 0, ended.output + ended.errors
    assert ended.output.endswith(f"identical, on another kind of CPU: here {here}, there another\n")
