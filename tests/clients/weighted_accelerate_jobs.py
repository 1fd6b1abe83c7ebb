"""Jobs of test_accelerate_weights.py on two ranks: unequal tokens, microbatches and last batches with Accelerate and
the Trainer, compared with one process with all tokens.
"""

from __future__ import annotations

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
from tests.clients.accelerate_jobs import Kind, reset
from tests.clients.common import blocks, distance, said, save_results
from torchddp.integrations.accelerate import Accelerator, TorchDDPKwargs, TorchDDPTrainer, adopt, token_weights, weigh

TOKENS, LENGTH, SIZE, BATCH = 32, 10, 19, 2  # ten batches, of which the last has one sample
ACCUMULATED = 3  # of five batches per rank: an epoch's last step has two
RATE = 0.5
IGNORED = -100


class Texts(torch.utils.data.Dataset):
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

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


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


Steps = list[list[dict[str, torch.Tensor]]]


def one_process(model: nn.Module, steps: Steps, shift: Callable = lambda labels: labels) -> list[float]:
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


def loop(weighs: bool, accelerator: Any, loss_kind: str = "mean", give_weight: Any = None) -> dict[str, Any]:
    give_weight = give_weight or accelerator.weigh
    model, optimizer, loader = prepared(accelerator)
    before = torchddp.finished_steps()
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                if weighs:
                    give_weight(model, tokens(batch["labels"]), loss=loss_kind)
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


def accelerator_of(*handlers: Any, cls: Any = Accelerator, **options: Any) -> Any:
    reset()
    config = accelerate.DataLoaderConfiguration(even_batches=False)
    given = {"gradient_accumulation_steps": ACCUMULATED, "dataloader_config": config, **options}
    return cls(kwargs_handlers=list(handlers), **given)


def loops(weighs: bool = True) -> dict[str, Any]:
    run = partial(loop, weighs)
    scaled = accelerator_of()
    scaled.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # like fp16 training
    found = {"scaled": run(scaled)}
    found["means"] = run(accelerator_of(TorchDDPKwargs(weighted=weighs)))
    found["sums"] = run(accelerator_of(), "sum")
    found["compiled"] = run(accelerator_of(dynamo_backend="eager"))
    found["adopted"] = run(adopt(accelerator_of(cls=accelerate.Accelerator)))
    with torchddp.install():
        plain = accelerator_of(cls=accelerate.Accelerator)
        found["installed"] = run(plain, give_weight=partial(weigh, plain))
    return found


def misuse() -> dict[str, str]:
    accelerator = accelerator_of()
    model = prepared(accelerator)[0]
    found = {
        "bare": said(lambda: weigh(accelerator, model.module, 1)),
        "negative": said(lambda: weigh(accelerator, model, -1)),
    }
    plain = accelerator_of(cls=accelerate.Accelerator)
    found["torch's"] = said(lambda: weigh(plain, prepared(plain)[0], 1))
    accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True
    found["each batch"] = said(lambda: weigh(accelerator, model, 1))
    return found


class Noting:
    """Records a trainer's microbatches and the number of its gathers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: Steps = []
        self.gathers = 0
        gather = self.accelerator.gather

        def counted(tensor: Any) -> Any:
            self.gathers += 1
            return gather(tensor)

        self.accelerator.gather = counted

    def get_batch_samples(self, *args: Any) -> Any:
        batches, n = super().get_batch_samples(*args)
        self.seen.append([{key: value.clone() for key, value in batch.items()} for batch in batches])
        return batches, n


class Weighted(Noting, TorchDDPTrainer):
    pass


class Plain(Noting, Trainer):
    """transformers' own Trainer."""


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


def trainer(
    make: Callable[[], nn.Module] = llama,
    cls: type = Weighted,
    data: Texts | None = None,
    compute_loss_func: Any = None,
    zero_weights: str = "raise",
    **options: Any,
) -> Any:
    reset()
    weighted = {"ddp_kwargs": {"weighted": True, "zero_weights": zero_weights}} if cls is not Plain else {}
    return cls(
        model=make(),
        args=arguments(**options),
        train_dataset=data or Texts(),
        eval_dataset=Texts(),
        compute_loss_func=compute_loss_func,
        **weighted,
    )


def logged(job: Trainer) -> list[float]:
    return [entry["loss"] for entry in job.state.log_history if "loss" in entry]


def trained(make: Callable[[], nn.Module] = llama, shift: Callable | None = None, **options: Any) -> dict[str, Any]:
    job = trainer(make, **options)
    start = copy.deepcopy(job.model)
    before = torchddp.finished_steps()
    job.train()
    steps: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(steps, job.seen)
    together = [[batch for rank in step for batch in rank] for step in zip(*steps, strict=True)]
    reference = copy.deepcopy(start)
    losses = one_process(reference, together, shift or (shifted if make is llama else lambda labels: labels))
    return {
        "error": distance(job.model, start, reference),
        "loss error": max(abs(a - b) / b for a, b in zip(logged(job), losses, strict=True)),
        "mean loss error": abs(job.state.log_history[-1]["train_loss"] / (sum(losses) / len(losses)) - 1),
        "steps": torchddp.finished_steps() - before,
        "gathers": job.gathers,
        "microbatches": [len(step) for step in job.seen],
        "averages across devices": job.args.average_tokens_across_devices,
    }


