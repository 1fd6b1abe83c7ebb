"""Deliberately wrong (or instrumented) DistributedDataParallel subclasses, to test the harness itself."""

import os
import sys
from contextlib import contextmanager

import torch
from torch.nn.parallel.distributed import DistributedDataParallel as Base


def _log(line):
    fd = os.open(os.environ["CONF_TRACE"], os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.write(fd, (line + "\n").encode())
    os.close(fd)


class Plain(Base):
    """Nothing changed: a subclass must pass all that the original passes."""


class Counting(Base):
    def __init__(self, *a, **k):
        super().__init__(*a, **k)
        _log(f"{os.getpid()} {os.getppid()}")


class Tracing(Base):
    """Writes down which attributes tests (and torch code outside distributed.py) touch."""

    def __getattribute__(self, name):
        f = sys._getframe(1)
        fn = f.f_code.co_filename
        if not fn.endswith(("nn/parallel/distributed.py", "nn/modules/module.py", "conf_mutants.py")):
            seen = _seen.setdefault((fn, name), 0)
            _seen[(fn, name)] = seen + 1
            if not seen:
                _log(f"{fn}\t{name}\t{f.f_code.co_name}")
        return super().__getattribute__(name)

    def __getattr__(self, name):
        f = sys._getframe(1)
        if f.f_code.co_filename.endswith("conf_mutants.py"):
            f = f.f_back
        return super().__getattr__(name)


_seen = {}


class DoubleGrad(Base):
    def __init__(self, module, *a, **k):
        super().__init__(module, *a, **k)
        for p in module.parameters():
            if p.requires_grad:
                p.register_hook(lambda g: g * 2)


class NoAllReduce(Base):
    def forward(self, *a, **k):
        old, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            return super().forward(*a, **k)
        finally:
            self.require_backward_grad_sync = old


class SlightlyOff(Base):
    """Gradients 0.1% too large on one rank."""

    def __init__(self, module, *a, **k):
        super().__init__(module, *a, **k)
        if torch.distributed.get_rank(self.process_group) == 1:
            for p in module.parameters():
                if p.requires_grad and not p.is_complex():
                    p.register_hook(lambda g: g * 1.001)


class NoInitSync(Base):
    def __init__(self, *a, **k):
        super().__init__(*a, **{**k, "init_sync": False})


class NoBufferSync(Base):
    def _sync_buffers(self):
        pass


class IgnoresNoSync(Base):
    @contextmanager
    def no_sync(self):
        yield


class NoUnusedSearch(Base):
    def __init__(self, *a, **k):
        super().__init__(*a, **{**k, "find_unused_parameters": False})


class AlwaysUnusedSearch(Base):
    def __init__(self, *a, **k):
        super().__init__(*a, **{**k, "find_unused_parameters": not k.get("static_graph", False)})


class NoBucketView(Base):
    def __init__(self, *a, **k):
        super().__init__(*a, **{**k, "gradient_as_bucket_view": False})


class NoStaticGraph(Base):
    def __init__(self, *a, **k):
        k.pop("static_graph", None)
        super().__init__(*a, **k)

    def _set_static_graph(self):
        pass


class NoHook(Base):
    def register_comm_hook(self, state, hook):
        pass

    def _register_builtin_comm_hook(self, hook):
        pass


class NoJoinShadow(Base):
    def join_hook(self, **k):
        from torch.distributed.algorithms.join import JoinHook

        return JoinHook()


class NoLogging(Base):
    def _get_ddp_logging_data(self):
        return {}


class IgnoresIgnored(Base):
    def __init__(self, module, *a, **k):
        if hasattr(module, "_ddp_params_and_buffers_to_ignore"):
            del module._ddp_params_and_buffers_to_ignore
        super().__init__(module, *a, **k)


class NoInputTraversal(Base):
    """Only a bare tensor output is looked at when preparing backward."""

    def _pre_forward(self, *i, **k):
        return super()._pre_forward(*i, **k)

    def _post_forward(self, output):
        if isinstance(output, torch.Tensor):
            return super()._post_forward(output)
        return output


MUTANTS = [
    k
    for k, v in list(globals().items())
    if isinstance(v, type) and issubclass(v, Base) and v is not Base and k not in ("Plain", "Counting", "Tracing")
]
