"""Runs a program's lines with one class of DistributedDataParallel, and exposes what is compared."""

import contextlib
import copy
import gc
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.optim import ZeroRedundancyOptimizer

from tests.fuzz.compare import Named
from tests.fuzz.model import When, Zoo, hash_of, inputs, loss_of
from tests.fuzz.program import Program
from tests.harness import future_of

KEPT_STEPS = 4  # how many steps' gradients a program keeps at once


class Side:
    """A wrapped model, its optimizer, the gradients that the program keeps, and what its lines call."""

    def __init__(
        self,
        program: Program,
        ddp_class: type,
        rank: int,
        group: dist.ProcessGroup,
        device: str = "cpu",
        hook_group: Any = None,  # of communication hooks; None: the model's
    ) -> None:
        self.program, self.ddp_class, self.rank, self.group, self.device = program, ddp_class, rank, group, device
        self.hook_group = hook_group or group
        self.kept: list[tuple[str, Tensor]] = []
        self.seen: list[tuple[str, Tensor]] = []  # results of hooks and forwards; cleared after comparison
        self.ever_kept = self.number = 0
        self.frozen: list[nn.Parameter] = []
        self.second: Any = None  # another model, wrapped
        called = (self.make, self.loss, self.look, self.trained, self.with_grad, self.keep, self.freeze)
        called += (self.assign_flat, self.assign_kept, self.small, self.doubled, self.swap_grads)
        called += (self.flatten_parameters, self.remake, self.other, self.thaw, self.zero, self.join)
        called += (self.failing, in_thread)
        modules = {"torch": torch, "nn": nn, "contextlib": contextlib, "copy": copy}
        self.names: dict[str, Any] = {**modules, "rank": rank}
        self.names |= {call.__name__: call for call in called}

    def run(self, line: str, step: int) -> None:
        self.number = self.names["step"] = step
        exec(line, self.names)

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters())

    def visible(self) -> dict[str, Named]:
        """What is compared."""
        parameters = self.parameters()
        return {
            "parameter": {name: p.detach() for name, p in parameters.items()},
            "gradient": {name: p.grad for name, p in parameters.items()},
            "buffer": dict(self.module.named_buffers()),
            "kept gradient": dict(self.kept),
            "seen": {f"{i} {name}": value for i, (name, value) in enumerate(self.seen)},
        }

    # --- what lines call ---

    def make(self) -> None:
        program = self.program
        torch.manual_seed(hash_of(program.key, self.rank if program.seeds_differ else 0))
        self.module = self.placed_model()
        for name, p in self.module.named_parameters():
            if p.requires_grad and program.tensor_hooks != "none":
                TENSOR_HOOKS[program.tensor_hooks](self, name, p)
        self.wanted = [p.requires_grad for p in self.module.parameters()]
        self.ddp = self.wrapped(self.module)
        self.names |= {"ddp": self.ddp, "module": self.module}
        self.names["optimizer"] = eval(program.optimizer, self.names)

    def wrapped(self, module: nn.Module) -> Any:
        program = self.program
        accepted = inspect.signature(self.ddp_class.__init__).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        options = {name: value for name, value in program.options.items() if takes_all or name in accepted}
        if program.transport != "auto" and self.ddp_class.__module__.split(".")[0] != "torch":
            options["transport"] = program.transport
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ddp = self.ddp_class(module, process_group=self.group, **options)
        register_comm_hook(ddp, program.comm_hook, self.hook_group)
        return ddp

    def remake(self) -> None:
        """Wrap the module anew."""
        self.ddp = self.names["ddp"] = None
        gc.collect()
        self.ddp = self.names["ddp"] = self.wrapped(self.module)

    def other(self) -> Any:
        """Another model of the same kind, wrapped."""
        if self.second is None:
            torch.manual_seed(hash_of(self.program.key, "other"))
            self.second = self.wrapped(self.placed_model())
        return self.second

    def placed_model(self) -> Zoo:
        module = Zoo(self.program.parts, self.program.output)
        if self.device != "cpu":
            torch.__future__.set_swap_module_params_on_conversion(True)  # so that tied parameters stay tied
            module.to(self.device)
            torch.__future__.set_swap_module_params_on_conversion(False)
        return module

    def zero(self, kind: type, **options: Any) -> Any:
        """torch's sharded optimizer, which takes one dtype."""
        if len({p.dtype for p in self.trained()}) > 1:
            return kind(self.trained(), **options)
        return ZeroRedundancyOptimizer(self.trained(), kind, process_group=self.group, **options)

    def join(self) -> Join:
        """For inputs that differ in number between ranks."""
        return Join([thing for thing in (self.ddp, self.names["optimizer"]) if isinstance(thing, Joinable)])

    def loss(self, micro: int = 0, offset: int = 0, model: Any = None, leaf: bool = False) -> Tensor:
        when = When(self.rank, self.program.world_size, self.number, micro)
        x = (inputs(self.program.key, when).to(self.device) + offset).requires_grad_(leaf)
        self.names["leaves"] = [x]
        loss = loss_of((model or self.ddp)(x, when))
        self.look("loss", [loss])
        return loss

    def look(self, name: str, values: Iterable[Tensor | None]) -> None:
        """Compare these too."""
        self.seen += [(name, value.detach().clone()) for value in values if value is not None]

    def trained(self, dtype: torch.dtype | None = None) -> list[nn.Parameter]:
        return [p for p in self.ddp.parameters() if p.requires_grad and dtype in (None, p.dtype)]

    def small(self) -> list[nn.Parameter]:
        return [p for p in self.trained(torch.float32) if p.numel() < 1000]

    def doubled(self) -> dict[str, Tensor]:
        """What functional_call takes instead of the parameters."""
        return {f"module.{name}": p * 2 for name, p in self.parameters().items()}

    def with_grad(self, sparse: bool = False) -> list[Any]:
        return [p for p in self.ddp.parameters() if p.grad is not None and (sparse or not p.grad.is_sparse)]

    def keep(self, what: Callable[[int, Tensor], Tensor | None], sparse: bool = True) -> None:
        """Keep something of each gradient."""
        names = {id(p): name for name, p in self.parameters().items()}
        self._keep((names[id(p)], what(i, p.grad)) for i, p in enumerate(self.with_grad(sparse)))

    def _keep(self, values: Iterable[tuple[str, Tensor | None]]) -> None:
        for i, (name, value) in enumerate(values):
            if value is not None:
                self.kept.append((f"{name} of step {self.number} ({self.ever_kept + i})", value))
        self.ever_kept += len(self.parameters())
        del self.kept[: -KEPT_STEPS * len(self.parameters())]

    def freeze(self) -> None:
        """Freeze some parameters and thaw those frozen before."""
        for p in self.frozen:
            p.requires_grad_(True)
        self.frozen = self.trained()[:: self.number + 2]
        for p in self.frozen:
            p.requires_grad_(False)

    def thaw(self) -> None:
        """Undo requires_grad_(False) of the whole model."""
        for p, wanted in zip(self.module.parameters(), self.wanted, strict=True):
            p.requires_grad_(wanted)

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """A parameter's gradient raises KeyError."""
        parameters = self.trained()
        handle = parameters[len(parameters) // 2].register_hook(lambda grad: {}["a fault of a hook"])
        with handle:
            yield

    def assign_flat(self) -> None:
        """Assign views of one flat tensor per dtype, as programs with flat gradients do."""
        flat: dict[str, Tensor] = {}
        for dtype in {p.dtype for p in self.with_grad()}:
            mine = [p for p in self.with_grad() if p.dtype is dtype]
            flat[str(dtype)] = torch.cat([p.grad.reshape(-1) for p in mine])
            for p, piece in zip(mine, flat[str(dtype)].split([p.numel() for p in mine]), strict=True):
                p.grad = piece.view(p.shape)
        self._keep(sorted(flat.items()))

    def swap_grads(self) -> None:
        """Exchange the gradients of parameters alike."""
        alike: dict[Any, list[Any]] = {}
        for p in self.with_grad():
            alike.setdefault((p.shape, p.dtype, p.stride()), []).append(p)
        for group in alike.values():
            for p, grad in zip(group, [p.grad for p in reversed(group)], strict=True):
                p.grad = grad

    def flatten_parameters(self) -> None:
        """Make the parameters views of one flat tensor per dtype."""
        for dtype in {p.dtype for p in self.trained()}:
            mine = [p for p in self.trained(dtype) if p.is_contiguous()]
            if mine:
                nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(mine).detach(), mine)

    def assign_kept(self) -> None:
        """Replace gradients by ones kept from earlier steps."""
        kept = {name.partition(" ")[0]: value for name, value in self.kept}
        for name, p in self.parameters().items():
            value = kept.get(name)
            if value is not None and value.shape == p.shape and value.dtype == p.dtype and not value.is_sparse:
                p.grad = value


