"""Train a tiny language model with the transformers Trainer and torchddp. Nothing is downloaded: the model is built
from a config and learns the bytes of these examples' source files.

    ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 examples/train_transformers.py
    ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 examples/train_transformers.py --comm-hook bf16 --output runs
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not __package__:  # started by path, as torchrun does: make `examples` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import torchddp
from examples.gpt.data import load_corpus
from examples.gpt.errors import ExampleError

BLOCK = 32


class Windows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Non-overlapping windows of ``BLOCK`` bytes."""

    def __init__(self, text: torch.Tensor) -> None:
        self.windows = text[: len(text) // BLOCK * BLOCK].view(-1, BLOCK).long()

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)
    set_seed(0)
    try:
        corpus = load_corpus(arguments.data, BLOCK)
    except ExampleError as error:
        sys.exit(f"error: {error}")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=BLOCK, **sizes))
    with tempfile.TemporaryDirectory() as scratch:
        training = TrainingArguments(
            output_dir=str(arguments.output or scratch),
            max_steps=arguments.steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=arguments.accumulate,
            learning_rate=3e-3,
            ddp_find_unused_parameters=False,  # the default searches for them in every step
            save_strategy="steps" if arguments.output else "no",
            save_steps=arguments.steps,
            logging_steps=max(1, arguments.steps // 4),
            report_to=[],
            disable_tqdm=True,
            use_cpu=os.environ.get("ACCELERATE_USE_CPU") == "true",
        )
        data = {"train_dataset": Windows(corpus.train), "eval_dataset": Windows(corpus.validation[: 64 * BLOCK])}
        if not arguments.torch_ddp:
            torchddp.install(comm_hook=arguments.comm_hook)
        trainer = Trainer(model=model, args=training, **data)
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
    weights = sum(float(p.detach().double().abs().sum()) for p in model.parameters())
    print(json.dumps({"eval_loss": loss, "weights": weights, "reduced_steps": torchddp.finished_steps()}), flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps")
    parser.add_argument("--accumulate", type=int, default=2, help="microbatches per step")
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "gpt", help="a file or folder of text")
    parser.add_argument("--comm-hook", help="how gradients are compressed: fp16, bf16, int8, powersgd, ...")
    parser.add_argument("--output", type=Path, help="folder for the last checkpoint")
    parser.add_argument("--torch-ddp", action="store_true", help="use torch's class, for comparison")
    return parser.parse_args()


if __name__ == "__main__":
    main()
