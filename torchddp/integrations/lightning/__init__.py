"""Lightning over torchddp: `TorchDDPStrategy` and the names that `Trainer(strategy=...)` and `Fabric` know it by.

    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="torchddp")

An installed torchddp makes the names known by itself, by what it has Python do when it starts; importing this package
does so too. See ``docs/lightning.md``. Needs ``torchddp[lightning]``.
"""

from __future__ import annotations

from torchddp.integrations.extras import require

require("lightning.pytorch", extra="lightning")

from torchddp.integrations.lightning.fabric import TorchDDPFabricStrategy  # noqa: E402
from torchddp.integrations.lightning.names import register  # noqa: E402
from torchddp.integrations.lightning.sharded import TorchDDPShardedStrategy  # noqa: E402
from torchddp.integrations.lightning.strategy import TorchDDPStrategy  # noqa: E402

__all__ = ["TorchDDPFabricStrategy", "TorchDDPShardedStrategy", "TorchDDPStrategy", "register"]

register()
