"""Turns a row of the table into a program: lines of Python, and what each does to the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.spec.covering import Row
from tests.spec.reference import Parameter, Settings, World
from tests.spec.table import DEFAULTS, FIELDS, HOOKS, OPTIONS, SHARDED_OPTIONS

# The beginning of every program. A rank's gradients depend on nothing but the arguments of `gradient`.
PRELUDE = """\
import datetime, os, tempfile, torch, torch.distributed as dist, torchddp, torch.nn as nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
def gradient(name, shape, dtype, key, rank, exact):
    random = torch.Generator().manual_seed(10_000 * key + 10 * ord(name) + rank)
    draw = lambda size: torch.randn(size, generator=random, dtype=torch.float64)
    if exact: draw = lambda size: 27.0 * torch.randint(-2, 3, size, generator=random)
    if name == "s": rows = torch.randperm(11, generator=random)[None, :3]
    if name == "s": return torch.sparse_coo_tensor(rows, draw((3, 4)), shape).coalesce().to(dtype)
    return torch.complex(draw(shape), draw(shape)).to(dtype) if dtype.is_complex else draw(shape).to(dtype)
class Net(nn.Module):
    def __init__(self, exact, **parameters):
        super().__init__(); self.exact = exact
        for name in parameters: setattr(self, name, nn.Parameter(torch.ones_like(parameters[name])))
        if hasattr(self, "s"): del self.s; self.table = nn.Embedding(11, 4, sparse=True)
    def forward(self, names, key, rank): return sum(self.term(name, key, rank) for name in names)
    def term(self, name, key, rank):
        p = getattr(self, name) if hasattr(self, name) else self.table.weight
        g = gradient(name, p.shape, p.dtype, key, rank, self.exact)
        if name == "s": return (nn.functional.embedding(g.indices()[0], p, sparse=True) * g.values()).sum().double()
        return (p * g.conj()).sum().real.double()
