"""Bootstrap of the DDP conformance harness (our own code; contains no PyTorch test source).

Three jobs, all driven by environment variables so that they also happen in spawned children:
  * swap   - replace torch's DistributedDataParallel by the class named in CONF_DDP, everywhere
             it is referred to by name (every loaded module that holds a reference to it);
  * shim   - CONF_SHIM=cpu: let tests written for N GPUs run on CPU tensors with gloo;
  * load   - import the wheel's test module and build a runnable class.
"""

import functools
import importlib
import os
import sys
import types
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
if HERE not in sys.path:
    sys.path.insert(0, HERE)

ENV_DDP, ENV_SHIM, ENV_TIMEOUT, ENV_START = "CONF_DDP", "CONF_SHIM", "CONF_TIMEOUT", "CONF_START"
ENV_DISABLED = "CONF_RUN_DISABLED"
TORCH_DDP = "torch.nn.parallel.DistributedDataParallel"

_state = {"done": False}


def shim_on():
    return os.environ.get(ENV_SHIM, "cpu") == "cpu"


# --------------------------------------------------------------------------- swap
def resolve(path):
    modname, _, attr = path.rpartition(".")
    return getattr(importlib.import_module(modname), attr)


def _sweep(orig, target):
    """Point every module-level reference to `orig` at `target`, except in the modules that
    define the target's own class hierarchy (they may need the original as a base class)."""
    import torch.nn.parallel.distributed as d

    home = {c.__module__ for c in target.__mro__} - {d.__name__}
    roots = {h.split(".")[0] for h in home} - {"torch", "builtins", "__main__", "abc"}
    n = 0
    for name, mod in list(sys.modules.items()):
        if mod is None or name == __name__ or name.split(".")[0] in roots or name in home - {"torch.nn.modules.module"}:
            continue
        try:
            items = list(vars(mod).items())
        except TypeError:
            continue
        for k, v in items:
            if v is orig:
                setattr(mod, k, target)
                n += 1
    return n


def swap():
    import torch.nn.parallel as p
    import torch.nn.parallel.distributed as d

    orig = _state.setdefault("orig", d.DistributedDataParallel)
    spec = os.environ.get(ENV_DDP, TORCH_DDP)
    target = orig if spec in (TORCH_DDP, "torch.nn.parallel.distributed.DistributedDataParallel") else resolve(spec)
    _state["target"] = target
    if target is not orig:
        _sweep(orig, target)
        # modules imported later do `from torch.nn.parallel[.distributed] import ...`
        d.DistributedDataParallel = target
        p.DistributedDataParallel = target
    return orig, target


def resweep():
    """Call after importing more modules (test files), in case they kept a reference."""
    if _state["target"] is not _state["orig"]:
        _sweep(_state["orig"], _state["target"])


# --------------------------------------------------------------------------- CPU shim
def _identity_decorator(*_a, **_k):
    return lambda f: f


class _Noop:
    """Stands in for torch.cuda.Stream / Event / device guards."""

    cuda_stream = 0
    device = None

    def __init__(self, *a, **k):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *a):
        return False

    def __call__(self, f):
        return f

    def wait(self, *a, **k):
        return None

    def query(self):
        return True

    def elapsed_time(self, other):
        return 0.0

    record = wait_stream = wait_event = synchronize = record_event = wait


def _make_fake_cuda(real):
    m = types.ModuleType("torch.cuda")

    def ngpu():
        return max(8, int(os.environ.get("WORLD_SIZE", "2")))

    def rank():
        import torch.distributed as dist

        return dist.get_rank() if dist.is_initialized() else 0

    over = dict(
        device_count=ngpu,
        is_available=lambda: False,
        current_device=rank,
        set_device=lambda *a: None,
        synchronize=lambda *a, **k: None,
        manual_seed=lambda *a: None,
        manual_seed_all=lambda *a: None,
        empty_cache=lambda: None,
        memory_allocated=lambda *a: 0,
        max_memory_allocated=lambda *a: 0,
        reset_peak_memory_stats=lambda *a: None,
        _sleep=lambda *a: None,
        Stream=_Noop,
        Event=_Noop,
        stream=_Noop,
        device=_Noop,
        current_stream=lambda *a: _Noop(),
        default_stream=lambda *a: _Noop(),
        is_bf16_supported=lambda *a, **k: True,
    )
    m.__dict__.update(over)
    m.__getattr__ = lambda name: getattr(real, name)
    return m


