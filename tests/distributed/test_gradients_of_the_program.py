"""`.grad` belongs to the program: several wrappers may reduce it, its storage may be swapped, hooks may change it."""

import contextlib
import ctypes
import gc
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchddp
from tests.harness import each, in_child, on_ranks, over_both
from tests.models import assert_grads, grads_of, seeded
from tests.parity.compare import TorchDDP
from tests.whole_buckets import packed_whole
from torchddp import Precision

pytestmark = pytest.mark.usefixtures("cheap_messages")


class Net(nn.Module):
    """Gradients of 2.5 KiB that are copied into a bucket, and of 1.1 MiB, which are reduced where they lie."""

    def __init__(self):
        super().__init__()
        self.first, self.large, self.last = nn.Linear(1, 540), nn.Linear(540, 540), nn.Linear(540, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.large(torch.tanh(self.first(x)))))


def batch(rank, step):
    return torch.linspace(-1, 1 + rank, 5).unsqueeze(1) * (1 + step)


class Wrappers:
    """Programs with several wrappers of one module; each yields after every step."""

    def in_turn_then_in_one_backward(cls, module, rank):
        a, b = cls(module), cls(module)
        for step in range(5):
            module.zero_grad(set_to_none=False)
            if step < 3:
                for model in (a, b):
                    model(batch(rank, step)).square().sum().backward()
            else:
                (a(batch(rank, step)) + b(batch(rank, step).flip(0) * 2)).square().sum().backward()
            yield

    def of_a_part(cls, module, rank):
        part, whole = cls(module.last), cls(module)
        for step in range(3):
            module.zero_grad(set_to_none=step == 1)
            (part(torch.ones(5, 540) * (1 + rank)) + whole(batch(rank, step))).square().sum().backward()
            yield

    def three_with_one_dropped(cls, module, rank):
        a, b, c = (cls(module, find_unused_parameters=i > 0) for i in range(3))
        for step in range(4):
            module.zero_grad()
            sum(model(batch(rank, step) * i) for i, model in enumerate((a, b, c), 1)).sum().backward()
            if step == 1:
                c = a
            yield

    def around_one_that_has_gradients(cls, module, rank):
        inner = cls(module)
        inner(batch(rank, 0)).square().sum().backward()
        yield
        outer = cls(nn.Sequential(inner))
        for step in range(3):
            outer.zero_grad(set_to_none=False)
            outer(batch(rank, step)).square().sum().backward()
            yield


@pytest.mark.filterwarnings("ignore:DistributedDataParallel wraps a model that is already wrapped")
@over_both
@on_ranks(2)
def test_several_wrappers_of_one_module(rank, ddp_class, transport):
    for name in each([name for name in vars(Wrappers) if name[0] != "_"]):
        seen = []
        for cls in (lambda m, **o: ddp_class(m, transport=transport, **o), TorchDDP):
            module = seeded(Net)
            seen.append([grads_of(module) for _ in getattr(Wrappers, name)(cls, module, rank)])
        for step, (ours, theirs) in enumerate(zip(*seen, strict=True)):
            assert_grads(ours, theirs, 0.0, f"{name}, step {step}:")


@over_both
@on_ranks(2)
def test_each_wrapper_sends_this_ranks_own_gradients(rank, transport):
    """And not averages that the other one has handed back: hooks that add up would add them up twice."""

    def total(hook_state, bucket):
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])

    for sparse, static in each([False, True], [False, True]):
        module = seeded(lambda: nn.ModuleList([nn.Embedding(9, 4, sparse=sparse), nn.Linear(4, 1)]))  # noqa: B023
        module.forward = lambda rows: module[1](module[0](rows))  # noqa: B023
        models = [
            torchddp.DDP(module, transport=transport, static_graph=static, comm_hook=(None, total)) for _ in range(2)
        ]
        for step in range(3):
            module.zero_grad()
            rows = torch.tensor([rank, 3 + step])
            sum(model(rows) for model in models).sum().backward()
            grad = module[0].weight.grad.to_dense()
            want = torch.zeros(9, 4).index_add_(0, torch.tensor([0, 1, 3 + step]), torch.ones(3, 1) * module[1].weight)
            want[3 + step] *= 2
            torch.testing.assert_close(grad, 2 * want.detach())


