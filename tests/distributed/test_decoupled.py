"""Training with decoupled=True and a DeferredOptimizer gives what torch's class and the plain optimizer give."""

import copy
import gc
import time

import pytest
import torch

import torchddp
from tests.decoupled import Shared, make_pair
from tests.harness import run_ranks
from tests.sharded import batch_of, loss_of, small_net

# Sums of more than two ranks have no one order through gloo.
TOLERANCE = {"shm": {}, "c10d": {"rtol": 1e-4, "atol": 1e-5}}
TRANSPORTS = ["shm", "c10d"]
SECONDS = 120.0
SGD = (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9})
ADAMW = (torch.optim.AdamW, {"lr": 0.003})


# Shared memory takes two.
RUNS = [("c10d", 1), ("shm", 2), ("c10d", 2), ("shm", 4)]
LONG_RUNS = [pytest.param(*run, marks=pytest.mark.slow) for run in (("shm", 3), ("c10d", 3), ("c10d", 4))]


def tolerance(transport, world_size):
    return TOLERANCE[transport] if world_size > 2 else {}


@pytest.mark.rest_is_thorough("c10d-1-plain", "shm-2-deferred", "c10d-2-plain", "shm-4-deferred", "c10d-3-deferred")
@pytest.mark.parametrize("deferred", [True, False], ids=["deferred", "plain"])
@pytest.mark.parametrize(("transport", "world_size"), RUNS + LONG_RUNS)
def test_fifty_steps(world_size, transport, deferred):
    # AdamW makes much of rounding where gradients are nearly zero.
    optim, options = SGD if tolerance(transport, world_size) else ADAMW

    def work(rank):
        pair = make_pair(optim, options, deferred=deferred, transport=transport)
        assert len(pair.model.reducer.plan) > 2
        for step in range(50):
            pair.backward(step)
            if step % 10 == 0:
                pair.assert_equal(**tolerance(transport, world_size))  # gradients
            pair.step()
        pair.assert_equal(**tolerance(transport, world_size))

    run_ranks(work, world_size, timeout=SECONDS)


@pytest.mark.parametrize("optim", [torch.optim.Adam, torch.optim.Adagrad, torch.optim.Adafactor, torch.optim.NAdam])
def test_other_optimizers(optim):
    def work(rank):
        pair = make_pair(optim, {"lr": 0.01}, small_net)
        pair.train(range(10))
        pair.assert_equal()

    run_ranks(work, 2)


