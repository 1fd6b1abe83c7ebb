"""The options of torchddp's class as a kwargs handler of Accelerate."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import DistributedDataParallelKwargs

from torchddp import comm_hooks
from torchddp.ddp.former_names import current
from torchddp.ddp.module import OPTIONS, options_of
from torchddp.integrations.install import installed

_OF_ACCELERATE = dict.fromkeys(("device_ids", "output_device"), "the device that Accelerate chooses")


class TorchDDPKwargs(DistributedDataParallelKwargs):
    """The arguments of :class:`torchddp.DistributedDataParallel`, as a kwargs handler of Accelerate.

        torchddp.install()
        accelerator = accelerate.Accelerator(kwargs_handlers=[TorchDDPKwargs(comm_hook="bf16")])

    It takes the place of Accelerate's ``DistributedDataParallelKwargs``, whose ``comm_hook`` is one of torch's.

    Args:
        options: any argument of the class except the module and those that Accelerate sets (``device_ids``,
            ``output_device``). They take precedence over those of `install`.

    Raises:
        TypeError: an unknown option, or a ``comm_hook`` that is not a hook.
        ValueError: a value that is not allowed.
        RuntimeError: in ``prepare()``, torchddp is not installed.
    """

    def __init__(self, **options: Any) -> None:
        known = [name for name in OPTIONS if name not in _OF_ACCELERATE]
        options = current(options, known, "TorchDDPKwargs", _OF_ACCELERATE)
        options_of(**options)  # checks the values
        if options.get("comm_hook") is not None:
            comm_hooks.resolve(options["comm_hook"])
        super().__init__()
        self._options: dict[str, object] = options

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        kind: type = DistributedDataParallelKwargs
        return kind  # Accelerate looks handlers up by their exact class

    def to_kwargs(self) -> dict[str, object]:
        """Accelerate passes these to torch's class."""
        if not installed():
            raise RuntimeError("TorchDDPKwargs has options of torchddp's class: call torchddp.install() first")
        return self._options

    def register_comm_hook(self, model: torch.nn.Module) -> None:
        """Nothing: the class has registered its own."""
