"""How a step of a DistributedDataParallel begins, and how one without a backward reduces what was accumulated."""

from __future__ import annotations

import logging

import torch
from torch.distributed.algorithms.join import Join

from torchddp.ddp import wrapped_model
from torchddp.ddp.ddp_construction import DDPConstruction
from torchddp.plan import model_plan

logger = logging.getLogger("torchddp.ddp.module")


class DDPSteps(DDPConstruction):
    """The part of the wrapper that tells the reducer of steps."""

    def _begin_step(self) -> None:
        if self._group_without_rank and self.require_backward_grad_sync:
            raise RuntimeError(
                f"This DistributedDataParallel (rank {self._own_rank} of its old process group) was given a process "
                "group that this rank is not in: it has nobody to reduce gradients with. Pass a group with this rank "
                "to _update_process_group(), or train under no_sync()."
            )
        self.session.joins = self._join_config.enable
        self.session.synchronises = self.require_backward_grad_sync
        for observer in self._observers:
            observer.before_step()
        try:
            if self.require_backward_grad_sync and self.reducer.prepare_for_forward():
                self._parameter_watch.step_without_gradients()
            if self._parameter_watch.in_doubt:
                self._parameter_watch.look(self.module, self._own_rank)
            if self._join_config.enable and (work := Join.notify_join_context(self)):
                by_world_size = bool(self._divide_by_initial_world_size)
                self.reducer.set_forward_pass_work_handle(work, by_world_size)
            # Before forward, where memory use is lowest. Once in a training run.
            if not self._has_rebuilt_buckets and self.reducer.rebuild_buckets():
                self._has_rebuilt_buckets = True
                logger.info("Reducer buckets have been rebuilt in this iteration.")
            if self._auto_plan is not None and self.require_backward_grad_sync:
                model_plan.before_step(self, self._auto_plan)
        except RuntimeError as error:
            changed = wrapped_model.describe_changes(self, self._reduced_ids)
            if not changed:
                raise
            raise RuntimeError(f"{error}\n{changed}") from error

    # --- reductions without a backward ---

    @torch.no_grad()
    def reduce(self) -> None:
        """Averages the gradients there are over the ranks, in buckets, as a synchronised backward would. Collective.

        For gradients that were accumulated under `no_sync`; what FORCED_SYNC of `torchddp.sync` calls. Ranks may have
        used different parameters: one that a rank has no gradient of counts as zero there. One that no rank has used
        since the last reduction keeps its ``.grad`` as it is, None too, if the model was made with
        ``find_unused_parameters``; without that, ranks can't tell, and it gets a gradient of zeros. Parameters that are
        frozen by now, and have no gradient, get none.

        Raises:
            RuntimeError: a mode in which gradients are not reduced by buckets alone (`check_can_reduce`).
            TransportError: a peer has died, or did not come in time.
        """
        self.check_can_reduce()
        if self._auto_plan is not None:
            # Nobody waits for gradients here, so no order of buckets is better than another.
            logger.warning(
                "bucket_cap_mb='auto': the buckets stay as they are, for gradients are reduced after backward."
            )
            model_plan.end(self)
        self._begin_step()
        frozen = [p for p in self._reduced_params if not p.requires_grad and p.grad is None]
        self.reducer.reduce_now()
        for parameter in frozen:
            parameter.grad = None

    def check_can_reduce(self) -> None:
        """RuntimeError, with the reason, if `reduce` can't work in this model's mode. Not collective."""
        reason = None
        if self.mixed_precision is not None:
            reason = "with mixed_precision, gradients are reduced and cast back inside of backward"
        elif self._delay_all_reduce_params:
            reason = "parameters of delay_all_reduce_named_params are reduced by a hook in backward"
        elif self._use_python_reducer:
            reason = "torch._dynamo.config.optimize_ddp='python_reducer' reduces each gradient by itself in backward"
        elif self._join_config.enable:
            reason = "under join(), ranks that have run out of inputs can't know of it"
        if reason is not None:
            raise RuntimeError(
                f"gradients can't be reduced after backward (reduce(), FORCED_SYNC) on rank {self._own_rank}: "
                f"{reason}. Take SINGLE_AUTO_SYNC or MULTI_AUTO_SYNC."
            )
