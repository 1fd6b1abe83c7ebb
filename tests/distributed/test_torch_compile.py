"""torch.compile around, inside and in parts of a wrapped model: torch's gradients, graphs and recompilations."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from tests.harness import on_ranks
from tests.models import batch, grads_of, loss_of, seeded
from tests.parity.compare import TorchDDP
from tests.torch_features import Blocks, assert_same_program, plain_names

WIDTH = 256  # a block has a quarter of a MiB, so that caps of one MiB split four blocks off
STEPS = 3


@pytest.fixture(autouse=True, scope="module")
def imported_once():
    """What the compiler imports when it first compiles: seconds, which each forked rank would take again."""
    for name in ("torch._inductor.compile_fx", "torch._dynamo.repro.after_aot", "torch.export._trace"):
        importlib.import_module(name)


def compiled(place, backend, cls, options, width=WIDTH):
    """A wrapped model compiled at this place: (what is called, the wrapper)."""
    model = seeded(lambda: Blocks(width))
    if place == "around":
        ddp = cls(model, **options)
        return torch.compile(ddp, backend=backend), ddp
    if place == "inside":
        ddp = cls(torch.compile(model, backend=backend), **options)
    elif place == "in place":
        model.compile(backend=backend)
        ddp = cls(model, **options)
    else:
        for block in model.blocks:
            block.compile(backend=backend)
        ddp = cls(model, **options)
    return ddp, ddp


class Run:
    """Trains with one class; remembers how many graphs were compiled, after each step."""

    def __init__(self, place, mode, backend="eager", width=WIDTH, **options):
        self.place, self.mode, self.backend, self.width, self.options = place, mode, backend, width, options
        self.graphs = {}

    def __call__(self, cls):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(self.backend)
        rank = torch.distributed.get_rank()
        with torch._dynamo.config.patch(optimize_ddp=self.mode):
            call, ddp = compiled(self.place, counter, cls, self.options, self.width)
            seen, counts = [], []
            for step in range(STEPS):
                ddp.zero_grad()
                loss_of(call(batch(rank, step, 4, self.width, dtype=torch.float32))).backward()
                seen.append(plain_names(grads_of(ddp)))
                counts.append(counter.frame_count)
        self.graphs[cls] = counts
        return seen


def compare(ddp_class, run, reductions=STEPS):
    """How many graphs: as many as with torch's class, none of them compiled again after the first step."""
    assert_same_program(ddp_class, run, reductions=reductions)
    theirs, ours = run.graphs.values()
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
        # DDPOptimizer cuts at `bucket_cap_mb`; the other modes don't cut.
        case("around", "ddp_optimizer", 2, bucket_cap_mb=1),
        case("around", True, 2, slow, bucket_cap_mb=1),
        case("around", "no_optimization", 1, slow, thorough, bucket_cap_mb=1),
        case("around", OTHER, 1, slow, thorough, bucket_cap_mb=1),
        case("inside", "ddp_optimizer", 2, slow, thorough, bucket_cap_mb=1),
        case("inside", True, 2, thorough, bucket_cap_mb=1),
        case("inside", "no_optimization", 1, bucket_cap_mb=1),
        case("inside", OTHER, 1, slow, thorough, bucket_cap_mb=1),
        # Five blocks of 1 MiB: the first bucket of torch's compiler takes one, the others what the cap allows.
        case("inside", "ddp_optimizer", 3, width=512, bucket_cap_mb=2),
        case("inside", "ddp_optimizer", 2, slow, width=512, bucket_cap_mb=None),
        case("inside", "ddp_optimizer", 5, slow, width=512, bucket_cap_mb=1),
        case("in place", True, None, bucket_cap_mb=1),
        case("submodules", True, None, thorough, bucket_cap_mb=1),
        case("inside", True, None, bucket_cap_mb=1, find_unused_parameters=True),
        case("inside", True, None, thorough, bucket_cap_mb=1, static_graph=True),
        # torch reduces each gradient in Python then; our reducer stands aside.
        case("around", "python_reducer", None),
        case("inside", "python_reducer", None, thorough),
    ],
)
@on_ranks(2)
def test_as_many_graphs_as_torchs_class(ddp_class, place, mode, graphs, width, options):
    run = Run(place, mode, "eager" if graphs else "aot_eager", width, **options)
    found = compare(ddp_class, run, reductions=0 if mode == "python_reducer" else STEPS)
    assert graphs in (None, found)


@on_ranks(2)
def test_ddp_optimizer_refuses_a_cap_below_one_mib(ddp_class):
    """torch's compiler does, with either class; its other modes don't look at it."""
    for cls in (TorchDDP, ddp_class):
        with pytest.raises(AssertionError, match="First bucket should be smaller"):
            Run("inside", "ddp_optimizer", bucket_cap_mb=0.5)(cls)
    compare(ddp_class, Run("inside", "no_optimization", width=8, bucket_cap_mb=0.5))


def autograd_program(mode, backend):
    def program(cls):
        torch._dynamo.reset()
        rank = torch.distributed.get_rank()
        with torch._dynamo.config.patch(optimize_ddp=mode):
            ddp = cls(seeded(lambda: Blocks(8)))
            call = torch.compile(ddp, backend=backend)
            seen = []
            for step in range(STEPS):
                ddp.zero_grad()
                with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)):
                    loss_of(call(batch(rank, step, 4, 8, dtype=torch.float32))).backward()
                seen.append(grads_of(ddp))
        return seen

    return program


@pytest.mark.slow
@on_ranks(2)
def test_python_reducer_with_compiled_autograd(ddp_class):
    assert_same_program(ddp_class, autograd_program("python_reducer", "aot_eager"), reductions=0)


@on_ranks(2)
def test_compiled_autograd_needs_the_python_reducer(ddp_class):
    """C++ hooks can't be traced: torch's class refuses in the same words."""
    with pytest.raises(RuntimeError, match="optimize_ddp=.python_reducer."):
        autograd_program("ddp_optimizer", "aot_eager")(ddp_class)


@pytest.mark.rest_is_thorough("around")
@pytest.mark.parametrize("place", ["around", "inside"])
@on_ranks(2)
def test_no_sync(rank, ddp_class, place):
    """Two microbatches of three are accumulated, without a compilation of their own after the first step."""
    counts = {}

    def program(cls):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        call, ddp = compiled(place, counter, cls, {}, 8)
        seen, counts[cls] = [], []
        for step in range(STEPS):
            ddp.zero_grad()
            with ddp.no_sync():
                for part in (0, 1):
                    loss_of(call(batch(rank, 3 * step + part, 4, 8, dtype=torch.float32))).backward()
            seen.append(plain_names(grads_of(ddp)))
            loss_of(call(batch(rank, 3 * step + 2, 4, 8, dtype=torch.float32))).backward()
            seen.append(plain_names(grads_of(ddp)))
            counts[cls].append(counter.frame_count)
        return seen

    assert_same_program(ddp_class, program, reductions=STEPS)
    assert counts[ddp_class][0] == counts[ddp_class][-1], counts


@on_ranks(2)
def test_the_comm_hook_runs_under_a_compiled_model(ddp_class):
    def program(cls):
        torch._dynamo.reset()
        ddp = cls(torch.compile(seeded(lambda: Blocks(8)), backend="aot_eager"))
        ddp.register_comm_hook(None, fp16_compress_hook)
        loss_of(ddp(batch(torch.distributed.get_rank(), 0, 4, 8, dtype=torch.float32))).backward()
        return [plain_names(grads_of(ddp))]

    assert_same_program(ddp_class, program, reductions=1)