@over_both
@on_ranks(2)
def test_a_sparse_gradient_of_several_wrappers(rank, transport):
    for is_used in each([True, False]):
        table = seeded(lambda: nn.Embedding(9, 4, sparse=True))
        module = nn.ModuleDict({"table": table, "head": nn.Linear(4, 1)})
        module.forward = lambda rows: module["head"](table(rows) if is_used else torch.ones(2, 4))  # noqa: B023
        models = [torchddp.DDP(module, transport=transport, find_unused_parameters=True) for _ in range(2)]
        for times in (1, 2):  # without zero_grad()
            held = table.weight.grad
            sum(model(torch.tensor([rank, 3])) for model in models).sum().backward()
            if not is_used:
                assert table.weight.grad is None
                continue
            assert held is None or table.weight.grad is held
            want = torch.zeros(9, 1).index_add_(0, torch.tensor([0, 1, 3]), torch.tensor([[1.0], [1.0], [2.0]]))
            torch.testing.assert_close(table.weight.grad.to_dense(), times * want * module["head"].weight.detach())


@over_both
@on_ranks(2)
def test_a_sparse_gradient_that_is_kept_and_added_to_stays_the_same_tensor(rank, ddp_class, transport):
    made = []
    for ddp in (lambda m: ddp_class(m, transport=transport), TorchDDP):
        model, kept = ddp(seeded(lambda: nn.Embedding(9, 4, sparse=True))), []
        for step in range(3):
            model(torch.tensor([rank, 3 + step])).sum().backward()
            kept.append(model.module.weight.grad)
        made.append({str(step): grad.to_dense() for step, grad in enumerate(kept)})
    assert_grads(*made, 0.0, "kept in step")


@over_both
@on_ranks(2)
def test_views_of_one_buffer_as_gradients_are_not_taken_for_writes(rank, ddp_class, transport):
    """They share a version counter, which also counts what autograd adds to the others."""
    torch.set_warn_always(True)
    for swaps in each([False, True]):
        model = ddp_class(seeded(Net), transport=transport, bucket_cap_mb=1e-4)
        params = [*model.parameters()]
        flat = torch.zeros(sum(p.numel() for p in params))
        for p, piece in zip(params, flat.split([p.numel() for p in params]), strict=True):
            p.grad = piece.view_as(p)
        for step in range(3):
            for p in params:
                p.grad.data = torch.zeros_like(p) if swaps else p.grad.data.zero_()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                with model.no_sync():
                    model(batch(rank, step)).sum().backward()
                model(batch(rank, step)).sum().backward()


@on_ranks(2)
def test_a_wrapper_with_main_gradients_and_one_without(rank):
    module = seeded(Net)
    a, b = torchddp.DDP(module, precision=Precision(main_grads=torch.float32)), torchddp.DDP(module)
    for model in (a, b):
        with pytest.raises(RuntimeError, match=f"rank {rank}: two wrappers reduce the same parameters.*wrap once"):
            model(batch(rank, 0))
    del a, model
    b(batch(rank, 0)).sum().backward()
    assert all(p.grad is not None for p in module.parameters())


SWAPS = {
    "each gradient": lambda model: [p.grad.share_memory_() for p in model.parameters()],
    "the large one": lambda model: model.module.large.weight.grad.share_memory_(),
    "the model": lambda model: model.share_memory(),
}


