"""torch's DistributedDataParallel tests on CPU and gloo, with another class in place of torch's.

The tests come from the installed torch; this module replaces their GPU calls by what torch does on a CPU.
"""

import contextlib
import functools
import importlib
import multiprocessing
import sys
import types
import unittest

import torch
import torch.distributed as dist
import torch.nn.parallel.distributed as ddp
import torch.testing._internal.common_distributed as common

TORCHS = ddp.DistributedDataParallel


def replace_class(target):
    """Replace the class in every module of torch; the target's modules may need torch's class as a base."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torch":
            for attribute, value in list(vars(module).items()):
                if value is TORCHS:
                    setattr(module, attribute, target)


# --- a CPU in place of GPUs


def no_gpus(*args, **kwargs):
    """Stands in for functions of torch.cuda that do nothing on a CPU."""


class NoStream:
    """Stands in for a stream or an event."""

    def __init__(self, *args, **kwargs):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *args):
        return False

    record = wait = wait_stream = wait_event = synchronize = record_event = no_gpus


def on_cpu(device):
    """Map GPU devices to the CPU; return other first arguments of to() unchanged."""
    is_gpu = isinstance(device, int) and not isinstance(device, bool)
    is_gpu |= isinstance(device, (str, torch.device)) and str(device).startswith("cuda")
    return torch.device("cpu") if is_gpu else device


def makes_on_cpu(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        if args[2:] == (1000, 1000):
            args = (*args[:2], 24, 24)  # an image sized for a GPU; the test does not depend on the shape
        return function(*args, **kwargs)

    return call


def moves_to_cpu(function):
    @functools.wraps(function)
    def to(self, *args, **kwargs):
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        return function(self, *map(on_cpu, args[:1]), *args[1:], **kwargs)

    return to


def torch_without_gpus():
    """The module that tests see as `torch`."""
    cuda = types.ModuleType("torch.cuda")
    cuda.__getattr__ = lambda name: getattr(torch.cuda, name)
    cuda.set_device = cuda.synchronize = cuda.manual_seed = no_gpus
    cuda.current_device = lambda: dist.get_rank()
    cuda.Stream = cuda.stream = NoStream
    view = types.ModuleType("torch")
    view.__getattr__ = lambda name: getattr(torch, name)
    view.cuda = cuda
    view.device = lambda device, *index: torch.device(on_cpu(device))
    for name in ("ones", "zeros", "rand", "randn", "tensor"):
        setattr(view, name, makes_on_cpu(getattr(torch, name)))
    return view


def sync_batch_norm(self, x):
    """SyncBatchNorm's forward, which torch implements only for GPUs: statistics by differentiable all-reduces."""
    from torch.distributed.nn.functional import all_reduce

    self._check_input_dim(x)
    self._check_non_zero_input_channels(x)
    if not self.training:
        normed = torch.nn.functional.batch_norm
        of_batch = self.running_mean is None
        return normed(x, self.running_mean, self.running_var, self.weight, self.bias, of_batch, 0.0, self.eps)
    group = self.process_group or dist.group.WORLD
    channels, dims = x.size(1), [0, *range(2, x.dim())]
    shape = [1, channels] + [1] * (x.dim() - 2)
    wide = x.float()
    count = torch.full((1,), float(wide.numel() // channels))
    sums = all_reduce(torch.cat([wide.sum(dims), count]), group=group)
    n = sums[-1].detach()
    mean = sums[:channels] / n
    var = all_reduce((wide - mean.view(shape)).square().sum(dims), group=group) / n
    with torch.no_grad():
        self.num_batches_tracked.add_(1)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
        self.running_var.lerp_((var * (n / (n - 1).clamp(min=1))).to(self.running_var.dtype), self.momentum)
    out = (wide - mean.view(shape)) * torch.rsqrt(var + self.eps).view(shape)
    if self.weight is not None:
        out = out * self.weight.float().view(shape) + self.bias.float().view(shape)
    return out.to(x.dtype)


def install_shim(target):
    for name in (
        "skip_if_lt_x_gpu",
        "nccl_skip_if_lt_x_gpu",
        "require_n_gpus_for_nccl_backend",
        "requires_nccl_version",
    ):
        setattr(common, name, lambda *args, **kwargs: lambda test: test)
    common.skip_if_no_gpu = lambda test: test
    common.init_multigpu_helper = lambda world_size, backend: {rank: [rank] for rank in range(int(world_size))}

    for cls in (torch.Tensor, torch.nn.Module):
        cls.to = moves_to_cpu(cls.to)
        cls.cuda = lambda self, *args, **kwargs: self
    # Mixed precision uses these.
    torch.Stream = torch.Event = NoStream
    torch.accelerator.current_stream = NoStream

    torch.nn.SyncBatchNorm.forward = sync_batch_norm
    target._passing_sync_batchnorm_handle = no_gpus  # the original refuses modules on a CPU
    init = target.__init__

    @functools.wraps(init)
    def __init__(self, module, device_ids=None, output_device=None, *args, **kwargs):
        if len(device_ids or ()) <= 1:  # the class itself refuses several
            device_ids = output_device = None
        init(self, module, device_ids, output_device, *args, **kwargs)

    target.__init__ = __init__


# --- the tests


def fork_ranks(timeout_s):
    """Make tests fork their ranks, wait `timeout_s` for them, and fail if a rank dies."""

    def spawn(self):
        self._start_processes(multiprocessing.get_context("fork").Process)

    check = common.MultiProcessTestCase._check_return_codes

    def check_all(self, fn, elapsed):
        if not self.processes:
            raise unittest.SkipTest("harness: the test spawned no ranks")
        check(self, fn, elapsed)  # misses the death of any rank other than 0
        codes = [process.exitcode for process in self.processes]
        if any(code is None or code < 0 for code in codes):
            raise RuntimeError(f"harness: a rank died, exit codes {codes}")

    common.MultiProcessTestCase._spawn_processes = spawn
    common.MultiProcessTestCase._check_return_codes = check_all
    common.get_timeout = lambda test_id: timeout_s


def run_disabled(cls):
    """Enable the tests that torch skips on this platform."""
    for name in dir(cls):
        test = inner = getattr(cls, name)
        while getattr(inner, "__unittest_skip__", False) and hasattr(inner, "__wrapped__"):
            inner = inner.__wrapped__
        if not name.startswith("test") or inner is test:
            continue

        def plain(self, *args, inner=inner, **kwargs):
            return inner(self, *args, **kwargs)

        plain.__name__, plain.__qualname__, plain.__doc__ = name, inner.__qualname__, inner.__doc__
        plain.__wrapped__ = plain  # TestDistBackend.setUp reads __wrapped__ of one test
        setattr(cls, name, plain)


def kept_for_all(temporary_file):
    """torch's `_rank_temp_file`, which rank 0 otherwise deletes while others may still read it."""

    @contextlib.contextmanager
    def make():
        with temporary_file() as name:
            yield name
            dist.barrier()

    return make


def load(class_name, timeout_s):
    """Load torch's tests for the class of this name. The environment must have BACKEND and WORLD_SIZE."""
    module, _, name = class_name.rpartition(".")
    target = getattr(importlib.import_module(module), name)
    replace_class(target)
    fork_ranks(timeout_s)
    install_shim(target)
    tests = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    tests.Barrier.sync.__func__.__defaults__ = (None, 40)  # the machine may be slow
    tests._rank_temp_file = kept_for_all(tests._rank_temp_file)
    tests.torch = torch_without_gpus()
    tests.autocast = functools.partial(torch.amp.autocast, "cpu", dtype=torch.bfloat16)
    tests.GradScaler = functools.partial(torch.amp.GradScaler, "cpu")

    class WheelDistTest(tests.TestDistBackend, tests.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            self._spawn_processes()

    run_disabled(WheelDistTest)
    return WheelDistTest
