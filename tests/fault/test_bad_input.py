"""Bad input: every rank raises an error of the right type that says what is wrong, and none hangs."""

import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from tests.harness import GROUP_TIMEOUT_S, errors_of, future_of, is_own_class, on_ranks, run_ranks
from tests.models import Branches, Mlp, assert_grads, batch, expected_grads, grads_of, loss_of, seeded, step_on
from torchddp import Checks


class Bad(NamedTuple):
    """`build(ddp_class, rank)` must raise one of these types with these words on every rank."""

    build: Callable[[Any, int], Any]
    errors: str
    words: tuple[str, ...]
    beyond_torch: str = ""
    world_size: int = 2


def alone(build, errors, *words, beyond_torch=""):
    return Bad(build, errors, words, beyond_torch, 1)


def given(errors, *words, beyond_torch="", **options):
    return alone(lambda ddp, rank: ddp(nn.Linear(2, 2), **options), errors, *words, beyond_torch=beyond_torch)


def differs(make, *words, beyond_torch="", world_size=2):
    """Models that differ between ranks."""
    return Bad(lambda ddp, rank: ddp(make(rank)), "RuntimeError", words, beyond_torch, world_size)


class Named(nn.Module):
    def __init__(self, dtype=torch.float32, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.ones(shape, dtype=dtype)))


def wrapping():
    """A layer whose weight is a tensor of two others."""
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(TwoTensor(torch.ones(2, 2), torch.ones(2, 2)))
    return model


def expanded(name):
    """A layer in which the rows of this tensor are the same memory."""
    model, rows = nn.Linear(2, 2), torch.ones(1, 2).expand(2, 2)
    if name == "weight":
        model.weight = nn.Parameter(rows)
    else:
        model.register_buffer(name, rows)
    return model


class Twice(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.first, self.shared = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=True)
        return x


def used_twice(ddp_class, rank):
    ddp = ddp_class(Twice())
    loss_of(ddp(torch.ones(2, 4))).backward()


def without_group(ddp_class, rank):
    dist.destroy_process_group()
    ddp_class(nn.Linear(2, 2))


def all_delayed(ddp_class, rank):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    late = [("0.weight", model[0].weight), ("0.bias", model[0].bias)]
    ddp_class(model, delay_all_reduce_named_params=late, param_to_hook_all_reduce=model[0].weight)


def delayed(ddp_class, rank):
    layer = nn.Linear(2, 2)
    ddp_class(layer, delay_all_reduce_named_params=[("weight", layer.weight)])


def partly_used(ddp_class, rank):
    ddp = ddp_class(seeded(Branches))
    for step in range(2):
        loss_of(ddp(batch(rank, step, 3, 4), "left")).backward()


def hooked(hook, errors, *words, beyond_torch=""):
    """A training step with a hook."""

    def build(ddp_class, rank):
        ddp = ddp_class(seeded(Mlp))
        ddp.register_comm_hook(None, hook)
        step_on(ddp, rank)

    return Bad(build, errors, words, beyond_torch)


def registered(hook, errors, *words, times=1):
    def build(ddp_class, rank):
        ddp = ddp_class(nn.Linear(2, 2))
        for _ in range(times):
            ddp.register_comm_hook(None, hook)

    return alone(build, errors, *words)


def under_fake_mode(ddp_class, rank):
    with FakeTensorMode():
        ddp_class(nn.Linear(2, 2))


def raising(state, bucket):
    raise ZeroDivisionError("the hook's own words")


def wrong_bucket(state, bucket: int) -> torch.futures.Future[torch.Tensor]: ...


def wrong_result(state, bucket: dist.GradBucket) -> int: ...


def completed(value=None, error=None):
    return lambda state, bucket: future_of(value, error)


def replace_a_layer(model):
    model.middle = nn.Linear(16, 24, dtype=torch.float64)


def freeze_a_layer(model):
    model.middle.requires_grad_(False)
    return model


def replace_a_parameter(model):
    model.last.weight = nn.Parameter(model.last.weight.detach().clone())


def changed(change, name, steps_before):
    """A model that is changed after wrapping."""

    def build(ddp_class, rank):
        ddp = ddp_class(seeded(Mlp))
        for step in range(steps_before):
            step_on(ddp, rank, step)
        change(ddp.module)
        for step in range(2):
            step_on(ddp, rank, step)

    words = (re.escape(name), "changed", "wrap")
    return Bad(build, "RuntimeError", words, "blames unused parameters, by number")


