"""Hooks that compress: what they send and hold back adds up to the gradients, on all ranks the same."""

import copy
import pickle

import pytest
import torch

import torchddp
from tests.comm_hooks import (
    SHAPES,
    Given,
    assert_equal,
    assert_near,
    assert_nothing_gets_lost,
    average,
    given,
    hooked,
    live_on,
    step_of,
)
from tests.harness import each, on_ranks
from tests.models import grads_of
from torchddp.comm_hooks import (
    BF16,
    FP16,
    CastAround,
    Int4,
    Int8,
    PerParameter,
    PowerSGD,
    Sign,
    TopK,
    formats,
    without_norms_and_biases,
)
from torchddp.traffic import Traffic

pytestmark = pytest.mark.beyond_torch("hooks of its own")

SLOW = pytest.mark.slow
# By world size, and the host of each rank: two hosts exchange shards of what each has summed.
PLACES = [(1, None), (2, None), (3, None), (4, "aabb"), pytest.param(4, "aaab", marks=SLOW)]
# How far the first average may be off.
ROUNDED = {FP16: 1e-3, BF16: 8e-3, Int8: 1.5e-2, Int4: 0.25}
COMPRESSORS = (
    FP16,
    BF16,
    Int8,
    Int4,
    Sign,
    TopK,
    lambda: TopK(k=50),
    lambda: PowerSGD(rank=2),
    lambda: PowerSGD(rank=2, warm_start=False),
    lambda: without_norms_and_biases(Int8()),
    lambda: FP16(error_feedback=True),
)


@pytest.mark.parametrize(("world_size", "hosts"), PLACES)
@on_ranks()
def test_first_average_is_rounded_only(rank, world_size, hosts):
    live_on(hosts, rank)
    for make, allowed in ROUNDED.items():
        model = hooked(make())
        assert_near(step_of(model, given(rank, 0)), average(0), 0.0 if world_size == 1 else allowed, make.__name__)


@pytest.mark.rest_is_thorough("2-None", "3-None", "4-aabb")
@pytest.mark.parametrize(("world_size", "hosts"), PLACES)
@on_ranks()
def test_what_is_sent_and_what_is_held_back_add_up(rank, world_size, hosts):
    """Also over the first step, after which buckets are rebuilt and residuals move."""
    live_on(hosts, rank)
    for make in (Int8, Int4, Sign, TopK, lambda: PowerSGD(rank=2), lambda: FP16(error_feedback=True)):
        hook = make()
        model = hooked(hook)
        kept = assert_nothing_gets_lost(model, hook, range(5))
        assert len(model.reducer.plan) > 1 and model.reducer.has_rebuilt_buckets
        assert world_size == 1 or max(value.norm() for value in kept.values()) > 0


@on_ranks(2, 3)
def test_bytes_on_the_wire(rank, world_size):
    for make in (FP16, Int8, Int4, Sign):
        hook = make()
        model = hooked(hook, bucket_cap_mb=100)
        step_of(model, given(rank, 0))
        plan = model.reducer.plan
        sizes = [formats.compressed_bytes(hook.format, bucket.numel) for bucket in plan.buckets]
        assert hook.traffic.payload_bytes == sum(bucket.nbytes for bucket in plan.buckets)
        if world_size == 2:
            assert sum(sizes) <= hook.traffic.wire_bytes <= sum(sizes) + 4 * len(sizes)
        else:  # shards of 1024 numbers or more, there and back
            least = 2 * (world_size - 1) / world_size * sum(sizes)
            assert least <= hook.traffic.wire_bytes <= 1.25 * least + 300
    for k in (1, 70):
        hook = TopK(k=k)
        model = hooked(hook, bucket_cap_mb=100)
        step_of(model, given(rank, 0))
        sent = 8 * k * (world_size - 1) * len(model.reducer.plan)
        assert hook.traffic.wire_bytes == sent
        with model.no_sync():
            model(given(rank, 1)).backward()
        assert hook.traffic.wire_bytes == sent


