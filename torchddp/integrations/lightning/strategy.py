"""The Trainer's and Fabric's strategies with torchddp.DistributedDataParallel."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from lightning.fabric.accelerators import Accelerator as FabricAccelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins import Precision as FabricPrecision
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import _augment_message
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from torchddp.ddp import grad_precision
from torchddp.ddp.former_names import current
from torchddp.ddp.module import DistributedDataParallel
from torchddp.durations import Duration, timedelta_of
from torchddp.integrations import keyword_options
from torchddp.integrations.lightning.together import FailsTogether

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]
# Arguments of the wrapper that the strategy sets itself.
_OF_THE_STRATEGY = frozenset({"module", "sharded_optimizer", "device_ids", "timeout"})


class TorchDDPStrategy(FailsTogether, DDPStrategy):
    """Lightning's DDPStrategy with torchddp's DistributedDataParallel. It takes all of that class's arguments, in its
    order; those not listed here mean what they mean there.

        trainer = Trainer(accelerator="cpu", devices=2, strategy=TorchDDPStrategy(gradient_as_bucket_view=True))

    Args:
        ddp_comm_state, ddp_comm_hook, ddp_comm_wrapper: a communication hook with torch's interface, its state, and a
            wrapper around it (``fp16_compress_wrapper``). They work on every device; Lightning's own strategy silently
            ignores them except on CUDA. ``comm_hook="..."`` selects one of torchddp's hooks by name instead.
        model_averaging_period: optimizer steps between averages of the parameters. Needs a ``PostLocalSGDState`` as
            ``ddp_comm_state``; averaging starts after its ``start_localSGD_iter`` steps.
        timeout: for the process group, and so for every reduction.
        fail_together: an exception on one rank ends all ranks within seconds, with that rank's message, but not while
            one writes a checkpoint: see :func:`torchddp.fail_together`, whose ``grace_s`` is ``fail_together_grace_s``.
            From the creation of the process group to the end of teardown, in all of the Trainer's methods.
        kwargs: arguments of `torchddp.DistributedDataParallel`: all of torch's, and ``transport``, ``comm_hook``,
            ``sync``, ``precision``, ``checks`` and so on.

    Raises:
        TypeError: an unknown argument; raised here rather than when the model is wrapped.
        ValueError: a wrapper without a hook, two hooks, or only one of ``model_averaging_period`` and its state.
    """

    _wrapper: type = DistributedDataParallel

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
        process_group_backend: str | None = None,
        timeout: Duration | None = default_pg_timeout,
        start_method: StartMethod = "popen",
        *,
        fail_together: bool = True,
        fail_together_grace_s: Duration | None = 3.0,
        **kwargs: object,
    ) -> None:
        kwargs = _options_of(self, kwargs)
        _check_hook(ddp_comm_hook, ddp_comm_wrapper, kwargs.get("comm_hook"))
        _check_averaging(model_averaging_period, ddp_comm_state)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            ddp_comm_state=ddp_comm_state,
            ddp_comm_hook=ddp_comm_hook,
            ddp_comm_wrapper=ddp_comm_wrapper,
            model_averaging_period=model_averaging_period,
            process_group_backend=process_group_backend,
            timeout=timedelta_of(timeout, "timeout"),
            start_method=start_method,
            **kwargs,
        )
        self._choose_failing(fail_together, fail_together_grace_s)

    def _setup_model(self, model: torch.nn.Module) -> TorchDDP:
        # Left by the previous wrapper: in Lightning a second fit would never end its static graph's first step.
        self._pl_static_graph_delay_done = False
        # On the current stream, not on a new one as in Lightning's strategy: torch moves each gradient to the stream of
        # the wrapping, with an event, a wait and a record_stream.
        return DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)

    def _register_ddp_hooks(self) -> None:
        _register_ddp_comm_hook(
            model=self.model,
            ddp_comm_state=self._ddp_comm_state,
            ddp_comm_hook=self._ddp_comm_hook,
            ddp_comm_wrapper=self._ddp_comm_wrapper,
        )

    def on_exception(self, exception: BaseException) -> None:
        """Add advice to the error about parameters without gradients."""
        _augment_message(
            exception,
            pattern=".*Expected to have finished reduction in the prior iteration.*",
            new_message=(
                "Parameters of your LightningModule took no part in the loss that training_step returned. If that is "
                "intended, use strategy='torchddp_find_unused_parameters_true', or "
                "TorchDDPStrategy(find_unused_parameters=True)."
            ),
        )

    def teardown(self) -> None:
        """Drop the wrapper; the LightningModule keeps the trained parameters."""
        self._model_averager = None
        super().teardown()


class TorchDDPFabricStrategy(FailsTogether, FabricDDPStrategy):
    """Fabric's DDPStrategy with torchddp's DistributedDataParallel. It takes all of that class's arguments, in its
    order; those not listed here mean what they mean there.

        fabric = Fabric(accelerator="cpu", devices=2, strategy=TorchDDPFabricStrategy())

    ``fabric.no_backward_sync`` is our ``no_sync``. Communication hooks: ``comm_hook=``, a name or ``(state, hook)``.

    Args:
        precision: Fabric's plugin, or a `torchddp.Precision` for the wrapper.
        timeout: for the process group, and so for every reduction.
        fail_together, fail_together_grace_s: see `TorchDDPStrategy`; applies to the function passed to
            ``fabric.launch``. A script that calls ``launch()`` without one enters :func:`torchddp.fail_together`.
        kwargs: arguments of `torchddp.DistributedDataParallel`.

    Raises:
        TypeError: an unknown argument.
    """

    _wrapper: type = DistributedDataParallel

    def __init__(
        self,
        accelerator: FabricAccelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: FabricPrecision | grad_precision.Precision | None = None,
        process_group_backend: str | None = None,
        timeout: Duration | None = default_pg_timeout,
        start_method: StartMethod = "popen",
        *,
        fail_together: bool = True,
        fail_together_grace_s: Duration | None = 3.0,
        **kwargs: object,
    ) -> None:
        kwargs = _options_of(self, kwargs)
        reduced_in = kwargs.pop("precision", None)
        if isinstance(precision, grad_precision.Precision):
            precision, reduced_in = None, precision
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            process_group_backend=process_group_backend,
            timeout=timedelta_of(timeout, "timeout"),
            start_method=start_method,
            **kwargs,
        )
        self._ddp_kwargs["precision"] = reduced_in
        self._choose_failing(fail_together, fail_together_grace_s)

    def setup_module(self, module: torch.nn.Module) -> TorchDDP:
        return DistributedDataParallel(module, device_ids=self._determine_ddp_device_ids(), **self._ddp_kwargs)


def _options_of(strategy: TorchDDPStrategy | TorchDDPFabricStrategy, given: Mapping[str, Any]) -> dict[str, Any]:
    """TypeError for a name that the wrapper does not take. Lightning's own fail only when the model is wrapped."""
    known = inspect.signature(strategy._wrapper).parameters.keys() - _OF_THE_STRATEGY
    return current(given, sorted(known), type(strategy).__name__)


