"""Sparse embeddings unused by some or all ranks in a step: gradients equal dense ones with torch's class."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from tests.harness import each, on_ranks, over_both
from tests.models import assert_grads, batch, grads_of, loss_of, seeded
from torchddp import DistributedDataParallel

STEPS = 7


class Lookup(nn.Module):
    """A table that a forward may skip, and a layer that is always used."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4, sparse=sparse, dtype=torch.float64)
        self.head = nn.Linear(4, 2, dtype=torch.float64)

    def forward(self, x: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        return self.head(x if rows is None else x + self.table(rows))


def make(sparse: bool, transport: str, find_unused_parameters: bool = True, **options) -> nn.Module:
    """Ours with a sparse table, or torch's with a dense one."""
    wrap = DistributedDataParallel if sparse else TorchDDP
    more = {"transport": transport} if sparse else {}
    return wrap(seeded(lambda: Lookup(sparse)), find_unused_parameters=find_unused_parameters, **more, **options)


def backward(model: nn.Module, rank: int, step: int, uses: bool) -> None:
    rows = torch.tensor([rank, 3, (3 + step) % 9, 8]) if uses else None
    loss_of(model(batch(rank, step, 4, 4), rows)).backward()


def assert_same(train, rank: int, *args) -> None:
    """Compare gradients after each step of `train(rank, sparse, *args)`."""
    for step, (ours, theirs) in enumerate(zip(train(rank, True, *args), train(rank, False, *args), strict=True)):
        assert_grads(ours, theirs, 1e-12, what=f"rank {rank}, step {step}:")


@over_both
@on_ranks(1, 2, 3)
def test_ranks_take_turns(rank, transport, world_size):
    """One rank after the other uses the table, then none."""

    def train(rank, sparse, between):
        model = make(sparse, transport)
        for step in range(STEPS):
            if between != "kept":
                model.zero_grad(set_to_none=between != "zeroed in place")
            if between == "accumulated":
                with model.no_sync():
                    backward(model, rank, 20 + step, (step + 1) % (world_size + 1) == rank)
            backward(model, rank, step, step % (world_size + 1) == rank)
            yield grads_of(model)

    for between in each(["zeroed", "zeroed in place", "kept", "accumulated"]):
        assert_same(train, rank, between)


@over_both
@on_ranks(2)
def test_other_modes(rank, transport):
    options = {"static_graph": {"static_graph": True}, "skip": {"skip_all_reduce_unused_params": True}}

    def train(rank, sparse, case):
        model = make(sparse, transport, **options.get(case, {}))
        if case == "hook":
            model.register_comm_hook(None, allreduce_hook)
        for step in range(STEPS):
            if step % 2 == 0:
                model.zero_grad()
            if case == "metadata" and sparse:
                model.reducer._set_sparse_metadata({"table.weight": torch.arange(9)})
            in_turn = {"skip": step % 3 == 1, "static_graph": rank == 1}  # "skip": the same on all ranks
            backward(model, rank, step, in_turn.get(case, step % 3 == rank))
            yield grads_of(model)

    for case in each(["static_graph", "hook", "skip", "metadata"]):
        assert_same(train, rank, case)


@over_both
@on_ranks(2)
def test_ranks_without_inputs(rank, transport):
    def train(rank, sparse, search):
        model = make(sparse, transport, search)
        with model.join():
            for step in range(1 + 2 * rank):
                model.zero_grad()
                backward(model, rank, step, not search or rank == 1)
        yield grads_of(model)

    for search in each([False, True]):
        assert_same(train, rank, search)


@on_ranks(2)
def test_sparse_gradients_that_are_not_rows(rank):
    """Accepted as in torch if all ranks use the parameter; otherwise refused, because gloo would abort."""
    for search in each([False, True]):
        model = make(True, "c10d", search)
        model.module.table.weight.register_hook(lambda grad: grad.to_dense().to_sparse(2))
        if not search:
            backward(model, rank, 0, True)
            assert model.module.table.weight.grad.sparse_dim() == 2
            continue
        with pytest.raises(RuntimeError, match=r"'table.weight' on rank \d: its sparse gradient has sparse_dim 2"):
            backward(model, rank, 0, True)