def in_thread(call: Callable[[], object]) -> None:
    """Call it in another thread, and raise what it raises."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call).result()


def register_comm_hook(ddp: Any, name: str, group: Any) -> None:
    if name == "builtin_allreduce":
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    elif name == "builtin_fp16":
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    elif name == "power_sgd":
        state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif name != "none":
        ddp.register_comm_hook(group, COMM_HOOKS[name])


# Hooks have no annotations: torch's class checks them and rejects strings as wrong types.
def sum_hook(group, bucket):
    return dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future().then(lambda f: f.value()[0])


def copying_hook(group, bucket):
    """Averages in its own memory."""
    work = dist.all_reduce(bucket.buffer().clone(), group=group, async_op=True)
    return work.get_future().then(lambda f: f.value()[0] / group.size())


def failing_hook(group, bucket):
    raise KeyError("a communication hook's own fault")


COMM_HOOKS = {
    "allreduce": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "sum": sum_hook,
    "copying": copying_hook,
    "local": lambda group, bucket: future_of(bucket.buffer()),  # each rank keeps its own
    "failing": failing_hook,
    "wrong": lambda group, bucket: bucket.buffer(),  # a tensor instead of a future
}


# With find_unused_parameters torch's class runs hooks of outputs that are not in the loss, without a gradient.
def after_accumulation(act: Callable[[Side, str, Any], None]) -> Callable[[Side, str, Any], Any]:
    def register(side: Side, name: str, p: Any) -> None:
        p.register_post_accumulate_grad_hook(lambda p: None if p.grad is None else act(side, name, p))

    return register


def look_at(side: Side, name: str, grad: Tensor | None) -> None:
    if grad is not None and not grad.is_sparse and grad.numel() < 1000:
        side.look(name, [grad])


def register_with_node(side: Side, name: str, p: Any) -> None:
    """As programs find a gradient's accumulation: its node, which they keep, has a hook that runs after it."""
    node = p.expand_as(p).grad_fn.next_functions[0][0]
    node.register_hook(lambda *unused: side.look(name, [torch.tensor(p.grad is None)]))  # its values may be in flight
    side.names.setdefault("nodes", []).append(node)


