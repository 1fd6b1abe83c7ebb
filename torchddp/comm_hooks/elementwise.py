"""Hooks that compress element by element, with fewer bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from typing_extensions import Unpack

from torchddp.comm_hooks.exchange import server_shard, sum_compressed
from torchddp.comm_hooks.hook import CommHook, HookOptions
from torchddp.comm_hooks.layout import Piece, Residuals, check_names


class Quantized(CommHook):
    """Sends gradients in a format of ``torchddp.comm_hooks.formats``.

    A bucket is a flat vector: the host's sum of it, or this rank's gradients, is compressed. Two hosts (or ranks) send
    each other everything; more send shards, and the sums back: about ``2 * (W - 1) / W * compressed_bytes`` per step
    and rank. Error feedback adds rounding errors to the next step's gradient, at both ends: fp32 residuals of the
    gradients' size (shared by a host's ranks), and of 1/W of it for sums.
    """

    def __init__(self, format: str, error_feedback: bool = True, **options: Unpack[HookOptions]) -> None:
        super().__init__(**options)
        self.format = format
        self.error_feedback = error_feedback
        self._residuals = Residuals()
        self._server_residuals = Residuals()

    def _reduce(self, piece: Piece) -> None:
        exchange = self._exchange
        shard = exchange.sum_to_shards(piece.flat)
        begin, end = 0, shard.numel()
        if exchange.places > 1:
            begin, end = exchange.host_shard(piece.flat.numel())
        residual = at_owner = None
        if self.error_feedback:
            add_parts = exchange.sum_in_host_ if exchange.places > 1 else None
            residual = self._residuals.of(piece.layout, shard, begin, end, add_parts)
            if exchange.members > 2:
                first, last = server_shard(exchange, shard.numel())
                at_owner = self._server_residuals.of(piece.layout, shard, begin + first, begin + last, exchange.sum_)
        sum_compressed(exchange, self.format, shard, 1 / exchange.world_size, residual, at_owner)
        exchange.gather_shards(piece.flat, shard)

    def _follow(self, lead: int) -> None:
        if self.error_feedback:
            # Sums' residuals become part of the rank's own: it may sum other shards from now on, or none.
            self._residuals.restart(self._shapes, self._device, self._server_residuals)
            self._server_residuals = Residuals()

    def _state(self) -> dict[str, Any]:
        return {
            "residual": self._residuals.state_dict(self._shapes),
            "server_residual": self._server_residuals.state_dict(self._shapes),
        }

    def _load_state(self, state: Mapping[str, Any]) -> None:
        for kind in ("residual", "server_residual"):
            check_names(state[kind], self._shapes)
        self._residuals.load_state_dict(state["residual"], self._device)
        self._server_residuals.load_state_dict(state["server_residual"], self._device)
        if state["server_residual"] and self._exchange.members <= 2:  # which send no sums
            self._follow(lead=0)


class Cast(Quantized):
    """Sends gradients as "fp16" or "bf16" and sums them in fp32 (Micikevicius et al., mixed precision, ICLR 2018).

    Sends half as many bytes as fp32. Works on CPU models as well. Gradients are divided by the world size before the
    cast, so fp16 overflows only at 65504 times the world size; overflowing values become Inf.

    Raises:
        ValueError: another format.
    """

    def __init__(
        self, format: Literal["fp16", "bf16"], error_feedback: bool = False, **options: Unpack[HookOptions]
    ) -> None:
        if format not in ("fp16", "bf16"):
            raise ValueError(f"Cast takes 'fp16' or 'bf16', got {format!r}")
        super().__init__(format, error_feedback, **options)


class FP16(Cast):
    """Sends gradients as float16 (:class:`Cast`), which has 10 bits of mantissa and a small range."""

    def __init__(self, error_feedback: bool = False, **options: Unpack[HookOptions]) -> None:
        super().__init__("fp16", error_feedback, **options)


class BF16(Cast):
    """Sends gradients as bfloat16 (:class:`Cast`), which has 7 bits of mantissa and the range of fp32."""

    def __init__(self, error_feedback: bool = False, **options: Unpack[HookOptions]) -> None:
        super().__init__("bf16", error_feedback, **options)


class Int8(Quantized):
    """Sends 8 bits per element, in blocks of 256 with a scale each (Dettmers et al., ICLR 2022): a quarter of fp32."""

    def __init__(self, error_feedback: bool = True, **options: Unpack[HookOptions]) -> None:
        super().__init__("int8", error_feedback, **options)


class Int4(Quantized):
    """Sends 4 bits per element, in blocks of 64 with one scale each: between a seventh and an eighth of fp32."""

    def __init__(self, error_feedback: bool = True, **options: Unpack[HookOptions]) -> None:
        super().__init__("int4", error_feedback, **options)
