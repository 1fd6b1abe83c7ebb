"""Runs a program's operations with one class of DistributedDataParallel, and exposes what is compared."""

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from tests.fuzz.compare import Named
from tests.fuzz.model import When, Zoo, hash_of, inputs, loss_of
from tests.fuzz.program import Do, Op, Program, Train
from tests.harness import future_of

KEPT_STEPS = 4  # how many steps' gradients a program keeps at once


class Side:
    """A wrapped model, its optimizer, and the gradients that the program keeps."""

    def __init__(self, program: Program, ddp_class: type, rank: int, group: dist.ProcessGroup) -> None:
        self.program = program
        self.rank = rank
        self.group = group
        self.ddp_class = ddp_class
        self.kept: list[tuple[str, Tensor]] = []
        self.seen: list[tuple[str, Tensor]] = []  # results of hooks and forwards; cleared after comparison
        self.ever_kept = 0
        self.frozen: list[nn.Parameter] = []

    # --- what is compared ---

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.ddp.module.named_parameters())

    def visible(self) -> dict[str, Named]:
        parameters = self.parameters()
        return {
            "parameter": {name: p.detach() for name, p in parameters.items()},
            "gradient": {name: p.grad for name, p in parameters.items()},
            "buffer": dict(self.ddp.module.named_buffers()),
            "kept gradient": dict(self.kept),
            "seen": {f"{i} {name}": value for i, (name, value) in enumerate(self.seen)},
        }

    # --- construction ---

    def make(self, when: When) -> None:
        program = self.program
        torch.manual_seed(hash_of(program.key, self.rank if program.seeds_differ else 0))
        module = Zoo(program.parts, program.output)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.ddp = self.ddp_class(module, process_group=self.group, **self._options())
        register_comm_hook(self.ddp, program.comm_hook, self.group)
        register_tensor_hooks(self.ddp.module, program.tensor_hooks, self.seen)
        self.optimizer = self._make_optimizer()

    def _options(self) -> dict[str, Any]:
        accepted = inspect.signature(self.ddp_class.__init__).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        options = {name: value for name, value in self.program.options.items() if takes_all or name in accepted}
        if self.program.transport != "auto" and self.ddp_class.__module__.split(".")[0] != "torch":
            options["transport"] = self.program.transport
        return options

    def _make_optimizer(self) -> torch.optim.Optimizer:
        wanted = self.program.optimizer
        parameters = [p for p in self.ddp.parameters() if p.requires_grad]
        if wanted.kind == "SGD":
            return torch.optim.SGD(parameters, lr=0.05, momentum=wanted.momentum, foreach=wanted.foreach)
        # A large epsilon, so that Adam doesn't amplify last-bit differences in sums over three ranks.
        return torch.optim.Adam(parameters, lr=0.01, eps=1e-3, foreach=wanted.foreach)

    # --- operations ---

    def do(self, op: Op, step: int) -> None:
        when = When(self.rank, self.program.world_size, step, op.micro if isinstance(op, Train) else 0)
        if isinstance(op, Do):
            method = getattr(self, f"{op.what}_{op.how}" if op.how else op.what, None)
            method(when) if method is not None else getattr(self, op.what)(op.how, when)
            return
        with contextlib.ExitStack() as stack:
            if not op.sync:
                stack.enter_context(self.ddp.no_sync())
            if op.autocast:
                stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            getattr(self, f"train_{op.how}")(when)

    def _loss(self, when: When, offset: int = 0) -> Tensor:
        x = inputs(self.program.key, when) + offset
        loss = loss_of(self.ddp(x, when))
        self.seen.append(("loss", loss.detach().clone()))
        return loss

    def train_plain(self, when: When) -> None:
        self._loss(when).backward()

    def train_two_forwards(self, when: When) -> None:
        (self._loss(when) + self._loss(when, 1)).backward()

    def train_two_of_each(self, when: When) -> None:
        first, second = self._loss(when), self._loss(when, 1)
        first.backward()
        second.backward()

    def train_retain(self, when: When, retain_graph: bool = True) -> None:
        loss = self._loss(when)
        loss.backward(retain_graph=retain_graph)
        loss.backward()

    def train_twice_without_retain(self, when: When) -> None:
        self.train_retain(when, retain_graph=False)

    def train_forward_only(self, when: When) -> None:
        self._loss(when)

    def train_bypass(self, when: When) -> None:
        """Train through the wrapped module, as generate() and similar methods do."""
        loss = loss_of(self.ddp.module(inputs(self.program.key, when), when))
        self.seen.append(("loss", loss.detach().clone()))
        loss.backward()

    def train_regularized(self, when: When) -> None:
        """Add a regularizer of the parameters to the loss, outside of forward."""
        loss = self._loss(when)
        dense = [p for p in self.ddp.parameters() if p.requires_grad and p.dtype is torch.float32]
        (loss + 0.01 * sum(p.pow(2).sum() for p in dense)).backward()

    def train_flag_off(self, when: When) -> None:
        """Accumulate by a flag, as some trainers do instead of no_sync()."""
        self.ddp.require_backward_grad_sync = False
        try:
            self._loss(when).backward()
        finally:
            self.ddp.require_backward_grad_sync = True

    def train_no_sync_around_forward(self, when: When) -> None:
        with self.ddp.no_sync():
            loss = self._loss(when)
        loss.backward()

    def train_no_sync_around_backward(self, when: When) -> None:
        loss = self._loss(when)
        with self.ddp.no_sync():
            loss.backward()

    def train_autograd_grad(self, when: When) -> None:
        wanted = [p for p in self.ddp.parameters() if p.requires_grad and p.numel() < 1000]
        for grad in torch.autograd.grad(self._loss(when), wanted, allow_unused=True):
            if grad is not None:
                self.seen.append(("autograd.grad", grad.detach().clone()))

    def train_forward_raises(self, when: When) -> None:
        self.ddp.module.fails = True
        try:
            with contextlib.suppress(KeyError):
                self._loss(when)
        finally:
            self.ddp.module.fails = False

    def train_hook_raises(self, when: When) -> None:
        def fail(grad: Tensor) -> None:
            raise KeyError("a hook's own fault")

        parameter = next(p for p in self.ddp.parameters() if p.requires_grad)
        handle = parameter.register_hook(fail)
        try:
            self._loss(when).backward()
        finally:
            handle.remove()

    def evaluate(self, when: When) -> None:
        self.ddp.eval()
        with torch.no_grad():
            self._loss(when, 3)
        self.ddp.train()

    def evaluate_training(self, when: When) -> None:
        """Run in training mode without gradients, as for batch norm statistics."""
        with torch.no_grad():
            self._loss(when, 3)

    def freeze(self, when: When) -> None:
        """Freeze some parameters and thaw those frozen before."""
        for p in self.frozen:
            p.requires_grad_(True)
        self.frozen = [p for p in self.ddp.parameters() if p.requires_grad][:: when.step + 2]
        for p in self.frozen:
            p.requires_grad_(False)

    def evaluate_inside(self, when: When) -> None:
        """Evaluate the wrapped module on rank 0 only."""
        if self.rank == 0:
            self.ddp.module.eval()
            with torch.inference_mode():
                self.ddp.module(inputs(self.program.key, when), when)
            self.ddp.module.train()

    def step(self, when: When) -> None:
        self.optimizer.step()

    def reload(self, when: When) -> None:
        self.ddp.load_state_dict({name: value.clone() for name, value in self.ddp.state_dict().items()})

    # --- zeroing ---

    def zero(self, how: str, when: When) -> None:
        target, _, to = how.partition("_")
        if target in ("model", "optimizer"):
            (self.ddp if target == "model" else self.optimizer).zero_grad(set_to_none=to == "none")
            return
        assert how in ("new", "by_hand", "some", "in_place", "data"), how
        for i, p in enumerate(self.ddp.parameters()):
            if how == "new":
                p.grad = torch.zeros_like(p)
            elif how == "by_hand" or (how == "some" and i % 2 == when.step % 2):
                p.grad = None
            elif how == "in_place" and p.grad is not None:
                p.grad.zero_()
            elif how == "data" and p.grad is not None and not p.grad.is_sparse:
                p.grad.data = torch.zeros_like(p.grad)

    def _with_grad(self, dense: bool = True) -> list[tuple[str, Any]]:
        named = self.parameters().items()
        return [(name, p) for name, p in named if p.grad is not None and not (dense and p.grad.is_sparse)]

    # --- gradients that are kept ---

    def _keep(self, how: str, when: When, values: Iterable[tuple[str, Tensor]]) -> None:
        self.kept += [
            (f"{name} of step {when.step} ({how}, {self.ever_kept + i})", v) for i, (name, v) in enumerate(values)
        ]
        self.ever_kept += len(self.parameters())
        del self.kept[: -KEPT_STEPS * len(self.parameters())]

    def keep(self, how: str, when: When) -> None:
        dense = how in ("view", "piece", "numpy")
        values = ((name, KEPT[how](i, p.grad)) for i, (name, p) in enumerate(self._with_grad(dense)))
        self._keep(how, when, ((name, value) for name, value in values if value is not None))

    def keep_forget(self, when: When) -> None:
        self.kept.clear()

    # --- gradients that are changed ---

    def edit(self, how: str, when: When) -> None:
        for i, (_, p) in enumerate(self._with_grad(dense=how not in ("mul", "assign"))):
            EDITED[how](i, p, self.rank)

    def edit_foreach(self, when: When) -> None:
        torch._foreach_mul_([p.grad for _, p in self._with_grad()], 0.75)

    def edit_clip_norm(self, when: When) -> None:
        norm = nn.utils.clip_grad_norm_([p for _, p in self._with_grad()], 0.5)
        self.seen.append(("norm", norm.detach().clone()))

    def edit_clip_value(self, when: When) -> None:
        nn.utils.clip_grad_value_([p for _, p in self._with_grad() if not p.is_complex()], 0.25)

    def edit_assign_flat(self, when: When) -> None:
        """Assign views of one flat tensor per dtype, as programs with flat gradients do."""
        flat: dict[torch.dtype, Tensor] = {}
        for dtype in {p.dtype for _, p in self._with_grad()}:
            mine = [p for _, p in self._with_grad() if p.dtype is dtype]
            flat[dtype] = torch.cat([p.grad.reshape(-1) for p in mine])
            for p, piece in zip(mine, flat[dtype].split([p.numel() for p in mine]), strict=True):
                p.grad = piece.view(p.shape)
        self._keep("flat", when, ((str(dtype), flat[dtype]) for dtype in sorted(flat, key=str)))

    def edit_assign_kept(self, when: When) -> None:
        """Replace gradients by ones kept from earlier steps."""
        kept = {name.partition(" ")[0]: value for name, value in self.kept}
        for name, p in self.parameters().items():
            value = kept.get(name)
            if value is not None and value.shape == p.shape and value.dtype == p.dtype and not value.is_sparse:
                p.grad = value