def with_gaps(grad: Tensor | None) -> Tensor | None:
    if grad is None or grad.is_sparse or grad.dim() == 0:
        return grad
    return torch.stack([grad, grad], -1)[..., 1]


def expanded(grad: Tensor | None) -> Tensor | None:
    return None if grad is None or grad.is_sparse else grad.mean().expand(grad.shape)


def register_with_module(side: Side, name: str, p: Any) -> None:
    """As programs watch a layer: a hook of the module that has the parameter."""
    module = side.module.get_submodule(name.rpartition(".")[0])
    module.register_full_backward_hook(lambda module, ins, outs: look_at(side, name, outs[0]))


# Hooks on every parameter that read or change gradients.
TENSOR_HOOKS: dict[str, Callable[[Side, str, Any], Any]] = {
    "strided": lambda side, name, p: p.register_hook(with_gaps),
    "expanded": lambda side, name, p: p.register_hook(expanded),
    "module": register_with_module,
    "look": lambda side, name, p: p.register_hook(lambda grad: look_at(side, name, grad)),
    "double": lambda side, name, p: p.register_hook(lambda grad: None if grad is None else grad * 2),
    "accumulated": after_accumulation(lambda side, name, p: look_at(side, name, p.grad)),
    "halve_accumulated": after_accumulation(lambda side, name, p: p.grad.mul_(0.5)),
    "clear_accumulated": after_accumulation(lambda side, name, p: setattr(p, "grad", None)),
    "node": register_with_node,
    "replace_accumulated": after_accumulation(lambda side, name, p: setattr(p, "grad", p.grad.clone())),
}
