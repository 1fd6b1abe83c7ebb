"""Checkpoints from which a run resumes on any number of ranks.

On the same one or two ranks, the losses are bitwise those of an uninterrupted run. With three or more, the order in
which the backend adds the ranks' gradients may depend on the bucket layout, which a resumed run rebuilds.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch

from examples.gpt.errors import ExampleError

FORMAT = 2
_KEYS = {"format", "identity", "step", "model", "optimizers", "schedulers", "rng"}


def rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The state of this rank's random number generators, which dropout draws from."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Restore what `rng_state` returned."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write `content` atomically: `path` is always either the complete old checkpoint or the complete new one."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        with unfinished.open("wb") as file:
            torch.save({"format": FORMAT, **content}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        raise ExampleError(f"cannot write checkpoint {path}: {_first_line(error)}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def load_checkpoint(path: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """Read a checkpoint and check that it belongs to the run described by `identity`."""
    if not path.exists():
        raise ExampleError(f"no checkpoint at {path}: omit --resume to start from the beginning")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise ExampleError(f"bad checkpoint {path}: {_first_line(error)}") from error
    if not isinstance(content, dict) or not content.keys() >= _KEYS:
        raise ExampleError(f"bad checkpoint {path}: it was not written by this example")
    if content["format"] != FORMAT:
        raise ExampleError(f"bad checkpoint {path}: format {content['format']}, this example reads format {FORMAT}")
    require_same_run(path, content["identity"], identity)
    return content


def require_same_run(path: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    """Raise an error that names the first difference if a checkpoint belongs to another run."""
    for part, words in (("model", "another model"), ("training", "a run with other settings")):
        differing = _differences(there[part], here[part])
        if differing:
            raise ExampleError(f"checkpoint {path} belongs to {words}: {differing}")
    if there["data"] != here["data"]:
        digests = f"sha256 {there['data'][:12]}... there, {here['data'][:12]}... here"
        raise ExampleError(f"checkpoint {path} belongs to other data: {digests}")


def _differences(there: dict[str, Any], here: dict[str, Any]) -> str:
    names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    return ", ".join(f"{name} {there.get(name)} there, {here.get(name)} here" for name in names)


def _first_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