def list_options(strategy: Any, plain: inspect.Signature) -> None:
    """Make the constructor's signature ``plain`` list the wrapper's arguments: LightningCLI passes every argument that
    it finds, and without this finds those of torch's class, with torch's defaults.
    """
    own = {name: parameter for name, parameter in plain.parameters.items() if name != "kwargs"}
    options = keyword_options(strategy._wrapper, _OF_THE_STRATEGY | own.keys())
    strategy.__init__.__signature__ = plain.replace(parameters=[*own.values(), *options])


def _check_hook(hook: object, wrapper: object, named: object) -> None:
    if hook is not None and named is not None:
        raise ValueError("TorchDDPStrategy got two communication hooks, ddp_comm_hook and comm_hook: leave one out")
    if hook is None and wrapper is not None:
        raise ValueError(
            "ddp_comm_wrapper wraps the hook that ddp_comm_hook names, which is None"
            + ("; comm_hook is not wrapped" if named is not None else "")
        )


def _check_averaging(period: int | None, state: object) -> None:
    if period is not None and (isinstance(period, bool) or not isinstance(period, int) or period < 1):
        raise ValueError(f"model_averaging_period must be a number of steps, 1 or more, or None, got {period!r}")
    if isinstance(state, PostLocalSGDState) != (period is not None):
        raise ValueError(
            "post-local SGD needs both ddp_comm_state=PostLocalSGDState(...) and model_averaging_period, got "
            f"{type(state).__name__ if state is not None else None} and {period!r}"
        )


ARGUMENTS = inspect.signature(TorchDDPStrategy.__init__)
list_options(TorchDDPStrategy, ARGUMENTS)
list_options(TorchDDPFabricStrategy, inspect.signature(TorchDDPFabricStrategy.__init__))
