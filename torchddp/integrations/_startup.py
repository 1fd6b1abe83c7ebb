"""What happens when Python starts: programs that never import torchddp get it by a variable, or by a strategy's name.

- TORCHDDP_INSTALL=1: the first use of torch's DistributedDataParallel imports torchddp, which installs it. A process
  that never wraps a model (torchrun's agent, workers of a data loader) does not import torchddp at all.
- The strategies of `torchddp.integrations.lightning` are known to Lightning by name. It has entry points for callbacks
  only; so its registries get the names when it has been imported, and the first use of one imports torchddp.

Installed beside the package too, as the top-level module `_torchddp_startup`, which a `.pth` file of site-packages
imports (`setup.py` writes both). So it must cost nothing: no torch, no torchddp, nearly no module that Python has not
loaded by then.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

ENV = "TORCHDDP_INSTALL"
OFF = ("", "0")
TORCH_MODULE = "torch.nn.parallel.distributed"
# As Lightning's own "ddp", "ddp_spawn" and so on.
_START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}


class _AfterImport:
    """A finder that finds nothing by itself: it has something called once a module has been executed."""

    def __init__(self) -> None:
        self.calls: dict[str, Callable[[], None]] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.calls:
            return None
        others = (getattr(finder, "find_spec", None) for finder in sys.meta_path if finder is not self)
        spec = next((spec for find in others if find and (spec := find(name, path, target))), None)
        # Nothing is forgotten yet: many programs look for a module's spec before they import it.
        loader = getattr(spec, "loader", None)
        if hasattr(loader, "exec_module"):
            self._wrap(name, loader)
        return spec

    def _wrap(self, name: str, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            vars(loader).pop("exec_module", None)  # this one: the class has its own
            execute(module)
            then = self.calls.pop(name, None)
            if not self.calls and self in sys.meta_path:
                sys.meta_path.remove(self)
            if then is not None:
                then()

        loader.exec_module = exec_module


# --- the variable ---


def arm() -> None:
    """From now on the first use of torch's class (a call, a class derived from it) imports torchddp.

    That has to be as late: torchddp needs all of torch, and costs time. A metaclass sees such a use, whatever name the
    class was reached by.
    """
    module = sys.modules.get(TORCH_MODULE)
    if module is None or "torchddp" in sys.modules:  # whose own import installs
        return
    torch_class = module.DistributedDataParallel
    plain: Any = type(torch_class)

    def install() -> None:
        torch_class.__class__ = plain
        try:
            import torchddp  # noqa: F401  installs, for the variable is set
        except BaseException:
            torch_class.__class__ = armed  # the next use must not silently get torch's
            raise

    class Armed(plain):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if cls is torch_class and type(cls) is Armed:
                install()
                return cls(*args, **kwargs)
            return super().__call__(*args, **kwargs)

        def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any) -> Any:
            if str(namespace.get("__module__")).partition(".")[0] == "torchddp":  # its import will end with installing
                torch_class.__class__ = plain
            elif type(torch_class) is Armed:
                install()
            return type(torch_class)(name, bases, namespace, **kwargs)

    armed = Armed
    torch_class.__class__ = armed


# --- Lightning ---


def add_strategies(registry: Any, made_by: dict[str, Callable[..., Any]]) -> None:
    """Puts the names of our strategies into one of Lightning's registries, in place of what has them.

    Args:
        made_by: what makes a strategy, by its kind: "ddp", "sharded". Kinds that are not there get no names.
    """
    for kind, name, arguments in _strategies():
        if kind in made_by:
            options = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
            text = f"torchddp, {kind}: {options}"
            registry.register(name, made_by[kind], description=text, override=True, **arguments)


def _strategies() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The kind, the name and the arguments of each."""
    for suffix, start_method in _START_METHODS.items():
        name = f"torchddp{suffix}"
        yield "ddp", name, {"start_method": start_method}
        for unused in (False, True):
            arguments = {"start_method": start_method, "find_unused_parameters": unused}
            yield "ddp", f"{name}_find_unused_parameters_{str(unused).lower()}", arguments
        if suffix != "_notebook":
            yield "sharded", f"torchddp_sharded{suffix}", {"start_method": start_method}


def offer_strategies() -> None:
    """Has Lightning, which was imported, know the names; the strategies themselves are imported where one is used."""
    if "lightning.pytorch" not in sys.modules:  # a package of that name that is not Lightning
        return
    try:
        from lightning.fabric.strategies import STRATEGY_REGISTRY
        from lightning.pytorch.strategies import StrategyRegistry

        trainers = {"ddp": _later("TorchDDPStrategy"), "sharded": _later("TorchDDPShardedStrategy")}
        add_strategies(StrategyRegistry, trainers)
        add_strategies(STRATEGY_REGISTRY, {"ddp": _later("TorchDDPFabricStrategy")})
    except Exception as error:  # of a version that we don't know: it must still be imported
        import logging

        logging.getLogger("torchddp").warning(
            "torchddp's strategies are not known to Lightning by name (%s: %s). "
            "`import torchddp.integrations.lightning` may say more.",
            type(error).__name__,
            error,
        )


def _later(name: str) -> Callable[..., Any]:
    def make(**arguments: Any) -> Any:
        import torchddp.integrations.lightning as strategies  # registers the classes in place of this

        return getattr(strategies, name)(**arguments)

    return make


def start() -> None:
    """Called when Python starts, by the `.pth` file."""
    if any(type(finder) is _AfterImport for finder in sys.meta_path):
        return
    after = _AfterImport()
    if os.environ.get(ENV, "") not in OFF:
        if TORCH_MODULE in sys.modules:
            arm()
        else:
            after.calls["torch"] = arm
    if "lightning" not in sys.modules:
        after.calls["lightning"] = offer_strategies
    if after.calls:
        sys.meta_path.insert(0, after)
