"""A small byte-level transformer: 256 tokens in, 256 logits out."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Causal self-attention and a two-layer network, each with its residual."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(rows, length, width)))
        mixed = self.mlp(self.norm2(x))
        return torch.add(x, self.dropout(mixed))


class ByteTransformer(nn.Module):
    """Next-byte prediction. ``forward(tokens)`` takes int64 ``(rows, length + 1)`` and returns the mean loss.

    Dropout draws from torch's global generator, so a run only repeats if the generator's state is restored too.
    """

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2, length: int = 256, dropout: float = 0.1):
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        given, wanted = tokens[:, :-1], tokens[:, 1:]
        x = self.tokens(given) + self.places(torch.arange(given.shape[1]))
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())
