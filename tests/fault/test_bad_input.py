"""Bad input: an error of the right type whose words say what is wrong, on every rank, and never a hang."""

import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from tests.harness import run_outcomes, run_ranks
from tests.models import Branches, Mlp, assert_grads, batch, expected_grads, grads_of, loss_of, seeded, step_on


def _refused(build, world_size=1):
    """(type name, message) of what `build(rank)` raises, by rank."""

    def work(rank):
        try:
            build(rank)
        except Exception as error:
            return type(error).__name__, str(error)
        return "nothing", "it was accepted"

    return run_ranks(work, world_size, timeout=40)


def _assert_refused(build, type_name, *words, world_size=1):
    for rank, (got, text) in enumerate(_refused(build, world_size)):
        assert got == type_name, f"rank {rank}: {got}: {text}"
        for word in words:
            assert re.search(word, text, re.IGNORECASE), f"rank {rank}: no '{word}' in: {text}"


# --- arguments


def test_no_trainable_parameter(ddp_class):
    frozen = nn.Linear(2, 2).requires_grad_(False)
    _assert_refused(lambda rank: ddp_class(frozen), "RuntimeError", "not needed", "grad")
    _assert_refused(lambda rank: ddp_class(nn.ReLU()), "RuntimeError", "not needed", "grad")


def test_mixed_device_types(ddp_class):
    def build(rank):
        ddp_class(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))

    _assert_refused(build, "ValueError", "same type of devices", "cpu", "meta")


def test_device_ids_on_cpu(ddp_class):
    _assert_refused(lambda rank: ddp_class(nn.Linear(2, 2), device_ids=[0]), "ValueError", "device_ids")
    _assert_refused(lambda rank: ddp_class(nn.Linear(2, 2), device_ids=[0, 1]), "ValueError", "device_ids", "single")
    _assert_refused(lambda rank: ddp_class(nn.Linear(2, 2), output_device=1), "ValueError", "output_device")


def test_uninitialised_parameters(ddp_class):
    build = lambda rank: ddp_class(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)))  # noqa: E731
    _assert_refused(build, "RuntimeError", "uninitialized", "forward")


def test_group_and_mesh_together(ddp_class):
    from torch.distributed.device_mesh import init_device_mesh

    def both(rank):
        ddp_class(nn.Linear(2, 2), process_group=dist.group.WORLD, device_mesh=init_device_mesh("cpu", (1,)))

    def two_dimensions(rank):
        ddp_class(nn.Linear(2, 2), device_mesh=init_device_mesh("cpu", (1, 1)))

    _assert_refused(both, "RuntimeError", "process_group", "device_mesh")
    _assert_refused(two_dimensions, "RuntimeError", "1D device mesh")


def test_delayed_parameters_without_the_hooked_one(ddp_class):
    layer = nn.Linear(2, 2)
    build = lambda rank: ddp_class(layer, delay_all_reduce_named_params=[("weight", layer.weight)])  # noqa: E731
    _assert_refused(build, "ValueError", "delay_all_reduce_named_params", "param_to_hook_all_reduce")


@pytest.mark.beyond_torch("takes any number")
@pytest.mark.parametrize("cap", [0, 0.0, -1, -0.5, float("nan")])
def test_cap_that_is_not_positive(ddp_class, cap):
    build = lambda rank: ddp_class(nn.Linear(2, 2), bucket_cap_mb=cap)  # noqa: E731
    _assert_refused(build, "ValueError", "bucket_cap_mb", "positive")


@pytest.mark.beyond_torch("takes any number")
@pytest.mark.parametrize("caps", [[1, 0], [-3]])
def test_cap_in_a_list_that_is_not_positive(ddp_class, caps):
    _assert_refused(
        lambda rank: ddp_class(nn.Linear(2, 2), bucket_cap_mb_list=caps), "ValueError", "bucket_cap_mb_list", "positive"
    )


@pytest.mark.beyond_torch("fails with an error about arithmetic")
@pytest.mark.parametrize(("cap", "error"), [("25", "ValueError"), ([25], "TypeError")])
def test_cap_that_is_no_number(ddp_class, cap, error):
    _assert_refused(lambda rank: ddp_class(nn.Linear(2, 2), bucket_cap_mb=cap), error, "bucket_cap_mb")


def test_sync_without_a_process_group(ddp_class):
    def build(rank):
        dist.destroy_process_group()
        ddp_class(nn.Linear(2, 2))

    _assert_refused(build, "ValueError", "process group", "init")


# --- models that differ between ranks


class _Named(nn.Module):
    def __init__(self, shapes, dtype=torch.float32):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.ones(shape, dtype=dtype)))


@pytest.mark.beyond_torch("names neither parameters nor, on all ranks, who differs")
def test_number_of_parameters_differs(ddp_class):
    def build(rank):
        ddp_class(_Named({"alpha": (2,), "beta": (3,)} if rank != 1 else {"alpha": (2,)}))

    _assert_refused(build, "RuntimeError", "rank 1", r"\b2\b", r"\b1\b", "beta", world_size=3)


