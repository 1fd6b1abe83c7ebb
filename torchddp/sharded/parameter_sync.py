"""Sends updated parameters from their owners to all ranks.

`OSS` alone sends them through its process group (`GroupSender`). Under ShardedDataParallel, parameters are views of
flat memory, those of one owner side by side, and `ParameterGather` sends them from there. Both send ``messages`` of one
owner each, in an order that all ranks know: `begin`, `send` for each, `finish`, all collective. ``needs_this_core``:
whether that takes the time of the core that computes. A message's ``memory``: flat memory that holds its parameters
side by side, if any; gaps in it may be written to.
"""

from __future__ import annotations

import datetime
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from torchddp import _C, _torch
from torchddp.errors import TransportError
from torchddp.sharded.flat_step import SMALL_NUMEL
from torchddp.sharded.partition import ParameterPartition, in_rounds, pack
from torchddp.transport.waits import started

# The largest message of a gather: small enough that the first layers need not wait for the last ones.
CHUNK_BYTES = 8 * 1024 * 1024

_MESSAGE_NUMEL = CHUNK_BYTES // 4  # the largest message of `OSS` alone, unless it is told another

# Views begin at multiples of this many bytes, which suits vectorized kernels and covers every dtype's alignment.
ALIGNMENT_BYTES = 64


class StepHooks(Protocol):
    """The data parallel module that reduces gradients to their owners and sends parameters, as `OSS` sees it."""

    def _check_new(self, params: list[torch.Tensor]) -> None:
        """Raises ValueError for new parameters that the module doesn't have."""

    def _gather_of(self, optimizer: Optimizer) -> ParameterGather:
        """What sends this optimizer's parameters to the other ranks."""

    def _partitions_beside(self, optimizer: Optimizer) -> Sequence[ParameterPartition]:
        """Of the other optimizers that step the module's parameters."""

    def synchronize(self) -> None:
        """Before parameters are changed."""

    def _owners_changed(self) -> None:
        """After parameters were added, frozen, thawed, or got owners. Collective."""


# --- OSS alone ---


@dataclass(frozen=True)
class Bucket:
    owner: int
    params: list[torch.Tensor]

    @property
    def numel(self) -> int:
        return sum(param.numel() for param in self.params)

    @property
    def dtype(self) -> torch.dtype:
        return self.params[0].dtype

    @property
    def memory(self) -> list[torch.Tensor]:
        return []


def plan_buckets(params: Sequence[torch.Tensor], owners: Sequence[int | None], max_numel: int) -> list[Bucket]:
    """Buckets of at most ``max_numel`` elements (-1: 2**21) of parameters with an owner and elements. See `pack`."""
    packed = pack(_keys(params, owners), [p.numel() for p in params], _MESSAGE_NUMEL if max_numel == -1 else max_numel)
    return [Bucket(owner, [params[index] for index in indices]) for (owner, _, _), indices in packed]


def _keys(
    params: Sequence[torch.Tensor], owners: Sequence[int | None]
) -> list[tuple[int, torch.device, torch.dtype] | None]:
    """What parameters sent together have in common; None for those that are not sent."""
    return [
        None if owner is None or param.numel() == 0 else (owner, param.device, param.dtype)
        for param, owner in zip(params, owners, strict=True)
    ]


