"""The Trainer's strategy with torchddp.ShardedDataParallel, and its optimizers and schedulers."""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch.optim import Optimizer

from torchddp.integrations.lightning.strategy import ARGUMENTS, TorchDDPStrategy, list_options
from torchddp.sharded import ShardedDataParallel
from torchddp.sharded.gradients import ShardedGradScaler
from torchddp.sharded.oss import OSS

logger = logging.getLogger(__name__)

_REFUSED = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")


class TorchDDPShardedStrategy(TorchDDPStrategy):
    """`TorchDDPStrategy` with sharded gradients and optimizer state (ZeRO stage 2, Rajbhandari et al. 2020).

        trainer = Trainer(accelerator="cpu", devices=2, strategy="torchddp_sharded")

    The optimizers that ``configure_optimizers`` returns are replaced by `torchddp.optim.OSS` with the same class,
    options and groups, and schedulers are moved to it. An OSS stays as it is. Gradients are clipped by the norm over
    all ranks' shares. Checkpoints hold the whole optimizer state in the plain optimizer's form, on rank 0's CPU: "ddp"
    loads them, and this strategy loads those of "ddp".

    Modeled on Lightning's former ``ddp_sharded`` with FairScale.

    Args:
        kwargs: as for `TorchDDPStrategy`, but those of `torchddp.ShardedDataParallel` (``reduce_fp16``,
            ``reduce_buffer_size``, ``overlap_gather``, ``find_unused_parameters``, ...). No communication hooks.

    Raises:
        TypeError: an optimizer that can't be sharded (LBFGS, or a class that can't be created from its defaults).
        ValueError: communication hooks or model averaging; no optimizer; an optimizer over parameters that are not the
            LightningModule's, or a trainable parameter without one; ``precision="16-mixed"`` with torch's scaler.
    """

    _wrapper = ShardedDataParallel
    # Lightning's.
    model: torch.nn.Module
    optimizers: list[Any]

    def __init__(self, *arguments: Any, **kwargs: Any) -> None:
        super().__init__(*arguments, **kwargs)
        for name in _REFUSED:
            if getattr(self, f"_{name}") is not None:
                raise ValueError(
                    f"{type(self).__name__} does not support {name}: each gradient goes to one rank. reduce_fp16=True "
                    "halves the bytes sent"
                )

    def configure_ddp(self) -> None:
        """Nothing yet: the wrapper needs the optimizers."""

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """``configure_optimizers``, sharding, and wrapping. Collective."""
        super().setup_optimizers(trainer)
        self._check_scaler()
        trainable = {param for param in self.model.parameters() if param.requires_grad}
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        if not any(param in trainable for group in groups for param in group["params"]):
            raise ValueError(
                f"{type(self).__name__} needs the module's optimizer: configure_optimizers returned none for it"
            )
        replaced = [(optimizer, shard(optimizer)) for optimizer in self.optimizers]
        self.optimizers = [new for _, new in replaced]
        follow([config.scheduler for config in self.lr_scheduler_configs], replaced)
        self.model = self._setup_model(self.model)

    def _setup_model(self, model: torch.nn.Module) -> ShardedDataParallel:
        self._pl_static_graph_delay_done = False
        optimizers: list[OSS] = self.optimizers
        device_ids = self.determine_ddp_device_ids()
        return ShardedDataParallel(model, optimizers, device_ids=device_ids, **self._ddp_kwargs)

    def _check_scaler(self) -> None:
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None and not isinstance(scaler, ShardedGradScaler):
            raise ValueError(
                f"{type(self).__name__} with a {type(scaler).__name__}: each rank would check only its own gradients, "
                "and ranks would skip different steps. Pass plugins=MixedPrecision('16-mixed', 'cuda', "
                "scaler=torchddp.optim.ShardedGradScaler()) instead of precision='16-mixed', or 'bf16-mixed'"
            )

    def setup_precision_plugin(self) -> None:
        """Make the plugin clip by all ranks' gradients, until teardown."""
        super().setup_precision_plugin()
        if isinstance(self.model, ShardedDataParallel):
            self.precision_plugin.clip_gradients = functools.partial(_clip_gradients, self.precision_plugin)

    def teardown(self) -> None:
        """Give parameters their own memory, and drop the wrapper. Optimizers can still be saved."""
        self.precision_plugin.__dict__.pop("clip_gradients", None)
        if isinstance(self.model, ShardedDataParallel):
            try:
                self.model.unwrap()
            except RuntimeError as error:  # after a failure: the other ranks are gone
                logger.debug("parameters in transit did not arrive: %s", error)
        super().teardown()


