"""Fabric's strategy over torchddp.DistributedDataParallel."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from torchddp.ddp.module import DistributedDataParallel
from torchddp.integrations.lightning.options import check_options
from torchddp.integrations.lightning.together import FabricProcesses, FabricScripts, FailsTogether

__all__ = ["TorchDDPFabricStrategy"]


class TorchDDPFabricStrategy(FailsTogether, DDPStrategy):
    """Fabric's DDPStrategy with torchddp's DistributedDataParallel; all of its arguments, in its order.

        fabric = Fabric(accelerator="cpu", devices=2, strategy=TorchDDPFabricStrategy())

    ``fabric.no_backward_sync`` is our ``no_sync``. Communication hooks: ``comm_hook=``, a name or ``(state, hook)``.

    Args:
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision, process_group_backend,
            start_method: as there.
        timeout: of the process group, and so of every reduction.
        fail_together, fail_together_grace_s: see `TorchDDPStrategy`; around the function that is given to
            ``fabric.launch``. A script that calls ``launch()`` without one enters :func:`torchddp.fail_together`.
        kwargs: of `torchddp.DistributedDataParallel`.

    Raises:
        TypeError: an argument that nobody takes.
    """

    _scripts = FabricScripts
    _processes = FabricProcesses

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: str = "popen",
        *,
        fail_together: bool = True,
        fail_together_grace_s: float | None = 3.0,
        **kwargs: Any,
    ) -> None:
        check_options(type(self).__name__, DistributedDataParallel, kwargs)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            **kwargs,
        )
        self._choose_failing(fail_together, fail_together_grace_s)

    def setup_module(self, module: torch.nn.Module) -> TorchDDP:
        """Wraps the module. Collective."""
        side_stream = torch.cuda.stream(torch.cuda.Stream()) if self.root_device.type == "cuda" else nullcontext()
        with side_stream:
            return DistributedDataParallel(module, device_ids=self._determine_ddp_device_ids(), **self._ddp_kwargs)
