"""Compressing hooks: sent values plus residuals add up to the gradients, equally on all ranks; PowerSGD's accuracy."""

import copy
import os
import pickle
import signal

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_power_sgd
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import torchddp
from tests.comm_hooks import SHAPES, Given, assert_equal, assert_near, average, given, hooked, live_on, step_of
from tests.harness import each, gathered, on_ranks
from tests.models import grads_of
from torchddp import _C
from torchddp.comm_hooks import BF16, FP16, Int4, Int8, PerParameter, PowerSGD, without_norms_and_biases
from torchddp.traffic import Traffic

pytestmark = pytest.mark.beyond_torch("hooks of its own")

SLOW = pytest.mark.slow
# World sizes and each rank's host: two hosts exchange shards of their sums.
PLACES = [(2, None), (3, None), (4, "aabb"), pytest.param(4, "aaab", marks=SLOW)]
# Tolerances of the first average.
ROUNDED = {FP16: 1e-3, BF16: 8e-3, Int8: 1.5e-2, Int4: 0.25}
COMPRESSORS = (
    FP16, BF16, Int8, Int4, lambda: PowerSGD(rank=2),
    lambda: PowerSGD(rank=2, warm_start=False), lambda: without_norms_and_biases(Int8()),
    lambda: FP16(error_feedback=True),
)  # fmt: skip


def zeros():
    return {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}


def add(total, values):
    for name, value in values.items():
        total[name] += value


def sum_over(group, tensors):
    """The sums over the group in fp64 (collective)."""
    sums = {name: value.double() for name, value in tensors.items()}
    for name in sorted(sums):
        dist.all_reduce(sums[name], group=group)
    return sums


def held_back(hook):
    """All residuals that this rank holds back, as part of the average."""
    total = zeros()

    def add_of(state):
        for kind in ("residual", "server_residual"):
            add(total, state.get(kind, {}))
        for inner in [*state.get("hooks", ()), *([state["inner"]] if "inner" in state else [])]:
            add_of(inner)

    add_of(hook.state_dict())
    return total


def assert_nothing_gets_lost(model, hook, steps, rtol=1e-5, ranks=None):
    """Assert that residuals account for the difference between averages in and out; return the final residuals.

    Collective over the model's group, which has these ranks.
    """
    rank, group = dist.get_rank(), model.process_group
    wanted, sent = sum_over(group, held_back(hook)), zeros()
    for step in steps:
        add(sent, step_of(model, given(rank, step)))
        add(wanted, average(step, ranks=ranks))
    kept = sum_over(group, held_back(hook))
    add(sent, kept)
    assert_near(sent, wanted, rtol, f"{type(hook).__name__}, rank {rank}:")
    return kept


@pytest.mark.rest_is_thorough("2-None", "4-aabb")
@pytest.mark.parametrize(("world_size", "hosts"), PLACES)
@on_ranks()
def test_the_first_average_is_only_rounded_and_residuals_add_up(rank, hosts):
    """Includes the first step, after which buckets are rebuilt and residuals move."""
    live_on(hosts, rank)
    for make, allowed in ROUNDED.items():
        assert_near(step_of(hooked(make()), given(rank, 0)), average(0), allowed, make.__name__)
    for make in (Int8, Int4, lambda: PowerSGD(rank=2), lambda: FP16(error_feedback=True)):
        hook = make()
        model = hooked(hook)
        kept = assert_nothing_gets_lost(model, hook, range(5))
        assert len(model.reducer.plan) > 1 and model.reducer.has_rebuilt_buckets
        assert max(value.norm() for value in kept.values()) > 0


@on_ranks(2, 3)
def test_bytes_on_the_wire(rank, world_size):
    for make in (FP16, Int8, Int4):
        hook = make()
        model = hooked(hook, bucket_cap_mb=100)
        step_of(model, given(rank, 0))
        plan = model.reducer.plan
        sizes = [_C.compressed_bytes(hook.format, bucket.numel) for bucket in plan.buckets]
        assert hook.traffic.payload_bytes == sum(bucket.nbytes for bucket in plan.buckets)
        if world_size == 2:
            assert sum(sizes) <= hook.traffic.wire_bytes <= sum(sizes) + 4 * len(sizes)
        else:  # shards of 1024 numbers or more, in both directions
            least = 2 * (world_size - 1) / world_size * sum(sizes)
            assert least <= hook.traffic.wire_bytes <= 1.25 * least + 300
        sent = hook.traffic.wire_bytes
        with model.no_sync():
            model(given(rank, 1)).backward()
        assert hook.traffic.wire_bytes == sent