def compute_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    return loss_of(outputs["logits"], labels, "sum") / num_items_in_batch


class Shifting(Net):
    """A model that predicts the next token, which the Trainer can't know of a custom model."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return super().forward(input_ids, None if labels is None else shifted(labels))


class Counting(Weighted):
    def count_items(self, inputs: Any) -> torch.Tensor:
        return tokens(shifted(inputs["labels"]))


def trainings() -> dict[str, Any]:
    each_batch, num_steps = (
        {"even_batches": False, "gradient_accumulation_kwargs": given}
        for given in ({"sync_each_batch": True}, {"num_steps": ACCUMULATED})
    )
    return {
        "counts": trained(),  # the model takes num_items_in_batch
        "means": trained(Net),
        "counts_itself": trained(Shifting, shifted, cls=Counting),
        "function": trained(Net, compute_loss_func=compute_loss),
        "syncs_each_batch": trained(accelerator_config=each_batch),
        # The accelerator divides too.
        "num_steps": trained(gradient_accumulation_steps=1, accelerator_config=num_steps),
        # Rank 0 has no labels in the first step.
        "idle_rank": trained(data=Texts(0, 1, 4, 5, 8, 9)),
        "plain": trained(cls=Plain, average_tokens_across_devices=False),
        "plain, averages": trained(cls=Plain),
    }


def folds() -> dict[str, Any]:
    """Losses are logged rarely, so ranks sum several of them first."""
    weighted = trainer(logging_steps=3)
    token_weights._FOLD_STEPS, before = 2, token_weights._FOLD_STEPS
    try:
        weighted.train()
    finally:
        token_weights._FOLD_STEPS = before
    plain = trainer(cls=Plain, logging_steps=3)
    plain.train()
    return {"weighted": logged(weighted), "plain": logged(plain)}


def evaluations() -> list[float]:
    """Evaluation, which the Trainer handles itself."""
    return [trainer(cls=cls, accelerator_config={}).evaluate()["eval_loss"] for cls in (Weighted, Plain)]


def nothing_at_all() -> dict[str, Any]:
    """Steps without a label on any rank."""
    unlabeled = Texts(*range(SIZE))
    error = said(trainer(data=unlabeled).train)
    other = trainer(data=unlabeled, zero_weights="zeros")
    start = copy.deepcopy(other.model)
    other.train()
    same = all(torch.equal(a, b) for a, b in zip(other.model.parameters(), start.parameters(), strict=True))
    return {"said": error, "stays": same, "losses": logged(other)}


EVEN = 16  # samples, which divide evenly: Accelerate repeats none


def of_the_page(section: str, make: Callable[[], nn.Module], shift: Callable, **names: Any) -> float:
    """The error of the example's weights after one epoch of two steps."""
    reset()
    data, model, reference = torch.utils.data.Subset(Texts(), range(EVEN)), make(), make()
    names = {"model": model, "data": data, **names}
    if section == "Accelerate":
        names["optimizer"] = torch.optim.SGD(model.parameters(), lr=RATE)
        names["loader"] = DataLoader(data, batch_size=BATCH)
    exec(blocks("weighted_means.md", section)[0], names)
    batches = [Texts()[i : i + BATCH] for i in range(0, EVEN, BATCH)]
    one_process(reference, [batches[:6], batches[6:]], shift)
    return distance(model, make(), reference)


def page() -> dict[str, Any]:
    def mean_loss(output: Any, labels: torch.Tensor) -> torch.Tensor:
        return loss_of(output["logits"], labels, "mean")

    names: dict[str, Any] = {"TorchDDPTrainer": TorchDDPTrainer}
    exec(blocks("weighted_means.md", "transformers Trainer")[1], names)
    return {
        "accelerate": of_the_page("Accelerate", Net, lambda labels: labels, mean_loss=mean_loss),
        "trainer": of_the_page("transformers Trainer", llama, shifted, args=arguments(num_train_epochs=1)),
        "items": int(names["Ranked"].count_items(None, {"pairs": torch.tensor([3, 4])})),
    }


def find(folder: Path) -> dict[str, Any]:
    accelerate.PartialState(cpu=True)
    jobs = (loops, misuse, trainings, folds, evaluations, nothing_at_all, page)
    results = {job.__name__: job() for job in jobs} | {"loops without weights": loops(weighs=False)}
    dist.barrier()
    dist.destroy_process_group()
    return results


if __name__ == "__main__":
    save_results(find)
