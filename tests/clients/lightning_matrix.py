"""Trains each case with Lightning's strategy and with ours, on two ranks started by Lightning.

    python -m tests.clients.lightning_matrix FOLDER

Each rank writes FOLDER/rankN.pt: by case and strategy what the module's state_dict was, losses, and how many steps our
reducers finished.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook

import torchddp
from tests.clients.lightning_models import LocalSGD, Manual, Plain, TwoOptimizers, batches
from torchddp.integrations.lightning import TorchDDPShardedStrategy, TorchDDPStrategy


class HookedDDPStrategy(pl.strategies.DDPStrategy):
    """Lightning's, with communication hooks on the CPU too."""

    def _register_ddp_hooks(self) -> None:
        _register_ddp_comm_hook(self.model, self._ddp_comm_state, self._ddp_comm_hook, self._ddp_comm_wrapper)


# name: (module, options of the module, options of the Trainer, strategies: the first is Lightning's)
PAIR = ("ddp", "torchddp")
ALL = ("ddp", "torchddp", "torchddp_sharded")
UNUSED = ("ddp_find_unused_parameters_true", "torchddp_find_unused_parameters_true")
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any], tuple[Any, ...]]] = {
    "default": (Plain, {}, {}, ALL),
    "two_epochs_adamw": (Plain, {"optimizer": torch.optim.AdamW}, {"max_epochs": 2}, ALL),
    "accumulate": (Plain, {}, {"accumulate_grad_batches": 2}, ALL),
    "clip_norm": (Plain, {}, {"gradient_clip_val": 0.1}, ALL),
    "clip_value": (Plain, {}, {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}, ALL),
    "bf16_mixed": (Plain, {}, {"precision": "bf16-mixed"}, ALL),
    "bf16_mixed_clip": (Plain, {}, {"precision": "bf16-mixed", "gradient_clip_val": 0.1}, ALL),
    "schedule": (Plain, {"schedule": True}, {}, ALL),
    "batch_norm": (Plain, {"batch_norm": True}, {}, ALL),
    "manual": (Manual, {}, {}, ALL),
    "manual_accumulate": (Manual, {"accumulate": True}, {}, ALL),
    "manual_static": (
        Manual,
        {},
        {},
        (pl.strategies.DDPStrategy(static_graph=True), TorchDDPStrategy(static_graph=True)),
    ),
    "two_optimizers": (
        TwoOptimizers,
        {},
        {},
        (*UNUSED, TorchDDPShardedStrategy(find_unused_parameters=True)),
    ),
    "unused_false": (
        Plain,
        {},
        {},
        ("ddp_find_unused_parameters_false", "torchddp_find_unused_parameters_false"),
    ),
    "unused_true": (Plain, {"unused": "always"}, {}, UNUSED),
    "unused_sometimes": (Plain, {"unused": "sometimes"}, {}, UNUSED),
    "comm_hook": (
        Plain,
        {},
        {},
        (
            HookedDDPStrategy(ddp_comm_hook=fp16_compress_hook),
            TorchDDPStrategy(ddp_comm_hook=fp16_compress_hook),
            TorchDDPStrategy(comm_hook=(None, fp16_compress_hook)),
        ),
    ),
    "post_local_sgd": (
        LocalSGD,
        {},
        {},
        tuple(
            kind(
                ddp_comm_state=PostLocalSGDState(None, None, 2),
                ddp_comm_hook=post_localSGD_hook,
                model_averaging_period=2,
            )
            for kind in (HookedDDPStrategy, TorchDDPStrategy)
        ),
    ),
}
QUIET = dict(
    accelerator="cpu",
    devices=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)


def run(name: str) -> list[dict[str, Any]]:
    """Trains a case under each of its strategies."""
    kind, options, of_trainer, strategies = CASES[name]
    results = []
    for strategy in strategies:
        module = kind(**options)
        before = torchddp.finished_steps()
        trainer = pl.Trainer(strategy=strategy, **{"max_epochs": 1, **QUIET, **of_trainer})
        trainer.fit(module, batches())
        results.append(
            {
                "strategy": strategy if isinstance(strategy, str) else type(strategy).__name__,
                "state": module.state_dict(),
                "seen": module.seen,
                "finished": torchddp.finished_steps() - before,
                "model_is_module": trainer.strategy.model is module,
            }
        )
    return results


def main(folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    results = {name: run(name) for name in CASES}
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    torch.save(results, os.path.join(folder, f"rank{rank}.pt"))


if __name__ == "__main__":
    main(sys.argv[1])
