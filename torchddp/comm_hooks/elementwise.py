"""Hooks that compress element by element: with fewer bits, or only the largest elements."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from torchddp.comm_hooks import formats
from torchddp.comm_hooks.compressed_sum import server_shard, sum_compressed
from torchddp.comm_hooks.hook import CommHook
from torchddp.comm_hooks.layout import Layout, Piece, Residuals, check_names


class FlatHook(CommHook):
    """A hook that treats a bucket as a flat vector: it compresses the host's sum, or this rank's gradients."""

    def __init__(self, *, error_feedback: bool, **options: Any) -> None:
        super().__init__(**options)
        self.error_feedback = error_feedback
        self._residuals = Residuals()

    def _reduce(self, piece: Piece) -> None:
        shard = self._exchange.sum_to_shards(piece.flat)
        begin, end = 0, shard.numel()
        if self._exchange.places > 1:
            begin, end = self._exchange.host_shard(piece.flat.numel())
        residual = None
        if self.error_feedback:
            add_parts = self._exchange.sum_in_host_ if self._exchange.places > 1 else None
            residual = self._residuals.of(piece.layout, shard, begin, end, add_parts)
        self._average_(shard, residual, piece.layout, begin)
        self._exchange.gather_shards(piece.flat, shard)

    @abc.abstractmethod
    def _average_(self, shard: Tensor, residual: Tensor | None, layout: Layout, begin: int) -> None:
        """In place: the sum over the exchange's members, divided by the world size.

        ``shard``: fp32 [n], elements [begin, begin + n) of the bucket. ``residual``: fp32 [n], updated in place.
        """

    def _follow(self, lead: int) -> None:
        if self.error_feedback:
            self._residuals.restart(self._shapes, self._device)

    def _state(self) -> dict[str, Any]:
        return {"residual": self._residuals.state_dict(self._shapes)}

    def _load_state(self, state: Mapping[str, Any]) -> None:
        check_names(state["residual"], self._shapes)
        self._residuals.load_state_dict(state["residual"], self._device)


class Quantized(FlatHook):
    """Sends gradients in a format of ``torchddp.comm_hooks.formats``.

    Two hosts (or ranks) send each other everything; more send shards, and the sums back: about ``2 * (W - 1) / W *
    compressed_bytes`` per step and rank. Error feedback adds rounding errors to the next step's gradient, at both ends:
    fp32 residuals of the gradients' size (shared by a host's ranks), and of 1/W of it for sums.
    """

    def __init__(self, format: str, error_feedback: bool = True, **options: Any) -> None:
        super().__init__(error_feedback=error_feedback, **options)
        self.format = format
        self._server_residuals = Residuals()

    def _average_(self, shard: Tensor, residual: Tensor | None, layout: Layout, begin: int) -> None:
        exchange = self._exchange
        server_residual = None
        first, last = server_shard(exchange, shard.numel())
        if self.error_feedback and exchange.members > 2:
            server_residual = self._server_residuals.of(layout, shard, begin + first, begin + last, exchange.sum_)
        sum_compressed(exchange, self.format, shard, 1 / exchange.world_size, residual, server_residual)

    def _follow(self, lead: int) -> None:
        if self.error_feedback:
            # This rank's residual of sums becomes part of its own residual, because it may sum other shards from now
            # on, or none.
            self._residuals.restart(self._shapes, self._device, self._server_residuals)
            self._server_residuals = Residuals()

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "server_residual": self._server_residuals.state_dict(self._shapes)}

    def _load_state(self, state: Mapping[str, Any]) -> None:
        check_names(state["server_residual"], self._shapes)
        super()._load_state(state)
        self._server_residuals.load_state_dict(state["server_residual"], self._device)


class Cast(Quantized):
    """Sends gradients as "fp16" or "bf16" and sums them in fp32 (Micikevicius et al., mixed precision, ICLR 2018).

    Sends half as many bytes as fp32. Works on CPU models as well. Gradients are divided by the world size before the
    cast, so fp16 overflows only at 65504 times the world size; overflowing values become Inf.

    Example:

        model = torchddp.DistributedDataParallel(module, comm_hook=torchddp.comm_hooks.Cast("bf16"))

    Raises:
        ValueError: another format.
    """

    def __init__(self, format: Literal["fp16", "bf16"], error_feedback: bool = False, **options: Any) -> None:
        if format not in ("fp16", "bf16"):
            raise ValueError(f"Cast takes 'fp16' or 'bf16', got {format!r}")
        super().__init__(format, error_feedback, **options)


class FP16(Cast):
    """Sends gradients as float16 (:class:`Cast`), which has 10 bits of mantissa and a small range."""

    def __init__(self, error_feedback: bool = False, **options: Any) -> None:
        super().__init__("fp16", error_feedback, **options)


class BF16(Cast):
    """Sends gradients as bfloat16 (:class:`Cast`), which has 7 bits of mantissa and the range of fp32."""

    def __init__(self, error_feedback: bool = False, **options: Any) -> None:
        super().__init__("bf16", error_feedback, **options)


class Int8(Quantized):
    """Sends 8 bits per element, in blocks of 256 with one scale each (Dettmers et al., ICLR 2022): a quarter of fp32.

    Example:

        model = torchddp.DistributedDataParallel(module, comm_hook=torchddp.comm_hooks.Int8())
    """

    def __init__(self, error_feedback: bool = True, **options: Any) -> None:
        super().__init__("int8", error_feedback, **options)


class Int4(Quantized):
    """Sends 4 bits per element, in blocks of 64 with one scale each: between a seventh and an eighth of fp32.

    Example:

        model = torchddp.DistributedDataParallel(module, comm_hook=torchddp.comm_hooks.Int4())
    """

    def __init__(self, error_feedback: bool = True, **options: Any) -> None:
        super().__init__("int4", error_feedback, **options)


class Sign(Quantized):
    """Sends the sign of each element, and one mean magnitude per 1024 elements: a thirty-second of fp32.

    The method is 1-bit SGD (Seide et al., Interspeech 2014), with error feedback (Karimireddy et al., ICML 2019).

    Example:

        model = torchddp.DistributedDataParallel(module, comm_hook=torchddp.comm_hooks.Sign())
    """

    def __init__(self, error_feedback: bool = True, **options: Any) -> None:
        super().__init__("sign", error_feedback, **options)


class TopK(FlatHook):
    """Sends the elements of largest magnitude of each bucket (Aji and Heafield, EMNLP 2017; with error feedback:
    Stich et al., NeurIPS 2018). The others wait in the residual until they are large enough.

    Each rank sends ``8 * k`` bytes per bucket (indices and values) to every other, which pays off for few hosts. Holds
    fp32 residuals of the gradients' size.

    Example:

        model = torchddp.DistributedDataParallel(module, comm_hook=torchddp.comm_hooks.TopK(ratio=0.01))

    Args:
        ratio: the share of a bucket's elements to send; at least one is sent.
        k: the number of elements of a bucket to send, instead of ``ratio``.

    Raises:
        ValueError: a ratio outside (0, 1], or both ``ratio`` and ``k``.
    """

    def __init__(
        self, ratio: float | None = None, k: int | None = None, error_feedback: bool = True, **options: Any
    ) -> None:
        super().__init__(error_feedback=error_feedback, **options)
        if ratio is not None and k is not None:
            raise ValueError(f"give ratio or k, not both (got ratio={ratio}, k={k})")
        if k is not None and k < 1:
            raise ValueError(f"k must be 1 or more, got {k}")
        self.ratio = 0.01 if ratio is None else ratio
        self.k = k
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio must be above 0 and at most 1, got {ratio}")

    def _average_(self, shard: Tensor, residual: Tensor | None, layout: Layout, begin: int) -> None:
        exchange = self._exchange
        scale = 1 / exchange.world_size
        if exchange.members == 1:
            shard.mul_(scale)
            return
        numel = shard.numel()
        count = min(numel, self.k if self.k is not None else max(1, round(self.ratio * numel)))
        message = torch.empty(8 * count, dtype=torch.uint8, device=shard.device)
        places, values = _places_and_values(message)
        formats.select_top_k(shard, count, places, values, residual, scale)
        shard.zero_()
        for theirs in exchange.gather(message).unbind():  # in rank order: the same sums everywhere
            places, values = _places_and_values(theirs)
            shard.index_add_(0, places, values)


def _places_and_values(message: Tensor) -> tuple[Tensor, Tensor]:
    half = message.numel() // 2
    return message[:half].view(torch.int32), message[half:].view(torch.float32)
