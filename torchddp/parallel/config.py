"""ParallelConfig: how to train a model in parallel, as plain data with its checks."""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import inspect
import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from torchddp.ddp.checks import Checks
from torchddp.ddp.former_names import FORMER, SETTINGS
from torchddp.ddp.grad_precision import Precision
from torchddp.ddp.module import DistributedDataParallel
from torchddp.errors import nearest_name, warn_user
from torchddp.sharded import ShardedDataParallel

Kind = Literal["auto", "none", "ddp", "sharded", "fsdp", "hsdp"]
Strategy = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
DtypeName = Literal["bfloat16", "float16", "float32", "float64"]
KINDS, STRATEGIES, DTYPES = get_args(Kind), get_args(Strategy), get_args(DtypeName)
HYBRID = ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_ALLOWED = {"kind": KINDS, "sharding_strategy": STRATEGIES, "param_dtype": DTYPES, "reduce_dtype": DTYPES}
# Set by parallelize itself, or available under other names.
_NOT_FOR_USERS = {
    "self": "",
    "module": "",
    "sharded_optimizer": "parallelize's optimizer",
    "process_group": "model_parallel, data_parallel and parallel_backend",
    "device_mesh": "model_parallel and data_parallel",
    "init_sync": "sync_module_states",
    "sync_models_at_startup": "sync_module_states",
}
_FSDP_ONLY = ("cpu_offload", "param_dtype", "reduce_dtype", "wrap", "forward_prefetch", "backward_prefetch")


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """What `torchddp.parallelize` should do with a model. Plain data that can be read from and written to a file.

    Example:

        config = torchddp.ParallelConfig(kind="ddp", ddp={"bucket_cap_mb": 25})
        same = torchddp.ParallelConfig.from_cli(["--kind", "ddp", "ddp.bucket_cap_mb=25"])
        model = torchddp.parallelize(module, config)

    Args:
        kind: ``"ddp"``: DistributedDataParallel. ``"sharded"``: ShardedDataParallel, gradients and optimizer state
            sharded (ZeRO-2). ``"fsdp"``, ``"hsdp"``: torch's ``fully_shard``, parameters sharded too, over all ranks,
            or over each model-parallel group with replicas between the groups. ``"none"``: the module as it is.
            ``"auto"``: from ``use_fsdp`` and ``sharding_strategy``. With one process every kind is ``"none"``.
        use_fsdp: FSDP or HSDP instead of DDP.
        sharding_strategy: with FSDP: ``"FULL_SHARD"``, the default, frees gathered parameters after forward;
            ``"SHARD_GRAD_OP"`` keeps them until backward; ``"NO_SHARD"`` replicates them; ``"HYBRID_SHARD"``, the
            default of ``"hsdp"``, and ``"HYBRID_SHARD_ZERO2"`` are the first two within each model-parallel group.
        cpu_offload: with FSDP: keep parameters, gradients and optimizer state in CPU memory.
        sync_module_states: start from rank 0's parameters and buffers. False: they are already equal.
        model_parallel: number of ranks that share one copy of the model. With HSDP: those that a copy is sharded over
            (None: the ranks of one host); otherwise those of the model's own tensor parallel plan (None: 1).
            Neighboring ranks form such a group.
        data_parallel: number of copies. None: the number of model-parallel groups.
        parallel_backend: backend of new groups, e.g. ``"gloo"``; None: that of the process group.
        device_type: ``"cpu"``, ``"cuda"``...; None: that of the model's parameters.
        param_dtype, reduce_dtype: with FSDP: the dtype in which parameters are gathered and used, and the one in which
            gradients are reduced: ``"bfloat16"``, ``"float16"``, ``"float32"``, ``"float64"`` or a torch.dtype.
        wrap: with FSDP: classes, or their names, whose modules are sharded and gathered one by one. None: the repeated
            modules of the model's lists. (): the model as a whole.
        forward_prefetch, backward_prefetch: with FSDP: number of modules that are gathered ahead. 0: as torch does.
        ddp: further options of DistributedDataParallel or ShardedDataParallel. Fields of their ``precision``
            and ``checks`` may be a table, or options like ``"precision.wire"``; dtypes may be names.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: a value that is not allowed, an unknown option, or conflicting options. Both name it and what is
            allowed.
    """

    kind: Kind = "auto"
    use_fsdp: bool = False
    sharding_strategy: Strategy | None = None
    cpu_offload: bool = False
    sync_module_states: bool = True
    model_parallel: int | None = None
    data_parallel: int | None = None
    parallel_backend: str | None = None
    device_type: str | None = None
    param_dtype: DtypeName | torch.dtype | None = None
    reduce_dtype: DtypeName | torch.dtype | None = None
    wrap: tuple[str | type[torch.nn.Module], ...] | None = None
    forward_prefetch: int = 0
    backward_prefetch: int = 0
    ddp: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype"):
            self._set(name, _plain(getattr(self, name)))
        wrap: object = self.wrap
        if isinstance(wrap, list):  # as in files
            self._set("wrap", tuple(wrap))
        if isinstance(self.ddp, Mapping):
            self._set("ddp", _flat(self.ddp))
        _check_types(self)
        _check_together(self)
        self._set("ddp", {name: _plain(value) for name, value in self.ddp.items()})

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def chosen_kind(self) -> str:
        """``kind``, with "auto" replaced by what ``use_fsdp`` and ``sharding_strategy`` ask for."""
        kind = self.kind if self.kind != "auto" else "fsdp" if self.use_fsdp else "ddp"
        return "hsdp" if kind == "fsdp" and self.sharding_strategy in HYBRID else kind

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], source: str = "ParallelConfig") -> ParallelConfig:
        """From a dictionary, such as a parsed file. Errors begin with ``source``."""
        return _made(values, source, ParallelConfig())

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], section: str | None = None) -> ParallelConfig:
        """From a TOML (.toml), YAML (.yaml, .yml; needs PyYAML) or JSON (.json) file. Not collective.

        ``section``: the file's table with these options (dots separate nested names); None: the file contains nothing
        else. Raises as the constructor does, naming file and option; also ValueError for a file that can't be parsed,
        another suffix or a missing section, ImportError if its parser is not installed, OSError.
        """
        return _made(_read_file(path, section), os.fspath(path), ParallelConfig())

    @classmethod
    def from_cli(cls, args: Iterable[str], base: ParallelConfig | None = None) -> ParallelConfig:
        """From arguments: ``--use-fsdp``, ``--no-use-fsdp``, ``--kind fsdp``, ``--kind=fsdp``, ``kind=fsdp``.

        Options of DDP are ``ddp.NAME=VALUE``; ``wrap`` takes comma-separated names; ``none`` is None. Options that are
        not given come from ``base``. Raises as the constructor does, suggesting the nearest name for an unknown one.
        """
        return _made(_read_arguments(args), "command line", base or ParallelConfig())

    def as_dict(self) -> dict[str, Any]:
        """The options that differ from their defaults, for ``from_mapping`` and files.

        TypeError for a value that files can't hold, such as a hook.
        """
        defaults = ParallelConfig()
        changed = [name for name in _NAMES if getattr(self, name) != getattr(defaults, name)]
        return {name: _filed(name, getattr(self, name)) for name in changed}


