"""Jobs of test_accelerate_weights.py on two ranks: unequal tokens, microbatches and last batches with Accelerate and
the Trainer, compared with one process with all tokens.
"""

import copy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import torchddp
from tests.clients import transformers_jobs
from tests.clients.accelerate_jobs import Kind, accelerator_of, reset
from tests.clients.common import distance, said, save_results
from tests.pages import blocks_of
from torchddp.integrations.accelerate import TorchDDPKwargs, weigh

TOKENS, LENGTH, SIZE, BATCH = 32, 10, 19, 2  # ten batches, of which the last has one sample
ACCUMULATED = 3  # of five batches per rank: an epoch's last step has two
RATE = 0.5
IGNORED = -100


class Texts(transformers_jobs.Texts):
    """Samples with 0 to LENGTH labeled tokens; two samples of one batch have none."""

    def __init__(self, *unlabeled: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(TOKENS, (SIZE, LENGTH), generator=generator)
        self.labels = self.ids.clone()
        for row in range(SIZE):
            self.labels[row, : 1 + int(torch.randint(LENGTH - 1, (), generator=generator))] = IGNORED
        self.labels[8:10] = IGNORED  # rank 0's third microbatch
        self.labels[0] = self.ids[0]
        self.labels[list(unlabeled)] = IGNORED


class Net(nn.Module):
    """A model whose loss is the mean over the microbatch's own labels: NaN without any."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(TOKENS, 16)
        self.hidden = nn.Linear(16, 64)
        self.head = nn.Linear(64, TOKENS)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.head(self.hidden(self.embedding(input_ids)).tanh())
        return {"loss": loss_of(logits, labels, "mean"), "logits": logits} if labels is not None else {"logits": logits}


def loss_of(logits: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction=reduction
    )


def tokens(labels: torch.Tensor) -> torch.Tensor:
    return labels.ne(IGNORED).sum()


def shifted(labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def unshifted(labels: torch.Tensor) -> torch.Tensor:
    return labels


Steps = list[list[dict[str, torch.Tensor]]]


def one_process(model: nn.Module, steps: Steps, shift: Callable = unshifted) -> list[float]:
    """Train a model with all tokens of each step; return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for batches in steps:
        optimizer.zero_grad()
        sums = [loss_of(model(b["input_ids"])["logits"].float(), shift(b["labels"]), "sum") for b in batches]
        loss = torch.stack(sums).sum() / sum(int(tokens(shift(b["labels"]))) for b in batches)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def prepared(accelerator: Any) -> tuple[Any, Any, Any]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    return accelerator.prepare(model, optimizer, DataLoader(Texts(), batch_size=BATCH))


def loop(weighs: bool, accelerator: Any, loss_kind: str = "mean") -> dict[str, Any]:
    model, optimizer, loader = prepared(accelerator)
    before = torchddp.finished_steps()
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                if weighs:
                    weigh(accelerator, model, tokens(batch["labels"]), loss=loss_kind)
                loss = loss_of(model(batch["input_ids"])["logits"], batch["labels"], loss_kind)
                accelerator.backward(loss if weighs else loss.nan_to_num())
                optimizer.step()
                optimizer.zero_grad()
    data, reference = Texts(), Net()
    batches = [data[i : i + BATCH] for i in range(0, SIZE, BATCH)]
    one_process(reference, [batches[:6], batches[6:]] * 2)
    return {
        "error": distance(accelerator.unwrap_model(model, keep_torch_compile=False), Net(), reference),
        "steps": torchddp.finished_steps() - before,
    }


def accumulating(handler: Any = None, **options: Any) -> Any:
    config = accelerate.DataLoaderConfiguration(even_batches=False)
    return accelerator_of(handler, gradient_accumulation_steps=ACCUMULATED, dataloader_config=config, **options)


def loops(weighs: bool = True) -> dict[str, Any]:
    run = partial(loop, weighs)
    scaled = accumulating()
    scaled.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # like fp16 training
    found = {"scaled": run(scaled)}
    found["means"] = run(accumulating(TorchDDPKwargs(weighted=weighs)))
    found["sums"] = run(accumulating(), "sum")
    found["compiled"] = run(accumulating(dynamo_backend="eager"))
    return found


def misuse() -> dict[str, str]:
    accelerator = accumulating()
    model = prepared(accelerator)[0]
    found = {
        "bare": said(lambda: weigh(accelerator, model.module, 1)),
        "negative": said(lambda: weigh(accelerator, model, -1)),
    }
    with torchddp.uninstall():
        plain = accumulating()
        found["torch's"] = said(lambda: weigh(plain, prepared(plain)[0], 1))
    accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True
    found["each batch"] = said(lambda: weigh(accelerator, model, 1))
    return found


class Noting(Trainer):
    """Records its microbatches."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: Steps = []

    def get_batch_samples(self, *args: Any) -> Any:
        batches, n = super().get_batch_samples(*args)
        self.seen.append([{key: value.clone() for key, value in batch.items()} for batch in batches])
        return batches, n


def llama() -> nn.Module:
    return transformers_jobs.llama(TOKENS, LENGTH, layers=1)


def arguments(**options: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {
        "num_train_epochs": 2,
        "gradient_accumulation_steps": ACCUMULATED,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 1000.0,
        "train_sampling_strategy": "sequential",
        "accelerator_config": {"even_batches": False},
        "logging_steps": 1,
        "ddp_find_unused_parameters": False,
    }
    return transformers_jobs.arguments(Kind("ours", Path(sys.argv[1])), **{**defaults, **options})


def trained(
    make: Callable[[], nn.Module] = llama,
    shift: Callable = shifted,
    data: Texts | None = None,
    compute_loss_func: Any = None,
) -> dict[str, Any]:
    reset()
    job = Noting(make(), arguments(), train_dataset=data or Texts(), compute_loss_func=compute_loss_func)
    start = copy.deepcopy(job.model)
    before = torchddp.finished_steps()
    job.train()
    steps: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(steps, job.seen)
    together = [[batch for rank in step for batch in rank] for step in zip(*steps, strict=True)]
    reference = copy.deepcopy(start)
    losses = one_process(reference, together, shift)
    logged = [entry["loss"] for entry in job.state.log_history if "loss" in entry]
    return {
        "error": distance(job.model, start, reference),
        "loss error": max(abs(a - b) / b for a, b in zip(logged, losses, strict=True)),
        "steps": torchddp.finished_steps() - before,
        "microbatches": [len(step) for step in job.seen],
    }


def compute_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    return loss_of(outputs["logits"], labels, "sum") / num_items_in_batch


def trainings() -> dict[str, Any]:
    return {
        "counts": trained(),  # the model takes num_items_in_batch
        "function": trained(Net, unshifted, compute_loss_func=compute_loss),
        # Rank 0 has no labels in the first step.
        "idle_rank": trained(data=Texts(0, 1, 4, 5, 8, 9)),
        "means": trained(Net, unshifted),
    }


EVEN = 16  # samples, which divide evenly: Accelerate repeats none


def of_the_page(section: str, **names: Any) -> float:
    """The error of the example's weights after one epoch of two steps."""
    reset()
    data, model, reference = torch.utils.data.Subset(Texts(), range(EVEN)), Net(), Net()
    names = {"model": model, "data": data, **names}
    if section == "Accelerate":
        names["optimizer"] = torch.optim.SGD(model.parameters(), lr=RATE)
        names["loader"] = DataLoader(data, batch_size=BATCH)
    exec(blocks_of("weighted_means.md", section)[0], names)
    batches = [Texts()[i : i + BATCH] for i in range(0, EVEN, BATCH)]
    one_process(reference, [batches[:6], batches[6:]])
    return distance(model, Net(), reference)


def page() -> dict[str, float]:
    def mean_loss(output: Any, labels: torch.Tensor) -> torch.Tensor:
        return loss_of(output["logits"], labels, "mean")

    return {
        "accelerate": of_the_page("Accelerate", mean_loss=mean_loss),
        "trainer": of_the_page("transformers Trainer", args=arguments(num_train_epochs=1)),
    }


def find(folder: Path) -> dict[str, Any]:
    accelerate.PartialState(cpu=True)
    with torchddp.install():
        results = {job.__name__: job() for job in (loops, misuse, trainings, page)}
        results["loops without weights"] = loops(weighs=False)
    dist.barrier()
    dist.destroy_process_group()
    return results


if __name__ == "__main__":
    save_results(find)
