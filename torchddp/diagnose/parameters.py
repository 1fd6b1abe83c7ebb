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
from torchddp.transport.agreement import TransportExchange


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
    transport = engine.reducer.transport
    steps = engine.reducer.finished_steps
    if transport.size == 1:
        return
    try:
        error = _find(named, transport, engine._reduced_params[0].device, engine._wait_limit(), steps)
    except TransportError as failure:
        raise TransportError(
            f"rank {transport.rank}: comparing parameters with those of the other ranks after {steps} synchronised "
            f"steps failed: {failure}"
        ) from failure
    if error is not None:
        raise error


def _find(
    named: Sequence[tuple[str, torch.Tensor]],
    transport: _C.Transport,
    device: torch.device,
    timeout: datetime.timedelta,
    steps: int,
) -> DesyncError | None:
    exchange = TransportExchange(transport, int, device, timeout)
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
    amounts = None
    if same_size:
        amounts = _measure(parameter, difference.reference_rank, transport, device, timeout)
    described = f"{parameter.dtype} {list(parameter.shape)}"
    return make_error(difference, name, described, exchange.size, len(named), amounts, steps)


def _measure(
    parameter: torch.Tensor,
    reference_rank: int,
    transport: _C.Transport,
    device: torch.device,
    timeout: datetime.timedelta,
) -> list[Amount]:
    """Collective. By rank: how far it is from the reference. Takes two copies of the parameter, and more."""
    own = parameter.detach().contiguous().to(device)
    own = torch.view_as_real(own.resolve_conj()) if own.is_complex() else own
    own = own.reshape(-1)
    words = own.view(torch.uint8).clone()
    work = transport.make_work()
    transport.broadcast(words, reference_rank, work)
    work.wait(timeout)
    theirs = words.view(own.dtype)
    same_bits = own.view(torch.uint8).view(-1, own.itemsize) == words.view(-1, own.itemsize)
    elements = (~same_bits.all(dim=1)).sum()
    apart = (own.double() - theirs.double()).abs()
    apart = apart[apart.isfinite()]
    largest = apart.max() if apart.numel() > 0 else apart.new_zeros(())
    found = TransportExchange(transport, float, device, timeout).gather([float(elements), float(largest)])
    return [Amount(int(count), largest) for count, largest in found]
