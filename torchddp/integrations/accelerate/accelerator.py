"""An Accelerator whose ``prepare()`` wraps models in torchddp's class."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import accelerate
import torch
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    DynamoBackend,
    compile_regions,
    is_compiled_module,
    model_has_dtensor,
)
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from torchddp.ddp.module import DistributedDataParallel
from torchddp.ddp.weights import LossKind
from torchddp.integrations.accelerate.options import TorchDDPKwargs, merge
from torchddp.integrations.accelerate.weights import weigh

# Other ways to distribute a model: their arguments, and the variable that `accelerate launch` sets for each.
_OTHERS = {
    "FSDP": (("fsdp_plugin",), "ACCELERATE_USE_FSDP"),
    "DeepSpeed": (("deepspeed_plugin", "deepspeed_plugins"), "ACCELERATE_USE_DEEPSPEED"),
    "Megatron-LM": (("megatron_lm_plugin",), "ACCELERATE_USE_MEGATRON_LM"),
}
_OTHER_TYPES = {
    DistributedType.FSDP: "FSDP",
    DistributedType.DEEPSPEED: "DeepSpeed",
    DistributedType.MEGATRON_LM: "Megatron-LM",
    DistributedType.XLA: "XLA",
}


class AcceleratorMixin:
    """``prepare_model`` for a subclass of ``accelerate.Accelerator``: wraps in torchddp's class instead of torch's."""

    ddp_handler: Any  # a DistributedDataParallelKwargs, or None

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """As in Accelerate, but wraps in torchddp's class.

        Collective if it wraps: all ranks prepare the same models in the same order. A model without trainable
        parameters is not wrapped.

        Raises:
            ValueError: the model is already wrapped, or has DTensor parameters.
        """
        if getattr(model, "_is_accelerate_prepared", False) or evaluation_mode or not self._wraps():
            return super().prepare_model(model, device_placement, evaluation_mode)  # type: ignore[misc]
        _refuse_wrapped(model)
        if not any(p.requires_grad for p in model.parameters()):
            return super().prepare_model(model, device_placement, evaluation_mode=True)  # type: ignore[misc]
        if model_has_dtensor(model):
            raise ValueError("DistributedDataParallel can't wrap DTensors: load the model without a device_map")
        if self.delayed_fp8_autocast:  # type: ignore[attr-defined]
            raise ValueError(
                "fp8 of TransformerEngine is set up between wrapping and compiling, which only accelerate.Accelerator "
                "does: use that, after torchddp.install()"
            )
        # In evaluation mode Accelerate does everything except wrap: device, autocast, and compiling, which must come
        # later.
        with self._compiling_nothing():
            model = super().prepare_model(model, device_placement, evaluation_mode=True)  # type: ignore[misc]
        del model._is_accelerate_prepared
        wrapped = self._compile(self._wrap(model))
        wrapped._is_accelerate_prepared = True  # type: ignore[assignment]
        return wrapped

    def weigh(self, model: torch.nn.Module, weight: float | torch.Tensor, *, loss: LossKind = "mean") -> None:
        """See :func:`torchddp.integrations.accelerate.weigh`, called with this accelerator."""
        weigh(self, model, weight, loss=loss)

    def _wraps(self) -> bool:
        mesh = self.parallelism_config  # type: ignore[attr-defined]
        if mesh is not None and mesh.tp_enabled:
            return False
        return self.multi_device or self.distributed_type == DistributedType.MULTI_CPU  # type: ignore[attr-defined]

    def _wrap(self, model: torch.nn.Module) -> DistributedDataParallel:
        handler: DistributedDataParallelKwargs | None = self.ddp_handler
        options = {} if handler is None else handler.to_kwargs()
        if self.multi_device and os.environ.get("ACCELERATE_BYPASS_DEVICE_MAP", "false") != "true":  # type: ignore[attr-defined]
            index = self.local_process_index  # type: ignore[attr-defined]
            options = {**options, "device_ids": [index], "output_device": index}
        wrapped = DistributedDataParallel(model, **options)
        if handler is not None:
            handler.register_comm_hook(wrapped)
        return wrapped

    @contextmanager
    def _compiling_nothing(self) -> Iterator[None]:
        plugin = self.state.dynamo_plugin  # type: ignore[attr-defined]
        backend, plugin.backend = plugin.backend, DynamoBackend.NO
        try:
            yield
        finally:
            plugin.backend = backend

    def _compile(self, model: torch.nn.Module) -> torch.nn.Module:
        plugin = self.state.dynamo_plugin  # type: ignore[attr-defined]
        if plugin.backend == DynamoBackend.NO or is_compiled_module(model):
            return model
        compiler: Any = compile_regions if plugin.use_regional_compilation else torch.compile
        return compiler(model, **plugin.to_kwargs())


class Accelerator(AcceleratorMixin, accelerate.Accelerator):
    """``accelerate.Accelerator``, with all its arguments, whose ``prepare()`` wraps models in torchddp's class.

    ``kwargs_handlers`` may contain a :class:`TorchDDPKwargs`, or Accelerate's ``DistributedDataParallelKwargs``. In a
    single process nothing is wrapped, as in Accelerate.

    Raises:
        ValueError: FSDP, DeepSpeed, Megatron-LM or XLA was chosen too, by a plug-in or by an environment variable that
            ``accelerate launch`` sets; or both handlers were given.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(accelerate.Accelerator.__init__).bind(self, *args, **kwargs).arguments
        _refuse_other_plugins(given)
        handlers = list(given.pop("kwargs_handlers", None) or ())
        own = [handler for handler in handlers if isinstance(handler, TorchDDPKwargs)]
        found = [type(handler).__name__ for handler in handlers if isinstance(handler, DistributedDataParallelKwargs)]
        if own and len(found) > 1:
            raise ValueError(f"kwargs_handlers may have one handler of DistributedDataParallel's options, got {found}")
        del given["self"]
        # Accelerate looks handlers up by their exact class.
        super().__init__(**given, kwargs_handlers=[handler for handler in handlers if handler not in own] or None)
        if own:
            self.ddp_handler = own[0]
        _refuse_other_types(self)