@over_both
@on_ranks(2)
def test_storage_that_moves_to_torchs_shared_memory(rank, ddp_class, transport):
    """As for a queue to another process."""
    for (name, swap), views, set_to_none in each(SWAPS.items(), [False, True], [False, True]):
        seen = []
        for cls, own in ((ddp_class, {"transport": transport}), (TorchDDP, {})):
            model = cls(seeded(Net), gradient_as_bucket_view=views, **own)
            grads = []
            for step in range(6):
                model.zero_grad(set_to_none)
                model(batch(rank, step)).square().sum().backward()
                grads.append(grads_of(model))
                if step in (1, 2, 4):
                    swap(model)
            seen.append(grads)
        for step, (ours, theirs) in enumerate(zip(*seen, strict=True)):
            assert_grads(ours, theirs, 0.0, f"{name}, step {step}:")


@over_both
@on_ranks(2)
def test_storage_that_the_program_frees(rank, ddp_class, transport):
    models = [ddp_class(seeded(Net), transport=transport), TorchDDP(seeded(Net))]
    for step in range(4):
        for model in models:
            model.zero_grad()
            model(batch(rank, step)).square().sum().backward()
        assert_grads(*map(grads_of, models), 0.0, f"step {step}:")
        for model in models:
            for parameter in model.parameters():
                parameter.grad.untyped_storage().resize_(0)


class MallInfo(ctypes.Structure):  # struct mallinfo2
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def bytes_in_use():
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = MallInfo
    return libc.mallinfo2().uordblks


@on_ranks(2)
def test_a_refresh_leaves_nothing_behind(rank):
    """A hook that stayed on each parameter's node would take 48 bytes, and run in every later backward.

    A message over gloo would take 1.5 kB: torch's flight recorder keeps the last 2,000, with stacks.
    """
    count, times = 200, 60
    model = torchddp.DDP(nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(count))), transport="shm")

    def refresh():
        for _ in range(times):
            model.refresh_trainable()
            model.zero_grad()
            model.weigh(1.0)
            model(torch.ones(1, 2)).sum().backward()

    refresh()
    before = bytes_in_use()
    refresh()
    assert bytes_in_use() - before < 6 * count * times


@over_both
@on_ranks(1, 2)
def test_a_forked_child_has_its_own_gradients(rank, ddp_class, transport):
    model = ddp_class(seeded(Net), transport=transport)
    for step in each(range(2)):
        model.zero_grad()
        model(batch(rank, step)).square().sum().backward()
        before = grads_of(model)

        def write(before=before):
            assert_grads(grads_of(model), before, 0)
            model.zero_grad(set_to_none=False)
            assert not any(p.grad.any() for p in model.parameters())

        assert in_child(write)
        assert_grads(grads_of(model), before, 0)


def _transposed(p):
    return torch.zeros(p.shape[::-1], dtype=p.dtype).permute(*range(p.dim() - 1, -1, -1))


def _with_gaps(p):
    return torch.zeros(*p.shape[:-1], 2 * p.shape[-1], dtype=p.dtype)[..., ::2]


def _with_odd_strides_of_single_elements(p):
    strides = [77 if size == 1 else stride for size, stride in zip(p.shape, p.stride(), strict=True)]
    return torch.zeros(p.numel(), dtype=p.dtype).as_strided(p.shape, strides)


@over_both
@on_ranks(2)
def test_gradients_of_any_strides_are_averaged_to_the_same_bits(rank, transport):
    def step(layout, dtype):
        torch.manual_seed(7)
        module = nn.Sequential(nn.Conv2d(3, 5, 1), nn.Flatten(), nn.Linear(20, 600), nn.Linear(600, 600)).to(dtype)
        model = torchddp.DistributedDataParallel(module, transport=transport)
        for p in module.parameters():
            p.grad = layout(p)  # autograd adds to it in place
        strides = [p.grad.stride() for p in module.parameters()]
        model(torch.randn(4, 3, 2, 2, dtype=dtype) * (1 + rank)).square().mean().backward()
        assert [p.grad.stride() for p in module.parameters()] == strides
        return grads_of(module)

    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        want = step(torch.zeros_like, dtype)
        for layout in (_transposed, _with_gaps, _with_odd_strides_of_single_elements):
            assert_grads(step(layout, dtype), want, 0)