def map_device(d):
    import torch

    if isinstance(d, bool) or d is None:
        return d
    if isinstance(d, int):
        return torch.device("cpu")
    if isinstance(d, str) and d.split(":")[0] == "cuda":
        return "cpu"
    if isinstance(d, torch.device) and d.type == "cuda":
        return torch.device("cpu")
    return d


def _map_call(args, kwargs):
    if args and not isinstance(args[0], float):
        args = (map_device(args[0]),) + tuple(args[1:])
    if "device" in kwargs:
        kwargs = dict(kwargs, device=map_device(kwargs["device"]))
    return args, kwargs


FACTORIES = (
    "ones zeros empty rand randn randint full arange tensor as_tensor eye linspace randperm empty_strided "
    "ones_like zeros_like empty_like rand_like randn_like full_like sparse_coo_tensor normal"
).split()


class _TorchProxy(types.ModuleType):
    """What a test module sees as `torch` under the shim: the real one, with cuda devices meaning CPU."""

    def __init__(self, real):
        super().__init__("torch")
        self.__dict__["_real"] = real
        self.__dict__["cuda"] = _make_fake_cuda(real.cuda)

        def device(*a, **k):
            if len(a) == 1 and isinstance(a[0], int):
                return real.device("cpu")
            return map_device(real.device(*a, **k))

        class DeviceMeta(type):
            def __instancecheck__(cls, obj):
                return isinstance(obj, real.device)

            def __call__(cls, *a, **k):
                return device(*a, **k)

        self.__dict__["device"] = DeviceMeta("device", (), {})
        for n in FACTORIES:
            f = getattr(real, n)

            def wrap(*a, __f=f, **k):
                if "device" in k:
                    k["device"] = map_device(k["device"])
                if len(a) == 4 and a[2:] == (1000, 1000):
                    a = a[:2] + (24, 24)  # an image sized for a GPU; shape does not matter to the test
                return __f(*a, **k)

            self.__dict__[n] = functools.wraps(f)(wrap)

    def __getattr__(self, name):
        return getattr(self.__dict__["_real"], name)


def proxy_module(mod):
    """Give a test module the CPU view of torch, under every name it binds torch to."""
    import torch

    if _state.get("proxy") is None:
        _state["proxy"] = _TorchProxy(torch)
    for k, v in list(vars(mod).items()):
        if v is torch:
            setattr(mod, k, _state["proxy"])

    def cpu_init(world_size, backend=None):
        return {i: [i] for i in range(int(world_size))}

    if hasattr(mod, "init_multigpu_helper"):
        mod.init_multigpu_helper = cpu_init
    if hasattr(mod, "autocast"):
        mod.autocast = functools.partial(torch.amp.autocast, "cpu", dtype=torch.bfloat16)
    if hasattr(mod, "GradScaler"):
        mod.GradScaler = functools.partial(torch.amp.GradScaler, "cpu")


