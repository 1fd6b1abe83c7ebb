"""A small GPT: pre-norm transformer blocks with causal attention over bytes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY_SIZE = 256  # bytes


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which each position attends to itself and earlier ones."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        return self.projection(attended.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each on its own residual branch."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalSelfAttention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """Byte-level language model; `forward` returns the mean cross entropy in nats per byte."""

    def __init__(self, *, block_size: int, layers: int, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY_SIZE, width)
        self.position_embedding = nn.Embedding(block_size, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.final_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY_SIZE, bias=False)
        self._initialize(layers)

    def _initialize(self, layers: int) -> None:
        """Linear layers preserve the variance of their input; residual branches start small, as in GPT-2."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue  # norms keep PyTorch's initialization; biases are zeroed below
            if name.endswith(("attention.projection.weight", "mlp.2.weight")):
                std = 0.02 / (2 * layers) ** 0.5
            elif "embedding" in name:
                std = 0.1  # with GPT-2's 0.02, a narrow model learns little in its first hundred steps
            else:
                std = parameter.shape[1] ** -0.5
            nn.init.normal_(parameter, std=std)
        for module in self.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """`tokens` and `targets` are (batch, length) byte values, targets shifted by one."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.final_norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