_NAMES = [item.name for item in dataclasses.fields(ParallelConfig)]


def _made(values: Mapping[str, Any], source: str, base: ParallelConfig) -> ParallelConfig:
    for name in values:
        if name not in _NAMES:
            raise ValueError(f"{source}: unknown option '{name}'{nearest(name, _NAMES)}")
    changes = dict(values)
    if isinstance(changes.get("ddp"), Mapping):
        changes["ddp"] = {**base.ddp, **changes["ddp"]}
    try:
        return dataclasses.replace(base, **changes)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{source}: {error}") from None


def _flat(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with the fields of ``precision`` and ``checks`` one by one: ``"precision.wire"``."""
    flat: dict[str, Any] = {}
    for name, value in options.items():
        now = ".".join(FORMER[name]) if name in FORMER else name
        if now != name:
            warn_user(f"ddp.{name} is deprecated: use ddp.{now}", FutureWarning)
        if isinstance(value, Precision | Checks):
            changed = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
            value = {key: item for key, item in changed.items() if item != getattr(type(value)(), key)}
        if name in SETTINGS and isinstance(value, Mapping):
            flat |= {f"{name}.{field}": item for field, item in value.items()}
        else:
            flat[now] = value
    return flat


def _plain(value: object) -> object:
    """An option's value as files store it."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value.total_seconds() if isinstance(value, datetime.timedelta) else value


def _filed(name: str, value: Any) -> object:
    if name == "wrap" and value is not None:
        return [item if isinstance(item, str) else f"{item.__module__}.{item.__qualname__}" for item in value]
    if name == "ddp":
        for option, inner in value.items():
            if not isinstance(inner, (str, int, float, bool, type(None))):
                raise TypeError(f"ddp.{option}: a {type(inner).__name__} can't be written to a file")
        return dict(value)
    return value


def nearest(name: str, names: Iterable[str]) -> str:
    """Text to add after an unknown name: the nearest existing one, and all that are allowed."""
    names = list(names)
    near = nearest_name(name, names)
    meant = f"; did you mean '{near}'?" if near else ""
    return f"{meant} (allowed: {', '.join(names)})"


def _check_types(config: ParallelConfig) -> None:
    for name in FLAGS:
        _require(name, getattr(config, name), isinstance(getattr(config, name), bool), "true or false")
    for name in ("kind", "sharding_strategy", "parallel_backend", "device_type", "param_dtype", "reduce_dtype"):
        value, wanted = getattr(config, name), "a string" if name == "kind" else "a string or none"
        _require(name, value, isinstance(value, str) or (value is None and name != "kind"), wanted)
    for name in NUMBERS:
        value, least = getattr(config, name), 1 if name.endswith("_parallel") else 0
        if value is None and least == 1:
            continue
        _require(name, value, isinstance(value, int) and not isinstance(value, bool), "a whole number")
        if value < least:
            raise ValueError(f"{name}: got {value}, allowed: {least} or more")
    wrap = config.wrap
    _require("wrap", wrap, wrap is None or isinstance(wrap, tuple), "a list of classes or names of classes, or none")
    for item in wrap or ():
        is_class = isinstance(item, type) and issubclass(item, torch.nn.Module)
        _require("wrap", item, is_class or isinstance(item, str), "classes of modules, or their names")
    _require("ddp", config.ddp, isinstance(config.ddp, Mapping), "a table of options")
    for name, allowed in _ALLOWED.items():
        value = getattr(config, name)
        if value is not None and value not in allowed:
            raise ValueError(f"{name}: got '{value}'{nearest(value, allowed)}")


def _require(name: str, value: object, holds: bool, wanted: str) -> None:
    if not holds:
        raise TypeError(f"{name}: got {value!r} ({type(value).__name__}), allowed: {wanted}")


def _check_together(config: ParallelConfig) -> None:
    kind, strategy = config.kind, config.sharding_strategy
    if config.use_fsdp and kind in ("none", "ddp", "sharded"):
        raise ValueError(f"use_fsdp with kind '{kind}': leave one out, or use kind 'fsdp' or 'hsdp'")
    with_fsdp = config.use_fsdp or kind in ("fsdp", "hsdp")
    if strategy is not None and not with_fsdp:
        raise ValueError(f"sharding_strategy '{strategy}' without use_fsdp: set use_fsdp, or leave the strategy out")
    if kind == "hsdp" and strategy is not None and not strategy.startswith("HYBRID_SHARD"):
        raise ValueError(f"kind 'hsdp' with sharding_strategy '{strategy}': allowed: HYBRID_SHARD, HYBRID_SHARD_ZERO2")
    if config.cpu_offload and not with_fsdp:
        chosen = config.chosen_kind
        raise ValueError(f"cpu_offload with kind '{chosen}', which can't: set use_fsdp (FSDP2), or use DeepSpeed")
    for name in _FSDP_ONLY:
        if not with_fsdp and getattr(config, name) not in (None, 0, False):
            raise ValueError(f"{name} with kind '{config.chosen_kind}': it is an option of FSDP; set use_fsdp")
    if with_fsdp and config.ddp:
        raise ValueError(f"ddp.{next(iter(config.ddp))} with FSDP: options of DistributedDataParallel have no effect")
    if kind == "sharded" and (config.model_parallel or 1) > 1:
        raise ValueError(f"model_parallel {config.model_parallel} with kind 'sharded': use 'ddp', 'fsdp' or 'hsdp'")
    if config.ddp:
        _check_ddp_options(config.chosen_kind, config.ddp)


def _check_ddp_options(kind: str, options: Mapping[str, Any]) -> None:
    if kind == "none":
        raise ValueError(f"ddp.{next(iter(options))} with kind 'none': there is no DistributedDataParallel")
    wrapper: type = ShardedDataParallel if kind == "sharded" else DistributedDataParallel
    parameters = inspect.signature(wrapper.__init__).parameters  # type: ignore[misc]
    allowed = [name for name in parameters if name not in _NOT_FOR_USERS]
    for argument, settings in SETTINGS.items():
        if argument in allowed:
            allowed += [f"{argument}.{item.name}" for item in dataclasses.fields(settings)]
    for name in map(str, options):
        if _NOT_FOR_USERS.get(name):
            raise ValueError(f"ddp.{name}: use {_NOT_FOR_USERS[name]} instead")
        if name not in allowed:
            raise ValueError(f"ddp.{name}: unknown option of {wrapper.__name__}{nearest(name, allowed)}")


# --- options from files and command lines ---


FLAGS = ("use_fsdp", "cpu_offload", "sync_module_states")
NUMBERS = ("model_parallel", "data_parallel", "forward_prefetch", "backward_prefetch")
_WORDS = {"true": True, "false": False, "none": None, "null": None}
_SUFFIXES = ".toml, .yaml, .yml, .json"


def _read_file(path: str | os.PathLike[str], section: str | None) -> dict[str, Any]:
    path = Path(path)
    table: Any = _parse(path)
    for name in section.split(".") if section else ():
        if not isinstance(table, Mapping) or name not in table:
            found = ", ".join(map(str, table)) if isinstance(table, Mapping) else "no table"
            raise ValueError(f"{path}: there is no section '{section}' (found: {found})")
        table = table[name]
    where = f"section '{section}'" if section else "the file"
    if table is None:  # an empty YAML file
        return {}
    if not isinstance(table, Mapping):
        raise TypeError(f"{path}: {where} is a {type(table).__name__}, allowed: a table of options")
    if bad := [key for key in table if not isinstance(key, str)]:
        raise TypeError(f"{path}: option {bad[0]!r} is not a string")
    return dict(table)


def _parse(path: Path) -> Any:
    if path.suffix not in _SUFFIXES.split(", "):
        raise ValueError(f"{path}: got the suffix '{path.suffix}', allowed: {_SUFFIXES}")
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".toml":
        name = "tomllib" if sys.version_info >= (3, 11) else "tomli"
        load = _needed(name, path, "tomli (Python 3.10 has no parser for TOML)").loads
        errors = ValueError  # TOMLDecodeError is one
    elif path.suffix == ".json":
        load, errors = json.loads, ValueError
    else:
        parser = _needed("yaml", path, "PyYAML")
        load, errors = parser.safe_load, parser.YAMLError
    try:
        return load(text)
    except errors as error:
        raise ValueError(f"{path}: {error}") from None


def _needed(module: str, path: Path, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise ImportError(f"{path}: to read it, pip install {package}") from None


def _read_arguments(args: Iterable[str]) -> dict[str, Any]:
    """Options by name: see ParallelConfig.from_cli. Names are not checked here, but flags and numbers are parsed."""
    found: dict[str, Any] = {}
    waiting = list(args)
    while waiting:
        argument = waiting.pop(0)
        key, has_value, text = argument.partition("=")
        if not (argument.startswith("--") or has_value):
            raise ValueError(f"command line: got '{argument}', allowed: --option, --option=value, option=value")
        name, _, option = key.removeprefix("--").partition(".")
        name, option = name.replace("-", "_"), option.replace("-", "_")
        if not has_value:
            if name in FLAGS:
                text = "true"
            elif name.removeprefix("no_") in FLAGS:
                name, text = name.removeprefix("no_"), "false"
            elif waiting and not waiting[0].startswith("--"):
                text = waiting.pop(0)
            else:
                raise ValueError(f"command line: {key} has no value: {key}=VALUE")
        if name == "ddp" and option:
            found.setdefault("ddp", {})[option] = _guessed(text)
        else:
            full = f"{name}.{option}" if option else name
            found[full] = _value(full, text)
    return found


def _value(name: str, text: str) -> Any:
    """The value of the option ``name``. A value that can't be parsed stays a string, which the config rejects."""
    if name != "kind" and text.lower() in ("none", "null"):
        return None
    if name in FLAGS:
        return _WORDS.get(text.lower(), text)
    if name in NUMBERS:
        try:
            return int(text)
        except ValueError:
            return text
    if name == "wrap":
        return [item.strip() for item in text.split(",")] if text else []
    return text


def _guessed(text: str) -> Any:
    """A value of unknown type: parsed as JSON, or as none, True or False, or else a string."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, (str, int, float)) else text
