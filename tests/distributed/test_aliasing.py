"""Gradients' memory: by default in their bucket, as tensors with their own storages, and reused by the next step."""

import ctypes
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tests.harness import each, is_own_class, on_ranks, status_bytes
from tests.models import Mlp, assert_steps, seeded, step_on
from torchddp import DistributedDataParallel

MIB = 1024 * 1024
M_MMAP_THRESHOLD = -3  # glibc's constant for mallopt


@pytest.mark.beyond_torch("copies gradients unless asked for views")
@on_ranks(2)
def test_default_gradients_are_adjacent_with_their_own_storages(rank, ddp_class):
    """They stay in the bucket's memory in every step; saving one, or its storage, includes no other gradient."""
    for set_to_none in each([False, True]):
        ddp = ddp_class(seeded(Mlp))
        places = []
        for step in range(5):
            ddp.zero_grad(set_to_none=set_to_none)
            step_on(ddp, rank, step)
            grads = [p.grad for p in ddp.parameters()]
            assert all(grad.untyped_storage().nbytes() == grad.nbytes for grad in grads), f"step {step}"
            end = max(grad.data_ptr() + grad.nbytes for grad in grads)
            assert end - min(grad.data_ptr() for grad in grads) == sum(grad.nbytes for grad in grads), f"step {step}"
            places.append([grad.data_ptr() for grad in grads])
        assert set_to_none or places[2] == places[3] == places[4]


def _detach_and_zero(model, rank, step):
    """Zero gradients as older optimizers do."""
    for p in model.parameters():
        if p.grad is not None:
            p.grad.detach_()
            p.grad.zero_()
    step_on(model, rank, step)


@on_ranks(2)
def test_gradients_can_be_detached_and_zeroed_in_place(rank, ddp_class):
    for views in each([None, False] + [True] * is_own_class()):
        ddp = ddp_class(seeded(Mlp), **({} if views is None else {"gradient_as_bucket_view": views}))
        ddp.zero_grad = lambda: None
        assert_steps(ddp, rank, range(4), _detach_and_zero)


def _growth(field, ddp_class, **options):
    """Growth of this process in multiples of the gradients' size, after three steps and at the peak of a fourth."""
    # Large blocks are mapped from and returned to the system, so that resident memory follows them.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB // 2)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16)))
    x, before, code = torch.randn(2, 1024), status_bytes(field), status_bytes("RssFile")
    ddp = ddp_class(model, **options)
    for _ in range(4):
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak
        ddp.zero_grad(set_to_none=True)
        ddp(x).sum().backward()
    gradient_bytes = sum(p.nbytes for p in model.parameters())
    # A forked rank maps library code again as it runs: 20 to 40 MB.
    code = status_bytes("RssFile") - code if field == "VmRSS" else 0
    grown = status_bytes("VmHWM" if field == "VmRSS" else field) - before - code
    return grown / gradient_bytes, ddp, gradient_bytes


@pytest.mark.usefixtures("cheap_messages")
@pytest.mark.beyond_torch("keeps gradients and buckets: two copies")
@on_ranks(2)
def test_no_second_copy_of_the_gradients_by_default(rank, ddp_class):
    """Resident memory of a training rank grows by one set of gradients (plus temporary ones), not two."""
    options = {"transport": "c10d"} if is_own_class() else {}
    for views in each([{}, {"bucket_cap_mb": 8, "gradient_as_bucket_view": True}]):
        growth, _, _ = _growth("VmRSS", ddp_class, **views, **options)
        assert 0.9 < growth < 1.6, f"memory grew by {growth:.2f} times the gradients"


@pytest.mark.beyond_torch("has no transports")
@on_ranks(2)
def test_over_shared_memory_gradients_are_only_in_the_segment(rank, ddp_class):
    """Shared pages count in each process that maps them, but private memory must not grow with the gradients."""
    growth, ddp, gradient_bytes = _growth("RssAnon", ddp_class, transport="shm")
    assert ddp.reducer.bucket_memory_bytes == gradient_bytes
    assert status_bytes("RssShmem") > gradient_bytes
    assert growth < 0.3, f"private memory grew by {growth:.2f} times the gradients"


LAYERS = 50


def many_small():
    """Many small parameters, whose gradients become ready one after the other."""
    return nn.Sequential(*(nn.RMSNorm(8) for _ in range(LAYERS)))


def _steps(model, count=3):
    for _ in range(count):
        model.zero_grad(set_to_none=True)
        model(torch.ones(8)).sum().backward()
    return model


def _recorded(model):
    """torch's operators and the number of allocations in a step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        _steps(model, 1)
    events = prof.profiler.kineto_results.events()
    allocated = sum(event.name() == "[memory]" and event.nbytes() > 0 for event in events)
    return Counter(event.name for event in prof.events() if event.name.startswith("aten::")), allocated


@on_ranks(1, 2)
def test_operators_memory_and_gradients_of_a_steady_step(world_size):
    ddp, local = _steps(DistributedDataParallel(many_small())), _steps(many_small())
    (with_ddp, allocated), (without, allocated_without) = _recorded(ddp), _recorded(local)
    # The process group runs a few for its one bucket; nothing may grow with the number of parameters.
    assert sum((with_ddp - without).values()) < LAYERS // 2, with_ddp - without
    assert world_size > 1 or allocated <= allocated_without

    # Gradient tensors and buckets are reused from the previous step.
    for model in (ddp, _steps(DistributedDataParallel(many_small(), transport="c10d"))):
        before = [(id(p.grad), p.grad.data_ptr()) for p in model.parameters()]
        memory = model.reducer.bucket_memory_bytes
        for _ in range(3):
            _steps(model, 1)
            assert [(id(p.grad), p.grad.data_ptr()) for p in model.parameters()] == before
        assert model.reducer.bucket_memory_bytes == memory == sum(p.nbytes for p in model.parameters())
