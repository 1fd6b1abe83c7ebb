"""The names of models that commands take. Imports neither torch nor typer."""

from torchddp.harness.variants import ArgumentError

# The built-in models, in torchddp.harness.models.
MODEL_NAMES = ("small", "mlp", "gpt", "conv", "gpt2")
MODEL_HELP = f"{', '.join(MODEL_NAMES)}, or your own: package.module:factory or file.py:factory"


def check_model_name(model: str) -> str:
    """Return the name if it is a built-in model's or may be a factory's; ArgumentError otherwise."""
    if model in MODEL_NAMES or ":" in model:
        return model
    if model.endswith(".py"):
        raise ArgumentError(f"--model {model}: also name the function that makes the model, like {model}:make.")
    raise ArgumentError(
        f"There is no model '{model}'; choose from {', '.join(MODEL_NAMES)}, or name your own: "
        "package.module:factory or file.py:factory."
    )