@pytest.mark.parametrize(("hosts", "auto"), [("aabb", (2, 2)), ("aaab", (4, 1)), ("abcd", (4, 1)), ("aaaa", (4, 1))])
@on_ranks(4)
def test_who_sends_to_whom(rank, hosts, auto):
    """How many ranks exchange messages and how many sum first, by the ranks' hosts."""
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


@on_ranks(3)
def test_two_ranks_send_what_was_left_of_the_sums_of_three(rank):
    make, pair = lambda: PerParameter(Int8(), [("bias", Int4())]), dist.new_group([0, 1])
    first_hook, second_hook = make(), make()
    first = hooked(first_hook)
    for step in range(3):
        step_of(first, given(rank, step))
    if rank < 2:
        hooked(second_hook, process_group=pair)
        second_hook.load_state_dict(first_hook.state_dict())
        assert_near(held_back(second_hook), held_back(first_hook), 1e-6)
        sums = [held for part in second_hook.state_dict()["hooks"] for held in part["server_residual"].values()]
        assert not any(held.any() for held in sums)


@pytest.mark.rest_is_thorough("2-None", "4-aabb")
@pytest.mark.parametrize(
    ("world_size", "hosts"), [pytest.param(2, None, marks=SLOW), (3, None), pytest.param(4, "aabb", marks=SLOW)]
)
@on_ranks()
def test_resume_is_exact_also_into_other_buckets(rank, hosts):
    live_on(hosts, rank)
    for make in (Int4, *COMPRESSORS[5:7], lambda: PowerSGD(2, start_step=3)):
        first_hook, second_hook = make(), make()
        options = {"bucket_cap_mb": 100}  # blocks follow buckets, so bitwise equality needs equal buckets
        first, second = hooked(first_hook, **options), hooked(second_hook, **options)
        for step in range(4):
            step_of(first, given(rank, step))
        state = pickle.loads(pickle.dumps(first_hook.state_dict()))
        step_of(second, given(rank, 99))  # its buckets are rebuilt, and it has its own residual
        second_hook.load_state_dict(state)
        for step in range(4, 8):
            assert_equal(step_of(second, given(rank, step)), step_of(first, given(rank, step)))
        # With other buckets no residual is lost.
        third_hook = make()
        third = hooked(third_hook, bucket_cap_mb=0.002)
        third_hook.load_state_dict(state)
        if isinstance(third_hook, Int4 | PowerSGD):
            assert_nothing_gets_lost(third, third_hook, range(4, 5))


def assert_finite(values):
    assert [name for name, value in values.items() if not torch.isfinite(value).all()] == []


@pytest.mark.rest_is_thorough("2")
@on_ranks(pytest.param(2, marks=SLOW), 3)
def test_a_nonfinite_number_reaches_all_ranks_and_is_gone_in_the_next_step(rank):
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
    as_argument = Int8()
    assert_near(step_of(torchddp.DDP(Given(), comm_hook=as_argument), given(rank, 0)), average(0), 3e-2)
    assert as_argument.traffic.wire_bytes > 0
    model = hooked(Int8())
    with model.join():
        for step in range(3 + 2 * rank):
            model.zero_grad()
            model(given(rank, step)).backward()
            if step >= 3:  # rank 0 has no more inputs and sends zeros
                wanted = {name: value.double() / 2 for name, value in given(1, step).items()}
                assert_near(grads_of(model), wanted, 5e-2)


@on_ranks(2)
def test_16_bit_gradients(rank):
    for dtype, make in each((torch.bfloat16, torch.float16), (BF16, Int8, lambda: PowerSGD(rank=2))):
        model = hooked(make(), Given(dtype))
        averages = step_of(model, {name: value.to(dtype) for name, value in given(rank, 0).items()})
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
    default, heads, embeddings = Int8(), Int4(), BF16()
    rules = [("norms", None), ("head.*", heads), ("biases", None), (torch.nn.Embedding, embeddings)]
    hook = PerParameter(default, [*rules, (lambda name, parameter: parameter.dim() == 1, heads)])
    model = hooked(hook, block)
    chosen = {name: type(used).__name__ for name, used in hook._hook_of.items()}
    plain = dict.fromkeys(("linear.bias", "norm.weight", "norm.bias"), "NoneType")
    compressed = {"embed.weight": "BF16", "linear.weight": "Int8", "head.weight": "Int4", "head.bias": "Int4"}
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
    """Each hook has its own thread and groups, so ranks may interleave them in any order."""
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
    step_of(model, given(rank, 1))  # the thread is restarted
    with pytest.raises(RuntimeError, match="belongs to another model"):
        other.attach(model)

    # A copy of a model has none, so that a state which can't be copied, such as a group, prevents no copy.
    model = torchddp.DDP(Given())
    model.register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        step_of(copied, given(rank, 0))
        assert not copied._comm_hooks


