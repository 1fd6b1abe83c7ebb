"""torch.distributed.pipelining with wrapped stages, tensor parallel by DeviceMesh, torch's own composable replicate."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torchddp
from tests.harness import on_ranks
from tests.models import Mlp, assert_grads, batch, expected_grads, grads_of, loss_of, seeded, step_on
from tests.parity.compare import TorchDDP
from tests.torch_features import Blocks, assert_same_program

WIDTH = 8
MICROBATCHES = 4


def stage_program(schedule, options, told=True):
    """Two stages, two replicas of each: gradients of this rank's stage after each step.

    `told`: the stages know the shapes of a microbatch; otherwise torch runs a forward and backward to find them out.
    """

    def program(cls):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        place, data_rank = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
        model = seeded(lambda: Blocks(WIDTH, 4))
        ddp = cls(
            nn.Sequential(*model.blocks[2 * place : 2 * place + 2]), process_group=mesh.get_group("dp"), **options
        )
        example = torch.zeros(8 // MICROBATCHES, WIDTH)
        shapes = (
            {
                "input_args": (example.requires_grad_(place > 0),),
                "output_args": (torch.zeros_like(example, requires_grad=True),),
            }
            if told
            else {}
        )
        stage = PipelineStage(ddp, place, 2, torch.device("cpu"), group=mesh.get_group("pp"), **shapes)
        runner = schedule(stage, MICROBATCHES, loss_fn=lambda output, target: loss_of(output - target))
        seen = []
        for step in range(3):
            ddp.zero_grad()
            inputs = batch(data_rank, step, 8, WIDTH, dtype=torch.float32)
            targets = batch(data_rank, step + 50, 8, WIDTH, dtype=torch.float32)
            if place == 0:
                runner.step(inputs)
            else:
                runner.step(target=targets)
            seen.append(grads_of(ddp))
        return seen

    return program


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=str)
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
@on_ranks(4)
def test_wrapped_stages(ddp_class, schedule, options):
    """A stage reduces in the backward of its last microbatch only: once a step."""
    assert_same_program(ddp_class, stage_program(schedule, options), reductions=3)


@pytest.mark.parametrize("told", [True, False])
@on_ranks(4)
def test_stages_give_the_gradients_of_the_whole_model(rank, ddp_class, told):
    steps = stage_program(ScheduleGPipe, {}, told)(ddp_class)
    place = rank // 2

    def run(model, data_rank, step):
        inputs = batch(data_rank, step, 8, WIDTH, dtype=torch.float32).chunk(MICROBATCHES)
        targets = batch(data_rank, step + 50, 8, WIDTH, dtype=torch.float32).chunk(MICROBATCHES)
        for x, y in zip(inputs, targets, strict=True):
            (loss_of(model(x) - y) / MICROBATCHES).backward()

    for step, got in enumerate(steps):
        want = expected_grads(seeded(lambda: Blocks(WIDTH, 4)), partial(run, step=step), world_size=2)
        mine = {}
        for i in (0, 1):
            prefix = f"blocks.{2 * place + i}."
            mine |= {n.replace(prefix, f"{i}."): g for n, g in want.items() if n.startswith(prefix)}
        assert_grads(got, mine, rtol=1e-5, what=f"step {step}:")


class Feed(nn.Module):
    """Two layers for tensor parallel, and a norm that every rank has whole."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(self.down(torch.relu(self.up(x))))


def tensor_parallel_program(options, steps=4):
    def program(cls):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        data_rank = mesh["dp"].get_local_rank()
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        ddp = cls(parallelize_module(seeded(Feed), mesh["tp"], plan), device_mesh=mesh["dp"], **options)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        seen = []
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(ddp(batch(data_rank, step, 3, 4, dtype=torch.float32))).backward()
            assert not any(isinstance(p, DTensor) for p in ddp.parameters())  # local between forwards
            seen.append(grads_of(ddp))
            optimizer.step()
        seen.append({name: p.detach().clone() for name, p in ddp.named_parameters()})
        return seen

    return program


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"gradient_as_bucket_view": False}], ids=str)
@on_ranks(4)
def test_tensor_parallel_inside_data_parallel(ddp_class, options):
    """The first bucket rebuild, four optimizer steps and a bias that is a DTensor too."""
    assert_same_program(ddp_class, tensor_parallel_program(options), reductions=4)


@on_ranks(4)
def test_a_mesh_of_two_dimensions_is_refused_as_torch_does(ddp_class):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(RuntimeError, match="Only 1D device mesh"):
        ddp_class(seeded(Mlp), device_mesh=mesh)


@on_ranks(2)
def test_torchs_composable_replicate_is_left_alone(rank):
    """`import torchddp` changes neither of torch's two: torch's own class and FSDP2, and none of our reducers."""
    before = torchddp.finished_steps()
    want = expected_grads(seeded(Mlp), step_on)
    by_ddp = replicate(seeded(Mlp))
    step_on(by_ddp, rank)
    assert type(replicate.state(by_ddp)._ddp) is TorchDDP
    assert_grads(grads_of(by_ddp), want)
    by_fsdp = replicate_with_fsdp(seeded(Mlp), mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    step_on(by_fsdp, rank)
    assert isinstance(by_fsdp, FSDPModule)
    assert_grads({name: p.grad.to_local() for name, p in by_fsdp.named_parameters()}, want)
    assert torchddp.finished_steps() == before


@on_ranks(4)
def test_device_mesh_of_one_dimension(rank, ddp_class):
    """The slice of a larger mesh: replicas are those of its group alone."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    ddp = ddp_class(seeded(Mlp), device_mesh=mesh["inner"])
    step_on(ddp, rank)
    pair = [rank // 2 * 2, rank // 2 * 2 + 1]
    want = expected_grads(seeded(Mlp), lambda m, r: step_on(m, pair[r]), world_size=2)
    assert_grads(grads_of(ddp), want)
    assert dist.get_process_group_ranks(ddp.process_group) == pair
