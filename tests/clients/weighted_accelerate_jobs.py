"""What test_accelerate_weights.py runs on two ranks: unequal tokens, microbatches and last batches under Accelerate and
the Trainer. "ours" weighs, "torch" does the same without; both are compared with one process with all tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from transformers import TrainingArguments

import torchddp
from tests.clients import transformers_jobs
from tests.clients.accelerate_jobs import Jobs, Kind, reset, run_jobs
from tests.clients.common import blocks, distance, said
from torchddp.integrations.accelerate import Accelerator, TorchDDPKwargs, TorchDDPTrainer, adopt, weigh

TOKENS, LENGTH, SIZE, BATCH = 32, 10, 19, 2  # ten batches, of which the last has one sample
ACCUMULATED = 3  # of five batches a rank: the last step of an epoch has two
RATE = 0.5
IGNORED = -100


class Texts(torch.utils.data.Dataset):
    """Of 0 to LENGTH tokens with labels; two samples that come in one batch have none."""

    def __init__(self, *unlabelled: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(TOKENS, (SIZE, LENGTH), generator=generator)
        self.labels = self.ids.clone()
        for row in range(SIZE):
            self.labels[row, : 1 + int(torch.randint(LENGTH - 1, (), generator=generator))] = IGNORED
        self.labels[8:10] = IGNORED  # rank 0's third microbatch
        self.labels[0] = self.ids[0]
        self.labels[list(unlabelled)] = IGNORED

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


class Net(nn.Module):
    """Its loss is the mean over the microbatch's own labels, whatever anybody else has: NaN without any."""

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
    """Trains a model with all tokens of each step; returns the losses."""
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


# --- Accelerate


def prepared(accelerator: Any) -> tuple[Any, Any, Any]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    return accelerator.prepare(model, optimizer, DataLoader(Texts(), batch_size=BATCH))


def loop(kind: Kind, accelerator: Any, loss_kind: str = "mean", function: bool = False) -> dict[str, Any]:
    model, optimizer, loader = prepared(accelerator)
    before = torchddp.finished_steps()
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                n = tokens(batch["labels"])
                if kind.ours:
                    (partial(weigh, accelerator) if function else accelerator.weigh)(model, n, loss=loss_kind)
                loss = loss_of(model(batch["input_ids"])["logits"], batch["labels"], loss_kind)
                # Without weights a microbatch without tokens must be left out by hand, or all is NaN.
                accelerator.backward(loss if kind.ours else loss.nan_to_num())
                optimizer.step()
                optimizer.zero_grad()
    data = Texts()
    batches = [data[i : i + BATCH] for i in range(0, SIZE, BATCH)]
    reference = Net()
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


def accelerate_scaled(kind: Kind) -> dict[str, Any]:
    """With a GradScaler, as for fp16."""
    accelerator = accelerator_of()
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return loop(kind, accelerator)


def accelerate_installed(kind: Kind) -> dict[str, Any]:
    with torchddp.install():
        return loop(kind, accelerator_of(cls=accelerate.Accelerator), function=True)


def misuse(kind: Kind) -> dict[str, Any]:
    if not kind.ours:
        return {}

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


# --- the Trainer


class Sequential(TorchDDPTrainer):
    """In the order of the samples; notes what it was given."""

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


def llama() -> nn.Module:
    return transformers_jobs.llama(TOKENS, LENGTH, layers=1)


def arguments(kind: Kind, **options: Any) -> TrainingArguments:
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
    return transformers_jobs.arguments(kind, **{**defaults, **options})


def trainer(
    kind: Kind,
    make: Callable[[], nn.Module],
    ddp_kwargs: Any = None,
    cls: type[Sequential] = Sequential,
    of_trainer: Any = None,
    data: Texts | None = None,
    **options: Any,
) -> Sequential:
    reset()
    weighted = {"weighted": True} if kind.ours else {}
    return cls(
        model=make(),
        args=arguments(kind, **options),
        train_dataset=data or Texts(),
        eval_dataset=Texts(),
        ddp_kwargs={**weighted, **(ddp_kwargs or {})},
        **(of_trainer or {}),
    )


def trained(kind: Kind, make: Callable[[], nn.Module], shift: Callable = lambda x: x, **options: Any) -> dict[str, Any]:
    job = trainer(kind, make, **options)
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
        "mean loss error": abs(job.state.log_history[-1]["train_loss"] / (sum(losses) / len(losses)) - 1),
        "steps": torchddp.finished_steps() - before,
        "gathers": job.gathers,
        "microbatches": [len(step) for step in job.seen],
        "averages across devices": job.args.average_tokens_across_devices,
    }


def compute_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    return loss_of(outputs["logits"], labels, "sum") / num_items_in_batch


class Shifting(Net):
    """Predicts the next token, which the trainer does not know of a model that is not its own."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return super().forward(input_ids, None if labels is None else shifted(labels))


class Counting(Sequential):
    def count_items(self, inputs: Any) -> torch.Tensor:
        return tokens(shifted(inputs["labels"]))


def trainer_folds(kind: Kind) -> dict[str, Any]:
    """Losses are logged rarely, so that ranks add up some of them before."""
    from torchddp.integrations.accelerate import token_weights

    token_weights._FOLD_STEPS, before = 2, token_weights._FOLD_STEPS
    try:
        job = trainer(kind, llama, logging_steps=3)
        job.train()
    finally:
        token_weights._FOLD_STEPS = before
    return {"losses": [entry["loss"] for entry in job.state.log_history if "loss" in entry]}


def no_nan(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Without weights a microbatch without labels must be left out by hand, or all is NaN."""

    def made() -> nn.Module:
        model = make()
        model.register_forward_hook(
            lambda module, inputs, output: {**output, "loss": output["loss"].nan_to_num()} if "loss" in output else None
        )
        return model

    return made


