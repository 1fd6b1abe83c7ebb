"""The parts of the small byte-level GPT that `examples/train_gpt.py` trains."""