# What a program keeps of the gradient of parameter i (None: nothing).
KEPT: dict[str, Callable[[int, Tensor], Tensor | None]] = {
    "grad": lambda i, grad: grad,
    "some": lambda i, grad: grad if i % 3 == 0 else None,
    "clone": lambda i, grad: grad.clone(),
    "detach": lambda i, grad: grad.detach(),
    "data": lambda i, grad: grad.data,
    "view": lambda i, grad: grad[...],
    "piece": lambda i, grad: grad.select(0, -1) if grad.dim() and grad.shape[0] > 1 else None,
    "numpy": lambda i, grad: torch.from_numpy(grad.numpy()) if grad.dtype is not torch.bfloat16 else None,
}


def assign_some(i: int, p: Any, rank: int) -> None:
    if i % 2:
        p.grad = torch.ones_like(p, memory_format=torch.contiguous_format)


# How a program changes parameter i's gradient.
EDITED: dict[str, Callable[[int, Any, int], Any]] = {
    "mul": lambda i, p, rank: p.grad.mul_(0.5),
    "add": lambda i, p, rank: p.grad.add_(0.125),
    "assign": lambda i, p, rank: setattr(p, "grad", p.grad * 2),
    "assign_some": assign_some,
    "data": lambda i, p, rank: p.grad.data.add_(0.25),
    "poison": lambda i, p, rank: p.grad.fill_(float("nan")) if i == rank else None,
}


