"""The names that strategies are chosen by."""

from __future__ import annotations

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from torchddp.integrations._startup import add_strategies
from torchddp.integrations.lightning.fabric import TorchDDPFabricStrategy
from torchddp.integrations.lightning.sharded import TorchDDPShardedStrategy
from torchddp.integrations.lightning.strategy import TorchDDPStrategy

__all__ = ["register"]


def register() -> None:
    """Makes the names known to Trainer and Fabric; done by importing the package. Harmless a second time.

    ``torchddp``, ``torchddp_spawn``, ``torchddp_fork``, ``torchddp_notebook``, each also with
    ``_find_unused_parameters_false`` and ``_true``; ``torchddp_sharded``, ``torchddp_sharded_spawn`` and
    ``torchddp_sharded_fork`` for the Trainer.

    Where torchddp is installed, the names are known without this import, by what its installation has Python do when
    it starts (`torchddp.integrations._startup`); a checkout on the path has no such thing.
    """
    add_strategies(StrategyRegistry, {"ddp": TorchDDPStrategy, "sharded": TorchDDPShardedStrategy})
    add_strategies(STRATEGY_REGISTRY, {"ddp": TorchDDPFabricStrategy})
