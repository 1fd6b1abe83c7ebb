"""The dtype in which the reducer reduces and stores gradients of 16-bit parameters: checks and setup, by mode."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP
from torch.utils.weak import WeakTensorKeyDictionary

from torchddp import _C

MAIN_GRAD: Final = "main_grad"
Tensors = Sequence[torch.Tensor]
_HALVES = (torch.bfloat16, torch.float16)
# Which wrapper takes a parameter's gradients, and the parameter's index there.
_takers = WeakTensorKeyDictionary()


class GradPrecision:
    """Gradients have the dtype of their parameter throughout."""

    kind = _C.GradPrecision.OF_PARAMETER
    shares_storage = False  # whether gradients are views of buckets, which the next step overwrites
    can_share = True  # whether another wrapper's reducer may average the same gradients

    def bucket_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        return parameter.dtype

    def check(self, ddp: TorchDDP, parameters: Tensors, names: Sequence[str], sparse: Sequence[bool]) -> None:
        """Raise ValueError or RuntimeError for a model that this mode does not support. Not collective."""
        for parameter, name in zip(parameters, names, strict=True):
            dtype = getattr(parameter, "grad_dtype", None)  # None: any
            is_set_here = self.kind is _C.GradPrecision.GRADS and parameter.dtype in _HALVES
            if dtype not in (None, parameter.dtype) and not is_set_here:
                raise ValueError(
                    f"parameter {name!r} is {parameter.dtype}, but its grad_dtype is {dtype}, perhaps from an earlier "
                    f'wrapper with Precision(main_grads_as="grad"): pass that again, or clear .grad and set grad_dtype '
                    f"to {parameter.dtype}, for all parameters"
                )

    def prepare(self, parameters: Sequence[torch.Tensor]) -> None:
        """Called before the reducer is created."""

    def opened(self, reducer: _C.Reducer, parameters: Sequence[torch.Tensor]) -> None:
        """Called once the reducer exists."""

    def before_forward(self) -> None:
        """Called before each forward with gradients."""

    def zero(self) -> None:
        """Called by the model's `zero_grad`."""


class ReducedWide(GradPrecision):
    """Reduce in float32, then round to ``.grad``."""

    kind = _C.GradPrecision.REDUCED
    asked_by = "Precision(reduce=torch.float32)"
    takes_all = False  # not only gradients of 16-bit parameters
    # Values of gradient_as_bucket_view that don't work here, and why.
    views_allowed: tuple[bool | None, ...] = (None, False)
    why_views = "a 16-bit .grad isn't a view of a float32 bucket: leave it out, or use Precision(main_grads=...)"

    def bucket_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        return torch.float32 if parameter.dtype in _HALVES else parameter.dtype

    def check(self, ddp: TorchDDP, parameters: Tensors, names: Sequence[str], sparse: Sequence[bool]) -> None:
        super().check(ddp, parameters, names, sparse)
        for parameter, name, is_sparse in zip(parameters, names, sparse, strict=True):
            if is_sparse and (self.takes_all or parameter.dtype in _HALVES):
                raise ValueError(
                    f"{self.asked_by} needs dense gradients, but those of parameter {name!r} ({parameter.dtype}) are "
                    "sparse and can't be converted: create its embedding with sparse=False"
                )
        if ddp._use_python_reducer:
            raise RuntimeError(
                f"{self.asked_by} conflicts with torch._dynamo.config.optimize_ddp='python_reducer', under which "
                "torch reduces each gradient separately, in its own dtype: use another mode, or leave the option out"
            )
        if any(hasattr(p, "_in_backward_optimizers") for p in parameters):
            raise RuntimeError(
                f"{self.asked_by} conflicts with optimizers that run in backward (_apply_optimizer_in_backward), "
                "which read gradients of the parameters' dtype from the buckets: step after backward instead"
            )


