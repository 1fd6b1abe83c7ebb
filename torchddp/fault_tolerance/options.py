"""Options of DistributedDataParallel that make no sense where replicas come and go, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_TALK = "replicas come and go, and one that has just been restarted must be able to wrap its model alone"
# Option: (values that are as good as leaving it out, the reason against others).
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "process_group": ((None,), "gradients go through the manager"),
    "device_mesh": ((None,), "gradients go through the manager"),
    "init_sync": ((False,), f"{_TALK}: torchft's Manager brings the weights (init_sync=True there)"),
    "broadcast_buffers": ((None, False), f"no replica's buffers are the right ones: {_TALK}"),
    "forward_sync_buffers": ((None, False), f"no replica's buffers are the right ones: {_TALK}"),
    "transport": (("auto", "c10d"), "the manager's process group moves the gradients"),
    "timeout": ((None,), "the manager's timeout holds: torchft.Manager(timeout=...)"),
    "wire_dtype": ((None,), "the manager's process group sends gradients as they are"),
    "mixed_precision": ((None,), "its communication hook averages over a fixed group; use torch.autocast"),
    "delay_all_reduce_named_params": ((None,), "it reduces over a fixed group"),
    "param_to_hook_all_reduce": ((None,), "it reduces over a fixed group"),
    "skip_all_reduce_unused_params": ((False,), "a replica can't know alone that the others skip the same buckets"),
    "stall_report_s": ((None, 0), "a replica that stalls is left behind by the quorum, after the manager's timeout"),
    "check_parameters_every": ((None,), "it compares ranks of a fixed group"),
}


def check_options(options: Mapping[str, Any], module: nn.Module) -> None:
    """Raise for what can't be had under a manager. Not collective.

    Raises:
        ValueError: an option, with the reason; parameters with sparse gradients, by name.
    """
    for name, value in options.items():
        if name not in _REFUSED:
            continue
        allowed, reason = _REFUSED[name]
        if not any(value is a or (type(value) is type(a) and value == a) for a in allowed):
            raise ValueError(f"{name}={value!r} does not go with a torchft Manager: {reason}")
    if options.get("bucket_cap_mb") == "auto":
        raise ValueError(
            "bucket_cap_mb='auto' does not go with a torchft Manager: a replica that heals has measured nothing, and "
            "must have the buckets of the others. Give a number of MiB, or None."
        )
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise ValueError(f"embedding {name!r} has sparse=True: torchft's all-reduce takes no sparse gradients")
    if torch._dynamo.config.optimize_ddp == "python_reducer":
        raise ValueError(
            "torch._dynamo.config.optimize_ddp='python_reducer' reduces over a fixed group, past the manager"
        )