@pytest.mark.parametrize(("hosts", "auto"), [("aabb", (2, 2)), ("aaab", (4, 1)), ("abcd", (4, 1)), ("aaaa", (4, 1))])
@on_ranks(4)
def test_who_sends_to_whom(rank, hosts, auto):
    """Between how many messages go, and how many sum before, by the hosts of the ranks."""
    live_on(hosts, rank)
    expected = {"auto": auto, False: (4, 1), True: (1, 4) if hosts == "aaaa" else auto}
    for hierarchical, shape in expected.items():
        hook = Int4(hierarchical=hierarchical)
        model = hooked(hook)
        assert (hook._exchange.members, hook._exchange.places) == shape, hierarchical
        if shape == (1, 4):  # nothing is compressed
            assert_near(step_of(model, given(rank, 0)), average(0), 1e-6)


@on_ranks(1)
def test_one_rank_sends_nothing(rank):
    for make in COMPRESSORS:
        hook = make()
        model = hooked(hook)
        assert_equal(step_of(model, given(0, 0)), average(0))
        assert hook.traffic == Traffic(model.reducer.bucket_memory_bytes, 0)


@pytest.mark.rest_is_thorough("2-None", "4-aabb")
@pytest.mark.parametrize(
    ("world_size", "hosts"), [pytest.param(2, None, marks=SLOW), (3, None), pytest.param(4, "aabb", marks=SLOW)]
)
@on_ranks(timeout=120)
def test_resume_is_exact_also_into_other_buckets(rank, hosts):
    live_on(hosts, rank)
    for make in (Sign, TopK, *COMPRESSORS[8:10], lambda: CastAround(PowerSGD(2, start_step=3))):
        first_hook, second_hook = make(), make()
        options = {"bucket_cap_mb": 100}  # blocks follow buckets: for the same bits these must be the same
        first, second = hooked(first_hook, **options), hooked(second_hook, **options)
        for step in range(4):
            step_of(first, given(rank, step))
        state = pickle.loads(pickle.dumps(first_hook.state_dict()))
        step_of(second, given(rank, 99))  # its buckets are rebuilt, and it has a residual of its own
        second_hook.load_state_dict(state)
        for step in range(4, 8):
            assert_equal(step_of(second, given(rank, step)), step_of(first, given(rank, step)))
        # Into other buckets: nothing that was held back is lost.
        third_hook = make()
        third = hooked(third_hook, bucket_cap_mb=0.002)
        third_hook.load_state_dict(state)
        if isinstance(third_hook, Int8 | Sign | TopK | PowerSGD):
            assert_nothing_gets_lost(third, third_hook, range(4, 5))


def assert_finite(values):
    assert [name for name, value in values.items() if not torch.isfinite(value).all()] == []


@pytest.mark.rest_is_thorough("2")
@on_ranks(pytest.param(2, marks=SLOW), 3)
def test_a_bad_number_is_seen_everywhere_and_gone_in_the_next_step(rank):
    def spoilt(rank, step):
        gradients = given(rank, step)
        if step == 1 and rank == 1:
            gradients["embed"][3, 4] = float("nan")
            gradients["long"][7] = float("inf")
        return gradients

    for make in each(COMPRESSORS):
        hook = make()
        model = hooked(hook)
        for step in range(4):
            averages = step_of(model, spoilt(rank, step))
            if step == 1:
                assert not torch.isfinite(averages["embed"]).all()
                assert not torch.isfinite(averages["long"]).all()
            else:
                assert_finite(averages)
        for kind in ("residual", "server_residual", "factors"):
            assert_finite(hook.state_dict().get(kind, {}))


@on_ranks(pytest.param(2, marks=SLOW), 3)
def test_accumulation_and_unused_parameters(rank):
    def some(rank, step):
        gradients = given(rank, step)
        del gradients["wide"], gradients["bias" if (rank + step) % 2 else "narrow"]
        return gradients

    for make in (Int8, lambda: PowerSGD(rank=2), lambda: without_norms_and_biases(Int4())):
        hook = make()
        model = hooked(hook, find_unused_parameters=True)
        for step in range(3):
            model.zero_grad()
            with model.no_sync():
                model(some(rank, step + 10)).backward()
            assert hook.state_dict()["step"] == step
            model(some(rank, step)).backward()
            assert model.module.wide.grad is None
        if not isinstance(hook, PowerSGD):
            exact = average(2)["embed"] + average(12)["embed"]
            assert (model.module.embed.grad - exact).norm() < 0.4 * exact.norm()


