"""Warnings from torchddp.install(): once per job where it takes effect; in a driver, that workers are not affected."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from types import ModuleType

import torch.distributed as dist
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from torchddp import _C
from torchddp.ddp.module import DistributedDataParallel
from torchddp.transport.store import is_first_in_job

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
