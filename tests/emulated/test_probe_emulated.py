"""The probe on CPUs that this machine is not, which compute the published bits, but for the emulator's faults."""

from __future__ import annotations

import pytest

from ddp_lab.probe.command import judge, measured
from ddp_lab.probe.published import published
from tests.emulated.emulation import PATIENCE, needs_emulator, on_each_cpu
from tools.emulation import FAULTS, python_on, without_faults

pytestmark = [pytest.mark.slow, needs_emulator, pytest.mark.timeout(3 * PATIENCE)]


@on_each_cpu
def test_an_emulated_cpu_computes_the_published_bits(cpu: str) -> None:
    whole = published()
    table = without_faults(whole)
    verdict = judge(table, *measured(table, python_on(cpu), limit=PATIENCE))
    assert [each.describe() for each in verdict.differences] == []
    assert verdict.count == len(whole.operations) + len(whole.training_steps) - len(FAULTS)
