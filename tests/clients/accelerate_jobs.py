"""What test_accelerate.py runs on two ranks: each job with torch's class and ours, in the same processes.

    ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 -m tests.clients.accelerate_jobs FOLDER [--install] [JOB ...]

Each rank writes FOLDER/rank<N>.json: job -> {"torch": result, "ours": result}. With --install "ours" is
Accelerate's own Accelerator after torchddp.install().
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext
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
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import DataLoader, TensorDataset

import torchddp
from tests.clients.common import digest, said
from torchddp.integrations.accelerate import Accelerator, TorchDDPKwargs, adopt

LENGTH, BATCH = 40, 4  # five batches a rank


class Net(nn.Module):
    """Layers of several sizes, buffers, and a part that may stay unused."""

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
    """How to make an accelerator that wraps in one of the classes."""

    def __init__(self, name: str, folder: Path, plug_in: bool = True) -> None:
        self.name = name
        self.ours = name == "ours" and plug_in
        self.folder = folder

    def accelerator(self, handler: Any = None, cls: Any = None, **options: Any) -> Any:
        reset()
        handlers = [handler] if handler is not None else None
        cls = cls or (Accelerator if self.ours else accelerate.Accelerator)
        return cls(kwargs_handlers=handlers, **options)

    def handler(self, **options: Any) -> Any:
        return (TorchDDPKwargs if self.ours else DistributedDataParallelKwargs)(**options)


def reset() -> None:
    AcceleratorState._reset_state()
    GradientState._reset_state()


def data(length: int = LENGTH) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(length, 6, generator=generator)
    return DataLoader(TensorDataset(x, x.square().sum(1, keepdim=True)), batch_size=BATCH)


def prepared(accelerator: Any, length: int = LENGTH) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return accelerator.prepare(model, optimizer, data(length))


def model_of(model: nn.Module) -> dict[str, str]:
    """Bit for bit. Ranks agree on weights, not on the statistics that BatchNorm keeps of its own batches."""
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


def trained(
    kind: Kind, handler: Any = None, *, own: Any = None, forward: Any = None, both: Any = None, **options: Any
) -> dict[str, Any]:
    """Options of the wrapper: `handler` is Accelerate's, `both` are of either class's, `own` are of ours alone."""
    before = torchddp.finished_steps()
    if both is not None:
        handler = kind.handler(**both)
    if own is not None and kind.ours:
        handler = TorchDDPKwargs(**own)
    accelerator = kind.accelerator(handler, **options)
    model, optimizer, loader = prepared(accelerator)
    fit(accelerator, model, optimizer, loader, **(forward or {}))
    return results_of(model, before)


def named_hooks(kind: Kind) -> dict[str, Any]:
    """Ours only: what torch's class refuses on CPU, and hooks by name."""
    hooks = {"bf16": DDPCommunicationHookType.BF16, "named": "bf16", "int8": "int8"}
    return {name: trained(kind, own={"comm_hook": hook}) for name, hook in hooks.items()} if kind.ours else {}


def adopted(kind: Kind) -> dict[str, Any]:
    """An accelerator of somebody else's class, which ours takes over."""
    before = torchddp.finished_steps()

    class Theirs(accelerate.Accelerator):
        pass

    accelerator = kind.accelerator(DistributedDataParallelKwargs(find_unused_parameters=True), Theirs)
    if kind.ours:
        assert adopt(accelerator, {"transport": "c10d"}) is accelerator
        assert isinstance(accelerator, Theirs) and accelerator.ddp_handler.find_unused_parameters
    model, optimizer, loader = prepared(accelerator)
    fit(accelerator, model, optimizer, loader, spare=False)
    assert model.find_unused_parameters
    return results_of(model, before)


