"""torch.compile around, inside and in parts of a wrapped model: gradients, graphs and recompilations equal torch's."""

import contextlib
import importlib

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from tests.harness import on_ranks
from tests.models import batch, grads_of, loss_of, seeded
from tests.torch_features import Blocks, assert_same_program

WIDTH = 256  # a block has 1/4 MiB, so a cap of 1 MiB splits off four blocks
STEPS = 3


@pytest.fixture(autouse=True, scope="module")
def imported_once():
    """Import what the compiler imports at first use, which would take seconds in each forked rank."""
    for name in ("torch._inductor.compile_fx", "torch._dynamo.repro.after_aot", "torch.export._trace"):
        importlib.import_module(name)


def compiled(place, backend, cls, options, width):
    """A wrapped model compiled at this place: (the callable, the wrapper)."""
    model = seeded(lambda: Blocks(width))
    if place == "inside":
        model = torch.compile(model, backend=backend)
    for part in {"in place": [model], "submodules": model.blocks}.get(place, []):
        part.compile(backend=backend)
    ddp = cls(model, **options)
    whole = torch._dynamo.config.optimize_ddp == "python_reducer"  # the wrapper's forward is in the graph, too
    return torch.compile(ddp, backend=backend, fullgraph=whole) if place == "around" else ddp, ddp


def trained(cls, place, mode, backend="eager", width=WIDTH, *, parts=1, hook=None, compiled_autograd=False, **options):
    """Gradients after each backward (`parts` per step), and the number of graphs after each step."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    rank = torch.distributed.get_rank()
    seen, counts = [], []
    with torch._dynamo.config.patch(optimize_ddp=mode):
        call, ddp = compiled(place, counter, cls, options, width)
        if hook is not None:
            ddp.register_comm_hook(None, hook)
        for number in range(parts * STEPS):
            if number % parts == 0:
                ddp.zero_grad()
            with contextlib.ExitStack() as stack:
                if (number + 1) % parts != 0:
                    stack.enter_context(ddp.no_sync())
                if compiled_autograd:
                    stack.enter_context(torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)))
                loss_of(call(batch(rank, number, 4, width, dtype=torch.float32))).backward()
            seen.append({name.replace("_orig_mod.", ""): grad for name, grad in grads_of(ddp).items()})
            if (number + 1) % parts == 0:
                counts.append(counter.frame_count)
    return seen, counts


def compare(ddp_class, *how, reductions=STEPS, **options):
    """Return the number of graphs; assert that it equals torch's, without recompilation after the first step."""
    graphs = {}

    def program(cls):
        seen, graphs[cls] = trained(cls, *how, **options)
        return seen

    assert_same_program(ddp_class, program, reductions=reductions)
    theirs, ours = graphs.values()
    assert ours == theirs, f"graphs after each step: {ours}, torch {theirs}"
    assert ours[0] == ours[-1] > 0, f"compiled again: {ours}"
    return ours[0]


slow, thorough = pytest.mark.slow, pytest.mark.thorough
OTHER = "python_reducer_without_compiled_forward"


def case(place, mode, graphs, *marks, width=WIDTH, **options):
    return pytest.param(place, mode, graphs, width, options, id=f"{place}-{mode}-{width}-{options}", marks=marks)


@pytest.mark.parametrize(
    ("place", "mode", "graphs", "width", "options"),
    [
        # DDPOptimizer splits at `bucket_cap_mb`; the other modes don't.
        case("around", "ddp_optimizer", 2, bucket_cap_mb=1),
        case("around", "no_optimization", 1, slow, thorough, bucket_cap_mb=1),
        case("inside", True, 2, thorough, bucket_cap_mb=1),
        case("inside", "no_optimization", 1, thorough, bucket_cap_mb=1),
        case("inside", OTHER, 1, slow, thorough, bucket_cap_mb=1),
        # Five blocks of 1 MiB: DDPOptimizer's first bucket takes one, the others as many as the cap allows.
        case("inside", "ddp_optimizer", 3, width=512, bucket_cap_mb=2),
        case("inside", "ddp_optimizer", 2, slow, width=512, bucket_cap_mb=None),
        case("inside", "ddp_optimizer", 5, slow, width=512, bucket_cap_mb=1),
        case("in place", True, 2, thorough, bucket_cap_mb=1),
        case("submodules", True, None, thorough, bucket_cap_mb=1),
        case("inside", True, 2, bucket_cap_mb=1, find_unused_parameters=True),
        case("inside", True, None, thorough, bucket_cap_mb=1, static_graph=True),
        # torch then reduces each gradient in Python, without our reducer.
        case("around", "python_reducer", None),
        case("inside", "python_reducer", None, thorough),
    ],
)
@on_ranks(2)
def test_as_many_graphs_as_torchs_class(ddp_class, place, mode, graphs, width, options):
    how = place, mode, "eager" if graphs else "aot_eager", width
    found = compare(ddp_class, *how, reductions=0 if mode == "python_reducer" else STEPS, **options)
    assert graphs in (None, found)


@pytest.mark.slow
@on_ranks(2)
def test_python_reducer_with_compiled_autograd(ddp_class):
    compare(ddp_class, "around", "python_reducer", "aot_eager", 8, reductions=0, compiled_autograd=True)


@on_ranks(2)
def test_compiled_autograd_needs_the_python_reducer(ddp_class):
    """C++ hooks can't be traced: torch's class raises the same error."""
    with pytest.raises(RuntimeError, match="optimize_ddp=.python_reducer."):
        trained(ddp_class, "around", "ddp_optimizer", "eager", 8, compiled_autograd=True)


@pytest.mark.rest_is_thorough("around-*")
@pytest.mark.parametrize(("place", "backend"), [("around", "eager"), ("inside", "aot_eager")])
@on_ranks(2)
def test_no_sync_and_a_comm_hook(ddp_class, place, backend):
    """Two of three microbatches are accumulated, without recompilation after the first step."""
    compare(ddp_class, place, True, backend, 8, parts=3, hook=fp16_compress_hook)


@on_ranks(2)
def test_nothing_is_compiled_again_in_a_model_with_buffers(ddp_class):
    """Not even the wrapper's own Python, which broadcasts buffers and counts how long it waits."""
    torch._dynamo.reset()
    call = torch.compile(ddp_class(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))), backend="eager")
    for number in range(4):
        with torch._dynamo.config.patch(error_on_recompile=number > 1):
            loss_of(call(batch(torch.distributed.get_rank(), number, 4, 8, dtype=torch.float32))).backward()