class WideGrads(ReducedWide):
    """``.grad`` of a 16-bit parameter is float32, and autograd accumulates into it."""

    kind = _C.GradPrecision.GRADS
    asked_by = 'Precision(main_grads=torch.float32, main_grads_as="grad")'
    views_allowed = (None, False, True)

    def prepare(self, parameters: Sequence[torch.Tensor]) -> None:
        for parameter in parameters:
            if parameter.dtype in _HALVES and parameter.grad_dtype != torch.float32:
                before, parameter.grad = parameter.grad, None  # torch requires None while grad_dtype changes
                parameter.grad_dtype = torch.float32
                parameter.grad = None if before is None else before.float()


class MainGrads(ReducedWide):
    """Accumulate gradients in ``parameter.main_grad``, which is bucket memory; ``.grad`` is None after backward.

    Of several wrappers of a parameter, the one with the last forward has its ``main_grad``.
    """

    kind = _C.GradPrecision.MAIN_GRADS
    shares_storage = True
    can_share = False
    asked_by = "Precision(main_grads=torch.float32)"
    takes_all = True
    views_allowed = (None, True)
    why_views = 'main_grad is bucket memory. Leave it out, or use main_grads_as="grad"'

    _reducer: _C.Reducer

    def __init__(self) -> None:
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._names: Sequence[str] = ()
        self._takes: list[bool] = []
        self._frozen: list[torch.Tensor] = []  # they were trained, and have a main_grad from that time

    def check(self, ddp: TorchDDP, parameters: Tensors, names: Sequence[str], sparse: Sequence[bool]) -> None:
        super().check(ddp, parameters, names, sparse)
        self._names = names
        trained = {id(parameter) for parameter in parameters}
        self._frozen = [
            p
            for name, p in ddp.module.named_parameters()
            if hasattr(p, MAIN_GRAD) and id(p) not in trained and name not in ddp.parameters_to_ignore
        ]
        if not ddp.gradient_as_bucket_view:  # an explicit False was rejected earlier, so the model is wrapped twice
            raise ValueError(
                f"{self.asked_by} conflicts with wrapping a model twice: both would take the same gradients. Wrap once"
            )

    def opened(self, reducer: _C.Reducer, parameters: Sequence[torch.Tensor]) -> None:
        self._reducer = reducer
        self._pairs = list(zip(parameters, reducer.main_grads(), strict=True))
        self._takes = [False] * len(self._pairs)
        self.before_forward()
        with torch.no_grad():
            for parameter, main in self._pairs:
                if parameter.grad is not None:  # from before it was wrapped or thawed
                    main.add_(parameter.grad)
                    parameter.grad = None

    def before_forward(self) -> None:
        changed = [i for i, (p, main) in enumerate(self._pairs) if getattr(p, MAIN_GRAD, None) is not main]
        if not changed:
            return
        given = {i: getattr(self._pairs[i][0], MAIN_GRAD, None) for i in changed}
        for index, value in given.items():
            self._check_value(index, value)
        self._reducer.clear_main_grads(changed)
        for index, value in given.items():
            parameter, main = self._pairs[index]
            if value is not None:
                with torch.no_grad():
                    main.copy_(value)
            parameter.main_grad = main  # type: ignore[attr-defined]
            if not self._takes[index]:
                self._take(index)

    def _take(self, index: int) -> None:
        parameter = self._pairs[index][0]
        if parameter in _takers:
            before, place = _takers[parameter]
            if (other := before()) is not None:
                other._set_taken(place, False)
        _takers[parameter] = weakref.ref(self), index
        self._set_taken(index, True)

    def _set_taken(self, index: int, take: bool) -> None:
        self._takes[index] = take
        self._reducer.take_main_grad(index, take)

    def _check_value(self, index: int, value: object) -> None:
        shape = list(self._pairs[index][1].shape)
        if value is not None and (not isinstance(value, torch.Tensor) or list(value.shape) != shape):
            got = f"one of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            name = self._names[index]
            raise ValueError(f"parameter {name!r}: main_grad must be None, or a tensor of shape {shape}; got {got}")

    def zero(self) -> None:
        self._reducer.clear_main_grads(list(range(len(self._pairs))))
        for (parameter, main), takes in zip(self._pairs, self._takes, strict=True):
            other = getattr(parameter, MAIN_GRAD, None)
            if other is None or other is main:
                continue
            if takes:  # the program has assigned it
                setattr(parameter, MAIN_GRAD, main)
            else:
                other.zero_()
        for parameter in self._frozen:
            if (kept := getattr(parameter, MAIN_GRAD, None)) is not None:
                kept.zero_()


