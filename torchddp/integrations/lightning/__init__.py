"""Lightning on torchddp: `TorchDDPStrategy`, and its names for `Trainer(strategy=...)` and `Fabric`.

    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="torchddp")

Importing this package registers the names, and so does ``import torchddp`` if Lightning is already imported. See
``docs/integrations.md``. Needs lightning 2.6 or newer.
"""

from __future__ import annotations

from typing import Any

from torchddp.integrations import require

require("lightning.pytorch", "lightning")

from lightning.fabric.strategies import STRATEGY_REGISTRY  # noqa: E402
from lightning.pytorch.strategies import StrategyRegistry  # noqa: E402

from torchddp.integrations.lightning.sharded import TorchDDPShardedStrategy  # noqa: E402
from torchddp.integrations.lightning.stop import StopTogetherCallback  # noqa: E402
from torchddp.integrations.lightning.strategy import TorchDDPFabricStrategy, TorchDDPStrategy  # noqa: E402
from torchddp.integrations.lightning.weights import weigh  # noqa: E402

__all__ = [
    "StopTogetherCallback",
    "TorchDDPFabricStrategy",
    "TorchDDPShardedStrategy",
    "TorchDDPStrategy",
    "register",
    "weigh",
]
# As Lightning's own "ddp", "ddp_spawn" and so on.
_START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}


def register() -> None:
    """Register the names with Trainer and Fabric; importing the package does it. May be called again.

    ``torchddp``, ``torchddp_spawn``, ``torchddp_fork``, ``torchddp_notebook``, each also with
    ``_find_unused_parameters_false`` and ``_true``; ``torchddp_sharded``, ``torchddp_sharded_spawn`` and
    ``torchddp_sharded_fork`` for the Trainer.
    """
    for suffix, start_method in _START_METHODS.items():
        variants: dict[str, dict[str, bool]] = {"": {}}
        for unused in (False, True):
            variants[f"_find_unused_parameters_{str(unused).lower()}"] = {"find_unused_parameters": unused}
        for variant, options in variants.items():
            name, arguments = f"torchddp{suffix}{variant}", {"start_method": start_method, **options}
            _add(StrategyRegistry, name, TorchDDPStrategy, arguments)
            _add(STRATEGY_REGISTRY, name, TorchDDPFabricStrategy, arguments)
        if suffix != "_notebook":
            name = f"torchddp_sharded{suffix}"
            _add(StrategyRegistry, name, TorchDDPShardedStrategy, {"start_method": start_method})


def _add(registry: Any, name: str, strategy: type, arguments: dict[str, Any]) -> None:
    options = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    registry.register(name, strategy, description=f"{strategy.__name__}: {options}", override=True, **arguments)


register()
