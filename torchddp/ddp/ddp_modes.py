"""What is switched on a DistributedDataParallel after it is made: communication hooks, join."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchddp.comm_hooks import CommHook
from torchddp.ddp.comm_hook_check import check_hook_signature, checked
from torchddp.ddp.ddp_construction import DDPConstruction
from torchddp.diagnose import nonfinite


class DDPModes(DDPConstruction):
    """The part of the wrapper that is about communication hooks and torch's special modes."""

    def _check_comm_hook(self, hook: Callable[..., Any]) -> None:
        try:
            check_hook_signature(hook)
        except (TypeError, ValueError) as error:
            self._log_and_throw(type(error), str(error))
        bf16 = ("bf16_compress_hook", "bf16_compress_wrapper_hook")
        if self.device_type != "cpu" and getattr(hook, "__name__", "") in bf16:
            super()._check_comm_hook(hook)  # torch asks for CUDA and NCCL here, also on CPU, where gloo sums bfloat16

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Reduce buckets with ``hook(state, bucket: GradBucket) -> Future[Tensor]`` from now on (torch's types).

        Once, before the first backward. The bucket is not divided by the world size beforehand. Any hook written for
        torch's class works. Every rank must register a hook that sends the same collectives; collective if it is one of
        ``torchddp.comm_hooks``.
        """
        self._check_comm_hook(hook)
        if isinstance(hook, CommHook):
            hook.attach(self)
        self.logger._set_comm_hook_name(getattr(hook, "__qualname__", type(hook).__qualname__))
        self._comm_hooks.append((hook, state))
        self.reducer.register_comm_hook(state, checked(hook, self.process_group.rank()))

    def join_hook(self, **kwargs: Any) -> Any:
        """As torch's, for `join()`. RuntimeError with ``find_nonfinite="raise"``."""
        if self._find_nonfinite == nonfinite.RAISE:
            raise RuntimeError(
                'find_nonfinite="raise" can\'t be used with join(): ranks that have run out of inputs would not raise. '
                "Make the module with find_nonfinite=True"
            )
        if self._parameter_check is not None:
            self._parameter_check.restart()  # ranks will have done different numbers of steps
        return super().join_hook(**kwargs)

    def _match_unused_params_allreduce(self) -> None:
        # A rank without inputs uses no parameter. (torch sends the last step's sum again, and calls everything used.)
        self.reducer.match_used_map()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """How often ``_get_ddp_logging_data()`` moves on after the first ten steps: every ``sample_rate``-th step."""
        if sample_rate < 1:
            self._log_and_throw(
                ValueError, "DDP runtime logging sample rate should be equal or greater than 1, got " + str(sample_rate)
            )
        self.logger.set_sample_rate(sample_rate)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self.logger._set_comm_hook_name(str(comm_hook_type))
        self._has_builtin_hook = True
        self.reducer.register_builtin_comm_hook(comm_hook_type)
