"""Help for the options of `torchddp doctor` and `torchddp build`, which argparse shows where typer is not installed."""

from torchddp.harness.model_names import MODEL_HELP as MODELS

JSON_HELP = "Print one JSON object."
MODEL_HELP = f"Show what each rank would own of this model: {MODELS}."
RANKS_HELP = "Number of ranks for --model."
KIND_HELP = "cpu or cuda. By default CUDA where torch has it and there is an nvcc."
