"""``torchddp.install()``: programs that create torch's DistributedDataParallel get torchddp's.

Note [What is replaced]
~~~~~~~~~~~~~~~~~~~~~~~
No name is replaced: torch's class stays in torch.nn.parallel, and code that imported it by name before, or keeps it in
a dict, a partial or a default argument, still has it. Only its metaclass changes while this is installed, because the
metaclass decides what calling the class creates. So:

* ``isinstance`` and ``issubclass`` are Python's own: an instance of torch's class made before, and one of ours made
  while installed, are both instances of it, because ours is a subclass.
* What torch stores on its class (``_active_ddp_module``, which Dynamo reads) exists only once.
* Pickles of both find their class under its name. Unpickling doesn't call a class, so copies keep theirs.
* Only the metaclass has to be restored, and modules imported later are unaffected.

The metaclass gives a class that is derived from torch's while installed our class as its base. A class derived before
keeps torch's, because it may already have instances; it also has our metaclass, which reports its first model.
"""

from __future__ import annotations

import atexit
import inspect
import logging
import os
import sys
import threading
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from torchddp import _C
from torchddp._command import is_command
from torchddp.ddp.former_names import current
from torchddp.ddp.module import OPTIONS, DistributedDataParallel
from torchddp.transport.store import is_first_in_job

ENV = "TORCHDDP_INSTALL"
_OFF = ("", "0")

_PlainMeta: Any = type(TorchDDP)
_lock = threading.RLock()
_defaults: dict[str, Any] | None = None  # None: not installed


def install(**defaults: object) -> ExitStack:
    """Make ``torch.nn.parallel.DistributedDataParallel(...)`` create torchddp's class in this process.

    Example:

        with torchddp.install(transport="shm"):  # or, for the rest of the program: torchddp.install()
            model = torch.nn.parallel.DistributedDataParallel(module)
        assert isinstance(model, torchddp.DistributedDataParallel)

    This includes names of the class that were imported before. Classes derived from torch's while this is installed
    derive from torchddp's; those derived before keep torch's, and a warning names them. Existing models don't change.
    The logger "torchddp" announces it with one warning per job, on rank 0, when the first model is created. In a driver
    of Ray or Spark, whose workers are not affected, it warns of that instead.

    In a ``with`` statement, the previous state is restored at the end, even after an exception. Calls may be nested and
    repeated. Not collective, but every rank must do the same. Processes forked afterwards inherit it; others install it
    only if the environment variable TORCHDDP_INSTALL is 1.

    Args:
        defaults: for any argument of :class:`torchddp.DistributedDataParallel` except ``module``: torchddp's own
            (``transport``, ``comm_hook``, ...), which frameworks don't pass, and torch's (``gradient_as_bucket_view``,
            ``bucket_cap_mb``, ...). Arguments passed to the class take precedence. Installing again adds to them.
            Objects are shared by all models: pass a ``comm_hook`` by name, so that each model gets its own.

    Raises:
        TypeError: a default for an argument that doesn't exist.
    """
    defaults = current(defaults, OPTIONS, "install")
    with _lock:
        before = _switch({**(_defaults or {}), **defaults})
    look_for_workers_elsewhere()
    return before


def uninstall() -> ExitStack:
    """Make torch's class create its own objects again. Does nothing if torchddp is not installed.

    In a ``with`` statement around a model that must be torch's, the previous state is restored at the end.
    """
    return _switch(None)


def installed() -> bool:
    """Whether torch's class creates torchddp's objects in this process."""
    return _defaults is not None


def install_by_variable() -> None:
    """For `import torchddp`: do what TORCHDDP_INSTALL says. ValueError unless that is 1, 0 or empty."""
    value = os.environ.get(ENV, "")
    if value in _OFF or is_command():  # the command compares torchddp with torch's class
        return
    check_variable(value)
    reach_children()
    with _lock:
        _switch(_defaults or {})


def reach_children() -> None:
    """Install in Python processes that this one starts by spawn or as a command, as soon as they import torch."""
    os.environ[ENV] = "1"
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "in_children")
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if folder not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, paths)])


def check_variable(value: str) -> None:
    if value not in (*_OFF, "1"):
        raise ValueError(
            f"the environment variable {ENV} must be 1 (torch.nn.parallel.DistributedDataParallel creates torchddp's "
            f"class), or 0 or empty (it does not), got {value!r}"
        )


