"""Errors of communication hooks, also when another rank is lost."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from tests.comm_hooks import SHAPES, Given, assert_near, average, given, hooked, step_of
from tests.harness import assert_each_raises, in_child, on_ranks, stay
from torchddp import comm_hooks
from torchddp.comm_hooks import FP16, Cast, Int4, Int8, PerParameter, PowerSGD, resolve
from torchddp.transport.worker import Worker

pytestmark = pytest.mark.beyond_torch("hooks of its own")


@on_ranks(2)
def test_models_that_hooks_refuse(rank):
    hook, sparse = Int8(), nn.ModuleDict({"words": nn.Embedding(10, 4, sparse=True)})
    hooked(hook)
    for used, module, error, match in (
        (Int8(), Given(torch.float64), TypeError, "'embed' is torch.float64"),
        (Int8(), Given(torch.complex64), TypeError, "'embed' is torch.complex64"),
        (Int4(), sparse, RuntimeError, "embedding 'words' has sparse=True"),
        (PowerSGD(26), Given(), ValueError, r"'wide' of shape \(24, 3, 9\) is a matrix of 24 x 27.*at most 24"),
        (PerParameter(Int8(), [("nothing.*", None)]), Given(), ValueError, "matches no parameter.*embed"),
        (hook, Given(), RuntimeError, "Int8 hook belongs to another model"),
    ):
        with pytest.raises(error, match=match):
            hooked(used, module)
    frozen = Given()
    frozen.embed.requires_grad_(False)
    hooked(PerParameter(Int8(), [("emb*", None)]), frozen)  # for when it is thawed
    step_of(hooked(PowerSGD(26, clamp_rank=True, min_compression_rate=0.1)), given(rank, 0))


def test_arguments():
    assert_each_raises(
        (lambda: PowerSGD(0), ValueError, "rank must be at least 1, got 0"),
        (lambda: PowerSGD("4"), TypeError, "rank must be an integer, at least 1, got '4'"),
        (lambda: PowerSGD(start_step=-1), ValueError, "start_step must be at least 0, got -1"),
        (lambda: PowerSGD(min_compression_rate=0), ValueError, "min_compression_rate must be above 0, got 0"),
        (lambda: Cast("int8"), ValueError, "'fp16' or 'bf16', got 'int8'"),
        (lambda: resolve("int3"), ValueError, "'powersgd' or a hook, got 'int3'"),
        (lambda: PerParameter(print, []), TypeError, "PerParameter takes hooks"),
        (lambda: PerParameter(None, [(3, None)]), TypeError, "a rule's selector must be a glob"),
        (lambda: resolve(Int8), TypeError, "write Int8()"),
    )
    for name in comm_hooks.NAMES:
        state, hook = resolve(name.upper())
        assert state is None and isinstance(hook, comm_hooks.CommHook)
    own = FP16()
    assert resolve(own) == (None, own)


@on_ranks(2)
def test_states_that_do_not_fit(rank):
    hook = Int8()
    assert hook.state_dict()["residual"] == {}
    with pytest.raises(RuntimeError, match="attach Int8 to a model"):
        hook.load_state_dict({})
    step_of(hooked(hook), given(rank, 0))
    state = hook.state_dict()
    assert {name: tuple(value.shape) for name, value in state["residual"].items()} == SHAPES
    other, low, high = Int4(), PowerSGD(2), PowerSGD(3)
    hooked(other)
    hooked(high)
    step_of(hooked(low), given(rank, 0))
    for loads, wrong, match in [
        (other, state, "state of a 'Int8' hook, not of 'Int4'"),
        (hook, {**state, "residual": {"other": torch.zeros(3)}}, "'other', which the model does not have"),
        (hook, {**state, "residual": {"norm": torch.zeros(3)}}, r"'norm' has shape \(3,\), the parameter \(30,\)"),
        (high, low.state_dict(), r"has shape \(\d+, 2\), this hook's factor \(\d+, 3\)"),
    ]:
        with pytest.raises(ValueError, match=match):
            loads.load_state_dict(wrong)


@on_ranks(2)
def test_with_torchs_class(rank):
    """The hook must be attached to the model, and rebound after a change of its process group."""

    def made():
        model, hook = TorchDDP(Given()), Int8()
        model.register_comm_hook(None, hook.__call__)
        return model, hook

    model, _ = made()
    with pytest.raises(RuntimeError, match=r"call hook.attach\(model\) on all ranks"):
        model(given(rank, 0)).backward()
    model, hook = made()
    hook.attach(model)
    step_of(model, given(rank, 0))
    model._update_process_group(dist.new_group([0, 1]))
    with pytest.raises(RuntimeError, match=r"has the model's old process group: call hook.rebind\(model\)"):
        model(given(rank, 1)).backward()
    model.reducer._reset_state()
    hook.rebind(model)
    assert_near(step_of(model, given(rank, 2)), average(2), 0.05)
    with pytest.raises(RuntimeError, match="not attached to this model"):
        hook.rebind(TorchDDP(Given()))


@on_ranks(2, needed_ranks=[0])
def test_a_lost_rank(rank):
    """The others raise in time, naming bucket and parameters; later steps fail at once."""
    model = hooked(Int8())
    step_of(model, given(rank, 0))
    if rank == 1:
        os._exit(3)
    with pytest.raises(RuntimeError, match=r"Int8 on rank 0, step 2, bucket 0 \("):
        model(given(rank, 1)).backward()
    with pytest.raises(RuntimeError, match="not reduced after"):
        model(given(rank, 2)).backward()


@on_ranks(2)
def test_the_time_limit_of_the_hook(rank):
    model = hooked(Int8(timeout=5))
    step_of(model, given(rank, 0))
    if rank == 0:
        with pytest.raises(RuntimeError, match="Int8 on rank 0, step 2"):
            model(given(rank, 1)).backward()
    stay(rank)


def test_a_hooks_thread_runs_in_the_child_of_a_fork():
    worker = Worker("before the fork")

    def work():
        assert worker.submit(lambda: torch.tensor(3.0), "job", torch.device("cpu")).wait().item() == 3.0

    work()
    assert in_child(work)
    worker.close()
    work()
