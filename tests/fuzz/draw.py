"""Draws a program from a seed and a trial number.

Not drawn, because the two classes could not be compared:
- no_sync with static_graph: torch's class may crash or stop reducing;
- static_graph with outputs that the loss doesn't use: torch's class counts their parameters as used in the first step,
  waits for them in later ones, reduces nothing, and the next forward raises;
- static_graph with a dataclass as output: neither class reduces anything (docs/checks.md);
- a forward without a backward, then no_sync, with unused parameters: torch's class then reduces under no_sync, and
  mistakes the other forward's unused parameters for this one's;
- PowerSGD with several buckets: its random matrices are drawn for each bucket, and layouts differ;
- with gradient_as_bucket_view=True kept gradients and those of other parameters that are put into p.grad (their values
  depend on layout), and p.grad.data = ... or p.grad.set_(...): torch's class then reduces the old gradients again and
  loses the new ones;
- bucket caps that are not positive (ours refuses them), and torch's bf16_compress_hook (torch's class does, on CPU).
"""

import random
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from tests.fuzz.program import Part, Program
from tests.spec.table import COLUMNS, TORCH_COLUMNS
from torchddp import Checks, Precision

T = TypeVar("T")
TRANSPORTS = tuple(map(eval, COLUMNS["transport"]))
# How often a program has another value than the default, of those in the table.
OPTIONS = {
    "gradient_as_bucket_view": 0.4, "bucket_cap_mb": 0.6, "bucket_cap_mb_list": 0.1, "batched_grad_copy": 0.15,
    "broadcast_buffers": 0.1, "forward_sync_buffers": 0.1, "init_sync": 0.05,
}  # fmt: skip
WORLD_SIZES = (1, 2, 2, 2, 2, 3, 3, 4)

