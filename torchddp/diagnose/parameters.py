"""Checks that all ranks have bitwise equal parameters: hashes, comparison, and the report of a difference."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from torchddp import _C, _torch
from torchddp.ddp.observers import StepObserver
from torchddp.ddp.session import ReducerSession
from torchddp.diagnose.rank_state import ranks_text
from torchddp.errors import DesyncError, TransportError

_AT_ONCE = 4 * 2**20  # elements: 128 MiB of memory per part
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLACE, _FIRST, _SECOND = (word - 2**64 for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class ParameterCheck(StepObserver):
    """Compares parameters every ``Checks(parameters_every=)`` finished synchronized steps.

    Not under `join()`, where ranks do different numbers of steps, nor after it, because torch doesn't reset its flag.
    """

    def __init__(self, session: ReducerSession) -> None:
        self._session = session
        self._last: int | None = None  # finished steps at the last check; None: set in the next step

    def before_step(self) -> None:
        """Check if it is due. Collective, and due in the same steps on all ranks. Raises DesyncError."""
        session = self._session
        if session.joins:
            self._last = None  # ranks may do different numbers of steps from now on
        every = session.options.checks.parameters_every
        if session.joins or not session.synchronizes or every is None or session.is_captured or _torch.in_functorch():
            return
        finished = session.reducer.finished_steps
        if self._last is None:
            self._last = finished
        if finished - self._last >= every:
            self._last = finished
            _check(session)


def check_parameters(model: TorchDDP) -> None:
    """Raise unless every parameter of ``model`` has the same bits on all ranks. Collective, between steps.

    Parameters are hashed (64 bits, at memory speed) and one number per rank is exchanged; more only if those differ.
    Bits count: 0.0 is not -0.0, while NaNs with equal bits are equal. Frozen parameters are included. Buffers are not
    (running statistics may legitimately differ), nor are the tensors that the model ignores.

    Example:

        for step, batch in enumerate(loader):
            loss_of(model(batch)).backward()
            optimizer.step()
            if step % 100 == 0:
                torchddp.check_parameters(model)

    Args:
        model: a torchddp.DistributedDataParallel or ShardedDataParallel; waits for the latter's updates.

    Raises:
        TypeError: another kind of model.
        DesyncError: on all ranks, with the first parameter that differs, on which ranks, and by how much.
        TransportError: a peer is gone or did not arrive in time.
    """
    session: Any = getattr(model, "session", None)
    if not hasattr(getattr(session, "reducer", None), "finished_steps"):
        raise TypeError(f"check_parameters() needs a torchddp.DistributedDataParallel, got {type(model).__name__}")
    _check(session)


def _check(session: ReducerSession) -> None:
    transport, steps = session.reducer.transport, session.reducer.finished_steps
    if transport.size == 1:
        return
    try:
        error = _find(session, steps)
    except TransportError as failure:
        raise TransportError(
            f"rank {transport.rank}: comparing parameters after {steps} synchronized steps failed: {failure}"
        ) from failure
    if error is not None:
        raise error


def _find(session: ReducerSession, steps: int) -> DesyncError | None:
    named = session.named_parameters()
    exchange = session.exchange(int)
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
    assert difference is not None  # if hashes of hashes differ, so do the hashes
    name, parameter = named[difference.index]
    same_size = len({own[difference.index][1] for own in pairs}) == 1
    amounts = _measure(parameter, difference.reference_rank, session) if same_size else None
    described = f"{parameter.dtype} {list(parameter.shape)}"
    return make_error(difference, name, described, exchange.size, len(named), amounts, steps)


def _measure(parameter: torch.Tensor, reference_rank: int, session: ReducerSession) -> list[Amount]:
    """By rank: how far its parameter is from the reference. Collective. Allocates several copies of the parameter."""
    transport, device = session.reducer.transport, session.device
    own = parameter.detach().contiguous().to(device)
    own = torch.view_as_real(own.resolve_conj()) if own.is_complex() else own
    own = own.reshape(-1)
    words = own.view(torch.uint8).clone()
    work = transport.make_work()
    transport.broadcast(words, reference_rank, work)
    work.wait(session.wait_limit)
    theirs = words.view(own.dtype)
    size = parameter.itemsize  # of both parts of a complex number
    differ = (own.view(torch.uint8).view(-1, size) != words.view(-1, size)).any(dim=1)
    apart = (own.double() - theirs.double()).abs().view(differ.numel(), -1)
    finite = apart[apart.isfinite()]
    largest = finite.max() if finite.numel() > 0 else apart.new_zeros(())
    nonfinite = differ & ~apart.isfinite().all(dim=1)
    by_rank = session.exchange(float).gather([float(differ.sum()), float(largest), float(nonfinite.sum())])
    return [Amount(int(count), most, int(nonfinite)) for count, most, nonfinite in by_rank]


@dataclass(frozen=True)
class Difference:
    index: int
    reference_rank: int  # a rank with the reference value
    ranks: tuple[int, ...]  # the ranks with another value
    count: int  # how many parameters differ in total


@dataclass(frozen=True)
class Amount:
    elements: int  # whose bits differ
    largest: float  # difference, of those that are finite on both
    nonfinite: int = 0  # elements that are infinite or NaN on one or both


def find_difference(by_rank: Sequence[Sequence[object]]) -> Difference | None:
    """The first item in ``by_rank[rank][parameter]`` that differs from the majority's, or else rank 0's."""
    differing = [index for index, values in enumerate(zip(*by_rank, strict=True)) if len(set(values)) > 1]
    if not differing:
        return None
    values = [own[differing[0]] for own in by_rank]
    most, votes = Counter(values).most_common(1)[0]
    reference = most if votes * 2 > len(values) else values[0]
    ranks = tuple(rank for rank, value in enumerate(values) if value != reference)
    return Difference(differing[0], values.index(reference), ranks, len(differing))


def make_error(
    difference: Difference,
    name: str,
    parameter: str,
    world_size: int,
    num_parameters: int,
    amounts: Sequence[Amount] | None,
    steps: int,
) -> DesyncError:
    """The same error for all ranks. `parameter` describes it; `amounts` are by rank, None where unknown."""
    others = [rank for rank in range(world_size) if rank not in difference.ranks]
    majority = len(others) * 2 > world_size
    found = {rank: amounts[rank] for rank in difference.ranks} if amounts is not None else {}
    largest = max((amount.largest for amount in found.values()), default=None)
    parts = [f"rank {rank} in {_amount_text(amount)}" for rank, amount in found.items()]
    details = f" ({'; '.join(parts)})" if parts else ""
    verb = "differ" if len(difference.ranks) > 1 else "differs"
    most = ", the majority" if majority else ""
    compared = f"{ranks_text(list(difference.ranks))} {verb} from {ranks_text(others)}{most}{details}"
    unsynchronized = "" if steps else "the module was called instead of the model, or every forward was in no_sync(); "
    text = (
        f"Parameters are not the same on all ranks after {steps} synchronized step{'' if steps == 1 else 's'}: "
        f"{difference.count} of {num_parameters} differ{'s' if difference.count == 1 else ''}. The first is '{name}' "
        f"({parameter}): {compared}. Likely causes: {unsynchronized}a rank whose optimizer, learning rate or gradient "
        "clipping differs, or that skipped a step; parameters that were loaded, set or initialized on some ranks only; "
        "gradients changed after backward; results that depend on the rank's hardware; a faulty machine. To continue, "
        "broadcast the parameters and optimizer state of a correct rank."
    )
    return DesyncError(text, steps, name, difference.ranks, difference.count, largest)


def _amount_text(amount: Amount) -> str:
    text = f"{amount.elements} element{'s' if amount.elements != 1 else ''}"
    if amount.nonfinite and amount.nonfinite == amount.elements:
        return f"{text}, infinite or NaN"
    also = f", {amount.nonfinite} of them infinite or NaN" if amount.nonfinite else ""
    return f"{text}{also}, by up to {amount.largest:.6g}"


# --- hashes: 64 bits of a tensor's bits, at memory speed ---


@torch.no_grad()
def hash_tensors(tensors: Sequence[torch.Tensor], *, by_operators: bool = False) -> list[int]:
    """A hash of each strided tensor's bits in logical order: 0.0 and -0.0 differ, NaNs with equal bits don't.

    On the CPU a kernel computes it. Elsewhere, or if ``by_operators``, torch's operators compute a different hash, with
    one synchronization per device. RuntimeError for other layouts.
    """
    hashes = [0] * len(tensors)
    sums: dict[torch.device, list[tuple[int, torch.Tensor]]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        if tensor.layout != torch.strided or tensor.is_meta:
            raise RuntimeError(f"tensor {index} has no memory to hash: got {tensor.layout} on {tensor.device}")
        values = tensor.detach().resolve_conj().resolve_neg().contiguous()
        if tensor.is_cpu and not by_operators:
            hashes[index] = _C.hash_tensor(values)
        else:
            sums[tensor.device].append((index, _sum_of_words(values)))
    for found in sums.values():
        for (index, _), word in zip(found, torch.stack([total for _, total in found]).tolist(), strict=True):
            # Includes the length, so that zeros at the end count.
            hashes[index] = _C.hash_tensor(torch.tensor([word, tensors[index].nbytes]))
    return hashes


def _sum_of_words(values: torch.Tensor) -> torch.Tensor:
    """The sum of a bijection (splitmix64) of each word, which depends on its place: 0-d int64, on the device."""
    real = torch.view_as_real(values) if values.is_complex() else values
    words = real.reshape(-1).view(_WORDS[real.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for begin in range(0, words.numel(), _AT_ONCE):
        part = words[begin : begin + _AT_ONCE]
        mixed = torch.arange(begin + 1, begin + 1 + part.numel(), dtype=torch.int64, device=values.device)
        mixed.mul_(_PLACE).add_(part)
        for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
            mixed.bitwise_xor_((mixed >> shift) & ((1 << (64 - shift)) - 1)).mul_(factor)  # as if unsigned
        total += mixed.sum()
    return total
