"""Sparse embeddings that some ranks, or all, leave out of a step: gradients as of dense ones with torch's class."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from tests.harness import on_ranks
from tests.models import assert_grads, batch, grads_of, loss_of, seeded
from torchddp import DistributedDataParallel

TRANSPORTS = ["c10d", "shm"]
STEPS = 7


class Lookup(nn.Module):
    """A table that a forward may leave out, and what is always used."""

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


def is_in_turn(rank: int, step: int, world_size: int) -> bool:
    """Each rank after the other, and then none."""
    return step % (world_size + 1) == rank


@pytest.mark.parametrize("between", ["zeroed", "zeroed in place", "kept", "accumulated"])
@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(1, 2, 3)
def test_ranks_take_turns(rank, world_size, transport, between):
    def train(rank, sparse):
        model = make(sparse, transport)
        seen = []
        for step in range(STEPS):
            if between != "kept":
                model.zero_grad(set_to_none=between != "zeroed in place")
            if between == "accumulated":
                with model.no_sync():
                    backward(model, rank, 20 + step, is_in_turn(rank, step + 1, world_size))
            backward(model, rank, step, is_in_turn(rank, step, world_size))
            seen.append(grads_of(model))
        return seen

    for step, (ours, theirs) in enumerate(zip(train(rank, True), train(rank, False), strict=True)):
        assert_grads(ours, theirs, 1e-12, what=f"rank {rank}, step {step}:")


@pytest.mark.parametrize("case", ["static_graph", "hook", "skip", "metadata"])
@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_other_modes(rank, transport, case):
    options = {"static_graph": {"static_graph": True}, "skip": {"skip_all_reduce_unused_params": True}}.get(case, {})

    def uses(rank, step):
        if case == "skip":
            return step % 3 == 1  # on all ranks or on none
        return rank == 1 if case == "static_graph" else is_in_turn(rank, step, 2)

    def train(rank, sparse):
        model = make(sparse, transport, **options)
        if case == "hook":
            model.register_comm_hook(None, allreduce_hook)
        seen = []
        for step in range(STEPS):
            if step % 2 == 0:
                model.zero_grad()
            if case == "metadata" and sparse:
                model.reducer._set_sparse_metadata({"table.weight": torch.arange(9)})
            backward(model, rank, step, uses(rank, step))
            seen.append(grads_of(model))
        return seen

    for step, (ours, theirs) in enumerate(zip(train(rank, True), train(rank, False), strict=True)):
        assert_grads(ours, theirs, 1e-12, what=f"rank {rank}, step {step}:")


@pytest.mark.parametrize("find_unused_parameters", [False, True])
@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_ranks_without_inputs(rank, transport, find_unused_parameters):
    def train(rank, sparse):
        model = make(sparse, transport, find_unused_parameters)
        with model.join():
            for step in range(1 + 2 * rank):
                model.zero_grad()
                backward(model, rank, step, not find_unused_parameters or rank == 1)
        return grads_of(model)

    assert_grads(train(rank, True), train(rank, False), 1e-12, what=f"rank {rank}:")


@on_ranks(2)
def test_gradients_that_are_no_rows(rank):
    """As torch takes them where all ranks use the parameter; refused before they meet others, which would end gloo."""
    model = make(True, "c10d", find_unused_parameters=False)
    model.module.table.weight.register_hook(lambda grad: grad.to_dense().to_sparse(2))
    backward(model, rank, 0, True)
    assert model.module.table.weight.grad.sparse_dim() == 2
    model = make(True, "c10d")
    model.module.table.weight.register_hook(lambda grad: grad.to_dense().to_sparse(2))
    with pytest.raises(RuntimeError, match=r"'table.weight' on rank \d: its sparse gradient has sparse_dim 2"):
        backward(model, rank, 0, True)
