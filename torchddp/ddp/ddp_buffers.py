"""How a DistributedDataParallel brings the model's buffers to all ranks."""

from __future__ import annotations

import torch

from torchddp import _C
from torchddp.ddp import buffer_sync
from torchddp.ddp.ddp_construction import DDPConstruction
from torchddp.errors import ADVICE_FOR_A_LOST_PEER, TransportError


class DDPBuffers(DDPConstruction):
    """The part of the wrapper that broadcasts buffers, around forward."""

    # As torch's, but for one thing: looking for an attribute that is not there makes nn.Module raise an error, which
    # takes longer than the rest. It is looked for several times in each forward.

    def _has_buffer_hook(self) -> bool:
        return "buffer_hook" in self.__dict__

    def _check_sync_bufs_pre_fwd(self) -> bool:
        wanted = super()._check_sync_bufs_pre_fwd if self._has_buffer_hook() else self.will_sync_module_buffers
        return bool(wanted())

    def _check_sync_bufs_post_fwd(self) -> bool:
        return self._has_buffer_hook() and bool(super()._check_sync_bufs_post_fwd())

    def _sync_buffers(self) -> None:
        # The order of torch's own: under join() all ranks first agree on who is authoritative.
        root = self._find_common_rank(self._distributed_rank, True) if self._join_config.enable else 0
        if self.parameters_to_ignore or self._has_buffer_hook():
            self._assign_modules_buffers()  # with names, by torch's slower walk
        else:
            # Buffers may have been reassigned. Past nn.Module, which would ask whether the list is a parameter.
            self.__dict__["modules_buffers"] = buffer_sync.buffers_of(self.module)
        self._sync_module_buffers(root)

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        if self._has_buffer_hook():
            # In-place updates must not make autograd refuse a backward through an earlier forward (two forwards, one
            # backward). Our own broadcast moves no version counter.
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(self.modules_buffers)):
                super()._sync_module_buffers(authoritative_rank)
        else:
            self._default_broadcast_coalesced(authoritative_rank=authoritative_rank)

    def _default_broadcast_coalesced(
        self, bufs: list[torch.Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        buffers = self.modules_buffers if bufs is None else bufs
        if self.process_group.size() == 1 or not buffers:
            return
        if _C.can_travel_as_bytes(buffers):
            self._broadcast_buffers(buffers, authoritative_rank)
            return
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(buffers)):
            super()._default_broadcast_coalesced(buffers, bucket_size, authoritative_rank)

    def _broadcast_buffers(self, buffers: list[torch.Tensor], root: int) -> None:
        wait = self.reducer.begin_wait("the broadcast of buffers")
        try:
            self._buffer_broadcast.run(buffers, root)
        except TransportError as error:
            text = (
                f"rank {self._own_rank}: the broadcast of {len(buffers)} buffers "
                f"({sum(b.nbytes for b in buffers)} bytes) from rank {root} failed: {error}\n{ADVICE_FOR_A_LOST_PEER}"
            )
            raise TransportError(self.reducer.with_failure_note(text)) from error
        finally:
            self.reducer.end_wait(wait)
