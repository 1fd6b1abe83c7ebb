"""Two ranks with unequal numbers of samples, compared with one process with all samples."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

import torchddp
from tests.clients.common import distance, said, save_results
from tests.clients.lightning_models import QUIET, TwoOptimizers, quiet, rank
from tests.pages import blocks_of
from torchddp.integrations.lightning import TorchDDPShardedStrategy, TorchDDPStrategy, weigh

SAMPLES = [[3, 1, 0, 5, 2], [2, 6, 4, 1, 3]]  # by rank and microbatch
ACCUMULATED = 3
STEPS = [range(3), range(3, 5)]  # the microbatches of an epoch
RATE = 0.2

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def batch(rank: int, index: int) -> Batch:
    """Six rows, and a mask of those that are samples."""
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * rank + index))
    return x, x.sum(1, keepdim=True).sin(), (torch.arange(6) < SAMPLES[rank][index]).float().unsqueeze(1)


def batches(rank: int) -> DataLoader:
    return DataLoader([batch(rank, index) for index in range(5)], batch_size=None)


def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def sum_of(out: torch.Tensor, of: Batch) -> torch.Tensor:
    return ((out - of[1]).square() * of[2]).sum()


def give_weight(target: Any, of: Batch, loss: Any = "mean") -> None:
    if Weighted.weighs:
        weigh(target, of[2].sum(), loss=loss)


def mean_of(out: torch.Tensor, of: Batch) -> torch.Tensor:
    """NaN, with gradients that are NaN, without a sample; 0 where it would not be left out."""
    return sum_of(out, of) / of[2].sum().clamp(min=0 if Weighted.weighs else 1)


class Weighted(pl.LightningModule):
    weighs = True  # here and in the other loops

    def __init__(self, loss: str = "mean") -> None:
        super().__init__()
        self.kind = loss
        self.net = net()

    def training_step(self, of: Batch, index: int) -> torch.Tensor | None:
        give_weight(self, of, self.kind)
        return (mean_of if self.kind == "mean" else sum_of)(self.net(of[0]), of)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=RATE)


class ManuallyWeighted(Weighted):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, of: Batch, index: int) -> None:
        optimizer: Any = self.optimizers()
        steps = index in (STEPS[0][-1], STEPS[1][-1])
        with optimizer.toggle_model(sync_grad=steps):
            give_weight(self, of)
            self.manual_backward(mean_of(self.net(of[0]), of))
        if steps:
            optimizer.step()
            optimizer.zero_grad()


class TwoOptimizersWeighted(TwoOptimizers):
    """A step is one microbatch."""

    rate = RATE

    def loss(self, of: Batch) -> torch.Tensor:
        give_weight(self.trainer, of)
        return mean_of(self.judge(self.maker(of[0]).tanh()), of)


def one_process() -> torch.nn.Module:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in STEPS * 2:
        together = [batch(rank, index) for index in step for rank in range(2)]
        loss = torch.stack([sum_of(model(of[0]), of) for of in together]).sum()
        optimizer.zero_grad()
        (loss / sum(of[2].sum() for of in together)).backward()
        optimizer.step()
    return model


def one_process_of_two_optimizers() -> torch.nn.Module:
    module = TwoOptimizersWeighted()
    optimizers = module.configure_optimizers()
    for index in [*range(5)] * 2:
        together = [batch(rank, index) for rank in range(2)]
        for optimizer, sign in zip(optimizers, module.signs, strict=True):
            sums = torch.stack([sum_of(module.judge(module.maker(of[0]).tanh()), of) for of in together]).sum()
            optimizer.zero_grad()
            (sign * sums / sum(of[2].sum() for of in together)).backward()
            optimizer.step()
    return module


def fit(module: pl.LightningModule, strategy: Any, **options: Any) -> None:
    defaults = dict(strategy=strategy, max_epochs=2, use_distributed_sampler=False, **QUIET)
    pl.Trainer(**{**defaults, **options}).fit(module, batches(rank()))


def fabric_training(fabric: Any, microbatch: Callable[..., None]) -> float:
    """Call `microbatch(fabric, model, batch, accumulating)` in a user-defined loop."""
    start = net()
    model, optimizer = fabric.setup(start, torch.optim.SGD(start.parameters(), lr=RATE))
    for step in STEPS * 2:
        for index in step:
            microbatch(fabric, model, batch(rank(), index), index != step[-1])
        optimizer.step()
        optimizer.zero_grad()
    return distance(start, net(), one_process())


def weighed(fabric: Any, model: Any, of: Batch, accumulating: bool) -> None:
    with fabric.no_backward_sync(model, enabled=accumulating):
        give_weight(model, of, "sum")
        fabric.backward(sum_of(model(of[0]), of))


def page() -> float:
    """The example of docs/weighted_means.md."""
    options = {"max_epochs": 2, "use_distributed_sampler": False, **QUIET}
    del options["devices"]
    names = {"pl": pl, "torch": torch, "net": net, "batches": batches(rank()), "options": options}
    exec(blocks_of("weighted_means.md", "Lightning")[0], names)
    trained: Any = names["trainer"]
    return distance(trained.lightning_module.net, net(), one_process())


def page_of_fabric(fabric: Any, model: Any, of: Batch, accumulating: bool) -> None:
    x, y, mask = of
    names = {"fabric": fabric, "model": model, "accumulating": accumulating, "x": x, "y": y, "mask": mask}
    exec(blocks_of("weighted_means.md", "Lightning")[1], {**names, "weigh": weigh})


def misuse_of_fabric(fabric: Any) -> str:
    module = Weighted()
    fabric.setup(module)
    return said(lambda: weigh(module, 1))


def under_fabric(function: Callable[..., Any], *arguments: Any) -> Any:
    return Fabric(accelerator="cpu", devices=2, strategy="torchddp").launch(function, *arguments)


def find(folder: Path) -> dict[Any, Any]:
    scheduler = pl.callbacks.GradientAccumulationScheduler({0: ACCUMULATED})
    accumulated = {"accumulate_grad_batches": ACCUMULATED}
    reference, results = one_process(), {}
    cases: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "automatic": (Weighted, TorchDDPStrategy, accumulated),
        "sums": (partial(Weighted, "sum"), "torchddp", accumulated),
        "sharded": (Weighted, TorchDDPShardedStrategy, accumulated),
        "manual": (ManuallyWeighted, "torchddp", {}),
        "manual sharded": (ManuallyWeighted, "torchddp_sharded", {}),
        "scheduled": (Weighted, "torchddp", {"callbacks": [scheduler]}),
        "compiled": (lambda: torch.compile(Weighted(), backend="eager"), "torchddp", accumulated),
        "installed": (Weighted, "ddp", accumulated),
    }
    for weighs in (False, True):
        Weighted.weighs = weighs
        for name, (make, strategy, options) in cases.items():
            module = make()
            with torchddp.install() if name == "installed" else nullcontext():
                fit(module, strategy if isinstance(strategy, str) else strategy(weighted=weighs), **options)
            results[name, weighs] = distance(module.net, net(), reference)
        module = TwoOptimizersWeighted()
        fit(module, "torchddp_find_unused_parameters_true")
        error = distance(module, TwoOptimizersWeighted(), one_process_of_two_optimizers())
        results["two optimizers", weighs] = error
        results["fabric", weighs] = under_fabric(fabric_training, weighed)
    results["page", True] = page()
    results["page of fabric", True] = under_fabric(fabric_training, page_of_fabric)
    said_of = {"lightning's": said(lambda: fit(Weighted(), "ddp")), "fabric": under_fabric(misuse_of_fabric)}
    return {"errors": results, "said": said_of}


if __name__ == "__main__":
    quiet()
    save_results(find)