class GroupSender:
    """Sends each bucket from its owner to all ranks. ``max_numel``: see `plan_buckets`. ``half``: float32 parameters as
    float16.
    """

    needs_this_core = False

    def __init__(self, partition: ParameterPartition, max_numel: int, group: dist.ProcessGroup, half: bool) -> None:
        self._partition, self._max_numel, self._group, self._half = partition, max_numel, group, half
        self._sent: list[tuple[Bucket, torch.Tensor, Callable[[], None], bool]] = []
        self._plan()

    def _plan(self) -> None:
        known = self._partition
        senders = [rank if on else None for rank, on in zip(known.owners, known.active, strict=True)]
        buckets = plan_buckets(known.params, senders, self._max_numel)
        self.messages = [buckets[i] for i in in_rounds([b.owner for b in buckets])] if known.world_size > 1 else []

    def follow_dtypes(self) -> None:
        """Before a step: the program may have converted some parameters of a message."""
        if any(len({param.dtype for param in bucket.params}) > 1 for bucket in self.messages):
            self._plan()

    def begin(self) -> None:
        self._sent.clear()

    @torch.no_grad()
    def send(self, index: int) -> None:
        bucket, group = self.messages[index], self._group
        first, owner = bucket.params[0], bucket.owner
        wire_dtype = torch.float16 if self._half and bucket.dtype == torch.float32 else bucket.dtype
        in_place = len(bucket.params) == 1 and first.is_contiguous() and wire_dtype == bucket.dtype
        if in_place:
            flat = first.detach().as_strided((first.numel(),), (1,))  # one element may have any stride
        elif group.rank() != owner:
            flat = torch.empty(bucket.numel, dtype=wire_dtype, device=first.device)
        else:
            flat = torch.cat([param.detach().reshape(-1) for param in bucket.params]).to(wire_dtype)
        # As bytes: no backend supports all dtypes, and a broadcast does no arithmetic.
        send = partial(dist.broadcast, flat.view(torch.uint8), group=group, group_src=owner, async_op=True)
        self._sent.append((bucket, flat, started(send, group, f"sending updated parameters of rank {owner}"), in_place))

    @torch.no_grad()
    def finish(self) -> None:
        for bucket, flat, wait, in_place in self._sent:
            wait()
            rounded = flat.dtype != bucket.dtype  # then the owner, too, takes the rounded values
            if in_place or (self._group.rank() == bucket.owner and not rounded):
                continue
            pieces = torch.split(flat, [param.numel() for param in bucket.params])
            for param, piece in zip(bucket.params, pieces, strict=True):
                param.copy_(piece.view(param.shape))
        self._sent.clear()


# --- ShardedDataParallel ---


@dataclass(frozen=True)
class ChunkPlan:
    """Parameters of one owner, device and dtype stored together: their indices and offsets (in elements)."""

    owner: int
    params: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int


