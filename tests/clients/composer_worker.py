"""One rank of tests/clients/test_composer.py, under torchrun: Composer's Trainer on torch's class and on ours."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.clients import composer_stubs
from tests.clients.common import digest, said, save_results

composer_stubs.install()

import composer  # noqa: E402
from composer.utils import dist as composer_dist  # noqa: E402

import torchddp  # noqa: E402
from torchddp.integrations import composer as ours  # noqa: E402

STRATEGIES = ("single_auto_sync", "multi_auto_sync", "forced_sync")
SAMPLES, BATCH, MICROBATCH = 64, 16, 4  # two ranks: two steps, of one or four microbatches per rank


class Net(composer.ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(5, 33), nn.Tanh(), nn.Linear(33, 1025), nn.Tanh(), nn.Linear(1025, 3))

    def forward(self, batch: list[Tensor]) -> Tensor:
        return self.net(batch[0])

    def loss(self, outputs: Tensor, batch: list[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])


class LeavesParametersUnused(composer.Algorithm):
    """An algorithm that makes Composer set find_unused_parameters=True, and does nothing else."""

    @property
    def find_unused_parameters(self) -> bool:
        return True

    def match(self, event: Any, state: Any) -> bool:
        return False

    def apply(self, event: Any, state: Any, logger: Any) -> None:
        pass


def train(strategy: str | None, microbatch: int, **options: Any) -> dict[str, Any]:
    """Train two epochs; return the weights and the wrapper's class."""
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(
        torch.randn(SAMPLES, 5, generator=generator), torch.randint(3, (SAMPLES,), generator=generator)
    )
    model = Net()
    loader = DataLoader(data, batch_size=BATCH, sampler=composer_dist.get_sampler(data, shuffle=True))
    before = torchddp.finished_steps()
    trainer = composer.Trainer(
        model=model,
        train_dataloader=loader,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        max_duration="2ep",
        device="cpu",
        device_train_microbatch_size=microbatch,
        ddp_sync_strategy=strategy,
        seed=17,
        progress_bar=False,
        auto_log_hparams=False,
        **options,
    )
    trainer.fit()
    found = {
        "class": f"{type(trainer.state.model).__module__}.{type(trainer.state.model).__qualname__}",
        "transport": trainer.state.model.session.options.transport if hasattr(trainer.state.model, "session") else None,
        "find_unused_parameters": trainer.state.model.find_unused_parameters,
        "steps": torchddp.finished_steps() - before,
        "weights": digest(model.named_parameters()),
    }
    trainer.close()
    return found


def find(folder: Path) -> dict[str, Any]:
    composer_dist.initialize_dist("cpu")
    cases = [(strategy, microbatch) for strategy in STRATEGIES for microbatch in (BATCH, MICROBATCH)]
    found: dict[str, Any] = {f"torch {s} {BATCH // m}": train(s, m) for s, m in cases}
    found["enabled before"] = ours.enabled()
    original = composer.trainer.trainer.prepare_ddp_module
    for strategy, microbatch in cases:
        with ours.enable():
            found[f"{strategy} {BATCH // microbatch}"] = train(strategy, microbatch)
    ours.enable(transport="c10d")
    with ours.enable(transport="shm"):  # the inner options, then the outer ones again
        found["shm"] = train("single_auto_sync", BATCH, algorithms=LeavesParametersUnused())
    found["c10d"] = train("single_auto_sync", BATCH)
    ours.disable()
    ours.disable()
    found["restored"] = {"same": composer.trainer.trainer.prepare_ddp_module is original, "enabled": ours.enabled()}
    found["restored"]["class"] = train("single_auto_sync", BATCH)["class"]
    with torchddp.install():
        found["install"] = train("single_auto_sync", MICROBATCH)
    return {**found, "unknown": said(lambda: ours.enable(transprot="shm"))}


if __name__ == "__main__":
    save_results(find)
