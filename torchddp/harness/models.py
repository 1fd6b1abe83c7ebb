"""Loads models to time: built-in ones, or the user's own at `package.module:factory` or `file.py:factory`."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchddp.harness import networks
from torchddp.harness.launch import ModelSettings
from torchddp.harness.variants import ArgumentError, describe_error, one_line

if TYPE_CHECKING:
    from torchddp.ddp.module import DistributedDataParallel
    from torchddp.ddp.options import TransportChoice

_ARGUMENTS = "; a batch holds only the module's arguments: use labels in the loss"
_OUTPUT = "; the loss gets only the module's output"
CONTRACT = (
    "it must return (module, batch) or (module, batch, loss): batch is a tensor, a tuple or dict of the module's "
    "arguments, or a function of a torch.Generator that makes one; loss is a function of the module's output"
)


def output_is_loss(output: Tensor) -> Tensor:
    """For a module that returns its loss."""
    return output


@dataclass(frozen=True)
class ModelSpec:
    title: str
    build: Callable[[], nn.Module]
    make_batch: Callable[[torch.Generator], Any]
    loss: Callable[[Any], Tensor] = output_is_loss
    # Whether ranks get different batches. If not, their gradients are equal, and averaging them proves nothing.
    batches_differ: bool = True


def run_forward(module: nn.Module, batch: object) -> Any:
    """The module's output for a batch: a tensor, or a tuple or dict of its arguments."""
    if isinstance(batch, dict):
        return module(**batch)
    return module(*batch) if isinstance(batch, (tuple, list)) else module(batch)


def default_loss(output: object) -> Tensor:
    """A scalar to differentiate: `output.loss`, `output["loss"]`, or the mean of the (first) tensor."""
    if isinstance(output, dict) and "loss" in output:
        output = output["loss"]
    output = getattr(output, "loss", output)
    if isinstance(output, dict):
        output = tuple(output.values())
    if isinstance(output, (tuple, list)):
        output = next((item for item in output if isinstance(item, Tensor) and item.requires_grad), None)
    if not isinstance(output, Tensor):
        raise TypeError(f"found no tensor to differentiate in the model's output, a {type(output).__name__}")
    return output if output.dim() == 0 else output.float().mean()


def _noise(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(shape, generator=generator)


def _tokens(vocabulary: int, length: int) -> Callable[[torch.Generator], Tensor]:
    # One more than the model sees, because each token but the first is a target.
    return lambda generator: torch.randint(0, vocabulary, (1, length + 1), generator=generator)


MODELS: dict[str, ModelSpec] = {
    "small": ModelSpec("small tensors", networks.ManySmallTensors, _noise(networks.SMALL_NUMEL)),
    "mlp": ModelSpec("MLP 6 x 1024x1024", networks.Mlp, _noise(32, 1024)),
    "gpt": ModelSpec("small GPT", networks.Gpt, _tokens(256, 64)),
    "conv": ModelSpec("batch-norm conv net", networks.ConvNet, _noise(8, 3, 32, 32)),
    # Small images and short texts, so that a step on one core takes at most a second.
    "gpt2": ModelSpec("GPT-2 small", networks.gpt2, _tokens(networks.GPT2_VOCABULARY, 32)),
}


def make_model(name: str, seed: int = 0) -> nn.Module:
    """A model with the same weights on every rank."""
    spec = find_model(name, seed)
    torch.manual_seed(seed)
    return spec.build()


def make_batch(name: str, seed: int, rank: int, index: int) -> object:
    """Batch `index` of a rank. Ranks see different data, so that gradients must really be averaged."""
    generator = torch.Generator().manual_seed(seed + 1000 * rank + index)
    return find_model(name, seed).make_batch(generator)


def find_model(name: str, seed: int = 0) -> ModelSpec:
    return load_factory(name, seed) if ":" in name else MODELS[name]


def describe_model(name: str, model: nn.Module, seed: int = 0) -> dict[str, Any]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return {
        "model": name,
        "title": find_model(name, seed).title,
        "parameters": len(parameters),
        "gradient_bytes": sum(p.numel() * p.element_size() for p in parameters),
    }


def find_factory(path: str) -> Callable[[], Any]:
    """The callable at `package.module:name` or `file.py:name`; ArgumentError in one sentence if there is none."""
    module_name, _, name = path.rpartition(":")
    if not module_name or not name:
        raise ArgumentError(
            f"--model must be a built-in model, package.module:factory or file.py:factory, not '{path}'."
        )
    is_file = module_name.endswith(".py")
    if is_file and not Path(module_name).is_file():
        raise ArgumentError(f"--model {path}: there is no file '{module_name}'.")
    folder = str(Path(module_name).resolve().parent) if is_file else os.getcwd()
    if folder not in sys.path and ("" not in sys.path or folder != os.getcwd()):
        sys.path.insert(0, folder)  # as `python file.py` and `python -m` do; the installed command does not
    try:
        module = _load_file(Path(module_name)) if is_file else importlib.import_module(module_name)
    except Exception as error:  # importing the user's code may raise anything
        raise ArgumentError(f"--model {path}: cannot import '{module_name}': {describe_error(error)}.") from error
    found = module
    for part in name.split("."):
        found = getattr(found, part, None)  # type: ignore[assignment]
    if not callable(found):
        raise ArgumentError(f"--model {path}: module '{module_name}' has no function or class named '{name}'.")
    return found


@functools.cache
def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickle look classes up there
    spec.loader.exec_module(module)
    return module


@functools.cache
def load_factory(path: str, seed: int = 0) -> ModelSpec:
    """Call the factory, once per process; ArgumentError in one sentence if it raises or returns something else."""
    factory = find_factory(path)
    torch.manual_seed(seed)
    try:
        made = factory()
    except Exception as error:
        raise ArgumentError(f"--model {path}: the factory raised {describe_error(error)}.") from error
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        raise ArgumentError(f"--model {path}: the factory returned {_a(made)}; {CONTRACT}.")
    module, batch, loss = (*made, default_loss)[:3]
    if not any(p.requires_grad for p in module.parameters()):
        raise ArgumentError(f"--model {path}: no parameter of the module requires a gradient.")
    if not callable(loss):
        raise ArgumentError(f"--model {path}: the factory's loss is {_a(loss)}; {CONTRACT}.")
    if callable(batch) and not isinstance(batch, Tensor):
        return ModelSpec(path, lambda: module, batch, loss)
    if not isinstance(batch, (Tensor, tuple, list, dict)):
        raise ArgumentError(f"--model {path}: the factory's batch is {_a(batch)}; {CONTRACT}.")
    return ModelSpec(path, lambda: module, lambda generator: batch, loss, batches_differ=False)


def _a(thing: object) -> str:
    name = type(thing).__name__
    members = f" ({', '.join(type(each).__name__ for each in thing)})" if isinstance(thing, tuple) else ""
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}{members}"


