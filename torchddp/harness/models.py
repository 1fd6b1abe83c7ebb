"""The models that are timed. Each returns its loss from `forward`, so that every variant runs the same step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchddp.harness.factory import load_factory
from torchddp.harness.llama import Llama
from torchddp.harness.model_spec import ModelSpec
from torchddp.harness.resnet import ResNet

SMALL_TENSORS = 1000
SMALL_NUMEL = 64
GPT2_VOCABULARY = 50257


class ManySmallTensors(nn.Module):
    """500 scale-and-shift layers: a thousand tensors of 64 elements, ready one after the other in backward."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.scales = nn.ParameterList(
            1 + 0.01 * torch.randn(SMALL_NUMEL, generator=generator) for _ in range(SMALL_TENSORS // 2)
        )
        self.shifts = nn.ParameterList(
            0.01 * torch.randn(SMALL_NUMEL, generator=generator) for _ in range(SMALL_TENSORS // 2)
        )
        # ParameterList.__getitem__ is slow; the layers are looked up once, outside the timed step.
        self._layers: list[tuple[Tensor, Tensor]] = []

    def forward(self, hidden: Tensor) -> Tensor:
        if not self._layers:
            self._layers = list(zip(self.scales, self.shifts, strict=True))
        for scale, shift in self._layers:
            hidden = torch.addcmul(shift, hidden, scale)
        return hidden.square().mean()


class Mlp(nn.Module):
    """Six linear layers of 1024 x 1024."""

    def __init__(self, width: int = 1024, depth: int = 6) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(depth):
            layers += [nn.Linear(width, width), nn.ReLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs).square().mean()


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
        return hidden + self.down(F.gelu(self.up(self.mlp_norm(hidden))))


class Gpt(nn.Module):
    """A decoder-only transformer; as it stands, over bytes and with about 17 M parameters."""

    def __init__(
        self,
        vocabulary: int = 256,
        width: int = 480,
        depth: int = 6,
        heads: int = 8,
        max_length: int = 64,
        *,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.max_length = max_length
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(self.max_length, width)
        self.blocks = nn.Sequential(*(_GptBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
            nn.init.normal_(self.tokens.weight, std=0.02)  # as a head, it would start with enormous logits

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens[:, :-1])
        hidden = hidden + self.positions.weight[: hidden.shape[1]]
        logits = self.head(self.norm(self.blocks(hidden)))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class ConvNet(nn.Module):
    """Eight 3x3 convolutions with batch norm: buffers to broadcast, many one-dimensional parameters."""

    def __init__(self, channels: tuple[int, ...] = (32, 32, 64, 64, 128, 128, 256, 256), classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        previous = 3
        for index, width in enumerate(channels):
            stride = 2 if index % 2 == 0 else 1
            layers += [
                nn.Conv2d(previous, width, 3, stride=stride, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
            ]
            previous = width
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(previous, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits = self.classifier(self.features(images).mean(dim=(2, 3)))
        return F.cross_entropy(logits, torch.zeros(len(images), dtype=torch.long, device=images.device))


def _gpt2() -> nn.Module:
    return Gpt(GPT2_VOCABULARY, width=768, depth=12, heads=12, max_length=1024, tied=True)


def _tokens(vocabulary: int, length: int) -> Callable[[torch.Generator], Tensor]:
    # One more than the model sees: each token but the first is a target.
    return lambda generator: torch.randint(0, vocabulary, (1, length + 1), generator=generator)


MODELS: dict[str, ModelSpec] = {
    "small": ModelSpec(
        "small tensors",
        ManySmallTensors,
        lambda generator: torch.randn(SMALL_NUMEL, generator=generator),
    ),
    "mlp": ModelSpec("MLP 6 x 1024x1024", Mlp, lambda generator: torch.randn(32, 1024, generator=generator)),
    "gpt": ModelSpec("small GPT", Gpt, _tokens(256, 64)),
    "conv": ModelSpec("batch-norm conv net", ConvNet, lambda generator: torch.randn(8, 3, 32, 32, generator=generator)),
    # Small images and short texts: a step on one core should take a second at most.
    "resnet50": ModelSpec("ResNet-50", ResNet, lambda generator: torch.randn(4, 3, 64, 64, generator=generator)),
    "gpt2": ModelSpec("GPT-2 small", _gpt2, _tokens(GPT2_VOCABULARY, 32)),
    "llama": ModelSpec("LLaMA-like", Llama, _tokens(4096, 64)),
}


def make_model(name: str, seed: int) -> nn.Module:
    """A model with the same weights on every rank."""
    spec = find_model(name, seed)
    torch.manual_seed(seed)
    return spec.build()


def make_batch(name: str, seed: int, rank: int, index: int) -> Any:
    """Batch `index` of a rank; ranks see different data, so that gradients must really be averaged."""
    generator = torch.Generator().manual_seed(seed + 1000 * rank + index)
    return find_model(name, seed).make_batch(generator)


def find_model(name: str, seed: int = 0) -> ModelSpec:
    """A built-in model, or the user's own by `package.module:factory` (torchddp.harness.factory)."""
    return load_factory(name, seed) if ":" in name else MODELS[name]


def describe_model(name: str, model: nn.Module, seed: int = 0) -> dict[str, Any]:
    """What results say about a model: its name, title, and how much there is to reduce."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return {
        "model": name,
        "title": find_model(name, seed).title,
        "parameters": len(parameters),
        "gradient_bytes": sum(p.numel() * p.element_size() for p in parameters),
    }