IN_GROUPS = {
    "int8": Int8,
    "bf16": lambda: BF16(error_feedback=True),
    "powersgd": lambda: PowerSGD(2),
    "rules": lambda: PerParameter(Int4(), [("narrow", PowerSGD(3)), ("bias", None), ("long", Int8())]),
}
MEMBERS = [[0, 1], [0, 1, 2], [0, 1, 2, 3], [3, 1], [1], [0, 2, 1]]


@pytest.mark.rest_is_thorough("aabb")
@pytest.mark.parametrize("hosts", [None, "aabb"])
@on_ranks(4)
def test_no_residual_is_lost_in_several_groups(rank, hosts):
    live_on(hosts, rank)
    for make in IN_GROUPS.values():
        groups = [dist.new_group(ranks) for ranks in MEMBERS]
        hook = make()
        alone = dist.new_group([rank], use_local_synchronization=True)
        model = hooked(hook, process_group=groups[0] if rank < 2 else alone)
        for number, (ranks, group) in enumerate(zip(MEMBERS, groups, strict=True)):
            if rank in ranks:
                own = held_back(hook)
                model.update_process_group(group)
                assert_near(held_back(hook), own, 1e-6, f"rank {rank} in {ranks}:")
                assert_nothing_gets_lost(model, hook, range(100 * number, 100 * number + 2), 2e-5, ranks)


@on_ranks(3)
def test_power_sgd_keeps_its_warm_start(rank):
    """A joining rank, here rank 0, gets the factors and step count of the rank with the most steps."""
    hook = PowerSGD(2)
    model = hooked(hook, process_group=dist.new_group([1, 2] if rank else [0], use_local_synchronization=True))
    for step in range(3 if rank else 1):
        step_of(model, given(rank, step))
    wanted = gathered(hook.state_dict()["factors"])[1]
    model.update_process_group(dist.group.WORLD)
    state = hook.state_dict()
    assert state["step"] == 3
    mine = state["factors"]
    assert mine.keys() == wanted.keys() == {"embed", "wide", "narrow"}
    for name, factor in mine.items():
        assert torch.equal(factor, wanted[name]), name
    for step in range(3):
        step_of(model, given(rank, step))  # equal on all ranks


@pytest.mark.parametrize("kind", ["int8", "powersgd", "rules"])
@on_ranks(3, needed_ranks=[0, 2])
def test_hooks_continue_after_a_death(rank, kind):
    """A death in the middle of a step, in which some ranks may have reduced some buckets."""
    hook = IN_GROUPS[kind]()
    model = hooked(hook)
    for step in range(3):
        step_of(model, given(rank, step))
    if rank == 1:
        model.module.wide.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RuntimeError, match=rf"on rank {rank}, step 4") as error:
        step_of(model, given(rank, 3))
    assert "callback" not in str(error.value) and "worker.py" not in str(error.value)
    model.update_process_group(dist.new_group([0, 2], use_local_synchronization=True))
    assert_nothing_gets_lost(model, hook, range(4, 7), 2e-5, [0, 2])
    assert hook.state_dict()["step"] == 7


@on_ranks(2)
def test_torch_hooks_bound_to_the_old_ranks_are_refused(rank):
    whole = dist.group.WORLD
    state = torch_power_sgd.PowerSGDState(whole, matrix_approximation_rank=1, start_powerSGD_iter=2)
    for words, given_state, hook in (
        ("its state is the old group itself", whole, default_hooks.allreduce_hook),
        ("all ranks of the default group", None, default_hooks.allreduce_hook),
        ("Set state.process_group", state, torch_power_sgd.powerSGD_hook),
    ):
        model = torchddp.DDP(Given())
        model.register_comm_hook(given_state, hook)
        with pytest.raises(RuntimeError, match=words):
            model.update_process_group(dist.new_group([0, 1]))
        step_of(model, given(rank, 0))
    group = dist.new_group([0, 1])
    state.process_group = (whole, group)[rank]
    words = ("Set state.process_group", "failed on other ranks: rank 0: Runtime.*Set state.process_group")[rank]
    with pytest.raises(RuntimeError, match=words):
        model.update_process_group(group)
    state.process_group = whole
    for _ in range(3):
        step_of(model, given(rank, 1))
    state.process_group = group
    model.update_process_group(group)
    step_of(model, given(rank, 1))
    builtin = torchddp.DDP(Given())
    builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    with pytest.raises(RuntimeError, match="built-in communication hook on rank"):
        builtin.update_process_group(dist.new_group([0, 1]))
    builtin.update_process_group(whole)