def _is_miscall(error: Exception) -> bool:
    return isinstance(error, TypeError) and "positional argument" in str(error)


def prove(name: str, seed: int = 0, *, find_unused_parameters: bool = False) -> None:
    """Run one step. ArgumentError if it fails, or leaves a parameter without a gradient, which DDP would wait for."""

    def refuse(problem: str, error: Exception | None = None) -> NoReturn:
        raise ArgumentError(f"--model {name}: {problem}.") from error

    model = make_model(name, seed)
    try:
        output = run_forward(model, make_batch(name, seed, dist.get_rank(), 0))
    except Exception as error:  # the user's code may raise anything
        refuse(f"forward raised {describe_error(error)}{_ARGUMENTS if _is_miscall(error) else ''}", error)
    try:
        loss = find_model(name, seed).loss(output)
    except Exception as error:
        refuse(f"the loss raised {describe_error(error)}{_OUTPUT if _is_miscall(error) else ''}", error)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        got = f"one of shape {list(loss.shape)}" if isinstance(loss, Tensor) and loss.requires_grad else _a(loss)
        refuse(f"the loss must be a scalar tensor that requires a gradient, not {got}")
    try:
        loss.backward()
    except Exception as error:
        refuse(f"backward raised {describe_error(error)}", error)
    for path, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            refuse(f"parameter '{path}' has a sparse gradient, which these commands cannot time")
        if parameter.requires_grad and parameter.grad is None and not find_unused_parameters:
            advice = "if that is intended, add --find-unused-parameters"
            refuse(f"parameter '{path}' got no gradient, and DDP would wait for it; {advice}")
    model.zero_grad(set_to_none=True)


@dataclass(frozen=True)
class Subject:
    """A wrapped model and its step: zero the gradients, forward, backward. `step(i)` uses this rank's batch i."""

    model: DistributedDataParallel
    device: torch.device
    step: Callable[[int], None]


def make_subject(settings: ModelSettings, bucket_cap_mb: float | None = None) -> Subject:
    """Wrap a built-in model, or the user's own at `package.module:factory`. Collective. ArgumentError if that fails."""
    from torchddp.ddp.module import DistributedDataParallel
    from torchddp.errors import TransportError

    name, rank = settings.model, dist.get_rank()
    if ":" in name:
        prove(name, find_unused_parameters=settings.find_unused_parameters)
    module = make_model(name)
    device = torch.device("cpu")
    if dist.get_backend() == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
        module.to(device)
    try:
        model = DistributedDataParallel(
            module,
            device_ids=None if device.index is None else [device.index],  # it moves batches there, too
            bucket_cap_mb=bucket_cap_mb,
            transport=cast("TransportChoice", settings.transport),
            find_unused_parameters=settings.find_unused_parameters,
        )
    except (ValueError, RuntimeError) as error:
        if settings.transport == "auto" or isinstance(error, TransportError):
            raise
        raise ArgumentError(f"--transport {settings.transport}: {one_line(error)}.") from error
    loss_of = find_model(name).loss

    # A repeated step must not include the time to make a batch.
    batch = functools.lru_cache(maxsize=2)(functools.partial(make_batch, name, 0, rank))

    def step(index: int) -> None:
        model.zero_grad(set_to_none=True)
        loss_of(run_forward(model, batch(index))).backward()

    return Subject(model, device, step)