def plan_chunks(
    params: Sequence[torch.Tensor], owners: Sequence[int], max_bytes: int, small_numel: int
) -> list[ChunkPlan]:
    """Chunks of at most ``max_bytes`` each of parameters with elements; a larger one is alone. See `pack`.

    In each chunk, parameters of less than ``small_numel`` elements come first, so that they are neighbors.
    """
    # Elements from the start of one parameter to the start of the next.
    steps = [max(1, ALIGNMENT_BYTES // param.itemsize) for param in params]
    spans = [-(-param.numel() // step) * step for param, step in zip(params, steps, strict=True)]
    sizes = [span * param.itemsize for span, param in zip(spans, params, strict=True)]
    plans = []
    for (owner, _, _), packed in pack(_keys(params, owners), sizes, max_bytes):
        indices = sorted(packed, key=lambda index: (params[index].numel() >= small_numel, index))
        offsets = [0, *accumulate(spans[index] for index in indices[:-1])]
        plans.append(ChunkPlan(owner, tuple(indices), tuple(offsets), offsets[-1] + params[indices[-1]].numel()))
    return plans


class Chunk:
    """The flat memory of a `ChunkPlan`. Parameters keep their identity; their memory moves here."""

    def __init__(self, plan: ChunkPlan, params: Sequence[torch.Tensor], transport: _C.Transport) -> None:
        self.owner = plan.owner
        self.params = [params[index] for index in plan.params]
        first = self.params[0].detach()
        if plan.owner == transport.rank and not transport.reaches_any_memory:
            flat = transport.allocate(plan.numel, first)  # where the other ranks can read it
        else:
            flat = torch.empty(plan.numel, dtype=first.dtype, device=first.device)
        self.flat = flat.zero_()  # gaps are sent too
        self.memory = [self.flat]
        self._views = [
            _C.make_flat_view(flat, offset, torch.empty_like(param, device="meta"))  # without gaps
            for param, offset in zip(self.params, plan.offsets, strict=True)
        ]
        self._addresses = [view.data_ptr() for view in self._views]
        self._offsets = plan.offsets
        self.attach()

    @torch.no_grad()
    def attach(self) -> None:
        """Move in parameters whose memory is elsewhere: initially, or because user code gave them other memory."""
        places = zip(self.params, self._views, self._addresses, self._offsets, strict=True)
        for param, like, address, offset in places:
            if param.data_ptr() == address:
                continue
            # A new one, because share_memory_() and queues of torch.multiprocessing move a tensor's storage.
            view = _C.make_flat_view(self.flat, offset, like)
            if param.shape != view.shape or param.dtype != view.dtype or param.device != view.device:
                raise RuntimeError(
                    f"a parameter was {view.dtype}{list(view.shape)} on {view.device} when the module was wrapped, and "
                    f"is now {param.dtype}{list(param.shape)} on {param.device}: use the wrapper's to(), or wrap again"
                )
            view.copy_(param.detach())
            param.data = view

    @torch.no_grad()
    def detach(self, params: Collection[torch.Tensor]) -> None:
        """Give those of ``params`` that are stored here their own memory, so that they don't keep the chunk alive."""
        for param, address in zip(self.params, self._addresses, strict=True):
            if param in params and param.data_ptr() == address:
                param.data = param.detach().clone()


class Arrival:
    """An event of the stream that first waited for parameters on a GPU, for other streams to wait for.

    The step's own stream waits for it at once.
    """

    def __init__(self, device: torch.device, step_stream: torch.Stream) -> None:
        here = torch.accelerator.current_stream(device)
        self._device, self._ordered = device, {here, step_stream}  # streams that wait for the event, or need not
        self._event = here.record_event()
        if here != step_stream:
            step_stream.wait_event(self._event)

    def join(self) -> None:
        """Make the current stream wait, too."""
        here = torch.accelerator.current_stream(self._device)
        if here not in self._ordered:
            here.wait_event(self._event)
            self._ordered.add(here)


class ParameterGather:
    """One message per chunk of an optimizer's parameters, directly from its owner's memory to the others'.

    All messages are started at once, in the same order on all ranks; each is waited for when its parameters are needed.
    The constructor moves the parameters (``owners``: the owning rank of each) into the chunks, unless there is only one
    rank. ``module``: reading parameters through it or its submodules waits for them.
    """

    def __init__(
        self,
        module: nn.Module,
        owners: Mapping[torch.Tensor, int],
        transport: _C.Transport,
        timeout: datetime.timedelta,
    ) -> None:
        params = list(owners)
        plans = plan_chunks(params, list(owners.values()), CHUNK_BYTES, SMALL_NUMEL) if transport.size > 1 else []
        self.messages = [Chunk(plans[i], params, transport) for i in in_rounds([plan.owner for plan in plans])]
        self._transport = transport
        self._timeout = timeout
        # Over shared memory, the ranks' own CPUs do the copying, so nothing travels while they compute.
        self.needs_this_core = not transport.reaches_any_memory
        self._reducer: _C.Reducer
        self._bytes = [chunk.flat.view(torch.uint8) for chunk in self.messages]  # no backend has all dtypes
        self._works = [transport.make_work() for _ in self.messages]
        self._under_way: set[int] = set()
        self._lock, self._process = threading.RLock(), os.getpid()  # several threads may read parameters
        self._streams: dict[torch.device, torch.Stream] = {}  # of the step, for each GPU
        self._arrivals: dict[int, Arrival] = {}  # by chunk
        chunk_of = {param: index for index, chunk in enumerate(self.messages) for param in chunk.params}
        # Modules, and the chunks that each waits for. Weak, because a module may hold this object.
        self._needs: list[tuple[weakref.ref[nn.Module], list[int]]] = []
        for part in module.modules():
            own = [param for param in part._parameters.values() if param is not None]
            if wanted := sorted({chunk_of[param] for param in own if param in chunk_of}):
                self._needs.append((weakref.ref(part), wanted))
        self._hooks: list[RemovableHandle] = []

    def connect(self, reducer: _C.Reducer, *, overlaps: bool) -> None:
        """Before the first step. ``reducer`` reports it if this rank hangs in a wait here.

        ``overlaps``: steps don't wait for messages; the first access to a module's parameters does.
        """
        # Code of torch.jit reads parameters unseen.
        scripted = any(isinstance(module, torch.jit.ScriptModule) for module, _ in self._modules())
        self._reducer, self.overlaps = reducer, overlaps and not scripted
        if not self.overlaps:
            return
        # These modules keep weights in lists of their own, which bypass the dictionary.
        recurrent = [module for module, _ in self._modules() if isinstance(module, nn.RNNBase)]
        self._hooks = [module.register_forward_pre_hook(_resolve) for module in recurrent]

    def _modules(self) -> Iterator[tuple[nn.Module, list[int]]]:
        return ((module, wanted) for ref, wanted in self._needs if (module := ref()) is not None)

    def disconnect(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def attach(self) -> None:
        """Before parameters change: memory that the program gave them stays as it is, on their owner and elsewhere."""
        for chunk in self.messages:
            chunk.attach()

    def begin(self) -> None:
        """Before the first message of a step."""
        self.synchronize()
        devices = {chunk.flat.device for chunk in self.messages if chunk.flat.device.type != "cpu"}
        self._streams = {device: torch.accelerator.current_stream(device) for device in devices}
        self._arrivals.clear()

    def send(self, index: int) -> None:
        """Start a message. Collective. TransportError names one that failed."""
        chunk = self.messages[index]
        chunk.attach()
        if chunk.owner != self._transport.rank:
            # Backward through a graph that saved the old values would be wrong; this makes autograd raise an error.
            torch.autograd.graph.increment_version(chunk.params)
        with self._failures_named(index):
            self._transport.broadcast(self._bytes[index], chunk.owner, self._works[index])
        self._under_way.add(index)

    def finish(self) -> None:
        """After the last message: wait for all, or let modules wait for theirs when their parameters are read."""
        if not self.overlaps:
            self.synchronize()
            return
        for module, wanted in self._modules():
            PendingParameters(module, partial(self._wait_for_read, wanted))

    def synchronize(self) -> None:
        """Wait until all parameters may be read (and this rank's own changed)."""
        self._wait(range(len(self.messages)))
        for module, _ in self._modules():
            _resolve(module)

    def _wait_for_read(self, indices: Iterable[int]) -> None:
        if self.overlaps and _torch.is_dynamo_tracing():
            # Compiled code is for modules with plain dictionaries, and would be compiled again in every step.
            self.overlaps = False
            self.synchronize()
        self._wait(indices)

    def _wait(self, indices: Iterable[int]) -> None:
        if os.getpid() != self._process and not self._under_way.isdisjoint(indices):
            raise RuntimeError(
                "this process was forked while updated parameters were on their way, and they can't arrive here: call "
                "synchronize() of the ShardedDataParallel before the fork"
            )
        with self._lock:
            for index in indices:
                self._wait_for(index)

    def _wait_for(self, index: int) -> None:
        if index not in self._under_way:
            if arrival := self._arrivals.get(index):
                arrival.join()
            return
        number = self._reducer.begin_wait("updated parameters of other ranks")
        try:
            with self._failures_named(index):
                self._works[index].wait(self._timeout)
        finally:
            self._reducer.end_wait(number)
        self._under_way.discard(index)  # not before: a wait that a signal's handler ended has brought nothing
        if step_stream := self._streams.get(device := self.messages[index].flat.device):
            self._arrivals[index] = Arrival(device, step_stream)

    @contextmanager
    def _failures_named(self, index: int) -> Iterator[None]:
        """A context in which a transport failure ends all messages and names the one that failed."""
        try:
            yield
        except TransportError as error:
            for work in self._works:
                work.abandon()
            self._under_way.clear()
            chunk = self.messages[index]
            raise TransportError(
                f"{error}\nrank {self._transport.rank}: message {index} of {len(self.messages)} with updated "
                f"parameters ({len(chunk.params)} of rank {chunk.owner}, {self._bytes[index].numel()} bytes) failed."
            ) from error


Sender = GroupSender | ParameterGather
Messages = Sequence[Bucket | Chunk]

Parameters = dict[str, nn.Parameter | None]  # a module's own, as torch types them


class PendingParameters(Parameters):
    """Replaces a module's parameter dictionary between a step and the first use of the module.

    Any access waits for those parameters and restores the plain dictionary, so that forward, `state_dict`,
    `parameters`, and `module.weight` all see the values after the step. Dict methods are added below.
    """

    def __init__(self, module: nn.Module, wait: Callable[[], None]) -> None:
        self._module = weakref.ref(module)  # no cycle, which would keep the parameters until it is collected
        self._plain = module._parameters
        self._wait = wait
        super().__init__(self._plain)  # code that bypasses our methods sees the same parameters
        module.__dict__["_parameters"] = self

    def resolve(self) -> Parameters:
        """Wait, restore the plain dictionary, and return it."""
        self._wait()
        module = self._module()
        if module is not None and module.__dict__.get("_parameters") is self:
            module.__dict__["_parameters"] = self._plain
        return self._plain

    def __contains__(self, name: object) -> bool:
        return name in self._plain and name in self.resolve()

    def __reduce__(self) -> tuple[type, tuple[Parameters]]:
        return (dict, (self.resolve(),))


def _add_method(name: str) -> None:
    def call(self: PendingParameters, *arguments: object, **more: object) -> object:
        return getattr(self.resolve(), name)(*arguments, **more)

    setattr(PendingParameters, name, call)


for _name in ("get", "items", "values", "keys", "copy", "pop", "update", "setdefault", "clear"):
    _add_method(_name)
for _name in ("getitem", "setitem", "delitem", "iter"):
    _add_method(f"__{_name}__")


def _resolve(module: nn.Module, *_: object) -> None:
    """Wait for a module's own pending parameters, if any. Also used as a forward hook."""
    if isinstance(module._parameters, PendingParameters):
        module._parameters.resolve()