def _clip_gradients(
    plugin: Precision,
    optimizer: Optimizer | LightningOptimizer,
    clip_val: float = 0.0,
    gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
) -> None:
    """``clip_gradients`` of a precision plugin, for gradients that are spread over ranks. Collective."""
    if clip_val is None or clip_val <= 0:
        return
    plain: Any = getattr(optimizer, "_optimizer", optimizer)  # a LightningOptimizer in manual optimization
    scaler = getattr(plugin, "scaler", None) if isinstance(plugin, MixedPrecision) else None
    if scaler is not None:
        scaler.unscale_(plain)  # Lightning leaves it to OSS, which would only do it in its step
    if gradient_clip_algorithm == GradClipAlgorithmType.NORM:
        plain.clip_grad_norm(clip_val)
    else:
        plugin.clip_grad_by_value(plain, clip_val)


def shard(optimizer: Optimizer) -> OSS:
    """An OSS with the optimizer's class, options, groups (the same dicts), hooks and state. Collective. An OSS stays.

    TypeError for a class that can't be created from its ``defaults``, or that OSS doesn't support.
    """
    if isinstance(optimizer, OSS):
        return optimizer
    kind = type(optimizer)
    sharded = OSS(optimizer.param_groups, optim=kind, **_arguments(optimizer))
    for name, hooks in vars(sharded).items():
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            hooks.update(getattr(optimizer, name, {}))
    if optimizer.state:
        sharded.load_state_dict(optimizer.state_dict())
    return sharded


def _arguments(optimizer: Optimizer) -> dict[str, Any]:
    """Its constructor's arguments: the entries of ``defaults`` that it accepts (AdamW's include one of Adam's)."""
    kind = type(optimizer)
    parameters = list(inspect.signature(kind).parameters.values())[1:]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(optimizer.defaults)
    names = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL]
    needed = [p.name for p in parameters if p.name in names and p.default is p.empty]
    missing = [name for name in needed if name not in optimizer.defaults]
    if missing:
        raise TypeError(
            f"torchddp_sharded can't create another {kind.__name__}: its argument {missing[0]!r} is not among its "
            f"defaults. Return torchddp.optim.OSS(params, optim={kind.__name__}, ...) from configure_optimizers"
        )
    return {name: optimizer.defaults[name] for name in names if name in optimizer.defaults}


def follow(schedulers: Iterable[Any], replaced: list[tuple[Optimizer, OSS]]) -> None:
    for scheduler in schedulers:
        for old, new in replaced:
            if getattr(scheduler, "optimizer", None) is old and new is not old:
                scheduler.optimizer = new
                if hasattr(old.step, "_wrapped_by_lr_sched"):
                    _note_steps(new)
        follow(getattr(scheduler, "_schedulers", ()), replaced)


def _note_steps(optimizer: OSS) -> None:
    """Mark step() as schedulers do for their own optimizer; otherwise they warn that it was not called."""
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return
    owner = weakref.ref(optimizer)

    @functools.wraps(optimizer.step)
    def step(*arguments: Any, **more: Any) -> Any:
        live: Any = owner()
        live._opt_called = True
        return type(live).step(live, *arguments, **more)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]


list_options(TorchDDPShardedStrategy, ARGUMENTS)
