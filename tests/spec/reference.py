"""The specification: what every parameter's gradient is on every rank after each call, and what is raised.

All ranks live in one process and take each step together, one rank after the other. Nothing overlaps, nothing is
packed, and a sum is a loop in rank order.

A backward is given as the gradients that autograd computes on each rank: `{"a": tensor}` for the parameters that the
rank's loss uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)
Grads = dict[str, Tensor | None]


@dataclass
class Parameter:
    shape: tuple[int, ...]
    dtype: torch.dtype
    sparse: bool = False
    trained: bool = True


@dataclass
class Settings:
    """What the wrapper was made with. The other options change no gradient."""

    find_unused_parameters: bool = False
    static_graph: bool = False
    weighted: bool = False
    zero_weights: str = "raise"
    comm_hook: str | None = None
    reduce: torch.dtype | None = None
    main_grads: torch.dtype | None = None
    main_grads_as: str = "main_grad"
    auto_refresh_trainable: bool = False
    hosts: str = ""  # the host of each rank; empty: one
    wire: torch.dtype | None = None
    reduce_fp16: bool = False
    owners: dict[str, int] | None = None  # sharded: the only rank that gets each parameter's average


@dataclass
class Share:
    """A parameter's gradients in an unfinished weighted step."""

    start: Tensor | None  # what the step began with, which counts with the rank's total
    counted: float  # how much of that is in `sum`
    sum: Tensor  # of weight * gradient
    unit: float  # what the program sees is divided by it: the weight of the last backward that used the parameter
    was_changed: bool = False  # by the program, so that nobody knows which part of it is `start`


@dataclass
class Rank:
    """One rank's gradients, and how far it is in a weighted step."""

    grads: Grads
    # Of an unfinished weighted step: its gradients, the last weight above 0, the sum of all weights.
    shares: dict[str, Share] = field(default_factory=dict)
    unit: float = 0.0
    total: float = 0.0
    began: Grads = field(default_factory=dict)  # with what, where it is reduced several times
    is_weighing: bool = False
    came: bool = False  # whether the backward of the last weigh() has run
    factor: float = 1.0  # of the next backward's gradients
    count: float = 0.0  # what it adds to the total
    used: list[set[str]] = field(default_factory=lambda: [set(), set()])  # by wrapper: since its last reduction
    used_before: set[str] = field(default_factory=set)  # until that
    averages: set[str] = field(default_factory=set)  # sharded: which gradients are averages that no other rank has
    aside: dict[str, Tensor] = field(default_factory=dict)  # such averages, while a backward adds to the gradient