SMALL_SHAPES = ((), (1,), (7,), (3, 5), (5, 1, 3), (2, 3, 2, 2), (0,), (3, 0), (129,))
BIG_SHAPES = ((300, 1000), (131_200,), (260, 520), (70_000,), (530, 520), (64, 16, 9, 33))
REAL = ("float32", "float32", "float32", "float64", "bfloat16", "float16")
RAW_DTYPES = (*REAL, "complex64", "complex128")
# How a microbatch is trained.
PLAIN = "loss({m}).backward()"
FORWARD_ONLY = "loss({m})"
AUTOGRAD_GRAD = (
    "grads = torch.autograd.grad(loss({m}), [p for p in trained() if p.numel() < 1000], allow_unused=True)\n"
    "look('autograd.grad', grads)"
)
GRADIENT_PENALTY = (
    "one = loss({m})\n"
    "grads = torch.autograd.grad(one, small(), create_graph=True, allow_unused=True)\n"
    "(one + 0.1 * sum(grad.pow(2).sum() for grad in grads if grad is not None)).backward()"
)
TWO_FORWARDS = "(loss({m}) + loss({m}, 1)).backward()"
OTHER_MODEL = (
    "(loss({m}) + loss({m}, model=other())).backward()\n"
    "look('the other model', [p.grad for p in other().parameters()]); other().zero_grad()"
)
CLOSURE = (
    "def closure():\n  optimizer.zero_grad(); one = loss({m}); one.backward(); return one\n"
    "look('closure', [optimizer.step(closure)])"
)
UNEVEN = (
    "with join():\n  for i in range(1 + (rank + step) % 3): ddp.zero_grad(); loss({m} + i).backward(); optimizer.step()"
)
WAYS = (
    GRADIENT_PENALTY,
    "one = loss({m}); optimizer.zero_grad(); one.backward()",
    "one = loss({m}); ddp.zero_grad(set_to_none=False); one.backward()",
    "one = loss({m})\nfor p in with_grad(): p.grad = p.grad.clone()\none.backward()",
    "loss({m}).backward(create_graph=True)",
    "loss({m}).backward(inputs=trained())",
    "torch.autograd.backward([loss({m}), loss({m}, 1)])",
    "first, second = loss({m}), loss({m}, 1); second.backward(); first.backward()",
    "in_thread(lambda: loss({m}).backward())",
    "one = loss({m}); in_thread(one.backward)",
    "with torch.autograd.graph.save_on_cpu(): one = loss({m})\none.backward()",
    "with torch.autograd.set_multithreading_enabled(False): loss({m}).backward()",
    "with torch.autograd.detect_anomaly(check_nan=False): loss({m}).backward()",
    "loss({m}, model=lambda *inputs: torch.func.functional_call(ddp, {{}}, inputs)).backward()",
    "loss({m}, model=lambda *inputs: torch.func.functional_call(ddp, doubled(), inputs)).backward()",
    TWO_FORWARDS,
    TWO_FORWARDS,
    OTHER_MODEL,
    CLOSURE,
    UNEVEN,
    "look('of the inputs', torch.autograd.grad(loss({m}, leaf=True), leaves, retain_graph=True))\nloss({m}).backward()",
    "loss({m}, leaf=True).backward(); look('of the inputs', [leaves[0].grad])",
    "first, second = loss({m}), loss({m}, 1); first.backward(); second.backward()",
    "one = loss({m}); one.backward(retain_graph=True); one.backward()",
    FORWARD_ONLY,
    "loss({m}, model=module).backward()",  # as generate() and similar methods do
    "with ddp.no_sync(): one = loss({m})\none.backward()",
    "one = loss({m})\nwith ddp.no_sync(): one.backward()",
    AUTOGRAD_GRAD,
    "module.fails = True\nwith contextlib.suppress(KeyError): loss({m})\nmodule.fails = False",
    "(loss({m}) + 0.01 * sum(p.pow(2).sum() for p in trained(torch.float32))).backward()",  # a regularizer outside
    # As some trainers do instead of no_sync().
    "ddp.require_backward_grad_sync = False; loss({m}).backward(); ddp.require_backward_grad_sync = True",
)
# Only without a reduction: what an interrupted one leaves is undefined.
FAILING = "with contextlib.suppress(KeyError), failing(): loss({m}).backward()"
BROKEN_WAYS = {
    "twice_without_retain": "one = loss(); one.backward(); one.backward()",
    "hook_raises": "trained()[0].register_hook(lambda grad: {}['a fault of a hook'])\nloss().backward()",
}
ZERO_DATA = "for p in with_grad(): p.grad.data = torch.zeros_like(p.grad)"
ZERO_IN_PLACE = "for p in with_grad(sparse=True): p.grad.zero_()"
ZEROING = (
    *["ddp.zero_grad()"] * 3,
    "optimizer.zero_grad()",
    "for p in ddp.parameters(): p.grad = None",
    "ddp.zero_grad(set_to_none=False)",
    "optimizer.zero_grad(set_to_none=False)",
    ZERO_IN_PLACE,
    ZERO_DATA,
    "for p in ddp.parameters(): p.grad = torch.zeros_like(p)",
    "for p in [*ddp.parameters()][step % 2 :: 2]: p.grad = None",
    "",
)
KEEP_VIEW = "keep(lambda i, grad: grad[...], sparse=False)"
KEEPING = (
    *["keep(lambda i, grad: grad)"] * 2,
    "keep(lambda i, grad: grad if i % 3 == 0 else None)",
    "keep(lambda i, grad: grad.clone())",
    "keep(lambda i, grad: grad.detach())",
    "keep(lambda i, grad: grad.data)",
    KEEP_VIEW,
    "keep(lambda i, grad: grad.select(0, -1) if grad.dim() and grad.shape[0] > 1 else None, sparse=False)",
    "keep(lambda i, grad: torch.from_numpy(grad.numpy()) if grad.dtype is not torch.bfloat16 else None, sparse=False)",
)
ASSIGN, ASSIGN_KEPT = "for p in with_grad(sparse=True): p.grad = p.grad * 2", "assign_kept()"
SWAP = "swap_grads()"
SET = "for p in with_grad(): p.grad.set_(p.grad * 2)"
EDITS = (
    "for p in with_grad(sparse=True): p.grad.mul_(0.5)",
    "for p in with_grad(): p.grad.add_(0.125)",
    "torch._foreach_mul_([p.grad for p in with_grad()], 0.75)",
    # Each alone: torch adds the norms of several dtypes in an order that differs between devices.
    "look('norm', [nn.utils.clip_grad_norm_(p, 0.5) for p in with_grad()])",
    "nn.utils.clip_grad_value_([p for p in with_grad() if not p.is_complex()], 0.25)",
    ASSIGN,
    "for p in with_grad()[1::2]: p.grad = torch.ones_like(p, memory_format=torch.contiguous_format)",
    ASSIGN_KEPT,
    "assign_flat()",
    "for p in with_grad(): p.grad.data.add_(0.25)",
    "for p in with_grad()[rank : rank + 1]: p.grad.fill_(float('nan'))",
    "for p in with_grad(): p.grad.detach_()",
    "for p in with_grad(): p.grad = torch.ones((), dtype=p.dtype, device=p.device).expand_as(p)",
    "for p in with_grad(): p.grad = p.grad.conj()",
    "for p in with_grad(): p.grad = torch._neg_view(p.grad)",
    "with torch.inference_mode(): halves = [p.grad * 0.5 for p in with_grad()]\n"
    "for p, half in zip(with_grad(), halves): p.grad = half",
    SET,
    SWAP,
    "for p in trained(): p.data = p.data.clone()",
    "flatten_parameters()",
)
OTHERS = (
    "ddp.eval()\nwith torch.no_grad(): loss(0, 3)\nddp.train()",
    "if rank == 0:\n  module.eval()\n  with torch.inference_mode(): loss(model=module)\n  module.train()",
    "with torch.no_grad(): loss(0, 3)",  # in training mode, as for batch norm statistics
    "ddp.load_state_dict({name: value.clone() for name, value in ddp.state_dict().items()})",
    "with torch.inference_mode(): loss(0, 3)",
    "copied = copy.deepcopy(module)\nloss(0, 3, model=copied).backward()\n"
    "look('copy', [p.grad for p in copied.parameters()])",
    "optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))",
    "copied = copy.deepcopy(ddp)\nloss(0, 3, model=copied).backward()\n"
    "look('copy', [p.grad for p in copied.parameters()])\ndel copied",
    "remake()",
    "ddp.requires_grad_(False)\nwith contextlib.suppress(RuntimeError): loss(0, 3).backward()\nthaw()",
)
FAULTS = ("twice_without_retain", "hook_raises", "unused", "failing", "wrong", "mixed_unused")


