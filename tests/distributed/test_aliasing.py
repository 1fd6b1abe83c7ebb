"""Where gradients live: in their bucket by default, in memory of their own when copies are asked for."""

import ctypes
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.harness import gathered, is_own_class, on_ranks, run_ranks
from tests.models import Mlp, assert_grads, expected_grads, grads_of, seeded, step_on, storage_of

DEFAULT = pytest.param({}, id="default", marks=pytest.mark.beyond_torch("copies gradients unless asked for views"))
VIEWS = [DEFAULT, pytest.param({"gradient_as_bucket_view": True}, id="views")]
MIB = 1024 * 1024
M_MMAP_THRESHOLD = -3  # of glibc's mallopt


def _want(step):
    return expected_grads(seeded(Mlp), lambda model, rank: step_on(model, rank, step))


@pytest.mark.parametrize("set_to_none", [False, True])
@on_ranks(2)
def test_gradients_of_a_bucket_share_its_storage_in_every_step(rank, ddp_class, set_to_none):
    ddp = ddp_class(seeded(Mlp), gradient_as_bucket_view=True)
    for step in range(5):
        ddp.zero_grad(set_to_none=set_to_none)
        step_on(ddp, rank, step)
        if step > 0:  # torch's own class rebuilds its buckets after the first step
            assert len({storage_of(p.grad) for p in ddp.parameters()}) == 1, f"step {step}"
        assert_grads(grads_of(ddp), _want(step), what=f"step {step}:")


@pytest.mark.beyond_torch("copies gradients unless asked for views")
@pytest.mark.parametrize("set_to_none", [False, True])
@on_ranks(2)
def test_default_gradients_lie_side_by_side_in_storages_of_their_own(rank, ddp_class, set_to_none):
    """In the bucket's memory, step by step; saving one, or asking for its storage, gives no other."""

    ddp = ddp_class(seeded(Mlp))
    for step in range(5):
        ddp.zero_grad(set_to_none=set_to_none)
        step_on(ddp, rank, step)
        grads = [p.grad for p in ddp.parameters()]
        assert all(grad.untyped_storage().nbytes() == grad.nbytes for grad in grads), f"step {step}"
        begin = min(grad.data_ptr() for grad in grads)
        end = max(grad.data_ptr() + grad.nbytes for grad in grads)
        assert end - begin == sum(grad.nbytes for grad in grads), f"step {step}"
        assert_grads(grads_of(ddp), _want(step), what=f"step {step}:")


@pytest.mark.parametrize("options", VIEWS)
@on_ranks(2)
def test_gradients_do_not_overlap_within_the_storage(rank, ddp_class, options):
    ddp = ddp_class(seeded(Mlp), **options)
    for step in range(2):
        step_on(ddp, rank, step)
    spans = sorted((p.grad.data_ptr(), p.grad.data_ptr() + p.grad.nbytes) for p in ddp.parameters())
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False)), spans


@on_ranks(2)
def test_small_caps_give_several_storages(rank, ddp_class):
    ddp = ddp_class(seeded(Mlp), bucket_cap_mb=0.001, gradient_as_bucket_view=True)
    for step in range(3):
        step_on(ddp, rank, step)
    assert 1 < len({storage_of(p.grad) for p in ddp.parameters()}) <= len(list(ddp.parameters()))


@pytest.mark.parametrize("options", VIEWS)
@on_ranks(2)
def test_alias_stays_the_same_memory_when_zeroed_in_place(rank, ddp_class, options):
    ddp = ddp_class(seeded(Mlp), **options)
    pointers = []
    for step in range(5):
        ddp.zero_grad(set_to_none=False)
        step_on(ddp, rank, step)
        pointers.append([p.grad.data_ptr() for p in ddp.parameters()])
    assert pointers[2] == pointers[3] == pointers[4]
    assert_grads(grads_of(ddp), _want(4))


@pytest.mark.parametrize("options", VIEWS)
@on_ranks(2)
def test_alias_survives_a_step_within_no_sync(rank, ddp_class, options):
    ddp = ddp_class(seeded(Mlp), **options)
    for _ in range(3):
        ddp.zero_grad()
        with ddp.no_sync():
            step_on(ddp, rank, 0)
        step_on(ddp, rank, 1)
    assert (len({storage_of(p.grad) for p in ddp.parameters()}) == 1) == bool(options)
    want = expected_grads(seeded(Mlp), lambda m, r: (step_on(m, r, 0), step_on(m, r, 1)))
    assert_grads(grads_of(ddp), want)


