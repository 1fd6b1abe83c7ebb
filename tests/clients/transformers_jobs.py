"""Trainer jobs of test_accelerate.py with a tiny model. As a program, runs these and the Accelerate jobs."""

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import torchddp
from tests.clients import accelerate_jobs
from tests.clients.accelerate_jobs import Jobs, Kind, model_of, reset, run_jobs

TOKENS, LENGTH = 48, 12
LOSSES = ("loss", "eval_loss", "grad_norm")


class Texts(torch.utils.data.Dataset):
    """Sequences in which each token determines the next."""

    def __init__(self, size: int) -> None:
        starts = torch.randint(TOKENS, (size, 1), generator=torch.Generator().manual_seed(size))
        self.ids = self.labels = (starts + 5 * torch.arange(LENGTH)) % TOKENS

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


class Branches(nn.Module):
    """A model that is no PreTrainedModel, with a layer that doesn't affect the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 8)
        self.head = nn.Linear(8, TOKENS)
        self.spare = nn.Linear(8, 8)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embedding(input_ids))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def llama(tokens: int = TOKENS, length: int = LENGTH, layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": layers, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=tokens, max_position_embeddings=length, **sizes))


def arguments(kind: Kind, **options: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {
        "output_dir": str(kind.folder / "trainer"),
        "per_device_train_batch_size": 2,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**{**defaults, **options})


STEPS = {"max_steps": 6, "gradient_accumulation_steps": 2, "learning_rate": 0.01, "max_grad_norm": 0.5}


def trained(
    kind: Kind, model: nn.Module | None = None, resume: str | None = None, own: Any = None, **options: Any
) -> dict[str, Any]:
    """Train, for our class with its `own` options."""
    before = torchddp.finished_steps()
    reset()
    args = arguments(kind, **{**STEPS, "logging_steps": 3, **options})
    job = Trainer(llama() if model is None else model, args, train_dataset=Texts(64), eval_dataset=Texts(10))
    with kind.wraps(**(own or {}) if kind.ours else {}):
        job.train(resume_from_checkpoint=resume)
    wrapped = job.model_wrapped
    return {
        "class": type(wrapped).__module__.partition(".")[0],
        "finds unused": wrapped.find_unused_parameters,
        "losses": [entry[key] for entry in job.state.log_history for key in LOSSES if key in entry],
        **model_of(job.model),
        "steps": torchddp.finished_steps() - before,
    }


def branches(kind: Kind, **options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    return trained(kind, Branches(), **options)


def checkpoints(kind: Kind) -> dict[str, Any]:
    """Both trainers resume from what one saved mid-training, and end with uninterrupted training's weights."""
    folder = kind.folder / f"saved_by_{kind.name}"
    ends = {"uninterrupted": trained(kind, output_dir=str(folder), save_strategy="steps", save_steps=3)}
    for name in ("torch", "ours"):
        resume = str(folder / "checkpoint-3")
        ends[f"resumed by {name}"] = trained(Kind(name, kind.folder), output_dir=str(folder), resume=resume)
    return ends


JOBS: Jobs = {
    # Accumulation, clipping, and evaluation in between.
    "trainer": partial(trained, eval_strategy="steps", eval_steps=2),
    "trainer_bf16": partial(trained, bf16=True, ddp_find_unused_parameters=False),
    "trainer_unused": partial(branches, ddp_find_unused_parameters=True, ddp_broadcast_buffers=False),
    "trainer_unused_by_default": branches,
    "trainer_own_options": partial(trained, own=accelerate_jobs.OWN_OPTIONS),
    "trainer_hook": lambda kind: trained(kind, own={"comm_hook": "bf16"}) if kind.ours else {},
    "checkpoints": checkpoints,
}

if __name__ == "__main__":
    run_jobs({**accelerate_jobs.JOBS, **JOBS})