"""
_prelude: dict[str, Any] = {}
exec(PRELUDE, _prelude)  # the reference uses the same gradients
gradient: Callable[..., Tensor] = _prelude["gradient"]

TORCHS = "torch.nn.parallel.DistributedDataParallel"
SPECIAL = {"sparse": "s"}  # the parameter that may be left out or frozen; "b" otherwise
MODELS: dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {
    "plain": {
        "a": ((5, 3), torch.float32), "b": ((7,), torch.float32), "c": ((), torch.float32), "d": ((2, 3), torch.float64)
    },
    "halves": {
        "a": ((5, 3), torch.bfloat16), "b": ((7,), torch.float16), "c": ((4,), torch.float32),
        "d": ((300,), torch.bfloat16),
    },
    # Sizes from which buckets hold one gradient, over shared memory and through a process group.
    "large": {"a": ((270_000,), torch.float32), "b": ((70_000,), torch.float32), "c": ((3,), torch.float32)},
    "sparse": {"a": ((5, 3), torch.float32), "s": ((11, 4), torch.float32), "c": ((7,), torch.float32)},
    "complex": {"a": ((5, 3), torch.complex64), "b": ((7,), torch.complex128), "c": ((4,), torch.float32)},
}  # fmt: skip
STEPS = 4
MAX_LINES = 40  # of a program that is printed
WEIGHTS = {"equal": (2, 2, 2, 2), "unequal": (1, 3, 2, 5), "some zero": (2, 0, 1, 0), "all zero": (0,) * 4}
WEIGHTS["sum"] = WEIGHTS["unequal"]
CLIP = 0.5


@dataclass(frozen=True)
class Op:
    """One line, and the same for the reference."""

    line: str
    do: Callable[[World], None]
    compares: bool = True


@dataclass
class Program:
    row: Row
    rank: int
    parameters: dict[str, Parameter] = field(init=False)

    def __post_init__(self) -> None:
        self.size = int(self.row["ranks"])
        self.shapes = MODELS[self.row["model"]]
        self.names = "".join(self.shapes)
        self.special = SPECIAL.get(self.row["model"], "b")
        # Ranks of this rank's group.
        self.members = [r for r in range(self.size) if not self.in_groups or r % 2 == self.rank % 2 or self.size < 3]
        starts_frozen = self.row["trainable"] in ("frozen", "thaw")
        self.index = self.members.index(self.rank)
        self.parameters = {
            name: Parameter(shape, dtype, name == "s", not (starts_frozen and name == self.special))
            for name, (shape, dtype) in self.shapes.items()
        }

    def world(self) -> World:
        return World(len(self.members), self.parameters, self.settings())

    # --- setting up ---

    @property
    def in_groups(self) -> bool:
        return self.row["process_group"] != "None"

    @property
    def exact(self) -> bool:
        return self.row["values"] == "exact"

    @property
    def hosts(self) -> str:
        """The host of each rank, by rank: the first ones on one, the others on another."""
        return "a" * ((self.size + 1) // 2) + "b" * (self.size // 2)

    def settings(self) -> Settings:
        given = {name: eval(value, {"torch": torch}) for name, value in self.row.items() if name in _READ}
        hosts = "".join(self.hosts[r] for r in self.members) if self.row["hosts"] == "two" else ""
        over_shm = self.row["transport"] == "'shm'"
        return Settings(**given, comm_hook=HOOKS.get(self.row["comm_hook"]), hosts=hosts if over_shm else "")

    def setup(self, ddp: str = "torchddp.DistributedDataParallel") -> list[str]:
        """Lines up to the wrapped model."""
        shapes = ", ".join(f"{n}=torch.empty({s}, dtype={d})" for n, (s, d) in self.shapes.items())
        lines = [f"module = Net({self.exact}, {shapes})"]
        if self.row["hosts"] == "two":
            lines.insert(0, f'os.environ["TORCHDDP_HOST_ID"] = {self.hosts!r}[rank]')
        if not self.parameters[self.special].trained:
            lines.append(f"{self._special_text}.requires_grad_(False)")
        if self.in_groups:
            halves = "[dist.new_group([*range(half, world_size, 2)]) for half in range(2)][rank % 2]"
            lines.append(f"group = {halves if self.size > 2 else 'dist.new_group()'}")
        else:
            lines.append("group = None")
        always = {"transport"} | ({"auto_refresh_trainable"} if self.row["wrapper"] == "sharded" else set())
        given = [n for n in (*OPTIONS, *SHARDED_OPTIONS) if self.row[n] != DEFAULTS[n] or n in always]
        options = "".join(f", {n}={self.row[n]}" for n in given)
        for argument, columns in FIELDS.items():
            if fields := ", ".join(f"{n}={self.row[n]}" for n in columns if self.row[n] != DEFAULTS[n]):
                options += f", {argument}=torchddp.{argument.title()}({fields})"
        hook = self.row["comm_hook"]
        if ddp == TORCHS:
            options = options.replace(f", transport={self.row['transport']}", "").replace(f", comm_hook={hook}", "")
        if self.row["wrapper"] == "sharded":
            group = ", group=group" if self.in_groups else ""
            lines.append(f"optimizer = torchddp.optim.OSS(module.parameters(), torch.optim.SGD, lr=0.1{group})")
            lines.append(f"model = torchddp.ShardedDataParallel(module, optimizer{options})")
        elif self.row["wrapper"] == "replicate":
            mesh = "mesh=torch.distributed.device_mesh.DeviceMesh.from_group(group, 'cpu')"
            lines.append(f"model = torchddp.replicate(module{options.replace('process_group=group', mesh)})")
            lines.append("engine = torchddp.composable.engine_of(model)")
        else:
            models = ["model", "second"] if self.row["wrapper"].startswith("two") else ["model"]
            lines += [f"{name} = {ddp}(module{options})" for name in models]
        if ddp == TORCHS and hook != "None":
            lines += [f"{name}.register_comm_hook(*{hook})" for name in models]
        return lines

    def _wrapper(self, model: str) -> str:
        """What has the calls that replicate() doesn't add to a module."""
        return "engine" if self.row["wrapper"] == "replicate" else model

    @property
    def _special_text(self) -> str:
        return "module.table.weight" if self.special == "s" else f"module.{self.special}"

    @property
    def keeps(self) -> bool:
        """Whether gradients that the program keeps stay as they are."""
        views = self.row["gradient_as_bucket_view"] == "True" or self._where == "main_grad"
        return self.row["zero"] == "none" and not views

    # --- steps ---

    def ops(self) -> Iterator[Op]:
        for step in range(STEPS):
            if step == 2 and self.row["trainable"] in ("freeze", "thaw"):
                yield from self._change_trainable()
            yield from self._zero(step)
            if self.row["edit"] == "assign before":
                yield self._assign(step)
            yield from self._train(step)
            if step and self.row["edit"] == "keep" and self.keeps:
                yield Op("assert all(torch.equal(grad.to_dense(), copy) for grad, copy in kept)", lambda world: None)
            yield from self._edit(step)
        if self.row["join"] != "never":
            yield self._join()

    def _change_trainable(self) -> Iterator[Op]:
        thaws = self.row["trainable"] == "thaw"
        trained = set(self.names) if thaws else set(self.names) - {self.special}
        yield Op(f"{self._special_text}.requires_grad_({thaws})", lambda world: world.set_trained(trained))
        if self.row["auto_refresh_trainable"] == "False":
            yield Op("model.refresh_trainable()", World.refresh)
            if self.row["wrapper"].startswith("two"):
                yield Op("second.refresh_trainable()", World.refresh)

    def _zero(self, step: int) -> Iterator[Op]:
        how = self.row["zero"]
        to_none = how == "none"
        if how in ("none", "zeros"):
            yield Op(f"model.zero_grad(set_to_none={to_none})", lambda world: world.zero_grad(to_none))
        elif how == "some" and self._where == "grad":
            names = self.names[0] if step % 2 == 0 else self.names[2:]
            line = f"[setattr(p, 'grad', None) for name, p in module.named_parameters() if name in {names!r}]"
            yield Op(line, lambda world: _drop(world, names))

    @property
    def _where(self) -> str:
        to_main = self.row["main_grads"] != "None" and self.row["main_grads_as"] == "'main_grad'"
        return "main_grad" if to_main else "grad"

    def _assign(self, step: int) -> Op:
        """Each rank's own tensor."""
        where, names = self._where, self.names.replace("s", "").replace(self.special, "")

        def do(world: World) -> None:
            for index, rank in enumerate(self.members):
                for name in names:
                    value = self._gradient(name, 90 + step, rank).to(world.grad_dtype(name))
                    world.replace(index, name, value)

        dtype = "p.main_grad.dtype" if where == "main_grad" else "p.grad_dtype or p.dtype"
        line = (
            f"[setattr(p, {where!r}, gradient(name, p.shape, p.dtype, {90 + step}, rank, {self.exact}).to({dtype})) "
            f"for name, p in module.named_parameters() if name in {names!r}]"
        )
        return Op(line, do)

    def _gradient(self, name: str, key: int, rank: int) -> Tensor:
        shape, dtype = self.shapes[name]
        return gradient(name, torch.Size(shape), dtype, key, rank, self.exact)

    def _given(self, key: int, step: int, micro: int) -> list[dict[str, Tensor]]:
        return [{n: self._gradient(n, key, rank) for n in self._used(rank, step, micro)} for rank in self.members]

    def _used(self, rank: int, step: int, micro: int) -> str:
        use = self.row["use"]
        leaves_out = (
            use == "never"
            or (use == "one rank" and rank != step % self.size)
            or (use == "first microbatch" and micro > 0)
        )
        return self.names.replace(self.special, "") if leaves_out else self.names

    def _forward(self, model: str, key: int, step: int, micro: int) -> str:
        by_rank = [self._used(rank, step, micro) for rank in range(self.size)]
        names = repr(by_rank[0]) if len(set(by_rank)) == 1 else f"{by_rank}[rank]"
        return f"{model}({names}, {key}, rank)"

    def _weights(self, micro: int) -> tuple[int, ...]:
        given = WEIGHTS[self.row["weigh"]]
        return tuple(given[(rank + micro) % 4] for rank in range(self.size))

    def _train(self, step: int) -> Iterator[Op]:
        how, wrapper = self.row["micro"], self.row["wrapper"]
        models, which = {
            "two at once": (["model", "second"], [0, 1]),
            "two in turn": ([["model", "second"][step % 2]], [step % 2]),
        }.get(wrapper, (["model"], [0]))
        key = 10 * step
        if how == "one":
            yield self._backward(models, which, step, [(key, 0)], True)
        elif how in ("no_sync", "reduce"):
            yield self._backward(models, which, step, [(key, 0)], False)
            yield self._backward(models, which, step, [(key + 1, 1)], how == "no_sync")
            if how == "reduce":
                yield Op(f"{self._wrapper(models[0])}.reduce()", lambda world: world.reduce(which[0]))
        elif how == "each":
            yield self._backward(models, which, step, [(key, 0)], True)
            yield self._backward(models, which, step, [(key + 1, 1)], True)
        elif how == "two forwards":
            yield self._backward(models, which, step, [(key, 0), (key + 1, 1)], True)
        elif how == "retain":
            yield from self._retain(models, which, step, key)
        else:
            yield self._loop(models[0], which[0], step, key)

    def _backward(
        self, models: Sequence[str], which: Sequence[int], step: int, keys: Sequence[tuple[int, int]], reduces: bool
    ) -> Op:
        """One backward, of several forwards if there are several keys or models."""
        forwards = [self._forward(model, key, step, micro) for model in models for key, micro in keys]
        line = f"({' + '.join(forwards)}).backward()"
        weights = self._weights(keys[0][1]) if self.row["weigh"] != "never" else None
        loss = "sum" if self.row["weigh"] == "sum" else "mean"
        if weights:
            line = f"{models[0]}.weigh({list(weights)}[rank], loss={loss!r}); {line}"
        if not reduces:
            line = f"with {', '.join(f'{model}.no_sync()' for model in models)}: {line}"

        def do(world: World) -> None:
            if weights:
                world.weigh([weights[rank] for rank in self.members], loss)
            # Autograd begins with the last forward.
            given = [self._given(key, step, micro) for _ in models for key, micro in keys][::-1]
            if self._where == "grad":  # and adds in the dtype of .grad
                given = [
                    [{n: g.to(world.grad_dtype(n)) for n, g in of_rank.items()} for of_rank in each] for each in given
                ]
            world.backward([_added(each) for each in zip(*given, strict=True)], reduces=reduces, wrappers=which)

        return Op(line, do)

    def _retain(self, models: Sequence[str], which: Sequence[int], step: int, key: int) -> Iterator[Op]:
        """Two backwards of one graph. Only the first is averaged: no forward has prepared the second."""
        first = self._backward(models, which, step, [(key, 0)], True)
        again = self._backward(models, which, step, [(key, 0)], False)
        weigh, _, rest = first.line.rpartition("; ")
        weigh = f"{weigh}; " if weigh else ""
        loss = rest.removesuffix(".backward()")
        yield Op(f"{weigh}loss = {loss}; loss.backward(retain_graph=True)", first.do)
        yield Op(f"{weigh}loss.backward()", again.do)

    def _loop(self, model: str, wrapper: int, step: int, key: int) -> Op:
        """`accumulate` over two microbatches, as the option `sync` says."""
        strategy = eval(self.row["sync"]) or (
            "multi_auto_sync" if self.row["find_unused_parameters"] == "True" else "single_auto_sync"
        )
        weigh = self.row["weigh"] != "never"
        by_micro = [self._weights(micro) for micro in range(2)] if weigh else []
        weights = f", weights={[list(w) for w in zip(*by_micro, strict=True)]}[rank]" if weigh else ""
        same = self.row["use"] != "first microbatch"
        forwards = [self._forward(model, key + micro, step, micro) for micro in range(2)]
        body = (
            forwards[0].replace(f" {key},", f" {key} + i,") if same else f"({forwards[0]} if i == 0 else {forwards[1]})"
        )
        line = f"for i in torchddp.sync.accumulate({model}, 2{weights}): {body}.backward()"
        refreshes = self.row["micro"] == "refreshed loop"
        if refreshes:
            line += f"; {model}.refresh_trainable()"

        def do(world: World) -> None:
            for micro in range(2):
                if weigh:
                    several = strategy == "multi_auto_sync"
                    by_rank = [by_micro[micro][rank] for rank in self.members]
                    world.weigh(by_rank, goes_on=several and micro > 0, is_last=not several or micro == 1)
                reduces = strategy == "multi_auto_sync" or (micro == 1 and strategy == "single_auto_sync")
                world.backward(self._given(key + micro, step, micro), reduces=reduces, wrappers=[wrapper])
                if any(world.errors):
                    return
                if refreshes:
                    world.refresh()
            if strategy == "forced_sync":
                world.reduce(wrapper)

        return Op(line, do)

    def _join(self) -> Op:
        """Rank r has r + 1 more inputs."""
        by_all = self.row["join"] == "all ranks"
        weights = self._weights(0) if self.row["weigh"] != "never" else None
        loss = "sum" if self.row["weigh"] == "sum" else "mean"
        forward = self._forward("model", 50, 0, 0).replace(" 50,", " 50 + k,")
        weigh = f"model.weigh({list(weights)}[rank], loss={loss!r}), " if weights else ""
        more = "" if by_all else "divide_by_initial_world_size=False"
        step = f"model.zero_grad(), {weigh}{forward}.backward()"
        line = f"with {self._wrapper('model')}.join({more}): [({step}) for k in range(1 + rank)]"

        def do(world: World) -> None:
            for k in range(self.size):
                active = [rank for rank in self.members if rank >= k]
                if not active:
                    return
                world.zero_grad(set_to_none=True, of=[self.members.index(rank) for rank in active])
                if weights:
                    world.weigh([weights[rank] if rank >= k else 0 for rank in self.members], loss)
                given = self._given(50 + k, 0, 0)
                present = [g if rank >= k else None for g, rank in zip(given, self.members, strict=True)]
                world.backward(present, count=None if by_all else len(active))
                if any(world.errors):
                    return

        return Op(line, do)

    def _edit(self, step: int) -> Iterator[Op]:
        how, where = self.row["edit"], self._where
        trained = f"[p for p in module.parameters() if p.requires_grad and p.{where} is not None]"
        if how == "scale":
            yield Op(f"[p.{where}.mul_(0.5) for p in {trained}]", lambda world: _write(world, self.names, _half))
        elif how == "clip" and where == "grad":
            call = (
                f"optimizer.clip_grad_norm({CLIP})"
                if self.row["wrapper"] == "sharded"
                else (f"torch.nn.utils.clip_grad_norm_({trained}, {CLIP})")
            )
            yield Op(call, lambda world: world.clip_norm(CLIP))
        elif how == "keep" and self.keeps:
            kept = f"[(p.{where}, p.{where}.to_dense().clone()) for p in module.parameters() if p.{where} is not None]"
            yield Op(f"kept = {kept}", lambda world: None)
        elif how == "drop" and step % 2:
            yield Op(f"module.a.{where} = None", lambda world: _drop(world, "a"))