@pytest.mark.parametrize("views", [True, False], ids=["views", "copies"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_wherever_it_is_called(set_to_none, views):
    def work(rank):
        pair = make_pair(*SGD, gradient_as_bucket_view=views)
        for step in range(30):
            if step % 3 == 0:
                pair.optimizer.zero_grad(set_to_none)
                pair.plain.zero_grad(set_to_none)
            for model, optimizer in pair.sides():
                output = model(batch_of(rank, step))
                if step % 3 == 1:
                    optimizer.zero_grad(set_to_none)
                loss_of(output).backward()
                optimizer.step()
                if step % 3 == 1:  # before the next step's, which comes too late
                    optimizer.zero_grad(set_to_none)
        pair.assert_equal()

    run_ranks(work, 2, timeout=SECONDS)


def test_gradients_that_are_thrown_away():
    def work(rank):
        pair = make_pair(*SGD)
        for step in range(8):
            pair.backward(2 * step)
            for _, optimizer in pair.sides():
                optimizer.zero_grad(set_to_none=step % 2 == 0)  # the averages may still be on their way
            pair.backward(2 * step + 1)
            pair.step()
        pair.assert_equal()

    run_ranks(work, 2)


@pytest.mark.rest_is_thorough("shm-2-True", "c10d-2-False", "shm-4-False")
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(
    ("transport", "world_size"),
    [("shm", 2), ("c10d", 2), *(pytest.param(name, 4, marks=pytest.mark.slow) for name in ("shm", "c10d"))],
)
def test_no_sync_clipping_and_schedulers_together(world_size, transport, set_to_none):
    def work(rank):
        pair = make_pair(*SGD, transport=transport)
        schedulers = [torch.optim.lr_scheduler.StepLR(o, 7, 0.7) for _, o in pair.sides()]
        assert isinstance(pair.optimizer, torch.optim.Optimizer)
        for step in range(50):
            for model, _ in pair.sides():
                with model.no_sync():
                    loss_of(model(batch_of(rank, 1000 + step))).backward()
            pair.backward(step)
            theirs = torch.nn.utils.clip_grad_norm_(pair.reference.parameters(), 0.05)
            mine = pair.optimizer.clip_grad_norm(0.05)
            torch.testing.assert_close(mine.double(), theirs.double(), rtol=1e-5, atol=1e-7)
            pair.step(set_to_none=set_to_none)
            for scheduler in schedulers:
                scheduler.step()
            assert pair.optimizer.param_groups[0]["lr"] == pair.plain.param_groups[0]["lr"]
        pair.assert_equal(rtol=2e-4, atol=2e-5)  # the norm is added up in another order

    run_ranks(work, world_size, timeout=SECONDS)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_clipping_measures_shards_and_waits_for_nothing(norm_type):
    def work(rank):
        pair = make_pair(*SGD)
        for step in range(6):
            pair.backward(step)
            waits = pair.model.reducer._gathers_are_under_way
            mine = pair.optimizer.clip_grad_norm(0.02, norm_type)
            assert waits and pair.model.reducer._gathers_are_under_way
            theirs = torch.nn.utils.clip_grad_norm_(pair.reference.parameters(), 0.02, norm_type)
            torch.testing.assert_close(mine.double(), theirs.double(), rtol=1e-5, atol=1e-7)
            if step == 3:  # seen by who reads gradients before the step
                pair.assert_equal(rtol=1e-5, atol=1e-7)
            pair.step()
        pair.assert_equal(rtol=1e-5, atol=1e-6)

    run_ranks(work, 3)


def test_clipping_after_one_rank_alone_has_looked():
    def work(rank):
        pair = make_pair(*SGD)
        for step in range(6):
            pair.backward(step)
            if rank == step % 2:
                assert all(p.grad is not None for p in pair.model.parameters())
            pair.optimizer.clip_grad_norm(0.02)
            torch.nn.utils.clip_grad_norm_(pair.reference.parameters(), 0.02)
            pair.step()
        pair.assert_equal()

    run_ranks(work, 2)


def test_torchs_clipping_and_scaler_find_final_gradients():
    def work(rank):
        pair = make_pair(*SGD)
        scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3) for _ in range(2)]
        for step in range(12):
            for (model, optimizer), scaler in zip(pair.sides(), scalers, strict=True):
                loss = loss_of(model(batch_of(rank, step)))
                if step == 5:
                    loss = loss * torch.inf  # this step is skipped
                scaler.scale(loss).backward()
                if step % 2:
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale() != 64.0
        pair.assert_equal()

    run_ranks(work, 2)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_shared_weights_and_modules_left_out(world_size, transport):
    def work(rank):
        pair = make_pair(*SGD, Shared, find_unused_parameters=True, transport=transport)
        for step in range(50):
            pair.backward(step, with_all=(step + rank) % 3 != 0 and step % 5 != 0)
            if step % 7 == 0:
                pair.assert_equal(**tolerance(transport, world_size))
            if step % 4 == 0:
                pair.optimizer.clip_grad_norm(0.5)
                torch.nn.utils.clip_grad_norm_(pair.reference.parameters(), 0.5)
            pair.step(set_to_none=step % 2 == 0)
        pair.assert_equal(**tolerance(transport, world_size))

    run_ranks(work, world_size, timeout=SECONDS)


def test_a_static_graph():
    def work(rank):
        pair = make_pair(*SGD, Shared, static_graph=True)
        for step in range(20):
            pair.backward(step, with_all=False)
            pair.step()
        pair.assert_equal()

    run_ranks(work, 2)