# What hooks see, and may change, while backward runs: the same as with torch's class.


@over_both
@on_ranks(2)
@pytest.mark.parametrize("whole", [False, True])
def test_a_gradient_with_a_negative_bit_that_no_rank_used_keeps_its_sign(rank, ddp_class, transport, whole):
    model = seeded(lambda: nn.Linear(2, 2))
    with packed_whole() if whole else contextlib.nullcontext():
        ddp = ddp_class(model, find_unused_parameters=True, gradient_as_bucket_view=True, transport=transport)
    ddp(torch.ones(1, 2)).sum().backward()
    bias = model.bias
    bias.grad = torch._neg_view(bias.grad)
    for _ in range(2):
        torch.func.functional_call(ddp, {"module.bias": torch.zeros(2)}, torch.ones(1, 2)).sum().backward()
        assert bias.grad.tolist() == [-1.0, -1.0]


def on_node(module, act):
    (node,) = [node for node, _ in module.first.weight.view(-1).grad_fn.next_functions]
    module.node = node  # which a parameter holds weakly
    node.register_hook(act)


# Ways to run `act` in backward once the other layers' gradients are there.
HOOKS = {
    "full backward": lambda module, act: module.first.register_full_backward_hook(act),
    "full backward pre": lambda module, act: module.first.register_full_backward_pre_hook(act),
    "all modules": lambda module, act: nn.modules.module.register_module_full_backward_hook(
        lambda part, *_: act() if part is module.first else None
    ),
    "tensor": lambda module, act: module.first.weight.register_hook(act),
    "post-accumulate": lambda module, act: module.first.weight.register_post_accumulate_grad_hook(act),
    "node": on_node,
}


def step(parameter):
    with torch.no_grad():
        parameter.sub_(parameter.grad, alpha=1e-3)


ACTS = {
    "read": lambda parameter: None,
    "clip": lambda parameter: parameter.grad.clamp_(-0.01, 0.01),
    "clip by .data": lambda parameter: parameter.grad.data.clamp_(-0.01, 0.01),
    "zero": lambda parameter: parameter.grad.zero_(),
    "step": step,
    "replace": lambda parameter: setattr(parameter, "grad", torch.full_like(parameter, 7.0)),
    "drop": lambda parameter: setattr(parameter, "grad", None),
}


def train(ddp, rank, register, act, **options):
    """After each step: what the hook has seen, what it has kept, and the gradients."""
    module, found = seeded(Net), {"seen": [], "kept": []}

    def run(*_):
        for parameter in (module.last.weight, module.large.weight, module.large.bias):
            found["seen"].append(parameter.grad.clone())
            found["kept"].append(parameter.grad)
            act(parameter)

    model = ddp(module, **options)
    register(module, run)
    for number in range(5):
        # New gradients, kept ones that are zero, and kept ones that are added to.
        if number != 3:
            module.zero_grad(set_to_none=number < 2)
        for grads in found.values():
            grads.clear()
        model(batch(rank, number)).square().sum().backward()
        noted = {f"{what} {index}": grad for what, grads in found.items() for index, grad in enumerate(grads)}
        yield {**{name: grad.clone() for name, grad in noted.items()}, **grads_of(module)}


@pytest.mark.filterwarnings("ignore:.*its gradient was written during backward")
@over_both
@on_ranks(2)
def test_a_registered_hook_sees_this_ranks_gradients(rank, ddp_class, transport):
    pairs = [(hook, act) for hook in HOOKS for act in ACTS if hook == "full backward" or act in ("read", "clip")]
    for hook, act in each(pairs):
        made = []
        for ddp in (lambda m: ddp_class(m, transport=transport), TorchDDP):
            made.append(list(train(ddp, rank, HOOKS[hook], ACTS[act])))
            nn.modules.module._global_backward_hooks.clear()
        for number, (ours, theirs) in enumerate(zip(*made, strict=True)):
            assert_grads(ours, theirs, 0.0, f"{hook}, {act}, step {number}:")


