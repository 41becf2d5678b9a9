"""A transformers model with tied embeddings, wrapped as experiments wrap them: does from_pretrained load it?"""

import torch
from torch import Tensor, nn

from ddp_core import Component, Experiment, InMemory, Optimizer, Splits
from ddp_core.base.torchvision_import import import_torchvision

import_torchvision()  # which transformers cannot import where it was built against another torch
from transformers import GPT2Config, GPT2LMHeadModel  # noqa: E402


class Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = GPT2Config(vocab_size=17, n_positions=8, n_embd=8, n_layer=1, n_head=2)
        self.language = GPT2LMHeadModel(config)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.language(tokens).logits
        return logits.transpose(1, 2)


def data() -> Splits:
    tokens = torch.arange(32 * 9).remainder(17).view(32, 9)
    samples = InMemory(tokens[:, :8], tokens[:, 1:])
    return Splits(samples, samples)


def hits(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).sum()


experiment = Experiment(
    name="tiny_language_model",
    model=Component(name="Logits"),
    data=Component(name="data"),
    optimizer=Optimizer(name="adam", lr=0.01),
    global_batch_size=16,
    micro_batch=8,
    epochs=1,
)