def test_recurrent_layers():
    class Recurrent(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = torch.nn.LSTM(16, 8, batch_first=True)
            self.head = torch.nn.Linear(8, 4)

        def forward(self, x):
            return self.head(self.rnn(x[:, None])[0])

    def work(rank):
        pair = make_pair(*SGD, Recurrent)
        pair.train(range(10))
        pair.assert_equal()

    run_ranks(work, 2)


# --- what reads parameters or optimizer state applies what is pending ---


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_whatever_is_read_right_after_a_step_is_updated(transport):
    def work(rank):
        pair = make_pair(transport=transport)
        for step in range(8):
            pair.train(range(step, step + 1))
            module, other = pair.model.module, pair.reference.module
            if step == 1:
                assert torch.equal(module.middle.weight, other.middle.weight)
            elif step == 2:
                for key, value in pair.model.state_dict().items():
                    assert torch.equal(value, other.state_dict()[key.removeprefix("module.")])
            elif step == 3:
                mine, theirs = pair.optimizer.state_dict(), pair.plain.state_dict()
                assert mine["param_groups"] == theirs["param_groups"]
                for index, state in theirs["state"].items():
                    assert all(torch.equal(mine["state"][index][key], state[key]) for key in state)
                pair.optimizer.load_state_dict(copy.deepcopy(theirs))
            elif step == 4:
                with torch.inference_mode():
                    assert torch.equal(pair.model(batch_of(0, 3)), pair.reference(batch_of(0, 3)))
            elif step == 5:
                with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
                    assert torch.equal(pair.model.module.first(batch_of(0, 3)), other.first(batch_of(0, 3)))
            elif step == 6:
                kept = list(pair.optimizer.optim.param_groups[0]["params"])  # not through a module
                pair.optimizer.synchronize()
                assert all(torch.equal(a, b) for a, b in zip(kept, pair.reference.parameters(), strict=True))
        pair.assert_equal()

    run_ranks(work, 2)


def test_a_second_step_new_groups_and_a_closure():
    def work(rank):
        pair = make_pair(*SGD)
        extra = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
        for param, (_, optimizer) in zip(extra, pair.sides(), strict=True):
            optimizer.add_param_group({"params": [param], "lr": 0.5})
        for step in range(6):
            for param, (model, optimizer) in zip(extra, pair.sides(), strict=True):
                if step == 3:

                    def closure(model=model, optimizer=optimizer):
                        optimizer.zero_grad()
                        loss = loss_of(model(batch_of(0, 77)))
                        loss.backward()
                        return loss

                    assert optimizer.step(closure) > 0
                    continue
                (loss_of(model(batch_of(rank, step))) + param.sum()).backward()
                optimizer.step()
                optimizer.step()
                optimizer.zero_grad()
        pair.assert_equal()
        assert torch.equal(*extra) and extra[0][0] != 1

    run_ranks(work, 2)


class Counting(torch.optim.SGD):
    """Counts its steps in its groups, as some optimizers do, and weakens with them."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["weight_decay"] = 0.1 / group["count"]
        return super().step(closure)


def test_options_are_those_of_the_step():
    def work(rank):
        pair = make_pair(Counting, {"lr": 0.05, "foreach": False})
        for _, optimizer in pair.sides():
            optimizer.param_groups[0]["lr"] = torch.tensor(0.05)
        for step in range(6):
            pair.backward(step)
            pair.step()
            for _, optimizer in pair.sides():
                optimizer.param_groups[0]["lr"].mul_(0.5)
        pair.assert_equal()
        mine, theirs = pair.optimizer.param_groups[0], pair.plain.param_groups[0]
        assert mine["count"] == theirs["count"] == 6 and mine["lr"] == theirs["lr"]

    run_ranks(work, 2)


def test_hooks_of_the_step_run_once():
    def work(rank):
        pair = make_pair()
        calls = []
        pair.optimizer.register_step_post_hook(lambda *_: calls.append(1))
        pair.train(range(4))
        assert len(calls) == 4
        pair.optimizer.optim.register_step_pre_hook(lambda *_: None)
        with pytest.raises(ValueError, match="step hooks"):
            torchddp.optim.DeferredOptimizer(pair.optimizer.optim, pair.model)

    run_ranks(work, 2)


def test_a_model_goes_on_when_its_optimizer_is_gone_or_replaced():
    def work(rank):
        pair = make_pair(*SGD)
        pair.train(range(3))
        first = pair.optimizer
        pair.optimizer = torchddp.optim.DeferredOptimizer(first.optim, pair.model)
        pair.train(range(3, 6))
        with pytest.raises(RuntimeError, match="has taken this one's place"):
            first.step()
        first = None
        pair.train(range(6, 9))
        pair.optimizer = pair.optimizer.optim
        pair.model._updates.apply()
        gc.collect()
        pair.train(range(9, 12))  # backward waits for the gathers again
        pair.assert_equal()

    run_ranks(work, 2)


# --- overlap ---


def test_a_layers_gather_is_waited_for_when_forward_comes_to_it():
    """Read off the reducer's timeline, whose clock is time.monotonic_ns."""

    def layers():
        return torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(6)))

    def work(rank):
        pair = make_pair(make=layers, bucket_cap_mb=0.0001)  # a bucket for each layer
        pair.train(range(3))
        assert len(pair.model.reducer.plan) == 6
        entered, left = {}, {}
        for index, layer in enumerate(pair.model.module):
            layer.register_forward_pre_hook(lambda *_, i=index: entered.__setitem__(i, time.monotonic_ns()))
            layer.register_forward_hook(lambda *_, i=index: left.__setitem__(i, time.monotonic_ns()))
        pair.model.reducer._enable_timeline(1000)
        pair.train(range(3, 4))
        assert pair.model.reducer._gathers_are_under_way and not entered.keys() - range(6)
        entered.clear()
        left.clear()
        for model, _ in pair.sides():
            model(batch_of(rank, 4))
        events = pair.model.reducer._timeline()
        waits = {event.id: event.time_ns for event in events if event.kind == "gather_wait"}
        done = {event.id: event.time_ns for event in events if event.kind == "gather_done"}
        ended = next(event.time_ns for event in events if event.kind == "backward_end")
        assert len(waits) == len(done) == 6
        names = [name for name, _ in pair.model.module.named_parameters()]
        for bucket, spec in enumerate(pair.model.reducer.plan.buckets):
            layer = int(names[spec.params[0]].split(".")[0])
            assert ended < entered[layer] < waits[bucket] < done[bucket] < left[layer]
            assert layer == 0 or left[layer - 1] < waits[bucket]

    run_ranks(work, 2)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_a_rank_that_reads_alone_keeps_nobody_waiting(transport):
    """One rank waits for its averages, the other in a barrier."""

    def work(rank):
        pair = make_pair(*SGD, transport=transport)
        for step in range(6):
            pair.train(range(step, step + 1))
            if rank == step % 2:
                pair.model.state_dict()
            torch.distributed.barrier()
            pair.backward(100 + step)
            if rank == step % 2:
                pair.optimizer.synchronize()
            torch.distributed.barrier()
            pair.step()
        pair.assert_equal()

    run_ranks(work, 2)


