"""A module made ready for training on several ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from torchddp.ddp.module import DistributedDataParallel


def prepare_ddp_module(
    module: torch.nn.Module, find_unused_parameters: bool = False, **options: Any
) -> torch.nn.Module:
    """The module in a DistributedDataParallel; as it is if no parameter requires grad. Collective.

    Composer's function, for torchddp's class. ``options`` are further arguments of that class.

    Raises:
        RuntimeError: there is no process group, or torch was built without torch.distributed; what
            DistributedDataParallel raises.
    """
    if not dist.is_available():
        raise RuntimeError(
            "this torch was built without torch.distributed, which training on several ranks needs: install one with it"
        )
    if not dist.is_initialized():
        raise RuntimeError(
            "there is no process group: call torch.distributed.init_process_group() before prepare_ddp_module()"
        )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return module
    return DistributedDataParallel(module, find_unused_parameters=find_unused_parameters, **options)
