"""Builds the peers from other packages, fairscale and deepspeed, as their documentation says."""

from __future__ import annotations

import importlib
import logging
import os
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from benchmarks.sharded.trainer import LEARNING_RATE, Trainer, tensors_in
from torchddp.harness.models import run_forward
from torchddp.harness.variants import Variant, load_class

# Stage 2 of ZeRO, in fp32, with defaults otherwise, except clipping, which is on by default (norm 1): it would change
# the training and be more work than the others do.
DEEPSPEED_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 2},
    "gradient_clipping": 0.0,
    "steps_per_print": 1_000_000_000,
}


class FairscaleTrainer(Trainer):
    """Uses the wrapper's `zero_grad`: the optimizer's, with set_to_none, would detach gradients from their buckets."""

    def zero_grad(self) -> None:
        """Drop gradients outside of buckets, zero the buckets."""
        self.module.zero_grad(set_to_none=True)

    def gradient_tensors(self) -> list[Tensor]:
        """Includes the buckets, which outlive the gradients in them."""
        module: Any = self.module
        return [*super().gradient_tensors(), *(b.buffer for b in module._bucket_list if b.buffer is not None)]


def build_fairscale(variant: Variant, module: nn.Module) -> Trainer:
    """OSS and ShardedDataParallel."""
    assert variant.class_path is not None
    optimizer = load_class("fairscale.optim.oss.OSS")(
        module.parameters(), optim=AdamW, lr=LEARNING_RATE, **variant.keywords
    )
    return FairscaleTrainer(variant, load_class(variant.class_path)(module, optimizer), module, optimizer)


@dataclass
class DeepspeedTrainer(Trainer):
    """Uses the engine's own backward and step, which zeroes the gradients."""

    def backward(self, batch: Any) -> None:
        """Run backward through the engine, which reduces the gradients."""
        engine: Any = self.module
        engine.backward(self.loss(run_forward(engine, batch)))

    def update(self) -> None:
        """Update and zero the gradients."""
        engine: Any = self.module
        engine.step()

    @property
    def inner_optimizer(self) -> Optimizer:
        """The optimizer of this rank's flat fp32 weights."""
        inner: Optimizer = self.optimizer.optimizer
        return inner

    def gradient_tensors(self) -> list[Tensor]:
        """Includes averaged gradients, which are kept in a list of the optimizer."""
        return [*super().gradient_tensors(), *tensors_in([self.optimizer.averaged_gradients])]


def import_deepspeed() -> Any:
    """Imports deepspeed, configured for a CPU and to log errors only."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["LOCAL_RANK"] = str(dist.get_rank())  # deepspeed requires it
    deepspeed = importlib.import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # Its compilation at the first start takes a minute. Only inference_all_reduce uses it, which training never calls.
    importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def build_deepspeed(variant: Variant, module: nn.Module) -> Trainer:
    """ZeRO stage 2 in the existing process group, with torch's AdamW."""
    deepspeed = import_deepspeed()
    deepspeed.init_distributed(dist_backend="gloo")
    optimizer = AdamW(module.parameters(), lr=LEARNING_RATE, **variant.keywords)
    engine, zero, _, _ = deepspeed.initialize(model=module, optimizer=optimizer, config=DEEPSPEED_CONFIG)
    return DeepspeedTrainer(variant, engine, module, zero)
