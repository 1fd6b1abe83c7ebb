"""Cases, each trained with Lightning's strategy and ours: final weights, losses, and steps reduced by ours."""

from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook

import torchddp
from tests.clients.common import save_results
from tests.clients.lightning_models import QUIET, LocalSGD, Manual, Plain, TwoOptimizers, batches, quiet
from torchddp.integrations.lightning import TorchDDPShardedStrategy, TorchDDPStrategy


class HookedDDPStrategy(pl.strategies.DDPStrategy):
    """Lightning's strategy, with communication hooks on the CPU too."""

    def _register_ddp_hooks(self) -> None:
        _register_ddp_comm_hook(self.model, self._ddp_comm_state, self._ddp_comm_hook, self._ddp_comm_wrapper)


def local_sgd(kind: Any) -> Any:
    state = PostLocalSGDState(None, None, 2)
    return kind(ddp_comm_state=state, ddp_comm_hook=post_localSGD_hook, model_averaging_period=2)


ALL = ("ddp", "torchddp", "torchddp_sharded", "ddp after install()")
UNUSED = ("ddp_find_unused_parameters_true", "torchddp_find_unused_parameters_true")


def case(kind: Any = Plain, of_trainer: Any = None, strategies: tuple[Any, ...] = ALL, **options: Any) -> Any:
    """A case: a module with options, options of the Trainer, and strategies, of which the first is Lightning's."""
    return kind, options, of_trainer or {}, strategies


CASES = {
    "default": case(),
    "two_epochs_adamw": case(of_trainer={"max_epochs": 2}, optimizer=torch.optim.AdamW),
    "accumulate": case(of_trainer={"accumulate_grad_batches": 2}),
    "clip_norm": case(of_trainer={"gradient_clip_val": 0.1}),
    "clip_value": case(of_trainer={"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}),
    "bf16_mixed": case(of_trainer={"precision": "bf16-mixed"}),
    "bf16_mixed_clip": case(of_trainer={"precision": "bf16-mixed", "gradient_clip_val": 0.1}),
    "schedule": case(schedule=True),
    "batch_norm": case(batch_norm=True),
    "manual": case(Manual),
    "manual_accumulate": case(Manual, accumulate=True),
    "manual_static": case(
        Manual, strategies=(pl.strategies.DDPStrategy(static_graph=True), TorchDDPStrategy(static_graph=True))
    ),
    "two_optimizers": case(
        TwoOptimizers, strategies=(*UNUSED, TorchDDPShardedStrategy(find_unused_parameters=True))
    ),
    "unused_false": case(
        strategies=("ddp_find_unused_parameters_false", "torchddp_find_unused_parameters_false")
    ),
    "unused_true": case(strategies=UNUSED, unused="always"),
    "unused_sometimes": case(strategies=UNUSED, unused="sometimes"),
    "comm_hook": case(
        strategies=(
            HookedDDPStrategy(ddp_comm_hook=fp16_compress_hook), TorchDDPStrategy(ddp_comm_hook=fp16_compress_hook),
            TorchDDPStrategy(comm_hook=(None, fp16_compress_hook)),
        )
    ),
    "post_local_sgd": case(LocalSGD, strategies=(local_sgd(HookedDDPStrategy), local_sgd(TorchDDPStrategy))),
}  # fmt: skip


def run(name: str) -> list[dict[str, Any]]:
    """Train a case under each of its strategies."""
    kind, options, of_trainer, strategies = CASES[name]
    results = []
    for strategy in strategies:
        module = kind(**options)
        before = torchddp.finished_steps()
        installs = strategy == ALL[-1]
        options_of_trainer = {"max_epochs": 1, **QUIET, **of_trainer}
        with torchddp.install() if installs else nullcontext():
            trainer = pl.Trainer(strategy="ddp" if installs else strategy, **options_of_trainer)
            trainer.fit(module, batches(), batches() if name == "accumulate" else None)
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


if __name__ == "__main__":
    quiet()
    save_results(lambda folder: {name: run(name) for name in CASES})
