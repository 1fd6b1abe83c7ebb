"""DeferredOptimizer: a step whose updates are made when the next forward needs them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from torchddp.errors import TransportError
from torchddp.optim import partial_steps
from torchddp.optim.grad_norm import sharded_norm
from torchddp.optim.partial_steps import Options, Part
from torchddp.pending import PendingModules, is_compiling

if TYPE_CHECKING:
    from torchddp.distributed import DistributedDataParallel


class DeferredOptimizer(Optimizer):
    """Any torch optimizer, stepping bucket by bucket while the next forward runs (DeAR, Zhang et al. 2023).

        model = torchddp.DistributedDataParallel(model, decoupled=True)
        optimizer = DeferredOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model)

    From now on ``model``'s backward ends while averages are still on their way (over the shared memory of one host it
    waits, and `step` updates at once). `step` notes the options of the groups (learning rates and so on) and returns; a
    bucket's parameters are updated when a module that has one of them runs or is read, once the bucket's averages are
    there. `zero_grad` after `step` clears each gradient after its update. The parameters that each module sees are
    those of the plain optimizer, bit for bit.

    Waiting happens by itself for what is read through a module (``module.weight``, ``parameters()``, ``state_dict()``,
    forward) and for ``param_groups`` (before `step`), ``state``, `state_dict` and the like of this optimizer. Whoever
    holds parameters or gradients apart from both calls `synchronize` first. torch's GradScaler and ``clip_grad_norm_``
    work and wait for all gradients; `clip_grad_norm` does not. Compile modules before making this optimizer: for
    compiled ones everything is applied before forward.

    Args:
        optimizer: it must treat parameters one by one, as torch's do (LBFGS is refused, and so are optimizers whose
            steps are collective). Learning rate schedulers take this optimizer or that one. The state and the groups
            stay its own: checkpoints are interchangeable.
        model: a `DistributedDataParallel` made with ``decoupled=True``. Parameters of the optimizer that are not the
            model's are updated within `step`. The last optimizer made for a model is its only one.

    Not collective; every rank must do the same. Raises TypeError for what is no optimizer, ValueError for one that
    can't be deferred and for a model that is not decoupled.

    An error while gathering (TransportError) comes out of whatever was waiting, a forward for instance. Updates that
    were pending are then lost, those of other buckets may have been made: go back to a checkpoint.
    """

    def __init__(self, optimizer: Optimizer, model: DistributedDataParallel) -> None:
        _check(optimizer, model)
        self._inner = optimizer
        self._model = model
        # One state: hooks of either side see it saved and loaded.
        self._optimizer_state_dict_pre_hooks = optimizer._optimizer_state_dict_pre_hooks
        self._optimizer_state_dict_post_hooks = optimizer._optimizer_state_dict_post_hooks
        self._optimizer_load_state_dict_pre_hooks = optimizer._optimizer_load_state_dict_pre_hooks
        self._optimizer_load_state_dict_post_hooks = optimizer._optimizer_load_state_dict_post_hooks
        super().__setstate__({})  # what a constructor does, but for groups of its own

        self._layout: Any = None
        self._parts: list[Part] = []
        self._rest: Part = []
        self._pending: PendingModules | None = None
        self._is_compiled = False

        self._coming: set[int] = set()  # buckets whose gradients are not final
        self._to_update: set[int] = set()  # buckets that a step has been asked for
        self._options: Options = []  # of that step
        self._zero: bool | None = None  # asked for after it; the argument of zero_grad
        self._clip: Callable[[Iterable[torch.Tensor]], None] | None = None  # of gradients that are not final
        self._has_shards = False  # they are this step's gradients, which nobody has cleared or clipped

        me = weakref.ref(self)
        reducer = weakref.ref(model)

        def gathers_started() -> None:
            if (optimizer := me()) is not None:
                optimizer._gathers_started()
            elif (owner := reducer()) is not None:  # nobody is left to wait for them
                owner.reducer._finish_gathers()

        model.defer_updates(self, gathers_started)

    # --- what there is ---

    @property
    def optim(self) -> Optimizer:
        """The optimizer that makes the updates."""
        return self._inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's. Between backward and `step` they are asked for gradients: waits for all of them."""
        if not self._to_update:
            self.synchronize()
        return self._inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's, with all updates applied."""
        self.synchronize()
        return self._inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The inner optimizer's."""
        return self._inner.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Applies what is pending first."""
        self.synchronize()
        self._inner.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, with all updates applied."""
        self.synchronize()
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the inner optimizer. Applies what is pending first."""
        self.synchronize()
        self._inner.load_state_dict(state_dict)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a DeferredOptimizer can't be copied or pickled: it belongs to its model. Copy its .optim instead"
        )

    # --- a step ---

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Asks for the updates, by the options and gradients of now. Without averages on their way makes them at once.

        The closure is called once, before, and its loss returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._to_update:
            self.synchronize()
        self._check_current()
        self._has_shards = False
        if not self._coming:
            self._inner.step()
            return loss
        self._options = partial_steps.options_of(self._inner)
        self._zero = None
        if self._rest:
            partial_steps.step(self._inner, self._rest, self._options)
        self._to_update = set(range(len(self._parts)))
        self._hold()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients: those that an update is waiting for after that update."""
        self._has_shards = False
        if not self._to_update:
            self.synchronize()  # gathers still write to them
            self._inner.zero_grad(set_to_none)
            return
        self._zero = set_to_none or bool(self._zero)
        for index, part in enumerate([*self._parts, self._rest]):
            if index not in self._to_update:
                partial_steps.zero_grad(self._inner, part, set_to_none)

    @torch.no_grad()
    def clip_grad_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        """Scales all gradients so that their norm is at most ``max_norm``; returns the norm before. Collective.

        To be called between backward and `step`. Each rank measures the averages that it has already, one all-reduce
        adds them up, and gradients are scaled when they arrive: as ``torch.nn.utils.clip_grad_norm_`` over all
        parameters, to rounding. Raises RuntimeError for a norm that is not finite if ``error_if_nonfinite``, ValueError
        for ``norm_type`` <= 0.
        """
        if not norm_type > 0:
            raise ValueError(f"norm_type must be above 0, got {norm_type}")
        norm = self._norm_of_shards(float(norm_type)) if self._has_shards and self._shards_are_gradients() else None
        self._has_shards = False
        if norm is None:
            self.synchronize()
            params = [p for group in self._inner.param_groups for p in group["params"]]
            return nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite, foreach)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(f"the norm of the gradients of order {norm_type} is {norm.item()}: it can't be clipped")
        self._clip = lambda params: nn.utils.clip_grads_with_norm_(params, max_norm, norm, foreach)
        return norm

    def _norm_of_shards(self, norm_type: float) -> torch.Tensor | None:
        """None on all ranks if a rank's gradients may have been changed since they arrived, or the norm is NaN."""
        reducer = self._model.reducer
        params = self._model._reduced_params
        dtype = torch.float32
        for param in params:
            dtype = torch.promote_types(dtype, param.dtype)
        shards = reducer._gradient_shards()
        if len(self._coming) < len(self._parts):
            shards = [torch.full((1,), torch.nan, device=params[0].device)]  # which makes all norms NaN
        norm = sharded_norm(shards, norm_type, dtype, self._model.process_group, params[0].device)
        return None if bool(norm.isnan()) else norm

    def _shards_are_gradients(self) -> bool:
        """Whether shards hold what ``.grad`` will: the same answer on all ranks."""
        model = self._model
        mine = {id(p) for part in self._parts for _, params in part for p in params}
        return (
            not self._rest
            and mine == model._reduced_ids
            and not model.find_unused_parameters  # unused ones keep what they had
            and not model.static_graph
            and not any(p.is_complex() for p in model._reduced_params)
        )

    # --- gradients on their way, and updates that wait for them ---

    def synchronize(self) -> None:
        """Until all gradients are final and all updates applied. Raises TransportError."""
        if not self._coming and not self._to_update:
            return
        self._settle(reversed(range(len(self._parts))))
        if self._pending is not None:
            self._pending.settle()

    def before_forward(self) -> None:
        """Called by the model. Compiled modules look past the dictionaries that others wait by."""
        if self._is_compiled or is_compiling():
            self.synchronize()

    def _drop(self) -> None:
        """Forgets gradients on their way and updates that were not made."""
        self._coming.clear()
        self._to_update.clear()
        self._clip = None
        self._has_shards = False
        if self._pending is not None:
            self._pending.settle()

    def _gathers_started(self) -> None:
        """The end of a backward."""
        self._lay_out()
        self._coming = set(range(len(self._parts)))
        self._clip = None
        self._has_shards = True
        self._hold()

    def _lay_out(self) -> None:
        reducer = self._model.reducer
        groups = [(id(group["params"]), len(group["params"])) for group in self._inner.param_groups]
        layout = (reducer._num_layouts, groups)
        if layout == self._layout:
            return
        params = self._model._reduced_params
        buckets = [[params[index] for index in bucket.params] for bucket in reducer.plan.buckets]
        self._parts, self._rest = partial_steps.parts_of(self._inner, buckets)
        if self._pending is not None:
            self._pending.remove_hooks()
        self._pending = PendingModules(self._model.module, buckets)
        self._pending.install_hooks()
        self._is_compiled = any(_is_compiled(module) for module in self._model.module.modules())
        self._layout = layout

    def _hold(self) -> None:
        if self._pending is not None:
            self._pending.hold(self._settle)

    def _settle(self, buckets: Iterable[int]) -> None:
        for index in buckets:
            if index not in self._coming and index not in self._to_update:
                continue
            with partial_steps.outside_of_forward(self._model.device_type):
                self._receive(index)
                self._update(index)

    def _receive(self, index: int) -> None:
        if index not in self._coming:
            return
        try:
            self._model.reducer._wait_gather(index)
        except TransportError as error:
            lost, count = len(self._to_update), len(self._parts)
            self._drop()
            if not lost:
                raise
            raise TransportError(
                f"{error}\nThe last step's updates were made for {count - lost} of {count} buckets on this rank: go "
                "back to a checkpoint."
            ) from error
        self._coming.discard(index)
        if self._clip is not None:
            self._clip([param for _, params in self._parts[index] for param in params])

    def _update(self, index: int) -> None:
        if index not in self._to_update:
            return
        self._to_update.discard(index)
        part = self._parts[index]
        if part:
            partial_steps.step(self._inner, part, self._options)
            if self._zero is not None:
                partial_steps.zero_grad(self._inner, part, self._zero)

    def _check_current(self) -> None:
        if not self._model._updates.are_of(self):
            raise RuntimeError("another DeferredOptimizer was made for this model since: it has taken this one's place")


def _check(optimizer: Any, model: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, (torch.optim.LBFGS, DeferredOptimizer)) or hasattr(optimizer, "process_group"):
        raise ValueError(
            f"{type(optimizer).__name__} can't be deferred: its steps must treat parameters one by one, and on each "
            "rank by itself"
        )
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise ValueError(
            "the optimizer has step hooks, which would run once for each bucket: register them on the DeferredOptimizer"
        )
    if not getattr(model, "_decoupled", False):
        raise ValueError("expected a torchddp.DistributedDataParallel that was made with decoupled=True")


def _is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