def local_sgd(kind: Kind) -> dict[str, Any]:
    before = torchddp.finished_steps()
    accelerator = kind.accelerator()
    model, optimizer, loader = prepared(accelerator)
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=True) as local:
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward((model(x) - y).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                local.step()
    ends = {"inside": torchddp.finished_steps() - before, **model_of(model)}
    # Each step is reduced again; ranks differ by then, for each has the optimizer state of its own steps.
    fit(accelerator, model, optimizer, loader, epochs=1)
    return {**ends, "after": model_of(model), "steps": torchddp.finished_steps() - before}


def states(kind: Kind) -> dict[str, Any]:
    """A state saved in mid-training and loaded by both classes ends where undisturbed training does."""
    folder = kind.folder / f"state_{kind.name}"
    accelerator = kind.accelerator()
    model, optimizer, loader = prepared(accelerator)
    fit(accelerator, model, optimizer, loader, epochs=1)
    accelerator.save_state(str(folder))
    fit(accelerator, model, optimizer, loader, epochs=1)
    ends: dict[str, Any] = {"undisturbed": model_of(model)}
    for other in (Kind("torch", kind.folder), Kind("ours", kind.folder)):
        accelerator = other.accelerator()
        model, optimizer, loader = prepared(accelerator)
        accelerator.load_state(str(folder))
        fit(accelerator, model, optimizer, loader, epochs=1)
        ends[f"loaded by {other.name}"] = model_of(model)
    return ends


def skipping(kind: Kind) -> dict[str, Any]:
    before = torchddp.finished_steps()
    accelerator = kind.accelerator(gradient_accumulation_steps=2)
    model, optimizer, loader = prepared(accelerator)
    fit(accelerator, model, optimizer, accelerator.skip_first_batches(loader, 2), epochs=1)
    return {**model_of(model), "steps": torchddp.finished_steps() - before}


def metrics(kind: Kind) -> dict[str, Any]:
    """Of a data set that does not divide by ranks and batch: each sample counts once."""
    accelerator = kind.accelerator()
    model, _, loader = prepared(accelerator, length=37)
    model.eval()
    with torch.no_grad():
        outputs = [accelerator.gather_for_metrics(model(x)) for x, _ in loader]
    together = torch.cat(outputs)
    return {"samples": len(together), "sum": float(together.double().sum())}


def unwrapping(kind: Kind) -> dict[str, Any]:
    accelerator = kind.accelerator(mixed_precision="bf16")
    torch.manual_seed(0)
    bare = Net()
    model = accelerator.prepare(bare)
    again = accelerator.prepare(model)
    with accelerator.autocast():
        dtype = str(bare.first(torch.ones(1, 6)).dtype)
    return {
        "bare": accelerator.unwrap_model(model) is bare and extract_model_from_parallel(model) is bare,
        "once": again is model,
        "keys": sorted(accelerator.get_state_dict(model)),
        "listed": len(accelerator._models),
        "dtype": dtype,
        "is torch's": isinstance(model, TorchDDP),
    }


def synced_late(kind: Kind) -> dict[str, Any]:
    """Two forwards under no_sync, of which the second backward reduces."""
    before = torchddp.finished_steps()
    accelerator = kind.accelerator()
    model, optimizer, loader = prepared(accelerator)
    model.module.norm.eval()
    batches = list(loader)
    with accelerator.no_sync(model):
        losses = [(model(x) - y).square().mean() for x, y in batches[:2]]
    accelerator.backward(losses[0])
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(losses[1])
    optimizer.step()
    return {**model_of(model), "steps": torchddp.finished_steps() - before}


def uneven(kind: Kind) -> dict[str, Any]:
    """Accelerate's join_uneven_inputs does nothing on CPU and says so; torch's Join around the model works."""
    accelerator = kind.accelerator(dataloader_config=accelerate.DataLoaderConfiguration(even_batches=False))
    model, optimizer, loader = prepared(accelerator, length=36)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with accelerator.join_uneven_inputs([model]):
            pass
    batches = list(loader)
    with Join([model]):
        for x, y in batches:
            accelerator.backward((model(x) - y).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    said = any("no effect" in str(w.message) for w in caught)
    return {**model_of(model), "batches": len(batches), "said": said}


def wrapped_before(kind: Kind) -> dict[str, Any]:
    if not kind.ours:
        return {}
    model = Net().requires_grad_(False)
    assert kind.accelerator().prepare(model) is model  # nothing to average
    classes = {"torch": TorchDDP, "ours": torchddp.DistributedDataParallel}
    return {name: said(lambda cls=cls: kind.accelerator().prepare(cls(Net()))) for name, cls in classes.items()}


HOOK = DDPCommunicationHookType
Jobs = dict[str, Callable[[Kind], dict[str, Any]]]
JOBS: Jobs = {
    "plain": trained,
    "accumulation": partial(trained, gradient_accumulation_steps=2),
    "bf16": partial(trained, mixed_precision="bf16"),
    "unused": partial(trained, both={"find_unused_parameters": True}, forward={"spare": False}),
    "torchs_options": partial(
        trained, handler=DistributedDataParallelKwargs(bucket_cap_mb=1, gradient_as_bucket_view=True)
    ),
    "fp16_hook": partial(trained, both={"comm_hook": HOOK.FP16}),
    "power_sgd_hook": partial(
        trained,
        both={
            "comm_hook": HOOK.POWER_SGD,
            "comm_wrapper": HOOK.FP16,
            "comm_state_option": {"matrix_approximation_rank": 2, "start_powerSGD_iter": 3},
        },
    ),
    "compiled": partial(trained, dynamo_backend="eager"),
    # Of the next two, torch's result is that without the options: they change no bit, and torch's class fails with a
    # static graph here, or stops reducing.
    "own_options": partial(
        trained,
        own={"bucket_cap_mb": "auto", "transport": "c10d", "stall_report_s": 5, "find_nonfinite": True},
    ),
    "static_graph_accumulation": partial(trained, own={"static_graph": True}, gradient_accumulation_steps=2),
    **{
        job.__name__: job
        for job in (
            named_hooks, adopted, local_sgd, states, skipping, metrics, unwrapping, synced_late, uneven, wrapped_before
        )
    },
}  # fmt: skip


def run_jobs(jobs: Jobs) -> None:
    """The command line of the files of jobs."""
    folder = Path(sys.argv[1])
    install = "--install" in sys.argv
    names = [name for name in sys.argv[2:] if name != "--install"]
    torch.set_num_threads(1)
    accelerate.PartialState(cpu=True)
    results: dict[str, Any] = {}
    try:
        for name in names or jobs:
            results[name] = {"torch": jobs[name](Kind("torch", folder))}
            with torchddp.install() if install else nullcontext():
                results[name]["ours"] = jobs[name](Kind("ours", folder, plug_in=not install))
    except Exception:
        results["error"] = f"in {name}:\n{traceback.format_exc()}"
        raise
    finally:
        (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_jobs(JOBS)