@on_ranks(2)
def test_copies_asked_for_have_memory_of_their_own(rank, ddp_class):
    ddp = ddp_class(seeded(Mlp), gradient_as_bucket_view=False)
    for step in range(4):
        ddp.zero_grad(set_to_none=step % 2 == 0)
        step_on(ddp, rank, step)
        storages = {storage_of(p.grad) for p in ddp.parameters()}
        assert len(storages) == len(list(ddp.parameters())), f"step {step}"
        for p in ddp.parameters():
            assert p.grad.untyped_storage().nbytes() == p.grad.nbytes, f"step {step}: the gradient is a view"
        assert_grads(grads_of(ddp), _want(step), what=f"step {step}:")


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": False}], ids=str)
@on_ranks(2)
def test_kept_gradients_do_not_change_with_the_next_step(rank, ddp_class, options):
    ddp = ddp_class(seeded(Mlp), **options)
    step_on(ddp, rank, 0)
    kept = {name.removeprefix("module."): p.grad for name, p in ddp.named_parameters()}
    ddp.zero_grad(set_to_none=True)
    step_on(ddp, rank, 1)
    assert_grads(kept, _want(0))


@pytest.mark.parametrize("options", [*VIEWS, pytest.param({"gradient_as_bucket_view": False}, id="copies")])
def test_gradients_can_be_detached_and_zeroed_in_place(ddp_class, options):
    """What older optimizers do in zero_grad: grad.detach_() and grad.zero_()."""

    def work(rank):
        ddp = ddp_class(seeded(Mlp), **options)
        for step in range(4):
            for p in ddp.parameters():
                if p.grad is not None:
                    p.grad.detach_()
                    p.grad.zero_()
            step_on(ddp, rank, step)
            assert_grads(grads_of(ddp), _want(step), what=f"step {step}:")

    if options.get("gradient_as_bucket_view") and not is_own_class():
        pytest.xfail("torch's views cannot be detached in place")
    run_ranks(work, 2)


@pytest.mark.parametrize("options", VIEWS)
@on_ranks(2)
def test_replaced_gradients_are_taken_up_again(rank, ddp_class, options):
    """A gradient that the user replaced by another tensor, or set to None for some parameters only."""

    ddp = ddp_class(seeded(Mlp), **options)
    for step in range(2):
        ddp.zero_grad()
        step_on(ddp, rank, step)
    first, *others = ddp.parameters()
    first.grad = torch.ones_like(first)
    for p in others:
        p.grad = None
    step_on(ddp, rank, 2)
    want = _want(2)
    want["first.weight"] = want["first.weight"] + 1
    assert_grads(grads_of(ddp), want)


@on_ranks(2)
def test_model_may_be_dropped_while_gradients_are_kept(rank, ddp_class):
    """Gradients stay valid after the wrapper, and with it the buckets, are gone."""

    model = seeded(Mlp)
    ddp = ddp_class(model)
    step_on(ddp, rank, 0)
    del ddp
    torch.randn(100_000)  # would overwrite memory that was given back
    assert_grads(grads_of(model), _want(0))
    model.zero_grad()
    step_on(model, rank, 1)  # the hooks of the dropped wrapper are gone too


@pytest.mark.beyond_torch("keeps gradients and buckets: two copies")
@on_ranks(2)
def test_no_second_copy_of_the_gradients_by_default(rank, ddp_class):
    """Resident memory of a training rank grows by one set of gradients (plus passing ones), not by two."""

    # Large blocks always come from and go back to the system, so that resident memory follows them.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB // 2)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16)))
    gradient_bytes = sum(p.nbytes for p in model.parameters())
    x = torch.randn(2, 1024)
    before = _status_bytes("VmRSS")
    ddp = ddp_class(model, bucket_cap_mb=8, **({"transport": "c10d"} if is_own_class() else {}))
    for _ in range(3):
        ddp.zero_grad(set_to_none=True)
        ddp(x).sum().backward()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak
    ddp.zero_grad(set_to_none=True)
    ddp(x).sum().backward()
    for growth in gathered((_status_bytes("VmHWM") - before) / gradient_bytes):
        assert 0.9 < growth < 1.6, f"memory grew by {growth:.2f} times the gradients"


@pytest.mark.beyond_torch("has no transports")
@on_ranks(2)
def test_over_shared_memory_gradients_are_only_in_the_segment(rank, ddp_class):
    """Shared pages are counted in each process that maps them; private memory must not grow with the gradients."""

    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB // 2)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16)))
    gradient_bytes = sum(p.nbytes for p in model.parameters())
    x = torch.randn(2, 1024)
    before = _status_bytes("RssAnon")
    ddp = ddp_class(model, transport="shm")
    for _ in range(3):
        ddp.zero_grad(set_to_none=True)
        ddp(x).sum().backward()
    assert ddp.reducer.bucket_memory_bytes == gradient_bytes
    assert _status_bytes("RssShmem") > gradient_bytes
    for growth in gathered((_status_bytes("RssAnon") - before) / gradient_bytes):
        assert growth < 0.3, f"private memory grew by {growth:.2f} times the gradients"


def _status_bytes(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)
