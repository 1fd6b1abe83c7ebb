"""ParallelConfig: how a model is to be trained in parallel, as plain data."""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from torchddp.parallel import checks, read

KINDS = ("auto", "none", "ddp", "sharded", "fsdp", "hsdp")
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
HYBRID = ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """What `torchddp.parallelize` is to do with a model. Plain data: it can be read from a file and written to one.

    Args:
        kind: ``"ddp"``: DistributedDataParallel. ``"sharded"``: ShardedDataParallel, gradients and optimizer state
            sharded (ZeRO-2). ``"fsdp"``, ``"hsdp"``: torch's ``fully_shard``, parameters sharded too, over all ranks,
            or over each model-parallel group with replicas between the groups. ``"none"``: the module as it is.
            ``"auto"``: by ``use_fsdp`` and ``sharding_strategy``. With one process every kind is ``"none"``.
        use_fsdp: FSDP or HSDP instead of DDP.
        sharding_strategy: with FSDP: ``"FULL_SHARD"``, the default, frees gathered parameters after forward;
            ``"SHARD_GRAD_OP"`` keeps them until backward; ``"NO_SHARD"`` replicates them; ``"HYBRID_SHARD"``, the
            default of ``"hsdp"``, and ``"HYBRID_SHARD_ZERO2"`` are the first two within each model-parallel group.
        cpu_offload: with FSDP: parameters, gradients and optimizer state live in the CPU's memory.
        sync_module_states: start from rank 0's parameters and buffers. False: they are the same already.
        model_parallel: number of ranks that hold one copy of the model between them: with HSDP those that a copy is
            sharded over (None: the ranks of one host), otherwise those of the model's own tensor parallel plan
            (None: 1). Neighbouring ranks form such a group.
        data_parallel: number of copies. None: as many as there are model-parallel groups.
        parallel_backend: backend of the groups that are made, e.g. ``"gloo"``; None: that of the process group.
        device_type: ``"cpu"``, ``"cuda"``...; None: that of the model's parameters.
        param_dtype, reduce_dtype: with FSDP: the dtype that parameters are gathered and used in, and that gradients
            are reduced in, one of ``"bfloat16"``, ``"float16"``, ``"float32"``, ``"float64"`` or a torch.dtype.
        wrap: with FSDP: classes, or their names, whose modules are sharded and gathered one by one. None: the
            repeated modules of the model's lists. (): the model as a whole.
        forward_prefetch, backward_prefetch: with FSDP: number of modules whose parameters are gathered ahead. 0: as
            torch does by itself.
        ddp: further options of DistributedDataParallel or ShardedDataParallel. ``timeout`` may be given in seconds,
            ``wire_dtype`` by its name.

    Raises:
        TypeError: a value of another type. ValueError: one that is not allowed, an unknown option, options that don't
            go together. Both name the option, what was got and what is allowed.
    """

    kind: str = "auto"
    use_fsdp: bool = False
    sharding_strategy: str | None = None
    cpu_offload: bool = False
    sync_module_states: bool = True
    model_parallel: int | None = None
    data_parallel: int | None = None
    parallel_backend: str | None = None
    device_type: str | None = None
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    wrap: tuple[str | type[torch.nn.Module], ...] | None = None
    forward_prefetch: int = 0
    backward_prefetch: int = 0
    ddp: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype"):
            self._set(name, _dtype_name(getattr(self, name)))
        wrap: Any = self.wrap
        if isinstance(wrap, list):  # as files have it
            self._set("wrap", tuple(wrap))
        checks.check_types(self)
        checks.check_one_of("kind", self.kind, KINDS)
        checks.check_one_of("sharding_strategy", self.sharding_strategy, STRATEGIES, optional=True)
        checks.check_one_of("param_dtype", self.param_dtype, DTYPES, optional=True)
        checks.check_one_of("reduce_dtype", self.reduce_dtype, DTYPES, optional=True)
        checks.check_together(self)
        self._set("ddp", {name: _plain(value) for name, value in self.ddp.items()})

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def chosen_kind(self) -> str:
        """``kind``, with "auto" replaced by what ``use_fsdp`` and ``sharding_strategy`` ask for (never "auto")."""
        if self.kind != "auto":
            return "hsdp" if self.kind == "fsdp" and self.sharding_strategy in HYBRID else self.kind
        if not self.use_fsdp:
            return "ddp"
        return "hsdp" if self.sharding_strategy in HYBRID else "fsdp"

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], source: str = "ParallelConfig") -> ParallelConfig:
        """From a dictionary, as a file gives it. Errors begin with ``source``."""
        return _made(values, source, ParallelConfig())

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], section: str | None = None) -> ParallelConfig:
        """From a TOML (.toml), YAML (.yaml, .yml; needs PyYAML) or JSON (.json) file. Not collective.

        ``section``: the table of the file with these options (dots between the names of nested ones); None: the file
        has nothing else. Raises as the constructor does, and names file and option; also ValueError for a file that
        can't be parsed, another suffix or a missing section, ImportError if its parser is not installed, OSError.
        """
        return _made(read.read_file(path, section), os.fspath(path), ParallelConfig())

    @classmethod
    def from_cli(cls, args: Iterable[str], base: ParallelConfig | None = None) -> ParallelConfig:
        """From arguments: ``--use-fsdp``, ``--no-use-fsdp``, ``--kind fsdp``, ``--kind=fsdp``, ``kind=fsdp``.

        Options of DDP are ``ddp.NAME=VALUE``; ``wrap`` takes names with commas between; ``none`` is None. What is not
        given is that of ``base``. Raises as the constructor does, with the nearest name for an unknown one.
        """
        return _made(read.read_arguments(args), "command line", base or ParallelConfig())

    def as_dict(self) -> dict[str, Any]:
        """The options that differ from their defaults, for ``from_mapping`` and files.

        Raises TypeError for a value that no file can hold, such as a hook.
        """
        values = {}
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            default = {} if item.name == "ddp" else item.default
            if value != default:
                values[item.name] = _filed(item.name, value)
        return values

    def to_cli(self) -> list[str]:
        """Arguments for `from_cli` that give this again. Raises TypeError as `as_dict` does."""
        return read.written_arguments(self.as_dict())


def _made(values: Mapping[str, Any], source: str, base: ParallelConfig) -> ParallelConfig:
    names = [item.name for item in dataclasses.fields(ParallelConfig)]
    for name in values:
        if name not in names:
            raise ValueError(f"{source}: unknown option '{name}'{checks.nearest(name, names)}")
    changes = dict(values)
    if isinstance(changes.get("ddp"), Mapping):
        changes["ddp"] = {**base.ddp, **changes["ddp"]}
    try:
        return dataclasses.replace(base, **changes)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{source}: {error}") from None


def _dtype_name(value: Any) -> Any:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def _plain(value: Any) -> Any:
    """An option of DDP as a file would have it."""
    return value.total_seconds() if isinstance(value, datetime.timedelta) else _dtype_name(value)


def _filed(name: str, value: Any) -> Any:
    if name == "wrap" and value is not None:
        return [item if isinstance(item, str) else f"{item.__module__}.{item.__qualname__}" for item in value]
    if name == "ddp":
        for option, inner in value.items():
            if not isinstance(inner, (str, int, float, bool, type(None))):
                raise TypeError(f"ddp.{option}: a {type(inner).__name__} can't be written to a file")
        return dict(value)
    return value
