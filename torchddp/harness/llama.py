"""A decoder after LLaMA: RMSNorm, rotary attention, SwiGLU, and no biases. Returns its loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROTARY_BASE = 10_000.0


def rotate(heads: Tensor) -> Tensor:
    """Rotary positions on [batch, head, length, width]: each pair of channels turns with its token's place."""
    length, half = heads.shape[2], heads.shape[3] // 2
    # Made anew each time: a table kept as a buffer would be broadcast by every step of a DDP class.
    pace = ROTARY_BASE ** (-torch.arange(half, device=heads.device) / half)
    angle = torch.arange(length, device=heads.device)[:, None] * pace
    cosine, sine = angle.cos(), angle.sin()
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


class _LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, hidden_width: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, hidden_width, bias=False)
        self.up = nn.Linear(width, hidden_width, bias=False)
        self.down = nn.Linear(hidden_width, width, bias=False)

    def _split(self, hidden: Tensor) -> Tensor:
        return hidden.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.attention_norm(hidden)
        query, key, value = (self._split(project(normed)) for project in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        hidden = hidden + self.projection(mixed.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(hidden)
        return hidden + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    """Embedding, blocks, norm and head; as it stands, with about 23 M parameters in 57 tensors."""

    def __init__(
        self, vocabulary: int = 4096, width: int = 512, depth: int = 6, heads: int = 8, hidden_width: int = 1376
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(_LlamaBlock(width, heads, hidden_width) for _ in range(depth)))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.norm(self.blocks(self.tokens(tokens[:, :-1]))))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
