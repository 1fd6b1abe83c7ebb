"""A fake torchft.Manager over the ranks of a test: its results are lazy, and it reports errors without raising."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class LazyWork(dist._Work):
    """Work whose result is valid only after wait(), which returns False after an error."""

    def __init__(self, manager: FakeManager, work: Any, tensor: torch.Tensor, divisor: int, fails: bool) -> None:
        super().__init__()
        self._manager, self._work, self._tensor, self._divisor, self._fails = manager, work, tensor, divisor, fails

    def wait(self, timeout: Any = None) -> bool:
        if self._work is not None:
            self._work.wait()
            self._work = None
            if self._divisor > 1:
                self._tensor /= self._divisor
        if self._fails:
            self._manager.report_error(RuntimeError("connection reset by peer"))
            return False
        return True


class FakeManager:
    """All ranks of the default group take part in every step."""

    def __init__(self) -> None:
        self._pg = dist.group.WORLD
        self.calls: list[tuple[int, bool]] = []  # elements, whether floating point
        self.fails_at: int | None = None  # index of the call in a step
        self.heals = False
        self.quorum = True
        self._call = 0
        self._step = 0
        self._error: Exception | None = None

    def current_step(self) -> int:
        return self._step

    def start_quorum(self) -> None:
        self._error, self._call = None, 0
        self.calls.clear()

    def should_commit(self) -> bool:
        self._step += self._error is None
        return self._error is None

    def num_participants(self) -> int:
        return dist.get_world_size() if self.quorum else 0

    def errored(self) -> Exception | None:
        return self._error

    def report_error(self, e: Exception) -> None:
        self._error = e

    def allreduce(
        self, tensor: torch.Tensor, should_quantize: bool = False, reduce_op: Any = dist.ReduceOp.AVG
    ) -> dist.Work:
        if self._error is not None:
            return LazyWork(self, None, tensor, 1, False)
        self.calls.append((tensor.numel(), tensor.is_floating_point()))
        self._call += 1
        if self.heals:
            tensor.zero_()
        if self.fails_at == self._call:
            tensor.fill_(0.0 if self.heals else float("nan"))
            return LazyWork(self, None, tensor, 1, True)
        divisor = self.num_participants() if reduce_op == dist.ReduceOp.AVG else 1
        return LazyWork(self, dist.all_reduce(tensor, async_op=True), tensor, divisor, False)
