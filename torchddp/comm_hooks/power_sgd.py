"""Low-rank gradients: PowerSGD (Vogels, Karimireddy and Jaggi, NeurIPS 2019)."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchddp.comm_hooks.hook import CommHook, Parameters
from torchddp.comm_hooks.layout import Layout, Piece, Residuals, Slot, check_names
from torchddp.durations import Duration
from torchddp.errors import check_count, check_number


@dataclass(frozen=True)
class _Batch:
    rows: int
    columns: int
    rank: int
    slots: tuple[Slot, ...]


class PowerSGD(CommHook):
    """Sends each gradient matrix as a product of two thin ones.

    A gradient of shape [n, ...] is a matrix M of n rows and m columns. With Q [m, r] from the previous step, P = M Q is
    summed over the ranks and made orthonormal, then Q = M^T P is summed. M becomes P Q^T, which is exact if M has at
    most rank r; the difference is added to the next step's gradient. All P of a bucket are sent in one message with its
    vectors, all Q in another: ``4 * (r * (n + m))`` bytes per matrix, and 4 per element of a vector. Every rank holds
    fp32 residuals of the matrices' size and 4 * r * m bytes of Q per matrix. All get the same bits on equal CPUs or
    GPUs.

    Example:

        hook = torchddp.comm_hooks.PowerSGD(rank=8, start_step=100)
        model = torchddp.DistributedDataParallel(module, comm_hook=hook)

    Args:
        rank: r, the columns of P and Q.
        warm_start: start from the last step's Q (a power iteration over the steps); otherwise from random numbers.
        error_feedback: add what the compression lost to the next step's gradient; False: drop it.
        start_step: gradients are sent uncompressed in the steps before this one (the first is 0).
        min_compression_rate: matrices that would not shrink by this factor are sent uncompressed.
        clamp_rank: use the largest possible rank for a matrix with fewer rows or columns than ``rank``.
        seed: the seed for the first Q; the same on all ranks.

    Raises:
        ValueError: invalid options; with ``clamp_rank=False`` (at :meth:`attach`) a matrix with fewer rows or
            columns than ``rank``, by name and shape.
    """

    sends_sums_only = True

    def __init__(
        self,
        rank: int = 4,
        warm_start: bool = True,
        error_feedback: bool = True,
        *,
        start_step: int = 0,
        min_compression_rate: float = 2.0,
        clamp_rank: bool = False,
        seed: int = 0,
        timeout: Duration | None = None,
    ) -> None:
        super().__init__(timeout=timeout, hierarchical=False)  # exact sums already take the hosts into account
        check_count("rank", rank, 1)
        check_count("start_step", start_step, 0)
        rate = min_compression_rate
        check_number("min_compression_rate", rate, lambda rate: rate > 0, "above 0")
        self.rank = rank
        self.warm_start = warm_start
        self.error_feedback = error_feedback
        self.start_step = start_step
        self.min_compression_rate = min_compression_rate
        self.clamp_rank = clamp_rank
        self.seed = seed
        self._residuals = Residuals()
        self._factors: dict[str, Tensor] = {}  # Q by parameter
        self._splits: dict[Layout, tuple[list[_Batch], list[Slot]]] = {}

    def _check(self, parameters: Parameters, module: nn.Module) -> None:
        for name, parameter in parameters.items():
            shape = parameter.shape
            if len(shape) < 2 or 0 in shape or self.clamp_rank:
                continue
            rows, columns, rank = self._as_matrix(shape)
            if self.rank > rank:
                use = f"use a rank of at most {rank}, clamp_rank=True, or PerParameter to leave it out"
                matrix = f"parameter {name!r} of shape {tuple(shape)} is a matrix of {rows} x {columns}"
                raise ValueError(f"PowerSGD(rank={self.rank}): {matrix}; {use}")

    def _as_matrix(self, shape: Sequence[int]) -> tuple[int, int, int]:
        rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
        return rows, columns, min(self.rank, rows, columns)

    def _reduce(self, piece: Piece) -> None:
        if piece.step <= self.start_step:  # steps count from 1 here
            self._average_exactly(piece.flat)
            return
        batches, uncompressed = self._split(piece.layout)
        whole = piece.flat.mul_(1 / self._exchange.world_size)
        residual = None
        if self.error_feedback and batches:
            residual = self._residuals.of(piece.layout, whole, 0, piece.layout.numel)
            whole.add_(residual)
        # Copies, which are kept while averages are written to the piece.
        matrices = [torch.stack([piece.slot(s).view(b.rows, b.columns) for s in b.slots]) for b in batches]
        factors = [self._first_factors(batch, piece) for batch in batches]
        plain = [piece.slot(slot) for slot in uncompressed]
        lefts = self._sum([*(m @ q for m, q in zip(matrices, factors, strict=True)), *plain])
        for vector in reversed(plain):
            vector.copy_(lefts.pop())
        not_finite = [~torch.isfinite(left).all(-1).all(-1) for left in lefts]
        lefts = [orthonormal(p.masked_fill(bad[:, None, None], 0.0)) for p, bad in zip(lefts, not_finite, strict=True)]
        each = zip(matrices, lefts, not_finite, strict=True)
        rights = self._sum([(m.mT @ p).masked_fill_(bad[:, None, None], 0.0) for m, p, bad in each])
        for batch, matrix, left, right, bad in zip(batches, matrices, lefts, rights, not_finite, strict=True):
            # A sum of finite numbers may still have overflowed.
            is_spoiled = (bad | ~torch.isfinite(right).all(-1).all(-1)).tolist()
            average = left @ right.mT
            for index, slot in enumerate(batch.slots):
                values = piece.slot(slot).view(batch.rows, batch.columns)
                if is_spoiled[index]:
                    values.fill_(float("nan"))  # and the residual stays as it was
                    continue
                if residual is not None:
                    left_out = residual[slot.offset : slot.end].view(batch.rows, batch.columns)
                    torch.sub(matrix[index], average[index], alpha=1 / self._exchange.world_size, out=left_out)
                values.copy_(average[index])
                if self.warm_start:
                    self._factors[slot.name] = right[index].clone()

    def _split(self, layout: Layout) -> tuple[list[_Batch], list[Slot]]:
        """A bucket's matrices, by shape, and the parameters that are sent uncompressed."""
        if layout not in self._splits:
            by_shape: dict[tuple[int, int, int], list[Slot]] = {}
            plain = []
            for slot in layout.slots:
                rows, columns, rank = self._as_matrix(slot.shape)
                if (rows + columns) * rank * self.min_compression_rate < rows * columns:
                    by_shape.setdefault((rows, columns, rank), []).append(slot)
                else:
                    plain.append(slot)
            self._splits[layout] = [_Batch(*shape, tuple(slots)) for shape, slots in by_shape.items()], plain
        return self._splits[layout]

    def _first_factors(self, batch: _Batch, piece: Piece) -> Tensor:
        """Q before this step: [matrices, columns, rank], with columns of length one."""
        factors = []
        for slot in batch.slots:
            if self.warm_start and slot.name in self._factors:
                factors.append(self._factors[slot.name])
                continue
            seed = zlib.crc32(f"{self.seed} {slot.name} {0 if self.warm_start else piece.step}".encode())
            generator = torch.Generator().manual_seed(seed)
            factors.append(torch.randn(batch.columns, batch.rank, generator=generator).to(piece.flat.device))
        stacked = torch.stack(factors)
        peak = stacked.abs().amax(1, keepdim=True)
        stacked = stacked / peak.masked_fill(peak == 0, 1.0)
        return torch.div(stacked, stacked.norm(dim=1, keepdim=True).clamp_min(1e-30))

    def _sum(self, parts: list[Tensor]) -> list[Tensor]:
        """Their sums over all ranks, sent in one message."""
        if not parts:
            return []
        message = torch.cat([part.reshape(-1) for part in parts])
        self._exchange.sum_(message)
        sums = message.split([part.numel() for part in parts])
        return [values.view(part.shape) for values, part in zip(sums, parts, strict=True)]

    def _follow(self, lead: int) -> None:
        """Every rank continues with the leading rank's factors, so that P is summed for one common Q."""
        for name, shape in self._shapes.items():
            _, columns, rank = self._as_matrix(shape)
            factor = torch.zeros(columns * rank + 1, device=self._device)
            if self._exchange.rank == lead and name in self._factors:
                factor[:-1], factor[-1] = self._factors[name].reshape(-1), 1.0
            self._exchange.sum_(factor)
            if factor[-1] != 0.0:
                self._factors[name] = factor[:-1].view(columns, -1).clone()
            else:
                self._factors.pop(name, None)

    def carried_state(self) -> dict[str, Any]:
        return {"factors": {name: factor.clone() for name, factor in self._factors.items()}}

    def start_over(self, state: Mapping[str, Any] | None = None) -> None:
        """Drop the residuals and use the given Q, which may differ between ranks: the next Q is the same on all."""
        self._residuals = Residuals()
        factors = {} if state is None else state["factors"]
        self._factors = {name: f.detach().to(self._device, copy=True) for name, f in factors.items()}

    def _state(self) -> dict[str, Any]:
        return {"residual": self._residuals.state_dict(self._shapes), **self.carried_state(), "seed": self.seed}

    def _load_state(self, state: Mapping[str, Any]) -> None:
        check_names(state["residual"], self._shapes)
        factors = {name: torch.Size(self._as_matrix(shape)[1:]) for name, shape in self._shapes.items()}
        check_names(state["factors"], factors, "this hook's factor")
        self._residuals.load_state_dict(state["residual"], self._device)
        self._factors = {n: f.detach().to(self._device, copy=True) for n, f in state["factors"].items()}
        self.seed = int(state["seed"])


def orthonormal(matrices: Tensor) -> Tensor:
    """Orthonormal columns that span at least those of ``matrices``: fp32 [..., n, r], n >= r, finite -> the same shape.

    Uses Householder reflections in fp64, which never divide by a zero norm: columns that are zero or depend on others
    get directions of their own instead of NaN. Columns are scaled first, so that tiny ones count.
    """
    wide = matrices.double()
    peak = wide.abs().amax(-2, keepdim=True)
    wide = wide / peak.masked_fill(peak == 0, 1.0)
    directions: Tensor = torch.linalg.qr(wide).Q
    return directions.float()