_READ = {
    "find_unused_parameters",
    "static_graph",
    "weighted",
    "zero_weights",
    "reduce",
    "main_grads",
    "main_grads_as",
    "wire",
    "reduce_fp16",
    "auto_refresh_trainable",
}


def _drop(world: World, names: str) -> None:
    for index in range(world.size):
        for name in names:
            world.drop(index, name)


def _half(value: Tensor) -> Tensor:
    return value * 0.5


def _write(world: World, names: str, change: Callable[[Tensor], Tensor]) -> None:
    for index in range(world.size):
        for name in names:
            value = world.grad_of(index, name)
            if value is not None and name in world.trained:
                world.write(index, name, change(value))


def _added(given: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The gradients of several forwards, which autograd adds up."""
    total = dict(given[0])
    for each in given[1:]:
        for name, gradient in each.items():
            total[name] = total[name] + gradient if name in total else gradient
    return total


def standalone(row: Row, lines: Sequence[str], check: str) -> str:
    """A program that repeats these lines on every rank, and then the check."""
    needed = {'"s"': row["model"] == "sparse", "_hooks": row["comm_hook"] != "None", "exact:": row["values"] == "exact"}
    left_out = [word for word, is_needed in needed.items() if not is_needed]
    prelude = [text for text in PRELUDE.splitlines() if not any(word in text for word in left_out)]
    size = row["ranks"]
    main = "dist.init_process_group('gloo', store=dist.FileStore(path, world_size), rank=rank, world_size=world_size)"
    for width in (100, 200, 400):  # as short lines as 40 of them allow
        text = "\n".join([
            *prelude,
            "def main(rank, world_size, path):",
            *(f"    {line}" for line in _joined([main, *lines, *([check] if check else [])], width)),
            f"torch.multiprocessing.start_processes(main, ({size}, tempfile.mktemp()), {size}, start_method='fork')\n",
        ])  # fmt: skip
        if text.count("\n") <= MAX_LINES:
            break
    return text


def _joined(lines: Sequence[str], width: int) -> list[str]:
    """Several simple statements in a line, up to this width."""
    joined: list[str] = []
    is_open = False  # whether the last line may go on
    for line in lines:
        is_simple = not line.startswith(("with ", "for ", "if "))
        if is_open and is_simple and len(joined[-1]) + len(line) < width:
            joined[-1] += f"; {line}"
        else:
            joined.append(line)
        is_open = is_simple
    return joined
