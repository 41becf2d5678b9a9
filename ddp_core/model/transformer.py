"""A small causal transformer: it predicts each next symbol of a text from those before it.

Its attention is written as matrix products. torch's own attention picks one of several kernels, by device, precision
and shape, and the backward of one of them, on CUDA, has no fixed order of additions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddp_core.base.errors import UserError


class Transformer(nn.Module):
    """Embeddings of symbols and positions, then blocks, then the logits of each next symbol.

    int64 [n, length] -> [n, length, symbols]. The logits are products with the symbols' embedding: the same parameter,
    used twice (Press and Wolf 2016, "Using the output embedding to improve language models").
    """

    def __init__(self, symbols: int, length: int, width: int, depth: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, width)
        self.positions = nn.Parameter(torch.empty(length, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        for weight in (self.embedding.weight, self.positions):
            # The first logits, products with normalised numbers, then deviate from 0 by about 1.
            nn.init.normal_(weight, std=width**-0.5)

    def forward(self, symbols: Tensor) -> Tensor:
        """The logits of each next symbol. Raises UserError for samples with more symbols than there are positions."""
        length = symbols.shape[1]
        if length > len(self.positions):
            raise UserError(
                f"samples of {length} symbols, but the transformer has {len(self.positions)} positions; "
                "set model.length and data.length to the same number"
            )
        hidden = self.dropout(self.embedding(symbols) + self.positions[:length])
        later = torch.ones(length, length, dtype=torch.bool, device=symbols.device).triu(1)
        for block in self.blocks:
            hidden = block(hidden, later)
        return functional.linear(self.norm(hidden), self.embedding.weight)


class Block(nn.Module):
    """Attention and a two-layer network, each normalised before and added to its input (pre-norm)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.before_network = nn.LayerNorm(width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, later: Tensor) -> Tensor:
        """`later` is bool [length, length]: true where the second position comes after the first."""
        hidden = hidden + self.dropout(self._attention(self.before_attention(hidden), later))
        changed: Tensor = self.dropout(self.network(self.before_network(hidden)))
        return hidden + changed

    def _attention(self, hidden: Tensor, later: Tensor) -> Tensor:
        samples, length, width = hidden.shape
        parts = self.queries_keys_values(hidden).view(samples, length, 3, self.heads, width // self.heads)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)  # each [n, heads, length, width / heads]
        scores = queries @ keys.transpose(-2, -1) * queries.shape[-1] ** -0.5
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        attended: Tensor = self.attended((weights @ values).transpose(1, 2).reshape(samples, length, width))
        return attended


def transformer(
    symbols: int = 128, length: int = 64, width: int = 64, depth: int = 2, heads: int = 4, dropout: float = 0.1
) -> nn.Module:
    """A causal transformer: int64 [n, up to length] in 0..symbols-1 -> logits [n, as many, symbols]."""
    if width % heads:
        raise UserError(f"model transformer: width {width} is not a multiple of heads {heads}")
    return Transformer(symbols, length, width, depth, heads, dropout)