def test_over_shared_memory_backward_waits():
    def work(rank):
        pair = make_pair(*SGD, transport="shm")
        pair.backward(0)
        assert not pair.model.reducer._gathers_are_under_way
        pair = make_pair(*SGD)
        pair.backward(0)
        assert pair.model.reducer._gathers_are_under_way

    run_ranks(work, 2)


# --- buckets ---


@pytest.mark.parametrize("world_size", [2, 3])
def test_memory(world_size):
    def work(rank):
        pair = make_pair(bucket_cap_mb=25)
        plan = pair.model.reducer.plan
        assert all(bucket.numel % world_size == 0 for bucket in plan.buckets)
        flat = sum(bucket.nbytes for bucket in plan.buckets)
        assert pair.model.reducer.bucket_memory_bytes == flat + flat // world_size
        shards = pair.model.reducer._gradient_shards()
        assert [s.numel() * world_size for s in shards] == [bucket.numel for bucket in plan.buckets]

    run_ranks(work, world_size)


def test_large_gradients_and_default_buckets():
    def work(rank):
        pair = make_pair(*SGD, bucket_cap_mb=None)
        pair.train(range(5))
        pair.assert_equal()

    run_ranks(work, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64, torch.float64], ids=str)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_dtypes(transport, dtype):
    def work(rank):
        torch.manual_seed(0)
        start = [torch.randn(size, dtype=dtype) for size in ((7, 3), (5,), (0,), ())]
        grads = []
        for decoupled in (False, True):
            module = torch.nn.ParameterList([torch.nn.Parameter(p.clone()) for p in start])
            ddp = torchddp.DistributedDataParallel(Sum(module), decoupled=decoupled, transport=transport)
            for _ in range(3):
                ddp(rank + 1).backward()
            grads.append([p.grad for p in ddp.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))

    run_ranks(work, 2)


class Sum(torch.nn.Module):
    def __init__(self, params):
        super().__init__()
        self.params = params

    def forward(self, factor):
        return sum((p * p.conj()).real.float().sum() for p in self.params) * factor


def test_going_on_with_fewer_ranks():
    def work(rank):
        pair = make_pair(*SGD, transport="c10d")
        pair.train(range(4))
        group = torch.distributed.new_group([0, 1])
        if rank == 2:
            return None
        pair.model._update_process_group(group)
        pair.reference._update_process_group(group)
        assert all(bucket.numel % 2 == 0 for bucket in pair.model.reducer.plan.buckets)
        pair.train(range(4, 10))
        pair.assert_equal(rtol=1e-4, atol=1e-5)
        return True

    assert run_ranks(work, 3) == [True, True, None]


class FailingGather:
    """A reducer, one of whose gathers fails."""

    def __init__(self, reducer, bucket):
        self._reducer = reducer
        self._bucket = bucket

    def __getattr__(self, name):
        return getattr(self._reducer, name)

    def _wait_gather(self, bucket):
        if bucket == self._bucket:
            raise torchddp.TransportError("rank 0: the reduction of bucket 1 failed")
        self._reducer._wait_gather(bucket)


