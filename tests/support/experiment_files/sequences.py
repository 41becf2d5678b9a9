"""Do sequences of different lengths, in dicts of tensors, keep their bits on every layout?

A sample is a dict of inputs and a dict of targets; `collate` pads the sequences of a micro-batch to its longest one.
The label is whether the largest token comes in the first half; the network also counts the tokens.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from ddp_core.config.experiment import Experiment, Optimizer
from ddp_core.data.splits import Splits

TOKENS = 20


class Sequences:
    """Sequences of 3 to 17 tokens, drawn from the number of the sample."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[dict[str, Any], dict[str, Any]]:
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(3, 18, (), generator=generator))
        tokens = torch.randint(1, TOKENS, (length,), generator=generator)
        return {"tokens": tokens}, {"label": int(tokens.argmax()) < length / 2, "length": length / 10}


def data() -> Splits:
    return Splits(Sequences(200), None, digest="sequences")


def collate(samples: list[Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    tokens = pad_sequence([inputs["tokens"] for inputs, _ in samples], batch_first=True)
    targets = {
        "label": torch.tensor([targets["label"] for _, targets in samples], dtype=torch.int64),
        "length": torch.tensor([targets["length"] for _, targets in samples]),
    }
    return {"tokens": tokens, "padding": tokens == 0}, targets


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, width, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.1, batch_first=True)
        self.heads = nn.ModuleDict({"logits": nn.Linear(width, 2), "length": nn.Linear(width, 1)})

    def forward(self, *, tokens: Tensor, padding: Tensor) -> dict[str, Tensor]:
        places = torch.linspace(-1, 1, 20)[: tokens.shape[1], None]
        hidden = self.layer(self.embedding(tokens) + places, src_key_padding_mask=padding)
        summed = (hidden * ~padding[..., None]).sum(1)
        return {name: head(summed) for name, head in self.heads.items()}


def model(width: int = 16) -> nn.Module:
    return Attention(width)


def two_losses(outputs: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
    label = functional.cross_entropy(outputs["logits"], targets["label"], reduction="sum")
    return label + functional.mse_loss(outputs["length"][:, 0], targets["length"], reduction="sum")


experiment = Experiment(
    name="sequences",
    loss="two_losses",
    optimizer=Optimizer(name="adamw", lr=0.005),
    global_batch_size=40,
    micro_batch=5,
    epochs=8,
)
