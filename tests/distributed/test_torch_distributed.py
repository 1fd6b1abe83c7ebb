"""torch.distributed's checkpoints, pipelining, RPC, tensor parallelism and composable replicate, with our class."""

import copy
from collections import OrderedDict
from functools import partial

import pytest
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import rpc
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torchddp
from tests.harness import each, on_ranks, run_ranks
from tests.models import (
    Mlp,
    NormNet,
    assert_grads,
    batch,
    expected_grads,
    grads_of,
    loss_of,
    same_on_all_ranks,
    seeded,
    step_on,
)
from tests.oss import assert_same_state
from tests.parity.compare import TorchDDP
from tests.shm_backend import shm_group
from tests.torch_features import Blocks, assert_same_program

OPTIONS = [{}, {"full_state_dict": True}, {"full_state_dict": True, "cpu_offload": True}]


def step(ddp, optimizer, rank, number):
    optimizer.zero_grad()
    loss_of(ddp(batch(rank, number, 4, 3, 6, 6))).backward()
    optimizer.step()


def trained(cls, steps=2, seed=0, frozen=False):
    """A wrapped model and its optimizer after some steps, equal on all ranks and for any world size."""
    model = seeded(NormNet, seed)
    model.conv.requires_grad_(not frozen)
    ddp = cls(model)
    optimizer = torch.optim.AdamW([p for p in ddp.parameters() if p.requires_grad], lr=0.01)
    for number in range(steps):
        step(ddp, optimizer, 0, number)
    return ddp, optimizer


@on_ranks(2)
def test_state_equals_torchs(rank, ddp_class):
    """Including keys, which are the plain module's, without "module."."""
    for options in each(OPTIONS):
        chosen = StateDictOptions(**options)
        states = [get_state_dict(*trained(cls), options=chosen) for cls in (ddp_class, TorchDDP)]
        assert_same_state(*states)
        is_left_out = options.get("cpu_offload") and rank != 0
        assert list(states[0][0]) == ([] if is_left_out else list(NormNet().state_dict()))
        if not is_left_out:
            assert list(states[0][1]["state"]) == list(states[1][1]["state"])
            NormNet().load_state_dict(states[0][0])
    chosen = StateDictOptions(ignore_frozen_params=True)
    ours, theirs = (get_state_dict(*trained(cls, frozen=True), options=chosen) for cls in (ddp_class, TorchDDP))
    assert_same_state(ours, theirs)
    assert list(ours[0]) == [name for name in NormNet().state_dict() if not name.startswith("conv.")]


@on_ranks(2)
def test_state_is_set_and_trains_on(rank, ddp_class):
    theirs, ours = trained(TorchDDP), trained(ddp_class, steps=0, seed=1)
    # Copied, because optimizers keep the tensors that they load, and each needs its own.
    model_state, optimizer_state = copy.deepcopy(get_state_dict(*theirs))
    set_state_dict(*ours, model_state_dict=model_state, optim_state_dict=optimizer_state)
    for side in (theirs, ours):
        step(*side, rank, 9)
    assert_same_state(get_state_dict(*ours), get_state_dict(*theirs))
    # Rank 0's is broadcast.
    other, state = trained(ddp_class, steps=1, seed=3), copy.deepcopy(get_model_state_dict(ours[0]))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other[0], dict(state) if rank == 0 else {}, options=options)
    if rank == 0:
        assert_same_state(get_model_state_dict(other[0]), state)
    assert same_on_all_ranks(get_model_state_dict(other[0]).values())
    step(*other, rank, 10)  # its parameters are still reduced
    assert same_on_all_ranks(other[0].parameters())


def state_of(ddp, optimizer):
    return dict(zip(("model", "optimizer"), get_state_dict(ddp, optimizer), strict=True))


def save_on_rank(rank, cls, folder, asynchronously):
    state = state_of(*trained(cls))
    saved = (dcp.async_save if asynchronously else dcp.save)(state, checkpoint_id=folder)
    if asynchronously:
        saved.result()
    torch.save(state, f"{folder}.rank{rank}")