class World:
    """The ranks of a process group and their model.

    Attributes:
        errors: what the last call raised, by rank.
        order_matters: whether some sum over ranks has other bits in another order.
        is_rounded: whether a result may differ in its last bits from that of other arithmetic, such as a weighted mean.
        squares: by rank, the sum of squares of what the last reduction gave it, as `gradient_stats()` says.
        largest: by parameter, the largest element that any rank has added.
    """

    def __init__(self, size: int, parameters: dict[str, Parameter], settings: Settings) -> None:
        self.parameters, self.settings = parameters, settings
        self.ranks = [Rank(dict.fromkeys(parameters)) for _ in range(size)]
        self.trained = {name for name, parameter in parameters.items() if parameter.trained}
        self.known = set(self.trained)  # those that are or were reduced
        self.errors: list[Exception | None] = [None] * size
        self.order_matters = self.is_rounded = False
        self.squares: list[float] = []
        self.largest = dict.fromkeys(parameters, 0.0)
        self.is_last = True  # whether the next reduction ends a weighted step
        # Main gradients that the program has set to None. The next forward brings them back, as zeros.
        self.dropped: list[set[str]] = [set() for _ in range(size)]

    @property
    def size(self) -> int:
        return len(self.ranks)

    # --- dtypes ---

    def grad_dtype(self, name: str) -> torch.dtype:
        """Of the gradient that is kept and accumulated into."""
        dtype = self.parameters[name].dtype
        is_wide = self.settings.main_grads is not None and dtype in HALVES and name in self.known
        return torch.float32 if is_wide else dtype

    def sent_dtype(self, name: str) -> torch.dtype:
        """Of the gradient in its bucket."""
        dtype = self.grad_dtype(name)
        return torch.float32 if self.settings.reduce is not None and dtype in HALVES else dtype

    @property
    def in_main_grad(self) -> bool:
        return self.settings.main_grads is not None and self.settings.main_grads_as == "main_grad"

    def zeros(self, name: str) -> Tensor:
        parameter = self.parameters[name]
        layout = torch.sparse_coo if parameter.sparse else torch.strided
        return torch.zeros(parameter.shape, dtype=self.grad_dtype(name), layout=layout)

    # --- what the program sees ---

    def seen(self, index: int) -> Grads:
        """A rank's `.grad` of every parameter, and "NAME.main_grad" if the gradients are there."""
        grads: Grads = {name: self.grad_of(index, name) for name in self.parameters}
        if not self.in_main_grad:
            return grads
        main: Grads = {}
        for name in self.parameters:
            if name in self.known:
                grad = grads[name]
                main[f"{name}.main_grad"] = self.zeros(name) if grad is None else grad
                if name in self.dropped[index]:
                    main[f"{name}.main_grad"] = None
                grads[name] = None
        return {**grads, **main}

    def grad_of(self, index: int, name: str) -> Tensor | None:
        """In a weighted step, the sum so far is divided by the last weight."""
        rank = self.ranks[index]
        share = rank.shares.get(name)
        return rank.grads[name] if share is None else (share.sum / share.unit).to(self.grad_dtype(name))

    # --- what the program does to gradients ---

    def zero_grad(self, set_to_none: bool, of: Sequence[int] | None = None) -> None:
        for index in range(self.size) if of is None else of:
            for name in self.parameters:
                if set_to_none or self.in_main_grad:
                    self.replace(index, name, None)
                elif (grad := self.grad_of(index, name)) is not None:
                    self.write(index, name, torch.zeros_like(grad))

    def replace(self, index: int, name: str, value: Tensor | None) -> None:
        """The program sets a gradient. Whatever was there is gone."""
        rank = self.ranks[index]
        rank.grads[name] = value
        rank.shares.pop(name, None)
        rank.averages.discard(name)

    def write(self, index: int, name: str, value: Tensor) -> None:
        """The program changes a gradient in place: in a weighted step, what has been added up so far."""
        rank, share = self.ranks[index], self.ranks[index].shares.get(name)
        if share is None:
            rank.grads[name] = value
        else:
            was_changed = share.was_changed or share.start is not None
            is_zero = not _dense(value).any()
            rank.shares[name] = Share(None, 0.0, _wide(value) * share.unit, share.unit, was_changed and not is_zero)
        if not _dense(value).any():  # so was an owner's average
            rank.averages.discard(name)

    def drop(self, index: int, name: str) -> None:
        """The program sets a gradient to None."""
        self.replace(index, name, None)
        if self.in_main_grad:
            self.dropped[index].add(name)

    def clip_norm(self, limit: float) -> float:
        """Clip the trained gradients as torch's `clip_grad_norm_` does; sharded ones by the norm over all ranks."""
        names = self.trained if self.settings.owners is None else self.parameters
        squares = [0.0] * self.size
        for index in range(self.size):
            for name in names:
                grad = self.grad_of(index, name)
                if grad is not None:
                    squares[index] += _dense(grad).abs().double().pow(2).sum().item()
        if self.settings.owners is not None:
            squares = [sum(squares)] * self.size
        for index, square in enumerate(squares):
            factor = min(1.0, limit / (math.sqrt(square) + 1e-6))
            for name in names:
                grad = self.grad_of(index, name)
                if grad is not None:
                    self.write(index, name, grad * factor)
        self.is_rounded = True
        return math.sqrt(squares[0])

    # --- training ---

    def weigh(self, weights: Sequence[float], loss: str = "mean", goes_on: bool = False, is_last: bool = True) -> None:
        """Each rank's weight of the next backward.

        Args:
            goes_on: it adds to the mean that earlier ones have made.
            is_last: no other will add to its mean.
        """
        self.is_rounded, self.is_last = True, is_last
        for rank, weight in zip(self.ranks, weights, strict=True):
            if rank.is_weighing and rank.came and not rank.shares:
                rank.total = rank.unit = 0.0  # the program has dropped what it had accumulated
            if not rank.is_weighing and not goes_on:
                rank.unit = rank.total = 0.0
                rank.began = {}
            elif not rank.is_weighing:
                # The averages stand for all that they are means of.
                total = rank.unit = rank.total
                grads = {n: _wide(g) for n, g in rank.grads.items() if g is not None}
                rank.shares = {n: Share(rank.began.get(n, g), total, g * total, total or 1.0) for n, g in grads.items()}
                rank.used[0] = rank.used_before
            rank.is_weighing, rank.came = True, False
            rank.factor, rank.count = (weight if loss == "mean" else float(weight > 0)), weight
            rank.unit = rank.factor if rank.factor > 0 else rank.unit

    def backward(
        self,
        gradients: Sequence[dict[str, Tensor] | None],
        *,
        reduces: bool = True,
        count: int | None = None,
        wrappers: Sequence[int] = (0,),
    ) -> None:
        """Accumulate every rank's gradients and, unless under `no_sync()`, average them.

        Args:
            gradients: by rank; None: under `join()`, the rank has run out of inputs.
            count: divide by this number instead of the number of ranks.
            wrappers: of two wrappers of the module, those whose forward this is the backward of.
        """
        self.errors = [None] * self.size
        self.dropped = [set() for _ in self.ranks]
        if reduces and self.settings.auto_refresh_trainable:
            self.refresh()
        for index, given in enumerate(gradients):
            if given is not None:
                self._accumulate(index, given, reduces)
        if reduces and not any(self.errors):
            takes_part = [given is not None for given in gradients]
            names = set().union(*map(self._reduced_in_backward, wrappers))
            self._reduce(names, takes_part, count or self.size, wrappers)

    def reduce(self, wrapper: int = 0) -> None:
        """Average what has been accumulated, without a backward. A missing gradient counts as zero."""
        self.errors = [None] * self.size
        if self.settings.auto_refresh_trainable:
            self.refresh()
        self._reduce(self._reduced_after_backward(wrapper), [True] * self.size, self.size, [wrapper])

    def _accumulate(self, index: int, given: dict[str, Tensor], reduces: bool) -> None:
        rank = self.ranks[index]
        if self.settings.weighted and not rank.is_weighing:
            self.errors[index] = RuntimeError("whose weight is unknown")
            return
        for name, gradient in given.items():
            if not self.parameters[name].trained:
                continue
            self.largest[name] = max(self.largest[name], _dense(gradient).abs().max().item())
            if name not in self.trained:
                value = rank.grads[name]
                rank.grads[name] = gradient if value is None else value + gradient
                continue
            if name in rank.averages and not self._put_aside(rank, name, reduces):
                self.errors[index] = RuntimeError("Call zero_grad() before no_sync()")
                return
            for used in rank.used:
                used.add(name)
            if rank.is_weighing:
                self._weighted(index, name, gradient)
            else:
                came, value = gradient.to(self.grad_dtype(name)), rank.grads[name]
                rank.grads[name] = came if value is None else value + came
        if rank.is_weighing:
            rank.total += 0.0 if rank.came else rank.count
            rank.came = True

    def _weighted(self, index: int, name: str, gradient: Tensor) -> None:
        rank = self.ranks[index]
        came = _wide(gradient) * rank.factor if rank.factor > 0 else torch.zeros_like(_wide(gradient))
        if rank.unit == 0:  # nothing of this rank counts yet
            value = rank.grads[name]
            rank.grads[name] = came.to(self.grad_dtype(name)) if value is None else value
            return
        if name not in rank.shares:
            start = rank.grads[name]
            start = _wide(start) if start is not None and _dense(start).any() else None
            rank.shares[name] = Share(start, rank.unit, came * 0 if start is None else start * rank.unit, rank.unit)
        share = rank.shares[name]
        if share.was_changed:
            self.errors[index] = RuntimeError("so the weights of its parts are unknown")
        share.sum, share.unit = share.sum + came, rank.unit

    def _reduced_in_backward(self, wrapper: int) -> set[str]:
        """Those that any rank has used since the last reduction; all, if the model may not leave any unused."""
        if not (self.settings.find_unused_parameters or self.settings.static_graph):
            return self.trained
        return set().union(*(rank.used[wrapper] for rank in self.ranks)) & self.trained

    def _reduced_after_backward(self, wrapper: int) -> set[str]:
        """All that some rank has a gradient of; with the option, all that some rank has used."""
        if self.settings.find_unused_parameters or self.settings.static_graph:
            return self._reduced_in_backward(wrapper)
        return self.trained & {
            name for rank in self.ranks for name, grad in rank.grads.items() if grad is not None or name in rank.shares
        }

    def _reduce(self, names: set[str], takes_part: Sequence[bool], count: int, wrappers: Sequence[int]) -> None:
        is_weighing = any(rank.is_weighing for rank in self.ranks)
        total = sum(rank.total for rank in self.ranks if rank.is_weighing)
        self.squares = [0.0] * self.size
        for name in self.trained:  # what no rank used stays as it is, but gradient_stats() counts it
            for rank in self.ranks:
                if name in rank.averages and name in names:
                    self._put_aside(rank, name, True)
                if is_weighing and name in names:
                    rank.began[name] = self._start_of(rank, name)
            if is_weighing:
                averages = [self._weighted_mean(name, total)] * self.size
            else:
                grads = [self.ranks[i].grads[name] if takes_part[i] else None for i in range(self.size)]
                averages = self._averages(name, [self.zeros(name) if g is None else g for g in grads], count)
            for index, average in enumerate(averages):
                if not self.parameters[name].sparse:
                    self.squares[index] += average.abs().double().pow(2).sum().item()
                if takes_part[index] and name in names:
                    self._give(index, name, average)
        for rank in self.ranks:
            rank.used_before = rank.used[0]
            for wrapper in wrappers:
                rank.used[wrapper] = set()
            rank.is_weighing, rank.shares = False, {}
        if is_weighing and self.is_last and total == 0 and self.settings.zero_weights == "raise":
            self.errors = [ValueError("no rank gave this step a weight above 0")] * self.size

    def _give(self, index: int, name: str, average: Tensor) -> None:
        rank, owners = self.ranks[index], self.settings.owners
        if owners is None:
            rank.grads[name] = average
        elif owners[name] != index:
            rank.grads[name] = None
        else:
            before = rank.aside.pop(name, None)
            rank.grads[name] = average if before is None else average + before
            rank.averages.add(name)

    def _put_aside(self, rank: Rank, name: str, reduces: bool) -> bool:
        """An average that only its owner has must not be averaged again. False: under `no_sync()` that is an error."""
        value = rank.grads[name]
        if value is not None and value.any() and not reduces:
            return False
        rank.averages.discard(name)
        rank.grads[name] = None
        if value is not None and value.any():
            rank.aside[name] = value
        return True

    # --- arithmetic ---

    def _averages(self, name: str, grads: Sequence[Tensor], count: int) -> list[Tensor]:
        """The result on each rank for these gradients of all ranks."""
        hook = self.settings.comm_hook
        if hook == "noop":
            return list(grads)
        real = [torch.view_as_real(g) if g.is_complex() else g for g in grads]
        dtype = self.sent_dtype(name)
        real = [
            g.to(dtype) if g.is_floating_point() and not self.parameters[name].dtype.is_complex else g for g in real
        ]
        if self.parameters[name].sparse and hook is None:
            average = self._sum([g.coalesce() * (1 / count) for g in real])
            self.is_rounded = True  # equal rows of several backwards are added up before or after
        elif hook is None:
            terms = [g * (1 / count) for g in real]
            narrow = self.settings.reduce_fp16 and terms[0].dtype is torch.float32
            average = self._sum_over_hosts([g.half() for g in terms] if narrow else terms).to(terms[0].dtype)
        else:
            average = _HOOKS[hook](real, self.size, self._sum)
        if grads[0].is_complex():
            average = torch.view_as_complex(average.contiguous())
        return [average.to(self.grad_dtype(name)) for _ in grads]

    def _sum_over_hosts(self, terms: list[Tensor]) -> Tensor:
        """In rank order; between hosts in `wire`."""
        if not self.settings.hosts:
            return self._sum(terms)
        by_host: dict[str, list[Tensor]] = {}
        for host, term in zip(self.settings.hosts, terms, strict=True):
            by_host.setdefault(host, []).append(term)
        sums = [self._sum(each) for each in by_host.values()]
        wire = self.settings.wire
        if wire is not None and terms[0].dtype is torch.float32 and len(sums) > 1:
            sums = [total.to(wire).float() for total in sums]
        return self._sum(sums)

    def _sum(self, terms: Sequence[Tensor]) -> Tensor:
        total = _sum_in_order(terms)
        if len(terms) > 2 and not terms[0].is_sparse:
            starts = [[*each[i:], *each[:i]] for each in (terms, terms[::-1]) for i in range(len(terms))]
            pairs = [_sum_in_order(terms[i : i + 2]) for i in range(0, len(terms), 2)]
            for other in (*starts, pairs):
                rounded = sum(other[1:], other[0])  # as gloo does, which rounds each sum of 16-bit floats
                self.order_matters |= not torch.equal(total, _sum_in_order(other)) or not torch.equal(total, rounded)
        return total

    def _weighted_mean(self, name: str, total: float) -> Tensor:
        """sum(weight * gradient) / sum(weight) over all ranks and backwards.

        What a step began with counts as part of each loss.
        """
        mean = _wide(self.zeros(name))
        for rank in self.ranks:
            share, start = rank.shares.get(name), rank.grads[name]
            if share is None and start is not None:
                share = Share(_wide(start), 0.0, _wide(start) * 0, 1.0)
            if share is not None:
                owed = share.sum * 0 if share.start is None else share.start * (rank.total - share.counted)
                mean = mean + (share.sum + owed) / total if total > 0 else mean
        return mean.to(self.grad_dtype(name))

    def _start_of(self, rank: Rank, name: str) -> Tensor | None:
        """What the step began with."""
        share, kept = rank.shares.get(name), rank.grads[name]
        return share.start if share is not None else None if kept is None else _wide(kept)

    # --- freezing and thawing ---

    def set_trained(self, names: set[str]) -> None:
        """The program sets `requires_grad`, on all ranks alike."""
        for name, parameter in self.parameters.items():
            parameter.trained = name in names

    def refresh(self) -> None:
        """The reducer learns which parameters are trained. Their gradients stay."""
        self.errors, self.squares = [None] * self.size, []
        self.dropped = [set() for _ in self.ranks]
        before, self.trained = self.trained, {name for name, parameter in self.parameters.items() if parameter.trained}
        self.known |= self.trained
        for index, rank in enumerate(self.ranks):
            for name in before - self.trained:
                self.replace(index, name, self.grad_of(index, name))
            rank.grads = {name: g if g is None else g.to(self.grad_dtype(name)) for name, g in rank.grads.items()}
            thawed = {name for name in self.trained - before if rank.grads[name] is not None}
            rank.used = [(used & self.trained) | thawed for used in rank.used]
            rank.averages &= self.trained


def _sum_in_order(terms: Sequence[Tensor]) -> Tensor:
    """16-bit floats are added in fp32 and rounded once."""
    dtype = terms[0].dtype
    wide = torch.float32 if dtype in HALVES else dtype
    total = terms[0].to(wide)
    for term in terms[1:]:
        total = total + term.to(wide)
    return total.to(dtype)


def _wide(value: Tensor) -> Tensor:
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def _dense(value: Tensor) -> Tensor:
    return value.to_dense() if value.is_sparse else value


Sum = Callable[[Sequence[Tensor]], Tensor]


def _compress_hook(dtype: torch.dtype) -> Callable[[Sequence[Tensor], int, Sum], Tensor]:
    """torch's hooks: cast, then divide, then sum in 16 bits."""
    return lambda grads, size, add: add([grad.to(dtype) / size for grad in grads]).to(grads[0].dtype)


# torch's communication hooks. Each gets the ranks' gradients as they are sent.
_HOOKS: dict[str, Callable[[Sequence[Tensor], int, Sum], Tensor]] = {
    "allreduce": lambda grads, size, add: add([grad / size for grad in grads]),
    "fp16": _compress_hook(torch.float16),
    "bf16": _compress_hook(torch.bfloat16),
}