def _cpu_syncbn_forward(self, input):
    """Synchronised batch norm on CPU, for the shim only: statistics through differentiable all-reduces."""
    import torch
    import torch.distributed as dist
    import torch.distributed.nn.functional as dfn

    self._check_input_dim(input)
    self._check_non_zero_input_channels(input)
    factor = 0.0 if self.momentum is None else self.momentum
    if self.training and self.track_running_stats:
        self.num_batches_tracked.add_(1)
        if self.momentum is None:
            factor = 1.0 / self.num_batches_tracked.item()
    use_batch = self.training or (self.running_mean is None and self.running_var is None)
    group = self.process_group or dist.group.WORLD
    sync = use_batch and self.training and dist.is_initialized() and dist.get_world_size(group) > 1
    if not sync:
        return torch.nn.functional.batch_norm(
            input,
            self.running_mean if not self.training or self.track_running_stats else None,
            self.running_var if not self.training or self.track_running_stats else None,
            self.weight,
            self.bias,
            use_batch,
            factor,
            self.eps,
        )
    dims = [0] + list(range(2, input.dim()))
    x = input.float() if input.dtype in (torch.half, torch.bfloat16) else input
    cnt = torch.full((1,), float(x.numel() // x.size(1)), dtype=x.dtype)
    stats = dfn.all_reduce(torch.cat([x.sum(dims), cnt]), group=group)
    c = x.size(1)
    shape = [1, c] + [1] * (x.dim() - 2)
    n = stats[-1].detach()
    mean = stats[:c] / n
    var = dfn.all_reduce(((x - mean.view(shape)) ** 2).sum(dims), group=group) / n
    if self.track_running_stats and self.running_mean is not None:
        with torch.no_grad():
            self.running_mean.lerp_(mean.detach().to(self.running_mean.dtype), factor)
            self.running_var.lerp_((var.detach() * (n / (n - 1).clamp(min=1))).to(self.running_var.dtype), factor)
    out = (x - mean.view(shape)) * torch.rsqrt(var + self.eps).view(shape)
    if self.weight is not None:
        out = out * self.weight.to(x.dtype).view(shape) + self.bias.to(x.dtype).view(shape)
    return out.to(input.dtype)


def install_shim():
    import torch
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d
    import torch.testing._internal.common_distributed as cd

    # decorators: "needs N GPUs" does not hold any more
    for n in (
        "skip_if_lt_x_gpu",
        "nccl_skip_if_lt_x_gpu",
        "require_n_gpus_for_nccl_backend",
        "requires_nccl",
        "requires_nccl_version",
        "requires_accelerator_dist_backend",
    ):
        setattr(cd, n, _identity_decorator)
    cd.skip_if_no_gpu = lambda f: f
    cd.at_least_x_gpu = lambda n: True
    cd.init_multigpu_helper = lambda world_size, backend=None: {i: [i] for i in range(int(world_size))}

    # tensors and modules: cuda means "stay here"
    T, M = torch.Tensor, torch.nn.Module
    T.cuda = lambda self, *a, **k: self
    M.cuda = lambda self, *a, **k: self
    t_to, m_to = T.to, M.to

    @functools.wraps(t_to)
    def tensor_to(self, *args, **kwargs):
        args, kwargs = _map_call(args, kwargs)
        return t_to(self, *args, **kwargs)

    @functools.wraps(m_to)
    def module_to(self, *args, **kwargs):
        args, kwargs = _map_call(args, kwargs)
        return m_to(self, *args, **kwargs)

    T.to, M.to = tensor_to, module_to
    for n in ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"):
        f = getattr(T, n)

        def new_(self, *a, __f=f, **k):
            if "device" in k:
                k["device"] = map_device(k["device"])
            return __f(self, *a, **k)

        setattr(T, n, functools.wraps(f)(new_))

    # default streams/events, as used for mixed precision (CPU has none)
    if not torch.cuda.is_available():
        torch.Stream, torch.Event = _Noop, _Noop
        torch.accelerator.current_stream = lambda *a, **k: _Noop()

    torch.cuda.nccl.version = lambda: (2, 27, 0)
    if not hasattr(c10d, "ProcessGroupNCCL"):
        c10d.ProcessGroupNCCL = type("ProcessGroupNCCL", (), {})

    # DDP + ZeRO overlap refuses gloo up front; let it try
    import torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook as zh

    zdist = types.ModuleType("torch.distributed")
    zdist.__getattr__ = lambda n: getattr(dist, n)
    zdist.get_backend = lambda *a, **k: "nccl"
    zh.dist = zdist

    # dynamo's one-process base class asks for an accelerator
    D1, DN = cd.DynamoDistributedSingleProcTestCase, cd.DynamoDistributedMultiProcTestCase

    def set_up_class(cls):
        import tempfile

        super(D1, cls).setUpClass()
        cls.rank, cls.device, cls.device_ids = 0, "cpu", None
        dist.init_process_group("gloo", rank=0, world_size=1, init_method="file://" + tempfile.mktemp())

    D1.setUpClass = classmethod(set_up_class)
    DN.world_size = property(lambda self: int(os.environ["WORLD_SIZE"]))
    torch.accelerator.set_device_index = lambda *a, **k: None

    # backend names
    def as_gloo(f):
        @functools.wraps(f)
        def g(*a, **k):
            if a and a[0] in ("nccl",):
                a = ("gloo",) + a[1:]
            if k.get("backend") == "nccl":
                k["backend"] = "gloo"
            k.pop("device_id", None)
            return f(*a, **k)

        return g

    for mod in (dist, c10d):
        mod.init_process_group = as_gloo(mod.init_process_group)
        mod.is_nccl_available = lambda: True
    ng = c10d.new_group

    @functools.wraps(ng)
    def new_group(ranks=None, timeout=None, backend=None, *a, **k):
        return ng(ranks, timeout, "gloo" if backend == "nccl" else backend, *a, **k)

    dist.new_group = c10d.new_group = new_group

    # SyncBatchNorm has no CPU kernel; the class refuses CPU modules
    torch.nn.SyncBatchNorm.forward = _cpu_syncbn_forward
    target = _state["target"]
    if hasattr(target, "_passing_sync_batchnorm_handle"):
        target._passing_sync_batchnorm_handle = lambda self, module: None

    # DDP on CPU modules takes no device_ids/output_device; keep the length check to the class itself
    init = target.__init__

    @functools.wraps(init)
    def __init__(self, module, device_ids=None, output_device=None, *a, **k):
        if all(p.device.type == "cpu" for p in module.parameters()) and (device_ids is None or len(device_ids) <= 1):
            device_ids = output_device = None
        init(self, module, device_ids, output_device, *a, **k)

    target.__init__ = __init__


# --------------------------------------------------------------------------- general test set-up
def bootstrap():
    if _state["done"]:
        return
    _state["done"] = True
    os.environ.setdefault("BACKEND", "gloo")
    os.environ.setdefault("WORLD_SIZE", "2")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch  # noqa: F401
    import torch.testing._internal.common_distributed as cd

    swap()
    t = float(os.environ.get(ENV_TIMEOUT, "60"))
    cd.get_timeout = lambda test_id: t
    start = os.environ.get(ENV_START, "fork")

    def _spawn_processes(self):
        import torch.multiprocessing as mp

        self._start_processes(mp.get_context(start).Process)

    cd.MultiProcessTestCase._spawn_processes = _spawn_processes
    orig_check = cd.MultiProcessTestCase._check_return_codes

    def _check_return_codes(self, fn, elapsed):
        """torch looks at rank 0's exit code only; a crash of any rank must not pass."""
        if not self.processes:
            raise unittest.SkipTest("harness: the test spawned no ranks")
        orig_check(self, fn, elapsed)
        if fn in getattr(self, "skip_return_code_checks", []) or fn in getattr(self, "special_return_code_checks", {}):
            return
        codes = [p.exitcode for p in self.processes]
        if any(c is None or c < 0 for c in codes):
            raise RuntimeError(f"harness: a rank died, exit codes {codes}")

    cd.MultiProcessTestCase._check_return_codes = _check_return_codes
    if shim_on():
        install_shim()


def _peel_disabled(cls):
    """--run-disabled: run tests that are switched off by unittest.skip/skipIf on this platform."""
    for n in dir(cls):
        if not n.startswith("test"):
            continue
        f = getattr(cls, n)
        if not getattr(f, "__unittest_skip__", False):
            continue
        g = f
        while getattr(g, "__unittest_skip__", False) and hasattr(g, "__wrapped__"):
            g = g.__wrapped__

        def plain(self, *a, __g=g, **k):
            return __g(self, *a, **k)

        plain.__name__, plain.__qualname__, plain.__doc__ = n, g.__qualname__, g.__doc__
        plain.__wrapped__ = plain  # TestDistBackend.setUp reads __wrapped__ of one test
        setattr(cls, n, plain)


def load_wheel():
    """Build the runnable class out of the test bases that ship in the wheel."""
    bootstrap()

    dt = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    dt.Barrier.sync.__func__.__defaults__ = (None, 40)  # the machine may be slow
    resweep()
    if shim_on():
        proxy_module(dt)

    class WheelDistTest(dt.TestDistBackend, dt.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            self._spawn_processes()

    WheelDistTest.__module__ = "conf_cases"
    WheelDistTest.__qualname__ = "WheelDistTest"
    if os.environ.get(ENV_DISABLED) == "1":
        _peel_disabled(WheelDistTest)
    return WheelDistTest