def draw(seed: int, trial: int, world_size: int | None = None, transport: str | None = None) -> Program:
    """The program of this trial; `world_size` and `transport` override its own and change nothing else."""
    source = random.Random(f"{seed}:{trial}")
    drawn_size, drawn_transport = source.choice(WORLD_SIZES), source.choice(TRANSPORTS)
    size = world_size or drawn_size
    choice = "auto" if size == 1 else transport or drawn_transport
    program = _Drawing(source).program(f"{seed}:{trial}")
    return replace(program, world_size=size, transport="auto" if "init_sync" in program.options else choice)


class _Drawing:
    def __init__(self, source: random.Random) -> None:
        self.source = source
        self.static = self.chance(0.12)
        self.search = self.chance(0.4)
        self.fault = self.of(FAULTS) if self.chance(0.08) else ""
        # Whether the graph may differ between ranks and steps.
        self.varies = self.search and not self.static

    def chance(self, probability: float) -> bool:
        return self.source.random() < probability

    def of(self, choices: Sequence[T]) -> T:
        return self.source.choice(choices)

    def program(self, key: str) -> Program:
        parts = self.parts()
        sparse = any(part.sparse for part in parts)
        comm_hook = self.comm_hook(parts)
        options = self.options(parts, comm_hook)
        self.views = options.get("gradient_as_bucket_view") is True
        if comm_hook == "power_sgd":
            options["bucket_cap_mb"] = 100
        program = Program(
            key=key,
            world_size=1,
            transport="auto",
            parts=parts,
            options=options,
            comm_hook=comm_hook,
            tensor_hooks=self.tensor_hooks(sparse),
            output=self.of(("tensor", "list", "nested", "dict", "dict" if self.static else "dataclass")),
            seeds_differ="init_sync" not in options and self.chance(0.7),
            optimizer=self.optimizer(sparse),
            steps=self.steps(),
        )
        return replace(program, options=options | self.neutral_options(program))

    # --- model ---

    def parts(self) -> tuple[Part, ...]:
        parts = [Part("dense", self.of(("float32", "float32", "float64", "bfloat16")), (self.of((3, 8)), 4))]
        parts += [self.part() for _ in range(self.source.randint(1, 7))]
        if self.chance(0.35):
            parts += [self.big_part() for _ in range(self.source.randint(1, 2))]
        raw = [i for i, part in enumerate(parts) if part.kind == "raw" and not part.frozen]
        if raw and self.chance(0.3):
            i = self.of(raw)
            parts.append(Part("raw", parts[i].dtype, parts[i].shape, parts[i].layout, tied_to=i))
        self.source.shuffle(parts)
        parts = _with_true_ties(parts)
        if self.fault in ("unused", "mixed_unused") and not self.search and not self.static:
            parts[-1] = replace(parts[-1], used="never" if self.fault == "unused" else "later_steps")
        return tuple(parts)

    def part(self) -> Part:
        kind = self.of(("dense", "raw", "raw", "raw", "raw", "norm", "convolution", "embedding", "bag", "buffered",
                        "checkpointed", "summed", "twins", "partly", "parametrized", "recurrent"))  # fmt: skip
        if kind == "checkpointed" and self.chance(0.3) and not self.search:
            kind = "checkpointed_reentrant"
        dtype, layout, sparse = self.of(REAL), "contiguous", False
        shape: tuple[int, ...] = ()
        if kind == "raw":
            dtype, shape = self.of(RAW_DTYPES), self.of(SMALL_SHAPES)
            layout = self.of(("contiguous", "contiguous", "transposed", "channels_last", "gaps"))
        elif kind in ("dense", "checkpointed", "checkpointed_reentrant"):
            dtype, shape = self.of(REAL[:5]), (self.of((3, 16)), self.of((2, 9)))
            layout = self.of(("contiguous", "contiguous", "gaps"))
        elif kind in ("embedding", "bag"):
            dtype, shape, sparse = self.of(("float32", "float64")), (11, 4), self.chance(0.4)
        elif kind == "convolution":
            layout = self.of(("contiguous", "channels_last"))
        elif kind in ("norm", "parametrized", "recurrent"):
            dtype = self.of(("float32", "float64"))
        elif kind in ("summed", "twins", "partly"):
            dtype, shape = self.of(RAW_DTYPES), self.of(SMALL_SHAPES)
        else:
            dtype = self.of(("float32", "float64", "bfloat16"))
        part = Part(kind, dtype, shape, layout, sparse)
        if self.chance(0.06) and kind != "buffered":
            return replace(part, frozen=True)
        if self.chance(0.04):
            return replace(part, ignored=True)
        part = replace(part, calls=self.of((1, 1, 1, 1, 2)))
        # Unused sparse parameters crash torch's class: draw few of them.
        return part if sparse and self.chance(0.8) else self.with_use(part)

    def big_part(self) -> Part:
        layout = self.of(("contiguous", "contiguous", "contiguous", "transposed", "gaps"))
        part = Part("raw", self.of(("float32", "float32", "float64", "bfloat16")), self.of(BIG_SHAPES), layout)
        return self.with_use(part)

    def with_use(self, part: Part) -> Part:
        if self.varies and self.chance(0.5):
            uses = ("never", "one_rank", "all_but_one_rank", "even_steps", "later_steps", "one_micro", "mixed")
            return replace(part, used=self.of(uses), in_loss=self.chance(0.8))
        if (self.static or self.search) and self.chance(0.25):
            used = self.of(("never", "always"))
            return replace(part, used=used, in_loss=self.static or used == "always" and self.chance(0.5))
        return part

    # --- options ---

    def options(self, parts: Sequence[Part], comm_hook: str) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if self.search:
            options["find_unused_parameters"] = True
        if self.static:
            options["static_graph"] = True
        for name, probability in OPTIONS.items():
            if self.chance(probability):
                options[name] = eval(self.of(TORCH_COLUMNS[name][1:]))
        if "bucket_cap_mb" in options:
            options.pop("bucket_cap_mb_list", None)
        same = all(part.used in ("always", "never") for part in parts)
        if self.search and same and self.chance(0.4):
            options["skip_all_reduce_unused_params"] = True
        return options

    def neutral_options(self, program: Program) -> dict[str, Any]:
        """Of our class alone: they must not change anything."""
        options: dict[str, Any] = {}
        if self.chance(0.3):
            flags = {name: self.chance(0.5) for name in ("nonfinite", "gradient_stats", "traps")}
            options["checks"] = Checks(**flags)
        lines = [line for step in program.steps for line in step]
        if self.chance(0.3) and not any("freeze()" in line or "requires_grad_(" in line for line in lines):
            options["auto_refresh_trainable"] = True
        wide = all(part.dtype in ("float32", "float64") for part in program.parts)
        if self.chance(0.3) and wide and not self.views:
            options["precision"] = Precision(reduce=torch.float32)
        return options

    def comm_hook(self, parts: Sequence[Part]) -> str:
        if self.fault in ("failing", "wrong"):
            return self.fault
        if self.chance(0.75):
            return "none"
        plain = all(part.dtype == "float32" and not part.sparse for part in parts)
        names = ["allreduce", "sum", "copying", "local", "builtin_allreduce", "fp16", "builtin_fp16"]
        return self.of([*names, "power_sgd"] if plain and not self.search and not self.static else names)

    def tensor_hooks(self, sparse: bool) -> str:
        if self.chance(0.7):
            return "none"
        return self.of((
            "look", "double", "strided", "expanded", "accumulated", "halve_accumulated", "replace_accumulated",
            "clear_accumulated", "node", "module",
        ))  # fmt: skip

    def optimizer(self, sparse: bool) -> str:
        foreach = self.of((None, True, False))
        if sparse:
            return f"torch.optim.SGD(trained(), lr=0.05, foreach={foreach})"
        return self.of((
            f"torch.optim.SGD(trained(), lr=0.05, momentum=0.9, foreach={foreach})",
            # A large epsilon, so that Adam doesn't amplify last-bit differences in sums over three ranks.
            f"torch.optim.Adam(trained(), lr=0.01, eps=1e-3, foreach={foreach})",
            "torch.optim.SGD(trained(), lr=0.05)",
            f"zero(torch.optim.SGD, lr=0.05, momentum=0.9, foreach={foreach})",
        ))  # fmt: skip

    # --- steps ---

    def steps(self) -> tuple[tuple[str, ...], ...]:
        zero = self.zeroing()
        keep = "" if self.chance(0.4) else self.of(KEEPING)
        count = self.source.randint(3, 8)
        fault_at = self.source.randint(1, count - 1)
        return tuple(
            self.step(zero if self.chance(0.75) else self.zeroing(), keep, self.fault if i == fault_at else "")
            for i in range(count)
        )

    def zeroing(self) -> str:
        how = self.of(ZEROING)
        return ZERO_IN_PLACE if how == ZERO_DATA and self.views else how

    def editing(self) -> str:
        how = self.of(EDITS)
        return ASSIGN if how in (ASSIGN_KEPT, SET, SWAP) and self.views else how

    def step(self, zero: str, keep: str, fault: str) -> tuple[str, ...]:
        lines = [zero] if zero else []
        if self.chance(0.08):
            lines.append(self.of(OTHERS))
        if self.varies and self.chance(0.05):
            lines.append("freeze()")
        lines += self.training(fault)
        if keep and self.chance(0.8):
            lines.append(keep)
        if self.chance(0.3):
            lines.append(self.editing())
        if self.chance(0.7):
            lines.append("optimizer.step()")
        return tuple(lines)

    def training(self, fault: str) -> list[str]:
        if fault in BROKEN_WAYS:
            return [BROKEN_WAYS[fault]]
        if self.static:  # a static graph must be the same in each step
            return [trained()]
        autocast = self.chance(0.06)
        micros = self.of((1, 1, 1, 1, 2, 3))
        lines = []
        for i in range(micros - 1):
            lines.append(trained(i, self.way(0.1, FAILING), sync=False, autocast=autocast))
            if self.chance(0.15):
                lines.append(self.of((self.editing(), self.zeroing(), "optimizer.step()", KEEP_VIEW)))
        lines.append(trained(micros - 1, self.way(0.2), autocast=autocast))
        if self.chance(0.04):
            lines.append(trained(micros, sync=False))  # with no reduction after it
        return lines

    def way(self, unusual: float, *others: str) -> str:
        how = self.of((*WAYS, *others)) if self.chance(unusual) else PLAIN
        # torch's class orders the messages of two models, and those of a rank without inputs, as if all parameters
        # were used.
        unlike = (FORWARD_ONLY, AUTOGRAD_GRAD) * self.varies + (OTHER_MODEL, UNEVEN) * self.search
        return PLAIN if how in unlike else how


def trained(micro: int = 0, way: str = PLAIN, sync: bool = True, autocast: bool = False) -> str:
    """The lines that train a microbatch."""
    around = ["ddp.no_sync()"] * (not sync) + ["torch.autocast('cpu', torch.bfloat16)"] * autocast
    lines = way.format(m=micro)
    return f"with {', '.join(around)}:\n{textwrap.indent(lines, '  ')}" if around else lines


def _with_true_ties(parts: list[Part]) -> list[Part]:
    """Fix ties after the shuffle, so that they point to an earlier part."""
    tied = next((part for part in parts if part.tied_to is not None), None)
    if tied is None:
        return parts
    twin = replace(tied, tied_to=None)
    others = [part for part in parts if part is not tied]
    first = next(
        (i for i, part in enumerate(others) if replace(part, used="always", in_loss=True, calls=1) == twin), None
    )
    if first is None or others[first].ignored:
        return others
    return [*others, replace(tied, tied_to=first)]