@on_ranks(2)
def test_options_of_the_model(rank):
    for options, transport in each([{"static_graph": True}, {"gradient_as_bucket_view": False}], ["shm", "c10d"]):
        model = hooked(Int8(), transport=transport, **options)
        for step in range(3):
            assert_near(step_of(model, given(rank, step)), average(step), 3e-2)


@on_ranks(2)
def test_ranks_that_run_out_of_inputs(rank):
    model = hooked(Int8())
    with model.join():
        for step in range(3 + 2 * rank):
            model.zero_grad()
            model(given(rank, step)).backward()
            if step >= 3:  # rank 0 has gone: zeros from it
                wanted = {name: value.double() / 2 for name, value in given(1, step).items()}
                assert_near(grads_of(model), wanted, 5e-2)


@on_ranks(3)
def test_many_buckets_in_any_order_of_ranks(rank):
    """Buckets become ready at other times on each rank; messages of neighbours must not be mixed up."""
    model = hooked(PowerSGD(2), bucket_cap_mb=0.0001)
    exact = hooked(PerParameter(None, []), bucket_cap_mb=0.0001)
    for step in range(3):
        step_of(model, given(rank, step))
        assert len(model.reducer.plan) == len(SHAPES)
        assert_near(step_of(exact, given(rank, step)), average(step), 1e-6)


@on_ranks(2)
def test_16_bit_gradients(rank):
    for dtype, make in each((torch.bfloat16, torch.float16), (BF16, Int8, TopK, lambda: PowerSGD(rank=2))):
        model = hooked(make(), Given(dtype))
        gradients = {name: value.to(dtype) for name, value in given(rank, 0).items()}
        averages = step_of(model, gradients)
        assert_finite(averages)
        assert averages["embed"].norm() > 0
        assert model.module.embed.grad.dtype == dtype
        if make in (BF16, Int8):
            assert_near(averages, average(0), 2e-2)


@on_ranks(2)
def test_rules_choose_by_name_kind_and_order(rank):
    block = torch.nn.Sequential()
    block.embed, block.linear = torch.nn.Embedding(20, 8), torch.nn.Linear(8, 8)
    block.norm, block.head = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)
    default, heads, embeddings = Int8(), Sign(), TopK()
    rules = [("norms", None), ("head.*", heads), ("biases", None), (torch.nn.Embedding, embeddings)]
    hook = PerParameter(default, [*rules, (lambda name, parameter: parameter.dim() == 1, heads)])
    model = hooked(hook, block)
    chosen = {name: type(used).__name__ for name, used in hook._hook_of.items()}
    plain = dict.fromkeys(("linear.bias", "norm.weight", "norm.bias"), "NoneType")
    compressed = {"embed.weight": "TopK", "linear.weight": "Int8", "head.weight": "Sign", "head.bias": "Sign"}
    assert chosen == plain | compressed
    reference = torchddp.DistributedDataParallel(copy.deepcopy(model.module))
    for step in range(2):
        tokens = torch.randint(20, (6,), generator=torch.Generator().manual_seed(10 * step + rank))
        for one in (model, reference):
            one.zero_grad()
            one(tokens).square().sum().backward()
    for name, parameter in reference.module.named_parameters():
        mine = model.module.get_parameter(name).grad
        if hook._hook_of[name] is None:
            torch.testing.assert_close(mine, parameter.grad, rtol=1e-6, atol=1e-7)
        else:
            assert not torch.equal(mine, parameter.grad), name


@on_ranks(3)
def test_two_models_in_one_backward(rank):
    """Each hook has a thread and groups of its own, so that ranks may interleave them in any way."""
    models = [hooked(Int8()), hooked(PowerSGD(2, clamp_rank=True))]
    for step in range(10):
        for model in models:
            model.zero_grad()
        sum(model(given(rank, step)) for model in models).backward()
        assert_near(grads_of(models[0]), average(step), 3e-2)
        assert_finite(grads_of(models[1]))


@on_ranks(2)
def test_copies_belong_to_no_model(rank):
    hook = Int8()
    model = hooked(hook)
    step_of(model, given(rank, 0))
    other = copy.deepcopy(hook)
    fresh = hooked(other)
    step_of(fresh, given(rank, 1))
    hook.close()
    step_of(model, given(rank, 1))  # the thread comes back
    with pytest.raises(RuntimeError, match="belongs to another model"):
        other.attach(model)