class DerivedDDP(DistributedDataParallel):
    """The base of classes that are derived from torch's while torchddp is installed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **_with_defaults(args, kwargs))
        model_made(self, type(self))

    def _ddp_init_helper(self, *args: Any, **kwargs: Any) -> None:
        if "_options" not in self.__dict__:
            raise TypeError(
                f"{type(self).__qualname__} was derived from torch's DistributedDataParallel while torchddp was "
                "installed, so its base is torchddp's; but its __init__ calls torch's class by name, which skips "
                "torchddp's constructor: call super().__init__(...)"
            )
        super()._ddp_init_helper(*args, **kwargs)


class _InstalledMeta(_PlainMeta):
    """The metaclass of torch's class while torchddp is installed: Note [What is replaced]."""

    def __call__(cls, *args: Any, **kwargs: Any) -> object:
        if _defaults is None or issubclass(cls, DistributedDataParallel):
            return super().__call__(*args, **kwargs)
        if cls is not TorchDDP:
            model = super().__call__(*args, **kwargs)
            torchs_model_made(model)
            return model
        model = DistributedDataParallel(*args, **_with_defaults(args, kwargs))
        model_made(model, TorchDDP)
        return model

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any) -> Any:
        if _defaults is None or TorchDDP not in bases or any(issubclass(b, DistributedDataParallel) for b in bases):
            return super().__new__(mcls, name, bases, namespace, **kwargs)
        ours = tuple(DerivedDDP if base is TorchDDP else base for base in bases)
        return _PlainMeta(name, ours, namespace, **kwargs)

    @property
    def __signature__(cls) -> inspect.Signature:
        """The signature of the class that a call creates: frameworks check whether it accepts an argument."""
        made: Any = DistributedDataParallel if cls is TorchDDP else cls
        parameters = list(inspect.signature(made.__init__).parameters.values())
        return inspect.Signature(parameters[1:])


def _switch(defaults: dict[str, Any] | None) -> ExitStack:
    global _defaults
    before = ExitStack()  # restores the state at the end of a ``with``; otherwise never
    with _lock:
        before.callback(_switch, _defaults)
        _defaults = defaults
        off, on = (_InstalledMeta, _PlainMeta) if defaults is None else (_PlainMeta, _InstalledMeta)
        for cls in (TorchDDP, *derived_early()):
            if type(cls) is off:  # otherwise it has its own metaclass
                cls.__class__ = on
    return before


def _with_defaults(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    by_place = OPTIONS[: max(0, len(args) - 1)]  # after the module
    return {**{name: value for name, value in (_defaults or {}).items() if name not in by_place}, **kwargs}


# --- warnings: once per job where it takes effect; in a driver, that workers are not affected ---


logger = logging.getLogger("torchddp")

_models = 0  # models of torchddp's class created through torch's class or a subclass
_warned = False  # about workers in other processes


def model_made(model: DistributedDataParallel, made_by: type) -> None:
    global _models
    _models += 1
    if not is_first_in_job("torch's class makes ours", model.process_group):
        return
    message = f"torchddp {_C.version} replaces torch.nn.parallel.DistributedDataParallel in this process"
    if made_by is not TorchDDP:
        message += f". The first model is a {_name(made_by)}, which is derived from it"
    if early := [_name(c) for c in derived_early()]:
        message += f". Classes derived from it before install() keep torch's reducer: {', '.join(early)}"
    logger.warning(message)


def torchs_model_made(model: TorchDDP) -> None:
    name = _name(type(model))
    if is_first_in_job(f"{name} keeps torch's", model.process_group):
        logger.warning(
            "%s was derived from torch's DistributedDataParallel before torchddp.install(), so its models keep "
            "torch's reducer: call install() before importing %s",
            name,
            type(model).__module__,
        )


def derived_early() -> list[type]:
    """Other packages' classes that derive from torch's, and not from ours."""
    found: list[type] = []
    todo = TorchDDP.__subclasses__()
    for cls in todo:
        if not issubclass(cls, DistributedDataParallel):
            todo.extend(cls.__subclasses__())
            if cls.__module__.partition(".")[0] not in ("torch", "torchddp"):
                found.append(cls)
    return found


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


# --- drivers: processes that train nothing themselves ---


def look_for_workers_elsewhere() -> None:
    """Warn if this process drives an engine now; at exit if it used one and no model is ours. Never in its workers."""
    if dist.is_initialized() or {"RANK", "WORLD_SIZE"} <= os.environ.keys() or _is_worker():
        return
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)
    if engine := _driven():
        _warn(engine)


def _at_exit() -> None:
    engines = {"ray": "Ray", "pyspark": "Spark"}
    loaded = [name for module, name in engines.items() if module in sys.modules]
    if loaded and not _models:
        _warn(loaded[0])


def _warn(engine: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        logger.warning(
            "torchddp.install() only affects this process, not %s's workers: call it in the function that %s runs "
            "on them, or set TORCHDDP_INSTALL=1 for them and import torchddp there",
            engine,
            engine,
        )


def _is_worker() -> bool:
    ray, spark = sys.modules.get("ray"), sys.modules.get("pyspark")
    return (_mode_of(ray) is not None and _mode_of(ray) == getattr(ray, "WORKER_MODE", None)) or (
        spark is not None and hasattr(spark, "TaskContext") and spark.TaskContext.get() is not None
    )


def _driven() -> str:
    """The engine that this process drives now, or ""."""
    if _mode_of(sys.modules.get("ray")) is not None:
        return "Ray"
    spark = sys.modules.get("pyspark")
    if getattr(getattr(spark, "SparkContext", None), "_active_spark_context", None) is not None:
        return "Spark"
    return ""


def _mode_of(ray: ModuleType | None) -> int | None:
    """Ray's number for this process's role; None if Ray is not initialized."""
    if ray is None or not hasattr(ray, "is_initialized") or not ray.is_initialized():
        return None
    mode: int | None = getattr(getattr(ray.get_runtime_context(), "worker", None), "mode", None)
    return mode