@over_both
@on_ranks(2)
def test_a_lost_write_is_a_warning(rank, ddp_class, transport):
    torch.set_warn_always(True)
    for act in each([act for act in ACTS if act not in ("read", "step", "clip by .data")]):
        model = ddp_class(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), transport=transport)
        last = model.module[1].weight
        model.module[0].register_full_backward_pre_hook(lambda *_, last=last, act=act: (ACTS[act](last), None)[1])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(torch.ones(1, 2)).sum().backward()
        (text,) = [str(warning.message) for warning in caught if "written during backward" in str(warning.message)]
        assert f"parameter '1.weight' on rank {rank}: its gradient was written" in text and "no effect" in text


class Watched(Net):
    """A hook on an activation looks at the large gradient while that is reduced where it lies."""

    look = staticmethod(lambda grad: None)

    def forward(self, x):
        inner = torch.tanh(self.first(x))
        inner.register_hook(lambda _: (self.look(self.large.weight.grad), None)[1])
        return self.last(torch.tanh(self.large(inner)))


@over_both
@on_ranks(2)
def test_a_write_that_nobody_could_see_is_an_error(rank, ddp_class, transport):
    model = ddp_class(seeded(Watched), transport=transport)
    model(batch(rank, 0)).sum().backward()
    kept = []
    for keep in (lambda grad: None, lambda grad: grad.view(-1), lambda grad: grad.detach()):
        model.module.look = lambda grad, keep=keep: (kept.append(keep(grad)), grad.mul_(2))
        model.zero_grad(set_to_none=False)
        with pytest.raises(
            RuntimeError, match=f"parameter 'large.weight' on rank {rank}: .*written during backward.*wrong"
        ):
            model(batch(rank, 0)).sum().backward()
        kept.clear()
    model.module.look = lambda grad: None
    model.zero_grad()
    model(batch(rank, 0)).sum().backward()


@over_both
@on_ranks(1, 2)
def test_gradients_after_a_backward_that_raised(rank, ddp_class, transport):
    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            hidden = self.first(x)
            hidden.register_hook(mock.Mock(side_effect=KeyError("planned")))
            return self.second(hidden)

    for hooked, none in each([(hooked, none) for hooked in (False, True) for none in (False, True)]):
        made = []
        for ddp in (lambda m: ddp_class(m, transport=transport), TorchDDP):
            model = ddp(seeded(Failing))
            if hooked:
                model.module.first.register_full_backward_hook(lambda *_: None)
            if not none:
                for parameter in model.parameters():
                    parameter.grad = torch.zeros_like(parameter)
            with pytest.raises(KeyError, match="planned"):
                model(torch.full((1, 3), 1.0 + rank)).square().sum().backward()
            made.append(grads_of(model))
        assert_grads(*made, 0.0, f"hooked {hooked}, None {none}")


@over_both
@on_ranks(2)
def test_gradients_are_reduced_where_they_lie_unless_there_is_a_hook(rank, ddp_class, transport):
    model = ddp_class(seeded(Watched), transport=transport)
    large, during, handles = model.module.large.weight, [], []
    model.module.look = lambda grad: during.append(grad.data_ptr())
    for hooked in each([False, True, False]):
        if hooked:
            handles.append(model.module.first.register_full_backward_hook(lambda *_: None))
        else:
            [handle.remove() for handle in handles]
        for zeroed in (True, False):
            large.grad = None if zeroed else large.grad
            model(batch(rank, 0)).square().sum().backward()
            assert (during[-1] == large.grad.data_ptr()) is not hooked
