"""A global batch whose loss is divided by what its samples weigh, such as their tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from tests.support.commands import ddp, trained

EXPERIMENT = """
import torch
from ddp_core import Experiment, Optimizer, Splits
from torch import nn
from torch.nn.functional import cross_entropy

def data():
    draw = torch.Generator().manual_seed(1)
    texts = [torch.randint(1, 12, (3 + number % 9,), generator=draw).tolist() for number in range(20)]
    count = [len(text) - 1 for text in texts]
    return Splits(texts[:16], texts[16:], weights=count[:16], test_weights=count[16:])

def collate(samples):
    longest = max(map(len, samples))
    tokens = torch.tensor([sample + [0] * (longest - len(sample)) for sample in samples])
    return tokens[:, :-1], tokens[:, 1:]

def model():
    return nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12))

def loss(outputs, targets):
    return cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum")

experiment = Experiment(
    name="tokens", global_batch_size=16, micro_batch=4, epochs=1, optimizer=Optimizer(lr=1.0, momentum=0.0)
)
"""


@pytest.mark.parametrize("words", [(), ("--layout", "ddp", "--nproc-per-node", "3"), ("--layout", "dp")], ids=str)
def test_the_loss_is_the_mean_over_all_tokens_of_the_global_batch(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "tokens.py").write_text(EXPERIMENT)
    ended = ddp("train", tmp_path / "tokens.py", *words, "--device", "cpu", "--output", tmp_path / "out")
    assert ended.code == 0, ended.errors
    directory, record = trained(tmp_path / "out")
    own: dict[str, object] = {}
    exec(EXPERIMENT, own)
    splits = own["data"]()  # type: ignore[operator]
    torch.manual_seed(0)
    model = own["model"]()  # type: ignore[operator]

    def mean(texts: list[list[int]]) -> torch.Tensor:
        inputs, targets = own["collate"](texts)  # type: ignore[operator]
        return cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=0)

    loss = mean(splits.train)
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    found = load_file(directory.path / "model.safetensors")
    torch.testing.assert_close(dict(model.state_dict()), found)
    assert record["result"]["train_loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert record["result"]["test_loss"] == pytest.approx(mean(splits.test).item(), rel=1e-6)