ANY_NUMBER, ARITHMETIC, CASTING = "takes any number", "fails with an error about arithmetic", "speaks of casting"
NAMES_NONE = "names no parameter, or only with a debug variable set"
WRONG_HOOK = "TypeError|RuntimeError|ValueError"
BAD = {
    "frozen": alone(lambda ddp, _: ddp(nn.Linear(2, 2).requires_grad_(False)), "RuntimeError", "not needed", "grad"),
    "no parameter": alone(lambda ddp, _: ddp(nn.ReLU()), "RuntimeError", "not needed", "grad"),
    "two device types": alone(
        lambda ddp, _: ddp(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))),
        "ValueError", "same type of devices", "cpu", "meta",
    ),
    "device_ids": given("ValueError", "device_ids", device_ids=[0]),
    "two device_ids": given("ValueError", "device_ids", "on the CPU", device_ids=[0, 1]),
    "output_device": given("ValueError", "output_device", output_device=1),
    "uninitialized": alone(
        lambda ddp, _: ddp(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))), "RuntimeError", "uninitialized", "forward"
    ),
    "wraps other tensors": alone(
        lambda ddp, _: ddp(seeded(wrapping), init_sync=False), "RuntimeError", "'weight'", "TwoTensor",
        beyond_torch="averages what it wraps, but sends only a part at first",
    ),
    "expanded parameter": differs(lambda _: expanded("weight"), "'weight'", "expanded", "(2, 2)", "clone()"),
    "expanded buffer": differs(lambda _: expanded("mask"), "'mask'", "expanded", "(2, 2)", "clone()"),
    "group and mesh": alone(
        lambda ddp, _: ddp(
            nn.Linear(2, 2), process_group=dist.group.WORLD, device_mesh=init_device_mesh("cpu", (1,))
        ),
        "RuntimeError", "process_group", "device_mesh",
    ),
    "mesh of two dimensions": alone(
        lambda ddp, _: ddp(nn.Linear(2, 2), device_mesh=init_device_mesh("cpu", (1, 1))),
        "RuntimeError", "1D device mesh",
    ),
    "delayed without the hooked": alone(
        delayed, "ValueError", "delay_all_reduce_named_params", "param_to_hook_all_reduce"
    ),
    "all delayed": alone(
        all_delayed, "ValueError", "delay_all_reduce_named_params", "leave one out", beyond_torch="raises in forward",
    ),
    "no process group": alone(without_group, "ValueError", "process group", "init"),
    **{
        f"cap {cap}": given("ValueError", "bucket_cap_mb", "positive", beyond_torch=ANY_NUMBER, bucket_cap_mb=cap)
        for cap in (0, -0.5, float("nan"))
    },
    "caps with 0": given(
        "ValueError", "bucket_cap_mb_list", "positive", beyond_torch=ANY_NUMBER, bucket_cap_mb_list=[1, 0]
    ),
    **{
        f"stall_report {s}": given("ValueError", "stall_report", beyond_torch="none", checks=Checks(stall_report=s))
        for s in (-1, float("nan"), GROUP_TIMEOUT_S + 1)
    },
    "cap '25'": given("ValueError", "bucket_cap_mb", beyond_torch=ARITHMETIC, bucket_cap_mb="25"),
    "cap [25]": given("TypeError", "bucket_cap_mb", beyond_torch=ARITHMETIC, bucket_cap_mb=[25]),
    "fake tensors": alone(under_fake_mode, "RuntimeError", "[Ff]ake"),
    "number differs": differs(
        lambda rank: Named(alpha=(2,), beta=(3,)) if rank != 1 else Named(alpha=(2,)),
        "rank 1", r"\b2\b", r"\b1\b", "beta", world_size=3, beyond_torch="does not say on all ranks who differs",
    ),
    "shape differs": differs(
        lambda rank: Named(alpha=(2,), beta=(3, 4) if rank != 2 else (4, 3)),
        r"\[2\]|rank 2", "beta", "3, 4", "4, 3", world_size=3, beyond_torch=NAMES_NONE,
    ),
    "dtype differs": differs(
        lambda rank: Named(torch.float64 if rank else torch.float32, alpha=(2,)),
        r"\[1\]|rank 1", "alpha", "float32", "float64", beyond_torch="does not look at dtypes",
    ),
    "order differs": differs(
        lambda rank: Named(alpha=(2,), beta=(2,)) if rank == 0 else Named(beta=(2,), alpha=(2,)),
        r"rank 1|\[1\]", "alpha", "beta", "order", beyond_torch="does not look at names",
    ),
    "strides differ": differs(
        lambda rank: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last if rank else torch.contiguous_format),
        r"\[1\]|rank 1", "weight", "stride", beyond_torch="compares shapes only, and names no parameter",
    ),
    "requires_grad differs": differs(lambda rank: Mlp() if rank else freeze_a_layer(Mlp()), "rank 1"),
    "used twice": Bad(
        used_twice, "RuntimeError",
        (r"parameter 'shared\.(weight|bias)", "twice", "pass use_reentrant=False to torch", "static_graph=True to D"),
        NAMES_NONE,
    ),
    "not used": Bad(
        partly_used, "RuntimeError",
        ("right.weight, right.bias, never.weight, never.bias\n", "keyword argument `find_unused_parameters=True`"),
        NAMES_NONE,
    ),
    "no hook": registered(1, "TypeError", "callable"),
    "bucket annotation": registered(wrong_bucket, "ValueError", "bucket annotation", "GradBucket"),
    "return annotation": registered(wrong_result, "ValueError", "return annotation", "Future"),
    "second hook": registered(raising, "RuntimeError", "register_comm_hook", "once|already", times=2),
    "raising hook": hooked(raising, "ZeroDivisionError|RuntimeError", "the hook's own words"),
    **{
        f"hook returns {type(value).__name__}": hooked(
            lambda state, bucket, value=value: value,
            WRONG_HOOK, "hook", "Future", type(value).__name__, beyond_torch=CASTING,
        )
        for value in (None, 3, torch.ones(2))
    },
    **{
        f"future of {value}": hooked(completed(value), WRONG_HOOK, "hook", beyond_torch=f"reads too far or {CASTING}")
        for value in (torch.ones(3, dtype=torch.float64), None, "text")
    },
    "failing future": hooked(
        completed(error=ValueError("sent by the future")), "ValueError|RuntimeError", "sent by the future"
    ),
    **{
        f"{change.__name__} after {steps}": changed(change, name, steps)
        for change, name in (
            (replace_a_layer, "middle.weight"),
            (freeze_a_layer, "middle.weight"),
            (replace_a_parameter, "last.weight"),
        )
        for steps in (0, 2)
    },
}  # fmt: skip


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_is_refused_on_every_rank(ddp_class, world_size):
    cases = {name: bad for name, bad in BAD.items() if bad.world_size == world_size}
    if not is_own_class():
        cases = {name: bad for name, bad in cases.items() if not bad.beyond_torch}

    def work(rank):
        calls = {name: partial(bad.build, ddp_class, rank) for name, bad in cases.items()}
        return errors_of(calls, rank, world_size)

    for rank, found in enumerate(run_ranks(work, world_size)):
        for name, (kinds, text) in found.items():
            told = f"{name}, rank {rank}: {kinds[:1]}: {text}"
            assert kinds and re.fullmatch(cases[name].errors, kinds[0]), told
            for word in cases[name].words:
                assert re.search(word, text, re.IGNORECASE), f"no '{word}' in {told}"


