"""Names, arguments and errors of the strategies, in one process."""

import inspect
import os
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("lightning", reason="Lightning is not installed: make test-clients")

import lightning.pytorch as pl
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

from tests.clients.common import launch
from tests.clients.lightning_models import QUIET, Plain, batches
from torchddp import DistributedDataParallel, ShardedDataParallel
from torchddp.integrations import lightning as ours
from torchddp.integrations.lightning.sharded import follow, shard
from torchddp.optim import OSS

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clean up the process group and variables after the test."""
    before = dict(os.environ)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in set(os.environ) - set(before):
        monkeypatch.delenv(name)


@pytest.fixture
def group(alone: None) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _fit(module: Any, strategy: Any, **options: Any) -> None:
    trainer = pl.Trainer(strategy=strategy, **{**QUIET, "devices": 1, "max_epochs": 1, **options})
    trainer.fit(module, batches())


def test_every_name_of_lightnings_ddp_has_a_counterpart() -> None:
    def of(registry: Any, prefix: str) -> set[str]:
        return {name[len(prefix) :] for name in registry if name.split("_")[0] == prefix}

    sharded = {"_sharded", "_sharded_spawn", "_sharded_fork"}
    assert of(StrategyRegistry, "torchddp") == of(StrategyRegistry, "ddp") | sharded
    assert issubclass(ours.TorchDDPShardedStrategy, DDPStrategy)
    assert of(STRATEGY_REGISTRY, "ddp") <= of(STRATEGY_REGISTRY, "torchddp")
    ours.register()  # a second time


BY_NAME = """
import sys
import lightning.pytorch as pl
from lightning.fabric import Fabric
import torchddp

quiet = {"accelerator": "cpu", "devices": 1}
for name in ("torchddp_find_unused_parameters_true", "torchddp_sharded", "torchddp"):
    strategy = pl.Trainer(strategy=name, logger=False, enable_checkpointing=False, **quiet).strategy
    print(type(strategy).__module__, type(strategy).__name__, strategy._ddp_kwargs.get("find_unused_parameters"))
