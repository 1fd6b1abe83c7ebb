"""Runnable examples: `python -m examples.demo` and `torchrun --nproc-per-node 2 examples/train_gpt.py`."""