@pytest.mark.beyond_torch("names no parameter")
def test_shape_differs(ddp_class):
    def build(rank):
        ddp_class(_Named({"alpha": (2,), "beta": (3, 4) if rank != 2 else (4, 3)}))

    _assert_refused(build, "RuntimeError", r"\[2\]|rank 2", "beta", "3, 4", "4, 3", world_size=3)


@pytest.mark.beyond_torch("does not look at dtypes")
def test_dtype_differs(ddp_class):
    def build(rank):
        ddp_class(_Named({"alpha": (2,)}, torch.float32 if rank == 0 else torch.float64))

    _assert_refused(build, "RuntimeError", r"\[1\]|rank 1", "alpha", "float32", "float64", world_size=2)


@pytest.mark.beyond_torch("does not look at names")
def test_order_differs(ddp_class):
    def build(rank):
        names = ["alpha", "beta"] if rank == 0 else ["beta", "alpha"]
        ddp_class(_Named(dict.fromkeys(names, (2,))))

    _assert_refused(build, "RuntimeError", "rank 1|\\[1\\]", "alpha", "beta", "order", world_size=2)


@pytest.mark.beyond_torch("compares shapes only, and names no parameter")
def test_strides_differ(ddp_class):
    def build(rank):
        model = nn.Conv2d(3, 4, 3)
        ddp_class(model.to(memory_format=torch.channels_last) if rank == 1 else model)

    _assert_refused(build, "RuntimeError", r"\[1\]|rank 1", "weight", "stride", world_size=2)


def test_requires_grad_differs(ddp_class):
    def build(rank):
        model = Mlp()
        model.middle.requires_grad_(rank == 0)
        ddp_class(model)

    _assert_refused(build, "RuntimeError", "rank 1", world_size=2)


# --- parameters used twice, or not at all


class _Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.shared = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=True)
        return x


@pytest.mark.beyond_torch("names the parameter only with a debug variable set")
def test_parameter_used_twice_is_named(ddp_class):
    def build(rank):
        ddp = ddp_class(_Twice())
        loss_of(ddp(torch.ones(2, 4))).backward()

    _assert_refused(build, "RuntimeError", r"shared\.(weight|bias)", "twice", "static_graph|checkpoint", world_size=2)


@pytest.mark.beyond_torch("names parameters only with a debug variable set")
def test_parameter_not_used_at_all_is_named(ddp_class):
    def build(rank):
        ddp = ddp_class(seeded(Branches))
        for step in range(2):
            loss_of(ddp(batch(rank, step, 3, 4), "left")).backward()

    _assert_refused(build, "RuntimeError", "never.weight", "right.bias", "find_unused_parameters", world_size=2)


# --- hooks


def _step_with(ddp_class, hook):
    def build(rank):
        ddp = ddp_class(seeded(Mlp))
        ddp.register_comm_hook(None, hook)
        step_on(ddp, rank)

    return build


def test_hook_that_is_not_callable(ddp_class):
    _assert_refused(lambda rank: ddp_class(nn.Linear(2, 2)).register_comm_hook(None, 1), "TypeError", "callable")


def test_hook_with_wrong_annotations(ddp_class):
    def wrong_bucket(state, bucket: int) -> torch.futures.Future[torch.Tensor]: ...

    def wrong_result(state, bucket: dist.GradBucket) -> int: ...

    register = lambda hook: lambda rank: ddp_class(nn.Linear(2, 2)).register_comm_hook(None, hook)  # noqa: E731
    _assert_refused(register(wrong_bucket), "ValueError", "bucket annotation", "GradBucket")
    _assert_refused(register(wrong_result), "ValueError", "return annotation", "Future")


def test_second_hook(ddp_class):
    def build(rank):
        ddp = ddp_class(nn.Linear(2, 2))
        for _ in range(2):
            ddp.register_comm_hook(None, lambda state, bucket: None)

    _assert_refused(build, "RuntimeError", "register_comm_hook", "once|already")


def test_hook_that_raises(ddp_class):
    def raises(state, bucket):
        raise ZeroDivisionError("the hook's own words")

    for got, text in _refused(_step_with(ddp_class, raises), 2):
        assert got in ("ZeroDivisionError", "RuntimeError") and "the hook's own words" in text


@pytest.mark.beyond_torch("fails with a message about casting")
@pytest.mark.parametrize("value", [None, 3, torch.ones(2)], ids=["None", "int", "tensor"])
def test_hook_that_returns_no_future(ddp_class, value):
    def wrong(state, bucket):
        return value

    for got, text in _refused(_step_with(ddp_class, wrong), 2):
        assert got in ("TypeError", "RuntimeError", "ValueError"), got
        assert "hook" in text.lower() and "Future" in text and type(value).__name__ in text, text