def load_on_rank(rank, cls, folder):
    ddp, optimizer = trained(cls, steps=0, seed=5)
    state = state_of(ddp, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(ddp, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert_same_state(state_of(ddp, optimizer), torch.load(f"{folder}.rank0", weights_only=True))
    before = torch.nn.utils.parameters_to_vector(ddp.parameters()).detach().clone()
    step(ddp, optimizer, rank, 7)
    assert same_on_all_ranks(ddp.parameters())
    assert not torch.equal(before, torch.nn.utils.parameters_to_vector(ddp.parameters()))


@pytest.mark.parametrize("saved_by", ["ours", "ours, asynchronously", "torch"])
def test_saved_on_two_ranks_and_loaded_on_one_and_three(ddp_class, saved_by, tmp_path):
    folder = str(tmp_path / "checkpoint")
    run_ranks(save_on_rank, 2, TorchDDP if saved_by == "torch" else ddp_class, folder, "asynchronously" in saved_by)
    for cls, world_size in ((ddp_class, 1), (ddp_class, 3), (TorchDDP, 2)):
        run_ranks(load_on_rank, world_size, cls, folder)


MICROBATCHES = 4
SCHEDULES = [ScheduleGPipe, Schedule1F1B]


def data(replica, step, rows, width):
    return (batch(replica, step + more, rows * MICROBATCHES, width, dtype=torch.float32) for more in (0, 50))


def run_stage(part, place, replica, schedule, group, told=True, rows=2, width=8):
    """Gradients of this rank's stage after each step.

    `told`: stages get a microbatch's shapes; otherwise torch runs a forward and backward to infer them.
    """
    example, shapes = torch.zeros(rows, width), {}
    if told:
        result = torch.zeros_like(example, requires_grad=True)
        shapes = {"input_args": (example.requires_grad_(place > 0),), "output_args": (result,)}
    stage = PipelineStage(part, place, 2, torch.device("cpu"), group=group, **shapes)
    runner = schedule(stage, MICROBATCHES, loss_fn=lambda output, target: loss_of(output - target))
    seen = []
    for step in range(3):
        part.zero_grad()
        inputs, targets = data(replica, step, rows, width)
        runner.step(inputs) if place == 0 else runner.step(target=targets)
        seen.append(grads_of(part))
    return seen


def stage_of(model, place):
    return nn.Sequential(*model.blocks[2 * place : 2 * place + 2])


def blocks(width=8):
    return seeded(lambda: Blocks(width, 4))


def assert_those_of_the_whole_model(steps, place, replicas, rows=2, width=8):
    for step, got in enumerate(steps):

        def run(model, replica, step=step):
            inputs, targets = (values.chunk(MICROBATCHES) for values in data(replica, step, rows, width))
            for x, y in zip(inputs, targets, strict=True):
                (loss_of(model(x) - y) / MICROBATCHES).backward()

        want = expected_grads(blocks(width), run, world_size=replicas)
        mine = {
            f"{i}.linear.{n}": want[f"blocks.{2 * place + i}.linear.{n}"] for i in (0, 1) for n in ("weight", "bias")
        }
        assert_grads(got, mine, rtol=1e-5, what=f"step {step}:")


@on_ranks(4)
def test_wrapped_stages(rank, ddp_class):
    """Two stages with two replicas each. A stage reduces only in its last microbatch's backward, once per step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    place, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()

    def program(cls, schedule=ScheduleGPipe, told=True, **options):
        ddp = cls(stage_of(blocks(), place), process_group=mesh.get_group("dp"), **options)
        return run_stage(ddp, place, replica, schedule, mesh.get_group("pp"), told)

    for schedule, search in each(SCHEDULES, [False, True]):
        with_options = partial(program, schedule=schedule, find_unused_parameters=search)
        assert_same_program(ddp_class, with_options, reductions=3)
    assert_those_of_the_whole_model(program(ddp_class, told=False), place, replicas=2)


@on_ranks(2)
def test_stages_over_the_shared_memory_backend(rank):
    group = shm_group()
    for schedule, (told, rows) in each(SCHEDULES, [(True, 2), (False, 2), (True, 64)]):
        steps = run_stage(stage_of(blocks(40), rank), rank, 0, schedule, group, told, rows, width=40)
        assert_those_of_the_whole_model(steps, rank, 1, rows, width=40)


def feed():
    """Two layers for tensor parallelism, and a norm that is not split."""
    return nn.Sequential(OrderedDict(up=nn.Linear(4, 8), relu=nn.ReLU(), down=nn.Linear(8, 4), norm=nn.LayerNorm(4)))


@on_ranks(4)
def test_tensor_parallel_inside_data_parallel(ddp_class):
    """With a bucket rebuild, four optimizer steps, and a DTensor bias."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for options in each([{}, {"static_graph": True}, {"gradient_as_bucket_view": False}]):

        def program(cls, options=options):
            ddp = cls(parallelize_module(seeded(feed), mesh["tp"], plan), device_mesh=mesh["dp"], **options)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
            seen = []
            for step in range(4):
                optimizer.zero_grad()
                loss_of(ddp(batch(mesh["dp"].get_local_rank(), step, 3, 4, dtype=torch.float32))).backward()
                assert not any(isinstance(p, DTensor) for p in ddp.parameters())  # local tensors between forwards
                seen.append(grads_of(ddp))
                optimizer.step()
            return [*seen, {name: p.detach().clone() for name, p in ddp.named_parameters()}]

        assert_same_program(ddp_class, program, reductions=4)


class Skips(Mlp):
    def forward(self, x, skip=False):
        return self.first(x) if skip else super().forward(x)


@on_ranks(2)
def test_distributed_autograd(ddp_class, rank, tmp_path):
    """Gradients are in an RPC context, not in .grad, also those that only a backward under no_sync() gives."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/rpc")
    rpc.init_rpc(str(rank), rank=rank, world_size=2, rpc_backend_options=options)

    def program(cls, **options):
        ddp, seen = cls(seeded(Skips), **options), []
        skips = "find_unused_parameters" in options
        for step in range(3):
            with dist_autograd.context() as context:
                if skips:
                    with ddp.no_sync():
                        dist_autograd.backward(context, [loss_of(ddp(batch(rank, step)))])
                dist_autograd.backward(context, [loss_of(ddp(batch(rank, step), skips))])
                found = dist_autograd.get_gradients(context)
                seen.append({name: found[p].clone() for name, p in ddp.named_parameters()})
        return seen

    for case in each([{}, {"find_unused_parameters": True}, {"static_graph": True}]):
        assert_same_program(ddp_class, partial(program, **case), reductions=3)
    rpc.shutdown()


@on_ranks(2)
def test_torchs_composable_replicate_is_unchanged(rank):
    """Neither of torch's versions, over its DDP and over FSDP2, uses our reducer after `import torchddp`."""
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
