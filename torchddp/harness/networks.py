"""The built-in networks. Each returns its loss from `forward`, so that every variant runs the same step."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SMALL_TENSORS = 1000
SMALL_NUMEL = 64
GPT2_VOCABULARY = 50257


class ManySmallTensors(nn.Module):
    """500 scale-and-shift layers: a thousand tensors of 64 elements, which become ready one by one in backward."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        noise = [0.01 * torch.randn(SMALL_NUMEL, generator=generator) for _ in range(SMALL_TENSORS)]
        self.scales = nn.ParameterList(1 + values for values in noise[: SMALL_TENSORS // 2])
        self.shifts = nn.ParameterList(noise[SMALL_TENSORS // 2 :])
        # ParameterList.__getitem__ is slow; the layers are looked up once, outside the timed step.
        self._layers: list[tuple[Tensor, Tensor]] = []

    def forward(self, hidden: Tensor) -> Tensor:
        if not self._layers:
            self._layers = list(zip(self.scales, self.shifts, strict=True))
        for scale, shift in self._layers:
            hidden = torch.addcmul(shift, hidden, scale)
        return hidden.square().mean()


class Mlp(nn.Module):
    def __init__(self, width: int = 1024, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.square(self.layers(inputs)).mean()


class _GptBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        qkv = self.qkv(self.attention_norm(hidden)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return torch.add(hidden, self.down(F.gelu(self.up(self.mlp_norm(hidden)))))


class Gpt(nn.Module):
    """A decoder-only transformer; by default over bytes, with about 17 M parameters."""

    def __init__(
        self,
        vocabulary: int = 256,
        width: int = 480,
        depth: int = 6,
        heads: int = 8,
        max_length: int = 512,
        *,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(max_length, width)
        self.blocks = nn.Sequential(*(_GptBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
            nn.init.normal_(self.tokens.weight, std=0.02)  # the default is too large for a head: enormous logits

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens[:, :-1])
        hidden = hidden + self.positions.weight[: hidden.shape[1]]
        logits = self.head(self.norm(self.blocks(hidden)))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def gpt2() -> Gpt:
    return Gpt(GPT2_VOCABULARY, width=768, depth=12, heads=12, max_length=1024, tied=True)


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False), nn.BatchNorm2d(outputs)]


class Classifier(nn.Module):
    def __init__(self, layers: list[nn.Module], channels: int, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits = self.classifier(self.features(images).mean(dim=(2, 3)))
        return F.cross_entropy(logits, torch.zeros(len(images), dtype=torch.long, device=images.device))


class ConvNet(Classifier):
    """Eight 3x3 convolutions with batch norm: buffers to broadcast, many one-dimensional parameters."""

    def __init__(self, channels: tuple[int, ...] = (32, 32, 64, 64, 128, 128, 256, 256), classes: int = 10) -> None:
        layers: list[nn.Module] = []
        for index, (inputs, width) in enumerate(pairwise((3, *channels))):
            layers += [*convolution(inputs, width, 3, stride=2 if index % 2 == 0 else 1), nn.ReLU()]
        super().__init__(layers, channels[-1], classes)
