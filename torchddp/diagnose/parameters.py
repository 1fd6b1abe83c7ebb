"""Whether all ranks have the same parameters, bit for bit."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from torchddp import _C
from torchddp.ddp.local_tensors import local_of
from torchddp.diagnose.desync import Amount, find_difference, make_error
from torchddp.diagnose.hashes import hash_tensors
from torchddp.errors import DesyncError, TransportError


class ParameterCheck:
    """Every so many synchronised steps of a model.

    Args:
        every: finished synchronised steps between two checks; ValueError if it is less than 1 or no integer.
    """

    def __init__(self, every: int) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(
                f"check_parameters_every must be a number of steps, 1 or more, or None for no checks; got {every!r}"
            )
        self.every = every
        self._last: int | None = 0  # finished steps at the last check; None: those of the next step

    def restart(self) -> None:
        """Ranks may have counted unevenly so far: all begin again at the next step."""
        self._last = None

    def before_step(self, model: Any) -> None:
        """Collective every ``every`` steps, which are the same on all ranks. Raises DesyncError.

        Not under `join()`, where ranks make different numbers of steps; torch leaves it switched on after its end.
        """
        if model._join_config.enable or (model.device_type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return
        finished = model.reducer.finished_steps
        if self._last is None:
            self._last = finished
        if finished - self._last >= self.every:
            self._last = finished
            check_parameters(model)


def check_parameters(model: TorchDDP) -> None:
    """Raises unless every parameter of ``model`` has the same bits on all ranks. Collective, between steps.

    Parameters are hashed (64 bits, at the speed of memory) and one number a rank is exchanged; more only if those
    differ. Bits count: 0.0 is not -0.0, while equal NaNs are equal. Frozen parameters count, buffers don't (running
    statistics may differ by right), nor what the model was told to ignore.

    Args:
        model: a torchddp.DistributedDataParallel or ShardedDataParallel, whose updates are waited for.

    Raises:
        TypeError: another kind of model.
        DesyncError: on all ranks: the first parameter that differs, on which ranks, by how much.
        TransportError: a peer is gone, or did not come in time.
    """
    engine: Any = model
    if not hasattr(getattr(model, "reducer", None), "finished_steps"):
        raise TypeError(f"check_parameters() wants a torchddp.DistributedDataParallel, got {type(model).__name__}")
    ignored = engine.parameters_to_ignore
    named = [(name, local_of(p)) for name, p in engine.module.named_parameters() if name not in ignored]
    exchange = _Exchange(engine.reducer.transport, engine._wait_limit(), engine._reduced_params[0].device)
    steps = engine.reducer.finished_steps
    if exchange.size == 1:
        return
    try:
        error = _find(named, exchange, steps)
    except TransportError as failure:
        raise TransportError(
            f"rank {exchange.rank}: comparing parameters with those of the other ranks after {steps} synchronised "
            f"steps failed: {failure}"
        ) from failure
    if error is not None:
        raise error


def _find(named: Sequence[tuple[str, torch.Tensor]], exchange: _Exchange, steps: int) -> DesyncError | None:
    hashes = hash_tensors([p for _, p in named])
    combined = _C.hash_tensor(torch.tensor(hashes, dtype=torch.int64))
    by_rank = exchange.gather([combined, len(named)])
    if all(mine == by_rank[0] for mine in by_rank):
        return None
    counts = [count for _, count in by_rank]
    if len(set(counts)) > 1:
        listed = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
        ranks = tuple(rank for rank, count in enumerate(counts) if count != counts[0])
        text = f"The ranks' models have different numbers of parameters ({listed}): some were changed after wrapping."
        return DesyncError(text, steps, None, ranks, 0, None)
    flat = exchange.gather([word for (_, p), own in zip(named, hashes, strict=True) for word in (own, p.nbytes)])
    pairs = [list(zip(own[0::2], own[1::2], strict=True)) for own in flat]
    difference = find_difference(pairs)
    if difference is None:
        return None  # hashes of hashes that differ come from hashes that do
    name, parameter = named[difference.index]
    same_size = len({own[difference.index][1] for own in pairs}) == 1
    amounts = exchange.measure(parameter, difference.reference_rank) if same_size else None
    described = f"{parameter.dtype} {list(parameter.shape)}"
    return make_error(difference, name, described, exchange.size, len(named), amounts, steps)


class _Exchange:
    """Messages between the ranks of a model, over its transport. All methods are collective."""

    def __init__(self, transport: _C.Transport, timeout: datetime.timedelta, device: torch.device) -> None:
        self.rank, self.size = transport.rank, transport.size
        self._transport = transport
        self._timeout = timeout
        self._device = device

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """By rank: its numbers, as many on each, 64 bits."""
        mine = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        return self._gather(mine).tolist()

    def measure(self, parameter: torch.Tensor, reference_rank: int) -> list[Amount]:
        """By rank: how far it is from the reference. Takes two copies of the parameter, and more."""
        own = parameter.detach().contiguous().to(self._device)
        own = torch.view_as_real(own.resolve_conj()) if own.is_complex() else own
        own = own.reshape(-1)
        words = own.view(torch.uint8).clone()
        work = self._transport.make_work()
        self._transport.broadcast(words, reference_rank, work)
        work.wait(self._timeout)
        theirs = words.view(own.dtype)
        same_bits = own.view(torch.uint8).view(-1, own.itemsize) == words.view(-1, own.itemsize)
        elements = (~same_bits.all(dim=1)).sum()
        apart = (own.double() - theirs.double()).abs()
        apart = apart[apart.isfinite()]
        largest = apart.max() if apart.numel() > 0 else apart.new_zeros(())
        found = self._gather(torch.stack([elements.double(), largest])).tolist()
        return [Amount(int(count), largest) for count, largest in found]

    def _gather(self, mine: torch.Tensor) -> torch.Tensor:
        everyone = torch.empty(self.size * mine.numel(), dtype=mine.dtype, device=mine.device)
        work = self._transport.make_work()
        self._transport.all_gather(everyone, mine, work)
        work.wait(self._timeout)
        return everyone.view(self.size, -1).cpu()
