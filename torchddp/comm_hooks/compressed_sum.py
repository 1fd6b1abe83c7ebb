"""Sums whose summands are sent compressed."""

from __future__ import annotations

import torch
from torch import Tensor

from torchddp.comm_hooks import formats
from torchddp.comm_hooks.exchange import Exchange, shard_numel


def sum_over_ranks(exchange: Exchange, flat: Tensor, format: str | None, scale: float = 1.0) -> None:
    """In place: the sum of ``flat * scale`` over all ranks, fp32 [n], the same bits on each. No ``format``: exact."""
    if format is None:
        exchange.sum_(flat if scale == 1.0 else flat.mul_(scale))
        return
    shard = exchange.sum_to_shards(flat)
    sum_compressed(exchange, format, shard, scale)
    exchange.gather_shards(flat, shard)


def sum_compressed(
    exchange: Exchange,
    format: str,
    flat: Tensor,
    scale: float = 1.0,
    residual: Tensor | None = None,
    server_residual: Tensor | None = None,
) -> None:
    """In place: the sum over the exchange's members of ``flat * scale``, sent in ``format``; the same bits on each.

    Two members send each other everything and add in rank order. More members send shards to their owners, which sum
    them in fp32 and send the sum to all, compressed again (with a residual at the owner: server-side error feedback as
    in double squeeze, Tang et al., ICML 2019).

    ``flat``: fp32 [n], contiguous. ``residual``: fp32 [n]; ``server_residual``: fp32 of this member's shard
    (:func:`server_shard`); None: no error feedback.
    """
    if exchange.members == 1:
        flat.mul_(scale)
        return
    if exchange.members == 2:
        size = formats.compressed_bytes(format, flat.numel())
        message = _messages(flat, size, 1)[0]
        formats.compress(format, flat, message[:size], residual, scale)
        for index, theirs in enumerate(exchange.gather(message).unbind()):
            formats.decompress(format, theirs[:size], flat, index > 0)
        return
    shards = _shards(flat.numel(), exchange.members)
    sizes = [formats.compressed_bytes(format, end - begin) for begin, end in shards]
    messages = _messages(flat, sizes[0], exchange.members)
    for (begin, end), size, message in zip(shards, sizes, messages.unbind(), strict=True):
        part = None if residual is None else residual[begin:end]
        formats.compress(format, flat[begin:end], message[:size], part, scale)
    begin, end = shards[exchange.member]
    size = sizes[exchange.member]
    total = flat[begin:end]
    for index, message in enumerate(exchange.swap(messages).unbind()):
        formats.decompress(format, message[:size], total, index > 0)
    answer = messages[0]
    formats.compress(format, total, answer[:size], server_residual, 1.0)
    for (begin, end), size, message in zip(shards, sizes, exchange.gather(answer).unbind(), strict=True):
        formats.decompress(format, message[:size], flat[begin:end])


def server_shard(exchange: Exchange, numel: int) -> tuple[int, int]:
    """The part of ``numel`` elements that this member sums, as [begin, end); empty for two members."""
    if exchange.members <= 2:
        return 0, 0
    return _shards(numel, exchange.members)[exchange.member]


def _shards(numel: int, members: int) -> list[tuple[int, int]]:
    size = shard_numel(numel, members)
    return [(min(i * size, numel), min((i + 1) * size, numel)) for i in range(members)]


def _messages(flat: Tensor, size: int, count: int) -> Tensor:
    """uint8 [count, size, rounded up to 4]: each row begins with fp32 scales, which must be aligned."""
    return torch.empty(count, -(-size // 4) * 4, dtype=torch.uint8, device=flat.device)