MATRICES = ("embed", "wide", "narrow")
HOSTS = [(2, None), (3, None), pytest.param(4, "aabb", marks=pytest.mark.slow)]


def low_rank(rank, step):
    """Matrices whose average has at most rank 2, because all ranks' rows lie in one plane."""
    gradients = given(rank, step)
    generator = torch.Generator().manual_seed(step)
    for name in MATRICES:
        rows, *rest = SHAPES[name]
        plane = torch.randn(2, torch.Size(rest).numel(), generator=generator)
        mix = torch.randn(rows, 2, generator=torch.Generator().manual_seed(77 * step + rank))
        gradients[name] = (mix @ plane).view(SHAPES[name])
    return gradients


@pytest.mark.parametrize(("world_size", "hosts"), HOSTS)
@on_ranks()
def test_matrices_of_that_rank_are_sent_exactly(rank, hosts):
    live_on(hosts, rank)
    for hook in (PowerSGD(2), PowerSGD(5, warm_start=False, error_feedback=False), PowerSGD(3, start_step=1)):
        model = hooked(hook)
        for step in range(3):
            assert_near(step_of(model, low_rank(rank, step)), average(step, low_rank), 1e-3, f"step {step}")


@on_ranks(2)
def test_as_accurate_as_torchs(rank):
    """Power iterations on one gradient without error feedback: both approach the best approximation."""
    ours, theirs = hooked(PowerSGD(3, error_feedback=False)), TorchDDP(Given())
    state = torch_power_sgd.PowerSGDState(
        None, matrix_approximation_rank=3, start_powerSGD_iter=2, use_error_feedback=False, min_compression_rate=2
    )
    theirs.register_comm_hook(state, torch_power_sgd.powerSGD_hook)
    for _ in range(15):
        mine, other = step_of(ours, given(rank, 0)), step_of(theirs, given(rank, 0))
    for name in MATRICES:
        exact = average(0)[name].flatten(1)
        best = torch.linalg.svdvals(exact)[3:].square().sum().sqrt()
        for value in (mine, other):
            assert best * 0.999 <= (value[name].flatten(1) - exact).norm() <= best * 1.03, name


@on_ranks(2)
def test_zero_dependent_and_tiny_gradients(rank):
    def odd(rank, step):
        gradients = given(rank, step)
        gradients["embed"] = torch.zeros(SHAPES["embed"]) if step < 2 else gradients["embed"] * 1e-30
        gradients["wide"] = torch.ones(SHAPES["wide"])
        gradients["narrow"] = gradients["narrow"] * (1e-42 if step else 1.0)
        return gradients

    model = hooked(PowerSGD(2))
    for step in range(5):
        averages = step_of(model, odd(rank, step))
        assert all(torch.isfinite(value).all() for value in averages.values())
        torch.testing.assert_close(averages["wide"], torch.ones(SHAPES["wide"]).double(), rtol=1e-5, atol=1e-5)
        assert step != 1 or (averages["embed"] == 0).all()
    assert averages["embed"].norm() > 1e-31  # zeros did not stop it permanently


@on_ranks(2)
def test_casts_are_torchs_within_a_rounding(rank):
    for make, dtype, torch_hook in (
        (FP16, torch.float16, default_hooks.fp16_compress_hook),
        (BF16, torch.bfloat16, None),  # torch's refuses CPU models
    ):
        ours, theirs = hooked(make()), TorchDDP(Given())
        if torch_hook is not None:
            theirs.register_comm_hook(None, torch_hook)
        for step in range(2):
            mine, other = step_of(ours, given(rank, step)), step_of(theirs, given(rank, step))
            for name, value in mine.items():
                first, second = ((given(r, step)[name] / 2).to(dtype).float() for r in range(2))
                assert torch.equal(value, (first + second).double()), (torch_hook, name)  # summed in fp32
                allowed = 2 * torch.finfo(dtype).eps * (first.abs() + second.abs()) + 1e-7
                assert ((value - other[name]).abs() <= allowed).all(), (torch_hook, name)
