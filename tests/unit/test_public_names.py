"""The package as seen by type checkers and interactive shells: public names and literal choices."""

import importlib
import sys
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

import torchddp
from torchddp import comm_hooks
from torchddp.ddp import grad_precision, options
from torchddp.ddp.hooks import HookChoice
from torchddp.ddp.options import DDPSyncStrategy
from torchddp.transport import select

MODULES = """averaging comm_hooks composable distributed fault_tolerance integrations optim parallel profiler
    sync""".split()
BUILT_IN_TRANSPORTS, _ = get_args(options.TransportChoice)  # the other type is for registered names


def test_dir_lists_exactly_the_public_names() -> None:
    names = """Checks DDP DesyncError DistributedDataParallel InternalError ParallelConfig
        PeerFailedError Precision ShardedDataParallel StopTogether TransportError UsageWarning __version__
        check_parameters fail_together finish_first finished_steps install installed parallel_group_info
        parallelize replicate survivors uninstall""".split()
    assert sorted(torchddp.__all__) == names
    for name in ("errors", "ddp", *MODULES):  # modules can be imported, but dir() lists only public ones
        assert importlib.import_module(f"torchddp.{name}") is getattr(torchddp, name)
    assert dir(torchddp) == sorted([*names, *MODULES])
    assert all(hasattr(torchddp, name) for name in names)


@pytest.mark.parametrize(
    ("code", "argument"),
    [
        (torchddp.DDP.weigh, "loss"),
        (torchddp.ParallelConfig, "kind"),
        (torchddp.ParallelConfig, "sharding_strategy"),
        (torchddp.ParallelConfig, "param_dtype"),
        (torchddp.averaging.DiLoCo.__init__, "wire"),
        (torchddp.comm_hooks.CommHook.__init__, "hierarchical"),
        (torchddp.comm_hooks.Cast.__init__, "format"),
        (torchddp.sync.accumulate, "strategy"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__qualname__,
)
def test_the_type_of_an_argument_with_fixed_choices_lists_them(code: object, argument: str) -> None:
    kind = code.__annotations__[argument]
    kind = eval(kind, vars(sys.modules[code.__module__])) if isinstance(kind, str) else kind
    parts = get_args(kind) if get_origin(kind) is not Literal else (kind,)
    assert str not in parts and any(get_origin(part) is Literal for part in parts)


def test_literal_choices_cover_all_transports_strategies_and_precisions() -> None:
    assert set(get_args(BUILT_IN_TRANSPORTS)) == {"auto", select.C10D, *select._kinds}
    assert set(get_args(options.SyncChoice)) == {strategy.value for strategy in DDPSyncStrategy}
    main_grads_as = get_type_hints(torchddp.Precision)["main_grads_as"]
    assert set(get_args(main_grads_as)) == set(grad_precision._STORED)


def test_an_editor_knows_the_names_of_all_communication_hooks() -> None:
    names, *_ = get_args(HookChoice)
    assert get_args(names) == tuple(comm_hooks.NAMES)