@pytest.mark.beyond_torch("is left in mid-step")
@on_ranks(2)
def test_training_goes_on_after_a_hook_has_raised(ddp_class, rank):
    """The error is raised once, and the next step is correct."""
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


@pytest.mark.beyond_torch("gives wrong gradients")
@on_ranks(2)
def test_wrapping_twice_with_torchs_class_inside_or_around(ddp_class, rank):
    """With views two reducers write to the same memory, which is an error. Without views the averages are correct."""
    inner = TorchDDP(seeded(Mlp), gradient_as_bucket_view=True)
    for wrapped in (inner, nn.Sequential(inner, nn.Linear(1, 1))):
        with pytest.raises(ValueError, match="Wrap once"):
            ddp_class(wrapped)
    with pytest.raises(RuntimeError, match="averaged twice, in the same memory"):
        step_on(TorchDDP(ddp_class(seeded(Mlp))), rank)
    with pytest.warns(UserWarning) as caught:
        ddp = TorchDDP(ddp_class(seeded(Mlp), gradient_as_bucket_view=False))
        for step in range(2):
            ddp.zero_grad()
            step_on(ddp, rank, step)
    assert_grads(grads_of(ddp), expected_grads(seeded(Mlp), lambda m, r: step_on(m, r, 1)))
    assert sum("already wrapped by torchddp" in str(w.message) for w in caught) == 1


@on_ranks(2)
def test_wrapping_once_gives_no_warning(ddp_class, rank):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ddp = ddp_class(seeded(Mlp))
        for step in range(3):
            step_on(ddp, rank, step)