def adopt(
    accelerator: accelerate.Accelerator, options: TorchDDPKwargs | Mapping[str, Any] | None = None
) -> accelerate.Accelerator:
    """Make an existing accelerator wrap the models that it prepares from now on in torchddp's class.

    For trainers that create their own, as in ``adopt(trainer.accelerator, {"transport": "shm"})`` before
    ``trainer.train()``. Not collective; every rank does the same.

    Args:
        options: those of :class:`TorchDDPKwargs`. The others come from the accelerator's own
            ``DistributedDataParallelKwargs``.

    Returns:
        The same object; its class is now a subclass of what it was.

    Raises:
        TypeError: not an Accelerator, or an unknown option.
        ValueError: it distributes by FSDP, DeepSpeed, Megatron-LM or XLA.
    """
    if not isinstance(accelerator, accelerate.Accelerator):
        raise TypeError(f"adopt() takes an accelerate.Accelerator, got {type(accelerator).__name__}")
    _refuse_other_types(accelerator)
    handler = merge(accelerator.ddp_handler, options)
    made_by = type(accelerator)
    if made_by is accelerate.Accelerator:
        accelerator.__class__ = Accelerator
    elif not isinstance(accelerator, AcceleratorMixin):
        accelerator.__class__ = type(made_by.__name__, (AcceleratorMixin, made_by), {})
    accelerator.ddp_handler = handler
    return accelerator


def _refuse_wrapped(model: torch.nn.Module) -> None:
    bare = getattr(model, "_orig_mod", model)  # torch.compile's
    if isinstance(bare, TorchDDP):
        raise ValueError(
            f"the model is already wrapped in {type(bare).__module__}.{type(bare).__name__}, and prepare() would wrap "
            "it again, which would average its gradients twice: give prepare() the model itself (model.module)"
        )


def _refuse_other_plugins(given: Mapping[str, Any]) -> None:
    for name, (arguments, variable) in _OTHERS.items():
        for argument in arguments:
            if given.get(argument) is not None:
                raise ValueError(_not_beside(name, f"{argument} was given"))
        if os.environ.get(variable, "false").lower() == "true":
            raise ValueError(_not_beside(name, f"{variable}=true"))


def _refuse_other_types(accelerator: accelerate.Accelerator) -> None:
    state = accelerator.state
    if accelerator.distributed_type in _OTHER_TYPES:
        name = _OTHER_TYPES[accelerator.distributed_type]
        raise ValueError(_not_beside(name, f"distributed_type is {accelerator.distributed_type}"))
    for name, plugin in (("FSDP", "fsdp_plugin"), ("DeepSpeed", "deepspeed_plugin")):
        if getattr(state, plugin, None) is not None:
            raise ValueError(_not_beside(name, f"the accelerator has a {plugin}"))


def _not_beside(name: str, why: str) -> str:
    return (
        f"torchddp's Accelerator averages the gradients of whole models, and {name} distributes them itself ({why}): "
        f"leave {name} out, or use accelerate.Accelerator"
    )
