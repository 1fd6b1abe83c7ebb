"""Accelerate jobs of test_accelerate.py on two ranks: each runs with torch's class and, after torchddp.install(), ours
in the same processes.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.local_sgd import LocalSGD
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, extract_model_from_parallel
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchddp
from tests.clients.common import digest, save_results
from torchddp import Checks
from torchddp.integrations.accelerate import TorchDDPKwargs

LENGTH, BATCH = 40, 4  # five batches per rank


class Net(nn.Module):
    """Layers of several sizes, buffers, and a part that may be unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 1)
        self.spare = nn.Linear(6, 16)

    def forward(self, x: torch.Tensor, spare: bool = True) -> torch.Tensor:
        hidden = self.norm(self.first(x)).relu()
        if spare:
            hidden = hidden + self.spare(x)
        return self.last(hidden)


class Kind:
    """The class that models are wrapped in: "torch", or "ours" with torchddp installed."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.ours = name == "ours"

    def wraps(self, **options: Any) -> AbstractContextManager[Any]:
        """A context in which Accelerate wraps in this class; the options are torchddp's."""
        return torchddp.install(**options) if self.ours else torchddp.uninstall()


def reset() -> None:
    AcceleratorState._reset_state()
    GradientState._reset_state()


def accelerator_of(handler: Any = None, **options: Any) -> Any:
    reset()
    return accelerate.Accelerator(kwargs_handlers=None if handler is None else [handler], **options)


def prepared(accelerator: Any) -> tuple[Any, Any, Any]:
    x = torch.randn(LENGTH, 6, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, x.square().sum(1, keepdim=True)), batch_size=BATCH)
    torch.manual_seed(0)
    model = Net()
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), loader)


def model_of(model: nn.Module) -> dict[str, str]:
    """Digests of the state. Ranks agree on weights, but not on BatchNorm's statistics of local batches."""
    bare = extract_model_from_parallel(model, keep_torch_compile=False)
    return {"weights": digest(bare.named_parameters()), "own buffers": digest(bare.named_buffers())}


def fit(accelerator: Any, model: Any, optimizer: Any, loader: Any, epochs: int = 2, **forward: Any) -> None:
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = (model(x, **forward) - y).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()


def results_of(model: Any, before: int) -> dict[str, Any]:
    name = type(getattr(model, "_orig_mod", model)).__module__.partition(".")[0]
    return {"class": name, **model_of(model), "steps": torchddp.finished_steps() - before}


def trained(kind: Kind, *, own: Any = None, handler: Any = None, spare: bool = True, **options: Any) -> dict[str, Any]:
    """Train with a handler of Accelerate's for both classes, or with `own` options, only for ours."""
    before = torchddp.finished_steps()
    if own is not None and kind.ours:
        handler = TorchDDPKwargs(**own)
    accelerator = accelerator_of(handler, **options)
    model, optimizer, loader = prepared(accelerator)
    fit(accelerator, model, optimizer, loader, spare=spare)
    return results_of(model, before)


def named_hooks(kind: Kind) -> dict[str, Any]:
    """Only for ours: hooks that torch's class refuses on CPU, and hooks by name."""
    handlers = {
        "bf16": DistributedDataParallelKwargs(comm_hook=HOOK.BF16),
        "named": TorchDDPKwargs(comm_hook="bf16"),
        "int8": TorchDDPKwargs(comm_hook="int8"),
    }
    return {name: trained(kind, handler=handler) for name, handler in handlers.items()} if kind.ours else {}


def local_sgd(kind: Kind) -> dict[str, Any]:
    before = torchddp.finished_steps()
    accelerator = accelerator_of()
    model, optimizer, loader = prepared(accelerator)
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=True) as local:
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward((model(x) - y).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                local.step()
    inside = {"steps inside": torchddp.finished_steps() - before, "inside": model_of(model)}
    # Steps are reduced again from different copies: each rank has the optimizer state of its local steps.
    fit(accelerator, model, optimizer, loader, epochs=1)
    ends = results_of(model, before)
    return {**inside, **ends, "weights": inside["inside"]["weights"], "after": ends["weights"]}


def states(kind: Kind) -> dict[str, Any]:
    """A state saved mid-training and loaded by both classes ends with the weights of uninterrupted training."""
    folder = kind.folder / f"state_{kind.name}"
    ends: dict[str, Any] = {}
    for way in (kind, Kind("torch", kind.folder), Kind("ours", kind.folder)):
        before = torchddp.finished_steps()
        accelerator = accelerator_of(gradient_accumulation_steps=2)
        with way.wraps():
            model, optimizer, loader = prepared(accelerator)
        if ends:
            accelerator.load_state(str(folder))
        else:
            fit(accelerator, model, optimizer, loader, epochs=1)
            accelerator.save_state(str(folder))
            before = torchddp.finished_steps()
        fit(accelerator, model, optimizer, accelerator.skip_first_batches(loader, 2), epochs=1)
        ends[f"loaded by {way.name}" if ends else "uninterrupted"] = results_of(model, before)
    return ends


def synced_late(kind: Kind) -> dict[str, Any]:
    """Two forwards under no_sync; the second backward reduces."""
    before = torchddp.finished_steps()
    accelerator = accelerator_of()
    model, optimizer, loader = prepared(accelerator)
    model.module.norm.eval()
    batches = list(loader)
    with accelerator.no_sync(model):
        losses = [(model(x) - y).square().mean() for x, y in batches[:2]]
    accelerator.backward(losses[0])
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(losses[1])
    optimizer.step()
    return results_of(model, before)


HOOK = DDPCommunicationHookType
POWER_SGD = {
    "comm_hook": HOOK.POWER_SGD,
    "comm_wrapper": HOOK.FP16,
    "comm_state_option": {"matrix_approximation_rank": 2, "start_powerSGD_iter": 3},
}
TORCHS_OPTIONS = {"find_unused_parameters": True, "bucket_cap_mb": 1, "gradient_as_bucket_view": True}
# These don't change results.
OWN_OPTIONS = {"bucket_cap_mb": "auto", "transport": "c10d", "checks": Checks(stall_report=5, nonfinite=True)}
Jobs = dict[str, Callable[[Kind], dict[str, Any]]]
JOBS: Jobs = {
    "plain": trained,
    "accumulation": partial(trained, gradient_accumulation_steps=2),
    "bf16": partial(trained, mixed_precision="bf16"),
    "torchs_options": partial(trained, handler=DistributedDataParallelKwargs(**TORCHS_OPTIONS), spare=False),
    "fp16_hook": partial(trained, handler=DistributedDataParallelKwargs(comm_hook=HOOK.FP16)),
    "power_sgd_hook": partial(trained, handler=DistributedDataParallelKwargs(**POWER_SGD)),
    "compiled": partial(trained, dynamo_backend="eager"),
    "own_options": partial(trained, own=OWN_OPTIONS),
    # With a static graph torch's class fails here or stops reducing, so it runs without one.
    "static_graph_accumulation": partial(trained, own={"static_graph": True}, gradient_accumulation_steps=2),
}
JOBS |= {job.__name__: job for job in (named_hooks, local_sgd, states, synced_late)}


def run_jobs(jobs: Jobs) -> None:
    """Run a module of jobs from the command line."""

    def find(folder: Path) -> dict[str, Any]:
        accelerate.PartialState(cpu=True)
        results: dict[str, Any] = {}
        for name, job in jobs.items():
            results[name] = {}
            for kind in (Kind("torch", folder), Kind("ours", folder)):
                with kind.wraps():
                    results[name][kind.name] = job(kind)
        dist.barrier()
        dist.destroy_process_group()
        return results

    save_results(find)