def nothing_at_all(kind: Kind) -> dict[str, Any]:
    """Steps without a label on any rank."""
    if not kind.ours:
        return {}

    unlabelled = Texts(*range(SIZE))
    job = trainer(kind, llama, data=unlabelled)
    error = said(job.train)
    other = trainer(kind, llama, {"zero_weights": "zeros"}, data=unlabelled)
    start = copy.deepcopy(other.model)
    other.train()
    same = all(torch.equal(a, b) for a, b in zip(other.model.parameters(), start.parameters(), strict=True))
    return {"said": error, "stays": same, "losses": [e["loss"] for e in other.state.log_history if "loss" in e]}


# --- docs/weighted_means.md


EVEN = 16  # samples: Accelerate repeats none


def of_the_page(kind: Kind, section: str, make: Callable[[], nn.Module], shift: Callable, **names: Any) -> Any:
    """The error of what the example trains, in one epoch of two steps."""
    if not kind.ours:
        return {}
    reset()
    data, model, reference = torch.utils.data.Subset(Texts(), range(EVEN)), make(), make()
    names = {"model": model, "data": data, **{name: value(model, data) for name, value in names.items()}}
    exec(blocks("weighted_means.md", section)[0], names)
    batches = [Texts()[i : i + BATCH] for i in range(0, EVEN, BATCH)]
    one_process(reference, [batches[:6], batches[6:]], shift)
    return {"error": distance(model, make(), reference)}


def page_accelerate(kind: Kind) -> dict[str, Any]:
    return of_the_page(
        kind,
        "Accelerate",
        Net,
        lambda labels: labels,
        optimizer=lambda model, _: torch.optim.SGD(model.parameters(), lr=RATE),
        loader=lambda _, data: DataLoader(data, batch_size=BATCH),
        mean_loss=lambda *_: lambda output, labels: loss_of(output["logits"], labels, "mean"),
    )


def page_trainer(kind: Kind) -> dict[str, Any]:
    args = arguments(kind, num_train_epochs=1)
    found = of_the_page(kind, "transformers Trainer", llama, shifted, args=lambda *_: args)
    names: dict[str, Any] = {"TorchDDPTrainer": TorchDDPTrainer}
    exec(blocks("weighted_means.md", "transformers Trainer")[1], names)
    pairs = torch.tensor([3, 4])
    return {**found, "items": int(names["Ranked"].count_items(None, {"pairs": pairs})), "pairs": int(pairs.sum())}


def counted(kind: Kind, **options: Any) -> dict[str, Any]:
    """The model takes num_items_in_batch; "torch": the trainer does not average over ranks either."""
    return trained(kind, llama, shifted, average_tokens_across_devices=kind.ours, **options)


def in_config(**accumulation: Any) -> dict[str, Any]:
    return {"even_batches": False, "gradient_accumulation_kwargs": accumulation}


JOBS: Jobs = {
    "accelerate_means": lambda kind: loop(kind, accelerator_of(TorchDDPKwargs(weighted=kind.ours))),
    "accelerate_sums": lambda kind: loop(kind, accelerator_of(), "sum"),
    "accelerate_compiled": lambda kind: loop(kind, accelerator_of(dynamo_backend="eager")),
    "accelerate_adopted": lambda kind: loop(kind, adopt(accelerator_of(cls=accelerate.Accelerator))),
    "trainer_counts": counted,
    "trainer_averages": lambda kind: trained(kind, llama, shifted),  # "torch": the trainer's own average over ranks
    "trainer_function": lambda kind: trained(
        kind, Net, of_trainer={"compute_loss_func": compute_loss}, average_tokens_across_devices=kind.ours
    ),
    "trainer_means": lambda kind: trained(kind, Net if kind.ours else no_nan(Net)),
    "trainer_syncs_each_batch": lambda kind: counted(kind, accelerator_config=in_config(sync_each_batch=True)),
    # Where the accelerator divides too.
    "trainer_num_steps": lambda kind: counted(
        kind, gradient_accumulation_steps=1, accelerator_config=in_config(num_steps=ACCUMULATED)
    ),
    # The loss of an evaluation is the trainer's own affair.
    "trainer_evaluates": lambda kind: {"loss": trainer(kind, llama, accelerator_config={}).evaluate()["eval_loss"]},
    # Rank 0 has no label in the first step.
    "trainer_idle_rank": lambda kind: trained(kind, llama, shifted, data=Texts(0, 1, 4, 5, 8, 9)) if kind.ours else {},
    "trainer_counts_itself": lambda kind: trained(
        kind, Shifting if kind.ours else no_nan(Shifting), shifted, cls=Counting
    ),
    **{
        job.__name__: job
        for job in (
            accelerate_scaled, accelerate_installed, misuse, trainer_folds, nothing_at_all,
            page_accelerate, page_trainer,
        )
    },
}  # fmt: skip

if __name__ == "__main__":
    run_jobs(JOBS)