def register_comm_hook(ddp: Any, name: str, group: dist.ProcessGroup) -> None:
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


def register_tensor_hooks(module: nn.Module, how: str, seen: list[tuple[str, Tensor]]) -> None:
    """Register hooks on every parameter that read or change gradients."""

    # With find_unused_parameters torch's class runs hooks of outputs that are not in the loss, without a gradient.
    def look(name: str, grad: Tensor | None) -> None:
        if grad is not None and not grad.is_sparse and grad.numel() < 1000:
            seen.append((f"{how} {name}", grad.detach().clone()))

    for name, p in module.named_parameters():
        if not p.requires_grad or how == "none":
            continue
        if how == "look":
            p.register_hook(lambda grad, name=name: look(name, grad))
        elif how == "double":
            p.register_hook(lambda grad: grad * 2)
        elif how == "accumulated":
            p.register_post_accumulate_grad_hook(lambda p, name=name: look(name, p.grad))
        elif how == "halve_accumulated":
            p.register_post_accumulate_grad_hook(halve)
        elif how == "replace_accumulated":
            p.register_post_accumulate_grad_hook(replace_by_clone)


def halve(p: Tensor) -> None:
    if p.grad is not None:
        p.grad.mul_(0.5)


def replace_by_clone(p: Tensor) -> None:
    if p.grad is not None:
        p.grad = p.grad.clone()
