"""The TORCHDDP_* variables of the environment, and what is wrong with those that are set."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass

PREFIX = "TORCHDDP_"
CPU_CAPABILITIES = ("generic", "avx2", "avx512")


@dataclass(frozen=True)
class Variable:
    """One that is set. `problem`: why its value is not allowed; `note`: what is odd, but no error."""

    name: str
    value: str
    problem: str = ""
    note: str = ""


def set_variables() -> list[Variable]:
    """Those set in this process's environment, by name."""
    return [_judge(name, os.environ[name]) for name in sorted(os.environ) if name.startswith(PREFIX)]


def _judge(name: str, value: str) -> Variable:
    if name not in KNOWN:
        return Variable(name, value, note="no variable of this version")
    if not value or name in READ_BY_THE_BUILD:
        return Variable(name, value)
    try:
        _CHECKS[name](value)
    except ValueError as error:
        return Variable(name, value, problem=str(error))
    except ImportError:
        return Variable(name, value, note="can't be checked: torchddp does not load")
    return Variable(name, value)


def _check_transport(_value: str) -> None:
    from torchddp.transport import select

    select.check_choice("auto")  # reads the variable


def _check_limit(_value: str) -> None:
    from torchddp.transport import shm

    shm.limit_bytes()


def _check_capability(value: str) -> None:
    if value not in CPU_CAPABILITIES:
        raise ValueError(f"TORCHDDP_CPU_CAPABILITY must be 'generic', 'avx2' or 'avx512', got {value!r}")


def _check_install(value: str) -> None:
    from torchddp.integrations.install import check_variable

    check_variable(value)


def _check_stall_limit(_value: str) -> None:
    from torchddp.diagnose import stall_limit

    stall_limit.choose(None, math.inf)  # reads the variable


def _check_nothing(_value: str) -> None:
    pass


_CHECKS: dict[str, Callable[[str], None]] = {
    "TORCHDDP_CACHE_DIR": _check_nothing,  # any path
    "TORCHDDP_CPU_CAPABILITY": _check_capability,
    "TORCHDDP_HANG_REPORT_DIR": _check_nothing,  # any path
    "TORCHDDP_HOST_ID": _check_nothing,  # any text
    "TORCHDDP_INSTALL": _check_install,
    "TORCHDDP_SHM_LIMIT_MB": _check_limit,
    "TORCHDDP_STALL_REPORT_S": _check_stall_limit,
    "TORCHDDP_TRANSPORT": _check_transport,
}
READ_BY_THE_BUILD = frozenset({"TORCHDDP_CUDA", "TORCHDDP_WERROR"})
KNOWN = _CHECKS.keys() | READ_BY_THE_BUILD
