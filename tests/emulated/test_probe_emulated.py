"""The probe on CPUs that this machine is not, which compute the published bits, but for the emulator's faults."""

from __future__ import annotations

import sys
from functools import cache

import pytest

from ddp_lab.probe.command import judge, measured
from ddp_lab.probe.published import published
from tests.support.emulation import PATIENCE, emulated, needs_emulator, on_each_cpu, output_of, start
from tools.emulation import FAULTS, python_on, without_faults

pytestmark = [pytest.mark.slow, needs_emulator, pytest.mark.timeout(3 * PATIENCE)]

# Far more than the rounding of any order of additions, far less than an emulator's fault.
CLOSE = 1e-3


@on_each_cpu
def test_an_emulated_cpu_computes_the_published_bits(cpu: str) -> None:
    whole = published()
    table = without_faults(whole)
    verdict = judge(table, *measured(table, python_on(cpu), limit=PATIENCE))
    assert [each.describe() for each in verdict.differences] == []
    assert verdict.count == len(whole.operations) + len(whole.training_steps) - len(FAULTS)


# What an LSTM and grid_sample are by definition, in float64 and without torch's kernels for them.
TRUTH = """
import sys, torch
from torch import nn
from torch.nn import functional
from ddp_lab.probe.operations.inputs import numbers

torch.set_num_threads(1)

def lstm(layer, inputs):
    hidden, cell = torch.zeros(3, 9).double(), torch.zeros(3, 9).double()
    weight_ih, weight_hh, bias_ih, bias_hh = (each.detach().double() for each in layer.parameters())
    outputs = []
    for x in inputs.double():
        gates = (x @ weight_ih.T + bias_ih + hidden @ weight_hh.T + bias_hh).chunk(4, 1)
        enter, forget, out = (1 / (1 + (-gates[i]).exp()) for i in (0, 1, 3))
        up, down = gates[2].exp(), (-gates[2]).exp()
        cell = forget * cell + enter * (up - down) / (up + down)
        up, down = cell.exp(), (-cell).exp()
        hidden = out * (up - down) / (up + down)
        outputs.append(hidden)
    return torch.stack(outputs)

def linear(distance):
    return max(0.0, 1 - abs(distance))

def cubic(distance):
    # A pixel's share at this distance: R. Keys, "Cubic convolution interpolation", 1981, with a = -0.75.
    t = abs(distance)
    if t <= 1:
        return 1.25 * t**3 - 2.25 * t**2 + 1
    return -0.75 * (t**3 - 5 * t**2 + 8 * t - 4) if t < 2 else 0.0

def sampled(image, grid, weight):
    # The value at each place of the grid: all pixels times their shares. Outside of the image, pixels are zero.
    height, width = image.shape
    found = torch.zeros(grid.shape[:2]).double()
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            x = ((float(grid[i, j, 0]) + 1) * width - 1) / 2
            y = ((float(grid[i, j, 1]) + 1) * height - 1) / 2
            for row in range(height):
                for column in range(width):
                    share = weight(x - column) * weight(y - row)
                    found[i, j] += share * float(image[row, column])
    return found

kind = sys.argv[1]
if kind == "LSTM":
    layer = nn.LSTM(7, 9)
    for key, parameter in enumerate(layer.parameters()):
        parameter.data = numbers(*parameter.shape, key=key)
    inputs = numbers(11, 3, 7)
    ours, true = layer(inputs)[0].detach(), lstm(layer, inputs)
else:
    image, grid = numbers(12, 15), numbers(6, 7, 2, key=1)
    ours = functional.grid_sample(image[None, None], grid[None], mode=kind, align_corners=False)[0, 0]
    true = sampled(image, grid, linear if kind == "bilinear" else cubic)
print(float((ours.double() - true).abs().max()))
"""


@cache
def distance_from_truth(kind: str, cpu: str | None) -> float | None:
    """How far torch is from the definition, here or on an emulated CPU; None where the emulator ends by a signal."""
    if cpu is None:
        return float(output_of(start([sys.executable, "-c", TRUTH, kind])))
    started = emulated(cpu, "-c", TRUTH, kind)
    output, errors = started.communicate(timeout=PATIENCE)
    if started.returncode < 0:
        return None
    assert started.returncode == 0, errors
    return float(output)


@pytest.mark.parametrize("kind", ["LSTM", "bilinear", "bicubic"])
def test_where_emulator_and_cpu_differ_the_cpu_is_right(kind: str) -> None:
    here, there = distance_from_truth(kind, None), distance_from_truth(kind, "Haswell")
    assert here is not None
    assert here < CLOSE
    assert there is None or not there < CLOSE, "the emulator is right now: take this out of tools.emulation.FAULTS"


# Four numbers are enough for the compiler's masked loads.
PLAIN_SGD = """
import torch
weight = torch.nn.Parameter(torch.arange(5.0))
weight.grad = torch.ones(5)
torch.optim.SGD([weight], lr=0.5, fused=True).step()
print(weight.tolist())
"""


def test_fused_sgd_without_momentum_ends_the_emulator_and_is_right_here() -> None:
    here = output_of(start([sys.executable, "-c", PLAIN_SGD]))
    assert here == "[-0.5, 0.5, 1.5, 2.5, 3.5]\n"
    there = emulated("Haswell", "-c", PLAIN_SGD)
    output, _ = there.communicate(timeout=PATIENCE)
    assert (there.returncode, output) != (0, here), "the emulator is right now: take this out of tools.emulation.FAULTS"


def test_an_emulated_cpu_is_another_cpu() -> None:
    """Left to itself, numpy finds AVX2 there and no AVX-512: so this is not the machine's own CPU."""
    code = "from numpy._core._multiarray_umath import __cpu_features__ as has; print(has['AVX2'], has['AVX512F'])"
    words = [word for word in python_on("EPYC-Rome-v2") if "NPY" not in word and word != "-E"]
    assert output_of(start([*words, "-c", code])) == "True False\n"