def _future(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


@pytest.mark.beyond_torch("reads past the end, or fails with a message about casting")
@pytest.mark.parametrize(
    "value", [torch.ones(3, dtype=torch.float64), None, "text"], ids=["too few elements", "None", "str"]
)
def test_hook_whose_future_holds_the_wrong_thing(ddp_class, value):
    for got, text in _refused(_step_with(ddp_class, lambda state, bucket: _future(value)), 2):
        assert got in ("TypeError", "RuntimeError", "ValueError"), got
        assert "hook" in text.lower(), text


def test_hook_whose_future_fails(ddp_class):
    def fails(state, bucket):
        future = torch.futures.Future()
        future.set_exception(ValueError("sent back by the future"))
        return future

    for got, text in _refused(_step_with(ddp_class, fails), 2):
        assert got in ("ValueError", "RuntimeError") and "sent back by the future" in text


@pytest.mark.beyond_torch("is left in mid-step")
def test_training_goes_on_after_a_hook_has_raised(ddp_class):
    """The error is told once; the next step is a good one."""

    def work(rank):
        fails = [True]

        def hook(state, bucket):
            if fails[0]:
                raise ZeroDivisionError("once")
            return dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future().then(lambda f: f.value()[0])

        ddp = ddp_class(seeded(Mlp))
        ddp.register_comm_hook(None, hook)
        with pytest.raises(Exception, match="once"):
            step_on(ddp, rank)
        fails[0] = False
        ddp.zero_grad()
        step_on(ddp, rank, 1)
        assert_grads(grads_of(ddp), expected_grads(seeded(Mlp), lambda m, r: step_on(m, r, 1)))

    run_ranks(work, 2)


# --- a model that is wrapped already, or was changed after wrapping


@pytest.mark.beyond_torch("says nothing")
def test_wrapping_a_wrapped_model_warns_and_works(ddp_class):
    def work(rank):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ddp = ddp_class(ddp_class(seeded(Mlp)))
        step_on(ddp, rank)
        assert_grads(grads_of(ddp), expected_grads(seeded(Mlp), step_on))
        return [str(w.message) for w in caught]

    for texts in run_ranks(work, 2):
        assert any("already wrapped" in text for text in texts), texts


@pytest.mark.beyond_torch("gives wrong gradients")
def test_wrapping_what_torchs_class_with_views_has_wrapped_is_refused(ddp_class):
    def work(rank):
        inner = TorchDDP(seeded(Mlp), gradient_as_bucket_view=True)
        with pytest.raises(ValueError, match="Wrap once"):
            ddp_class(inner)
        with pytest.raises(ValueError, match="Wrap once"):
            ddp_class(nn.Sequential(inner, nn.Linear(1, 1)))

    run_ranks(work, 2)


@pytest.mark.beyond_torch("gives wrong gradients")
def test_a_wrapper_of_torchs_class_around_ours_is_noticed(ddp_class):
    """With views two reducers write to one memory: an error. Without them the averages are right."""

    def work(rank):
        with pytest.raises(RuntimeError, match="averaged twice, in the same memory"):
            step_on(TorchDDP(ddp_class(seeded(Mlp))), rank)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ddp = TorchDDP(ddp_class(seeded(Mlp), gradient_as_bucket_view=False))
            for step in range(2):
                ddp.zero_grad()
                step_on(ddp, rank, step)
        assert_grads(grads_of(ddp), expected_grads(seeded(Mlp), lambda m, r: step_on(m, r, 1)))
        return sum("already wrapped by torchddp" in str(w.message) for w in caught)

    assert run_ranks(work, 2) == [1, 1]


def test_wrapping_once_warns_of_nothing(ddp_class):
    def work(rank):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ddp = ddp_class(seeded(Mlp))
            for step in range(3):
                step_on(ddp, rank, step)

    run_ranks(work, 2)


def _replace_a_layer(model):
    model.middle = nn.Linear(16, 24, dtype=torch.float64)


def _freeze_a_layer(model):
    model.middle.requires_grad_(False)


def _replace_a_parameter(model):
    model.last.weight = nn.Parameter(model.last.weight.detach().clone())


CHANGES = {
    "layer replaced": (_replace_a_layer, "middle.weight"),
    "layer frozen": (_freeze_a_layer, "middle.weight"),
    "parameter replaced": (_replace_a_parameter, "last.weight"),
}


@pytest.mark.beyond_torch("blames unused parameters, by number")
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_model_changed_after_wrapping(ddp_class, change, steps_before):
    apply, name = CHANGES[change]

    def build(rank):
        ddp = ddp_class(seeded(Mlp))
        for step in range(steps_before):
            step_on(ddp, rank, step)
        apply(ddp.module)
        for step in range(2):
            step_on(ddp, rank, step)

    _assert_refused(build, "RuntimeError", re.escape(name), "changed", "wrap", world_size=2)


def test_harness_tells_a_rank_that_dies():
    """What the tests of faults rest on: a death is seen at once and told with its signal."""
    import os
    import signal

    def dies(rank):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return rank

    first, second = run_outcomes(dies, 2)
    assert first.ok and first.value == 0
    assert not second.ok and second.exit_code == -signal.SIGKILL