print(type(Fabric(strategy="torchddp", **quiet).strategy).__name__)
"""


def test_strategies_are_known_by_name_if_lightning_is_imported_first() -> None:
    assert launch("-c", BY_NAME, timeout_s=250).stdout.splitlines() == [
        "torchddp.integrations.lightning.strategy TorchDDPStrategy True",
        "torchddp.integrations.lightning.sharded TorchDDPShardedStrategy None",
        "torchddp.integrations.lightning.strategy TorchDDPStrategy None",
        "TorchDDPFabricStrategy",
    ]


def test_wrong_arguments_are_named_at_once() -> None:
    plain, sharded, fabric = ours.TorchDDPStrategy, ours.TorchDDPShardedStrategy, ours.TorchDDPFabricStrategy
    for kind, given, error, says in (
        (plain, {"find_unsed_parameters": True}, TypeError, "'find_unsed_parameters'. Did you mean 'find_unused"),
        (plain, {"ddp_comm_wrapper": id}, ValueError, "ddp_comm_hook"),
        (plain, {"ddp_comm_hook": id, "comm_hook": "fp16"}, ValueError, "two communication hooks"),
        (plain, {"model_averaging_period": 4}, ValueError, "PostLocalSGDState"),
        (plain, {"model_averaging_period": 0}, ValueError, "1 or more"),
        (plain, {"ddp_comm_state": PostLocalSGDState(None, None, 1)}, ValueError, "model_averaging_period"),
        (plain, {"fail_together_grace_s": -1.0}, ValueError, "grace_s"),
        (sharded, {"ddp_comm_hook": id}, ValueError, "ddp_comm_hook"),
        (sharded, {"gradient_as_bucket_view": True}, TypeError, "TorchDDPShardedStrategy.*gradient_as_bucket_view"),
        (fabric, {"transprt": "shm"}, TypeError, "transprt.*transport"),
    ):
        with pytest.raises(error, match=says):
            kind(**given)


class NoOptimizer(Plain):
    def configure_optimizers(self) -> None:
        return None


class HalfOptimized(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[0].parameters(), lr=0.1)


@pytest.mark.parametrize("name", ["TorchDDPStrategy", "TorchDDPFabricStrategy", "TorchDDPShardedStrategy"])
def test_signatures_list_the_wrappers_arguments(name: str) -> None:
    """LightningCLI passes all of them, with their defaults."""
    strategy = getattr(ours, name)
    listed = inspect.signature(strategy).parameters
    wrapper = inspect.signature(ShardedDataParallel if "Sharded" in name else DistributedDataParallel).parameters
    assert wrapper.keys() - listed.keys() == {"module", "device_ids"} | ({"sharded_optimizer"} & wrapper.keys())
    assert list(listed)[:2] == ["accelerator", "parallel_devices"] and "kwargs" not in listed
    passed = strategy(**{argument: parameter.default for argument, parameter in listed.items()})._ddp_kwargs
    assert passed and passed == {argument: wrapper[argument].default for argument in passed}
    added = [listed[argument] for argument in passed if listed[argument].kind is inspect.Parameter.KEYWORD_ONLY]
    assert added and not any(isinstance(parameter.annotation, str) for parameter in added)  # it can't resolve our names


def test_sharded_needs_optimizers_of_all_parameters(alone: None) -> None:
    with pytest.raises(ValueError, match="configure_optimizers"):
        _fit(NoOptimizer(), "torchddp_sharded")
    with pytest.raises(ValueError, match="net.2"):
        _fit(HalfOptimized(), "torchddp_sharded")
    _fit(Plain(), "torchddp_sharded")  # the failed fits left nothing behind


def test_sharded_needs_a_scaler_that_all_ranks_share(alone: None) -> None:
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="ShardedGradScaler"):
        _fit(Plain(), "torchddp_sharded", plugins=plugin)


def test_models_are_wrapped_on_the_current_stream(group: None) -> None:
    """Elsewhere torch would move every gradient to the stream of the wrapping."""
    cuda = torch.device("cuda", 0)
    for kind, wrap, target in (
        (ours.TorchDDPStrategy, "_setup_model", "strategy.DistributedDataParallel"),
        (ours.TorchDDPFabricStrategy, "setup_module", "strategy.DistributedDataParallel"),
        (ours.TorchDDPShardedStrategy, "_setup_model", "sharded.ShardedDataParallel"),
    ):
        strategy = kind()
        strategy.optimizers = []
        on_gpu = mock.patch.object(kind, "root_device", mock.PropertyMock(return_value=cuda))
        with on_gpu, mock.patch(f"{ours.__name__}.{target}") as wrapped, mock.patch("torch.cuda.Stream") as stream:
            getattr(strategy, wrap)(torch.nn.Linear(1, 1))
        wrapped.assert_called_once()
        stream.assert_not_called()


def test_unused_parameters_are_explained(alone: None) -> None:
    with pytest.raises(RuntimeError, match="torchddp_find_unused_parameters_true"):
        _fit(Plain(unused="always"), "torchddp")


class Picky(torch.optim.SGD):
    def __init__(self, params: Any, how: str, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)


def test_optimizers_are_recreated_with_their_options(group: None) -> None:
    net = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW([{"params": [net.weight], "lr": 0.5}, {"params": [net.bias]}], betas=(0.8, 0.9))
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    sharded = shard(optimizer)
    assert isinstance(sharded.optim, torch.optim.AdamW)
    assert [group["lr"] for group in sharded.param_groups] == [0.5, 1e-3]
    assert sharded.param_groups[0] is optimizer.param_groups[0]
    assert sharded.param_groups[1]["betas"] == (0.8, 0.9)
    torch.testing.assert_close(sharded.state[net.weight]["exp_avg"], optimizer.state[net.weight]["exp_avg"])
    assert shard(sharded) is sharded
    with pytest.raises(TypeError, match="'how'.*torchddp.optim.OSS"):
        shard(Picky(net.parameters(), "so"))
    with pytest.raises(TypeError, match="LBFGS"):
        shard(torch.optim.LBFGS(net.parameters()))


def test_schedulers_follow_their_optimizer_without_a_warning(group: None) -> None:
    net = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    steps = [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5) for _ in range(2)]
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, steps, milestones=[2])
    sharded = shard(optimizer)
    follow([schedule], [(optimizer, sharded)])
    assert isinstance(sharded, OSS) and all(one.optimizer is sharded for one in (schedule, *steps))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net(torch.ones(1, 4)).sum().backward()
        sharded.step()
        schedule.step()
    assert sharded.param_groups[0]["lr"] == 0.5