@dataclass(frozen=True)
class Precision:
    """The dtypes in which gradients are sent, reduced and kept: the argument ``precision`` of DistributedDataParallel.
    All ranks must give the same. The values are checked by the class that gets them, on all ranks.

    Args:
        wire: ``torch.bfloat16`` or ``torch.float16``: send fp32 gradients between hosts in 16 bits, and sum them in
            fp32. All ranks get the same values, with one rounding error per host. Between two hosts it halves the
            traffic; with more, every host sends its part to every other host. Within a host sums are exact: with all
            ranks on one host, this option changes nothing. Over shared memory only (RuntimeError otherwise; the hook
            ``torchddp.comm_hooks.BF16`` works everywhere). None: no conversion.
        reduce: ``torch.float32``: cast gradients of bfloat16 and float16 parameters to float32 as they enter their
            buckets, scale and sum them over the ranks in float32, and round once, to ``.grad`` in the parameter's
            dtype. Accumulation under ``no_sync()`` still happens in ``.grad``. Buckets take 4 bytes per element, in
            addition to the 2 of ``.grad``. None: no conversion. Other gradients are always reduced in their own dtype.
        main_grads: ``torch.float32``: also accumulate these gradients in float32 over microbatches and ranks (implies
            ``reduce``). Takes 4 bytes per element, which is the bucket itself; the 16-bit gradient made by autograd
            lives until its hook has run. None: off. ``docs/sync.md`` has examples.
        main_grads_as: where they are stored. ``"main_grad"``: in ``parameter.main_grad``, always the same tensor,
            initially zero; ``.grad`` is None after each backward. All parameters have one; those that are not 16-bit
            have it in their own dtype. The wrapper's ``zero_grad()`` clears it, as does ``parameter.main_grad = None``
            before the next forward (which restores the tensor); an optimizer's ``zero_grad()`` does not. ``"grad"``: in
            ``.grad``, which is then float32 (``Tensor.grad_dtype``); everything else works as usual.
    """

    wire: torch.dtype | None = None
    reduce: torch.dtype | None = None
    main_grads: torch.dtype | None = None
    main_grads_as: Literal["main_grad", "grad"] = MAIN_GRAD

    def check(self) -> None:
        """ValueError for a value that is not allowed."""
        if self.wire not in (None, torch.bfloat16, torch.float16):
            raise ValueError(f"Precision(wire=) must be torch.bfloat16, torch.float16 or None, got {self.wire!r}")
        for name, dtype in (("reduce", self.reduce), ("main_grads", self.main_grads)):
            if dtype not in (None, torch.float32):
                raise ValueError(
                    f"Precision({name}=) must be torch.float32 or None, got {dtype!r}. (To send float32 in 16 bits: "
                    "Precision(wire=torch.bfloat16), over shared memory, or the hook torchddp.comm_hooks.BF16)"
                )
        if self.main_grads_as not in tuple(_STORED):
            allowed = ", ".join(map(repr, _STORED))
            raise ValueError(f"Precision(main_grads_as=) must be one of {allowed}, got {self.main_grads_as!r}")
        if self.main_grads is None and self.main_grads_as != MAIN_GRAD:
            raise ValueError(f"Precision(main_grads_as={self.main_grads_as!r}) has no effect without main_grads=")

    def mode(self) -> GradPrecision:
        if self.main_grads is not None:
            return _STORED[self.main_grads_as]()
        return GradPrecision() if self.reduce is None else ReducedWide()


# By main_grads_as.
_STORED: dict[str, Callable[[], GradPrecision]] = {MAIN_GRAD: MainGrads, "grad": WideGrads}
