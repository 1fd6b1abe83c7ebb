"""Lightning over torchddp: `TorchDDPStrategy` and the names that `Trainer(strategy=...)` and `Fabric` know it by.

    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="torchddp")

Importing this package makes the names known, and so does ``import torchddp`` where Lightning has been imported before.
See ``docs/lightning.md``. Needs ``torchddp[lightning]``.
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