def test_a_gather_that_fails_in_forward():
    def layers():
        return torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))

    def work(rank):
        pair = make_pair(*SGD, layers, bucket_cap_mb=0.0001)
        pair.train(range(3))
        reducer = pair.model.reducer
        assert len(reducer.plan) == 4  # the last layer's first
        before = [p.detach().clone() for p in pair.optimizer.optim.param_groups[0]["params"]]
        pair.model.reducer = FailingGather(reducer, 1)
        with pytest.raises(torchddp.TransportError, match=r"bucket 1 failed\n.* made for 2 of 4 buckets"):
            pair.model(batch_of(rank, 3))
        pair.model.reducer = reducer
        after = list(pair.model.parameters())  # nothing is left to wait for
        assert [not torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True] * 4 + [False] * 4
        loss_of(pair.model(batch_of(rank, 3))).backward()

    run_ranks(work, 2)


def test_a_copy_has_what_was_pending():
    def work(rank):
        pair = make_pair(*SGD)
        pair.train(range(3))
        other = copy.deepcopy(pair.model)
        with pytest.raises(TypeError, match="belongs to its model"):
            copy.deepcopy(pair.optimizer)
        for a, b in zip(other.parameters(), pair.reference.parameters(), strict=True):
            assert torch.equal(a, b)
        for model in (other, pair.reference):
            loss_of(model(batch_of(rank, 3))).backward()
        for a, b in zip(other.parameters(), pair.reference.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)  # the copy has no optimizer: its backward waits

    run_ranks(work, 2)


def test_compiled_modules_find_everything_updated():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    class Compiled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.compile(small_net(), backend=backend)

        def forward(self, x):
            return self.inner(x)

    def work(rank):
        pair = make_pair(*SGD, Compiled, bucket_cap_mb=2)  # torch's compiler takes no less than 1
        pair.train(range(1))
        count = len(compiled)
        pair.train(range(1, 6))
        assert len(compiled) == count > 0  # modules look as they did
        pair.assert_equal()

    run_ranks(work, 2, timeout=SECONDS)


def test_gradient_stats_are_of_the_averages():
    def work(rank):
        pair = make_pair(*SGD, gradient_stats=True)
        for step in range(4):
            pair.backward(step)
            total = sum(p.grad.double().square().sum() for p in pair.reference.parameters())
            torch.testing.assert_close(pair.model.gradient_stats()[:, 0].sum(), total)
            pair.step()
        pair.assert_equal()

    run_ranks(work, 2)


# --- refusals ---


def test_what_is_refused():
    def work(rank):
        def wrap(module=None, **options):
            return torchddp.DistributedDataParallel(module or small_net(), decoupled=True, **options)

        for options in ({"bucket_cap_mb": "auto"}, {"wire_dtype": torch.bfloat16}):
            with pytest.raises(ValueError, match="decoupled"):
                wrap(**options)
        with pytest.raises(RuntimeError, match=r"parameter 'weight' has sparse gradients"):
            wrap(torch.nn.Embedding(4, 2, sparse=True))
        model = wrap()
        with pytest.raises(RuntimeError, match="takes no communication hook"):
            model.register_comm_hook(None, lambda state, bucket: None)
        with pytest.raises(RuntimeError, match="takes no communication hook"):
            model._register_builtin_comm_hook(torch.distributed.BuiltinCommHookType.ALLREDUCE)
        with pytest.raises(RuntimeError, match=r"can't be used with join\(\)"), model.join():
            pass
        with pytest.raises(RuntimeError, match=r"replan\(\)"):
            model.replan()

        deferred, sgd = torchddp.optim.DeferredOptimizer, torch.optim.SGD(model.parameters())
        with pytest.raises(TypeError, match=r"expected a torch.optim.Optimizer, got list"):
            deferred([sgd], model)
        for refused in (torch.optim.LBFGS(model.parameters()), torchddp.optim.OSS(model.parameters(), torch.optim.SGD)):
            with pytest.raises(ValueError, match="must treat parameters one by one"):
                deferred(refused, model)
        with pytest.raises(ValueError, match="made with decoupled=True"):
            deferred(sgd, torchddp.DistributedDataParallel(small_net()))
        with pytest.raises(ValueError, match="norm_type must be above 0"):
            optimizer = deferred(sgd, model)
            loss_of(model(batch_of(rank, 0))).backward()
            optimizer.clip_grad_norm(1.0, 0.0)

    run_ranks(work, 2)
