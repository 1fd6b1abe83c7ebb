"""parallelize() compared with the same parallelism set up by hand, and the groups that it reports."""

import dataclasses
import functools
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torchddp
from tests.harness import assert_each_raises, each, on_ranks, reductions, run_ranks
from tests.models import assert_same_training, seeded
from tests.pages import DOCS
from torchddp import Precision
from torchddp.optim import OSS
from torchddp.parallel import ParallelConfig, device_mesh, parallel_group_info, parallelize

SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
# fp64, because DDP and FSDP2 add in different orders.
CLOSE = 1e-11


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16, dtype=torch.float64)
        self.down = nn.Linear(16, 8, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8, dtype=torch.float64)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(8, 3, dtype=torch.float64)
        self.register_buffer("scale", torch.ones(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x) * self.scale


def train(model: nn.Module, copy_number: int, optimizer: torch.optim.Optimizer | None = None) -> nn.Module:
    """Three steps."""
    optimizer = optimizer or SGD(model.parameters())
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + copy_number)
        model(torch.randn(4, 6, generator=generator, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def by_ddp(rank: int) -> nn.Module:
    return train(torchddp.DistributedDataParallel(seeded(Net)), rank)


@pytest.mark.parametrize("initialized", [False, True])
@on_ranks(1)
def test_one_process_gets_the_module_itself(initialized: bool):
    if not initialized:
        dist.destroy_process_group()
    for kind in each(["auto", "none", "ddp", "sharded", "fsdp", "hsdp"]):
        config, model = ParallelConfig(kind=kind), Net()
        assert parallelize(model, config) is model
        made, optimizer = parallelize(model, config, optimizer=SGD)
        assert made is model and type(optimizer) is torch.optim.SGD
        assert type(model) is Net
        info = parallel_group_info(model)
        for group in (info.mp, info.dp):
            assert (group.rank, group.world_size, group.global_rank, group.group) == (0, 1, 0, None)


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_several_processes_without_a_process_group_are_an_error(monkeypatch: pytest.MonkeyPatch, variable: str):
    monkeypatch.setenv(variable, "2")
    with pytest.raises(RuntimeError, match=f"{variable} is 2, .*init_process_group"):
        parallelize(Net())
    with pytest.raises(RuntimeError, match="init_process_group"):
        device_mesh(ParallelConfig())


@on_ranks(2, 4)
def test_ddp(rank: int, world_size: int):
    model, optimizer = parallelize(seeded(Net), optimizer=SGD)
    assert type(model) is torchddp.DistributedDataParallel
    with reductions(3):
        train(model, rank, optimizer)
    assert_same_training(model, by_ddp(rank))
    if world_size == 2:
        assert_same_training(model, train(nn.parallel.DistributedDataParallel(seeded(Net)), rank))

    # Its options are passed on.
    config = ParallelConfig.from_cli(["ddp.bucket_cap_mb=0.001", "ddp.transport=c10d", "ddp.timeout=20"])
    model = train(parallelize(seeded(Net), config), rank)
    with pytest.raises(ValueError, match=r"ddp\.precision\.wire: got 'int3', allowed: bfloat16"):
        parallelize(seeded(Net), ParallelConfig(ddp={"precision": Precision(wire="int3")}))
    narrow = parallelize(seeded(Net).float(), ParallelConfig(ddp={"precision": Precision(wire=torch.bfloat16)}))
    assert model._get_ddp_logging_data()["bucket_cap_bytes"] == 1048
    assert model.session.wait_limit.total_seconds() == 20.0
    assert narrow.session.options.precision.wire == torch.bfloat16


@on_ranks(2, 4)
def test_sharded(rank: int, world_size: int):
    config = ParallelConfig(kind="sharded", ddp={"reduce_buffer_size": 100})
    oss_of = functools.partial(OSS, optim=torch.optim.SGD, lr=0.05, momentum=0.9)
    by_hand = seeded(Net)
    oss = oss_of(by_hand.parameters())
    want = train(torchddp.ShardedDataParallel(by_hand, oss, reduce_buffer_size=100), rank, oss)
    for factory in each([SGD, oss_of]):
        model, optimizer = parallelize(seeded(Net), config, optimizer=factory)
        assert type(model) is torchddp.ShardedDataParallel and type(optimizer) is OSS
        with reductions(3):
            train(model, rank, optimizer)
        for other in (want, by_ddp(rank)):
            assert_same_training(model, other)
    with pytest.raises(ValueError, match="pass optimizer="):
        parallelize(Net(), config)
    for wrong in (lambda params: SGD(params), functools.partial(torch.optim.SGD, [])):
        with pytest.raises(TypeError, match="needs a class, or a partial with only keywords"):
            parallelize(Net(), config, optimizer=wrong)


def by_fully_shard(shape: tuple[int, ...], rank: int, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "mp")[: len(shape)])
    model = seeded(Net)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **{**options, "reshard_after_forward": False})
    return train(model, rank)


@on_ranks(4)
def test_a_config_that_differs_is_an_error_on_all_ranks(rank: int):
    """Also on those whose own groups agree."""
    config = ParallelConfig(kind="hsdp", model_parallel=2, param_dtype="bfloat16" if rank == 3 else None)
    with pytest.raises((ValueError, RuntimeError), match="param_dtype is None on rank 0, 'bfloat16' on rank 1"):
        parallelize(Net(), config)


@on_ranks(4)
def test_fsdp_and_hsdp(rank: int, world_size: int):
    by_our_ddp = by_ddp(rank)
    whole, pairs = (world_size,), (world_size // 2, 2)
    # By strategy: the mesh, whether parameters are freed after forward, and the share that a rank holds.
    cases: list[tuple[str | None, tuple[int, ...], bool, float]] = [
        (None, whole, True, 1 / world_size),
        ("SHARD_GRAD_OP", whole, False, 1 / world_size),
        ("NO_SHARD", (world_size, 1), False, 1),
        ("HYBRID_SHARD", pairs, True, 1 / 2),
        ("HYBRID_SHARD_ZERO2", pairs, False, 1 / 2),
    ]
    for strategy, shape, reshards, share in each(cases):
        model_parallel = {"model_parallel": 2} if shape is pairs else {}
        config = ParallelConfig(use_fsdp=True, sharding_strategy=strategy, **model_parallel)
        net = seeded(Net)
        model, optimizer = parallelize(net, config, optimizer=SGD)
        assert model is net and isinstance(model, Net)
        assert all(isinstance(part, FSDPModule) for part in (model, *model.blocks))
        train(model, rank, optimizer)
        assert_same_training(model, by_fully_shard(shape, rank, reshard_after_forward=reshards))
        assert_same_training(model, by_our_ddp, CLOSE)
        assert model.first.weight.to_local().numel() == share * model.first.weight.numel()
        model(torch.zeros(1, 6, dtype=torch.float64))
        assert isinstance(model.blocks[0].up.weight, DTensor) is reshards


def test_hsdp_shards_over_a_host_by_default(monkeypatch: pytest.MonkeyPatch):
    def work(rank: int, hosts: str = "") -> tuple[int, int]:
        if hosts:
            os.environ["TORCHDDP_HOST_ID"] = hosts[rank]
        info = parallel_group_info(parallelize(seeded(Net), ParallelConfig(kind="hsdp")))
        return info.dp.world_size, info.mp.world_size

    assert run_ranks(work, 4) == [(1, 4)] * 4
    # One torchrun per rank, as with Spark: the ranks still share the host.
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert run_ranks(work, 4) == [(1, 4)] * 4
    assert run_ranks(work, 4, "aabb") == [(2, 2)] * 4
    assert run_ranks(work, 4, "abab") == [(1, 4)] * 4  # interleaved, as in Slurm's cyclic distribution
    assert run_ranks(work, 3, "aab") == [(1, 3)] * 3


@on_ranks(2)
def test_weights_at_the_start_and_options(rank):
    # Options of FSDP are passed on.
    config = ParallelConfig.from_cli(
        ["--use-fsdp", "--cpu-offload", "wrap=Linear", "--forward-prefetch=1", "--backward-prefetch=2"]
        + ["--param-dtype=bfloat16", "--reduce-dtype=float32", "--parallel-backend=torchddp_shm"]
    )
    model = parallelize(seeded(Net), config)
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert all(isinstance(layer, FSDPModule) for layer in layers)
    assert not any(isinstance(block, FSDPModule) for block in model.blocks)
    states = [layer._get_fsdp_state() for layer in layers]
    assert states[0]._states_to_forward_prefetch == [states[1]]
    assert states[5]._states_to_backward_prefetch == [states[4], states[3]]
    assert states[0]._fsdp_param_group.offload_policy.pin_memory is False
    policy = states[0]._mp_policy
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    dtypes = []
    model.blocks[0].register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    model(torch.zeros(1, 6))
    assert dtypes == [torch.bfloat16]
    assert dist.get_backend(parallel_group_info(model).dp.group) == "torchddp_shm"
    train(model, rank)

    # All start from rank 0.
    for options in each([{}, {"use_fsdp": True}, {"kind": "hsdp", "model_parallel": 1}, {"kind": "sharded"}]):
        net = seeded(Net, seed=rank)
        net.scale += rank
        net.register_buffer("grid", torch.full((2, 3), float(rank)).t())  # not contiguous
        model, _ = parallelize(net, ParallelConfig(**options), optimizer=SGD)
        assert_same_training(model, seeded(Net))
        assert net.scale.eq(1).all() and net.grid.eq(0).all()

    # Ranks may keep their own.
    model = parallelize(seeded(Net, seed=rank), ParallelConfig(use_fsdp=True, sync_module_states=False))
    local = model.last.bias.to_local()
    assert torch.equal(local, seeded(Net, seed=rank).last.bias[rank * 2 : rank * 2 + 2][: len(local)])

    # A model on the meta device.
    empty = Net().to("meta")
    with pytest.raises(ValueError, match="'first.weight' is on the meta device"):
        parallelize(empty, ParallelConfig(use_fsdp=True, device_type="cpu"))
    model = parallelize(empty, ParallelConfig(use_fsdp=True, device_type="cpu", sync_module_states=False))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(0.1)
    train(model, rank)

    # What is refused.
    net, ddp, fsdp = Net(), parallelize(Net()), parallelize(Net(), ParallelConfig(use_fsdp=True))
    three, wraps = ParallelConfig(data_parallel=3), ParallelConfig(use_fsdp=True, wrap=("Blocks",))
    for parallel in (ddp, fsdp, replicate(Net())):
        assert_each_raises((lambda model=parallel: parallelize(model), ValueError, "the model is already parallel"))
    assert_each_raises(
        (lambda: parallelize(net, {"kind": "ddp"}), TypeError, "config: got a dict"),
        (lambda: parallelize(by_ddp), TypeError, "model: got a function"),
        (lambda: parallelize(net, optimizer=SGD(net.parameters())), TypeError, "got an existing SGD"),
        (lambda: parallelize(net, optimizer=0.1), TypeError, "optimizer: got a float"),
        (lambda: parallelize(nn.Sequential(ddp)), ValueError, "its module '0' is already parallel"),
        (lambda: parallelize(net, three), ValueError, "data_parallel 3 x model_parallel 1 is 3, but there are 2 rank"),
        (lambda: parallelize(net, wraps), ValueError, "did you mean 'Block'"),
    )


@on_ranks(4)
def test_groups_of_two_by_two(rank):
    with pytest.raises(RuntimeError, match="this Net has no data- and model-parallel groups"):
        parallel_group_info(Net())
    first = parallelize(Net(), ParallelConfig(kind="hsdp", model_parallel=2))
    info = parallel_group_info(first)
    of_mp, of_dp = (0, 1) if rank < 2 else (2, 3), (0, 2) if rank % 2 == 0 else (1, 3)
    for group, place, members in ((info.mp, rank % 2, of_mp), (info.dp, rank // 2, of_dp)):
        assert (group.rank, group.world_size, group.global_rank, group.global_ranks) == (place, 2, rank, members)
        value = torch.tensor(10.0**rank)
        dist.all_reduce(value, group=group.group)
        assert value == sum(10.0**member for member in group.global_ranks)
    same = device_mesh(ParallelConfig(kind="hsdp", data_parallel=2, device_type="cpu"))
    assert same.get_group("mp") is info.mp.group  # created once
    second = parallelize(Net())
    assert parallel_group_info(same) == parallel_group_info(first) == info  # whatever was called since
    info = parallel_group_info(second)
    assert info.dp.world_size == 4 and info.dp.group is dist.group.WORLD
    assert (info.mp.world_size, info.mp.global_ranks, info.mp.group) == (1, (rank,), None)
    dist.barrier()
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="no data- and model-parallel groups"):
        parallel_group_info(second)


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


@pytest.mark.parametrize(("kind", "world_size"), [("fsdp", 4), ("ddp", 4), ("ddp", 2)])
@on_ranks()
def test_tensor_parallel_over_mp(rank: int, kind: str, world_size: int):
    config = ParallelConfig(kind=kind, model_parallel=2)
    net = seeded(Net)
    with pytest.raises(ValueError, match="without a tensor parallel plan"):
        parallelize(seeded(Net), config)
    mesh = device_mesh(config)
    assert mesh.mesh_dim_names == ("dp", "mp") and mesh.shape == (world_size // 2, 2)
    for block in net.blocks:
        parallelize_module(block, mesh["mp"], PLAN)
    model, optimizer = parallelize(net, config, optimizer=SGD)
    info = parallel_group_info(model)
    assert info.mp.group is mesh.get_group("mp")
    with reductions(3 * (kind == "ddp" and world_size == 4)):
        train(model, info.dp.rank, optimizer)
    alone = seeded(Net)
    want = torchddp.DistributedDataParallel(alone, process_group=info.dp.group) if info.dp.group else alone
    assert_same_training(model, train(want, info.dp.rank), CLOSE)
    if kind == "fsdp":  # such models take rank 0's weights too
        net = seeded(Net, seed=rank)
        for block in net.blocks:
            # Each model-parallel group gets its rank 0's weights; groups still differ.
            parallelize_module(block, mesh["mp"], PLAN)
        assert_same_training(parallelize(net, config), seeded(Net))


def test_every_option_is_on_the_page():
    table = (DOCS / "parallelize.md").read_text().split("## Options")[1].split("## Groups")[0]
    for field in dataclasses.fields(ParallelConfig):
        assert f"`{field.name}`" in table, field.name
