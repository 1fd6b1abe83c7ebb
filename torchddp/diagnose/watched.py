"""Which torch.distributed functions are watched, and how calls are intercepted.

Note [How a function is watched]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Function objects stay in place, because a program may already hold them: ``from torch.distributed import all_reduce``
and a stored ``dist.barrier`` are watched too, `P2POp` and Dynamo still recognize functions by identity, and they are
still pickled by name. There are two ways in:

* Almost all are decorated by torch (``_exception_logger``): the closure cell that holds the bare function is set to
  ours.
* The others get the code object of a function with the same parameters, which calls ours.

Ours are generated from one template with the parameters of the bare function, because going through ``*args,
**kwargs`` would cost more than the recording. They pass the call to compiled code (csrc/bindings/bind_calls.cpp), which
records and makes it in about a microsecond.

Dynamo must not trace into them, because what they write changes with every call. It compiles no frame of a file in
torch's folder, and the template's file name claims to be there. Where it would inline a call, it breaks the graph,
because our functions are marked as by its ``disable``; the call into C++ is a graph break too.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from torchddp import _C
from torchddp.diagnose import calls, rank_state

Function = Callable[..., Any]


@dataclass(frozen=True)
class _Kind:
    """What to record for a kind of call besides function and caller: expressions over its parameters.

    Attributes:
        names: of the functions.
        is_counted: whether all ranks of the group make this call, in the same order.
        tensor: the parameter with a tensor that all ranks have; empty: none.
        detail: the sender or receiver, as `Call.detail`.
        group: the process group; empty: the parameter of that name, if there is one. None is the default group.
    """

    names: tuple[str, ...]
    is_counted: str = "True"
    tensor: str = ""
    detail: str = "None"
    group: str = ""


_FROM, _TO = "('from', src, group_src)", "('to', dst, group_dst)"
_KINDS = (
    _Kind(("all_reduce", "all_gather"), tensor="tensor"),
    _Kind(("broadcast", "scatter"), tensor="tensor", detail=_FROM),
    _Kind(("reduce", "gather"), tensor="tensor", detail=_TO),
    _Kind(("all_gather_single", "all_gather_into_tensor", "_all_gather_base"), tensor="input_tensor"),
    _Kind(
        ("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "_reduce_scatter_base"), tensor="output"
    ),
    _Kind(("all_to_all_single",), tensor="output"),
    _Kind(
        (
            "all_to_all",
            "all_gather_coalesced",
            "all_reduce_coalesced",
            "all_gather_object",
            "barrier",
            "monitored_barrier",
            "split_group",
        )
    ),  # fmt: skip
    _Kind(("broadcast_object_list", "scatter_object_list"), detail=_FROM),
    _Kind(("gather_object",), detail=_TO),
    # With use_local_synchronization, only the members call it.
    _Kind(("new_group",), is_counted="not use_local_synchronization"),
    _Kind(("send", "isend"), "False", tensor="tensor", detail=_TO),
    _Kind(("recv", "irecv"), "False", tensor="tensor", detail=_FROM),
    _Kind(("send_object_list",), "False", detail=_TO),
    _Kind(("recv_object_list",), "False", detail=_FROM),
    _Kind(("batch_isend_irecv",), "False", detail="peers_of(p2p_op_list)", group="group_of(p2p_op_list)"),
)

_FILE = os.path.join(os.path.dirname(dist.__file__), "<torchddp watches {name}>")
_TEMPLATE = """
def {name}({parameters}):
    try:
        return noted(bare, '{name}', {is_counted}, {group}, {tensor}, {detail}, {arguments})
    except Exception as error:
        note_exception(error, '{name}')
        raise
"""

_WAIT_TEMPLATE = """
def wait(self, timeout=...):
    me = get_ident()
    if me in active:  # the wait is part of a call that is recorded already
        return bare(self) if timeout is ... else bare(self, timeout)
    active[me] = (0, 'wait', None, None, ref(self), *caller(), me, None)
    try:
        return bare(self) if timeout is ... else bare(self, timeout)
    finally:
        del active[me]
"""


def _peers_of(operations: object) -> list[tuple[str, int, None]]:
    """The peers of a batch; none for one that torch will reject."""
    try:
        return [("to" if op.op is dist.isend else "from", op.peer, None) for op in operations]  # type: ignore[attr-defined]
    except Exception:
        return []


def _group_of(operations: object) -> dist.ProcessGroup | None:
    """The group of a batch; None for one that torch will reject."""
    try:
        found: dist.ProcessGroup | None = operations[0].group  # type: ignore[index]
        return found
    except Exception:
        return None


def _keep_started(result: object, call: tuple[Any, ...]) -> None:
    """Remember the operations that a batch has started; other functions return other things."""
    if isinstance(result, list):
        calls.started.extend((weakref.ref(work), call) for work in result if isinstance(work, dist.Work))


_NAMES = {
    "active": calls.active,
    "caller": calls.caller,
    "get_ident": threading.get_ident,
    "group_of": _group_of,
    "note_exception": rank_state.note_exception,
    "noted": _C.call_noter(
        (
            calls.active,
            calls.logs,
            calls.started,
            rank_state.training,
            calls.outer_files,
            sys._getframe,
            calls.open_log,
            calls.outer_frame,
            _keep_started,
            dist.Work,
        )
    ),
    "peers_of": _peers_of,
    "ref": weakref.ref,
    "world": c10d._world,
}


def watch_all() -> ExitStack:
    """Record calls of the functions above in `calls` until the stack is closed."""
    stack = ExitStack()
    for kind in _KINDS:
        for name in kind.names:
            function = getattr(c10d, name, None)
            if function is not None:  # missing in some torch versions
                _watch(function, kind, stack)
    stack.callback(setattr, dist.Work, "wait", dist.Work.wait)
    dist.Work.wait = _watched_wait(dist.Work.wait)  # type: ignore[method-assign]
    return stack


def after_each_call(function: Function, then: Callable[[], None]) -> ExitStack:
    """Call ``then()`` after each call of a function that torch has decorated, until the stack is closed."""
    cell = _innermost_cell(function)
    assert cell is not None, function
    bare = cell.cell_contents

    def called(*args: Any, **kwargs: Any) -> Any:
        result = bare(*args, **kwargs)
        then()
        return result

    stack = ExitStack()
    stack.callback(_fill, cell, bare)
    _fill(cell, called)
    return stack


def _watch(function: types.FunctionType, kind: _Kind, stack: ExitStack) -> None:
    cell = _innermost_cell(function)
    if cell is not None:
        bare = cell.cell_contents
        stack.callback(_fill, cell, bare)
        _fill(cell, _watched(bare, kind))
        return
    code, hidden = function.__code__, f"_torchddp_watched_{function.__name__}"
    bare = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    bare.__kwdefaults__ = function.__kwdefaults__
    parameters, arguments = _parameters_of(function)
    names: dict[str, Any] = {}
    exec(f"def {function.__name__}({parameters}): return {hidden}({arguments})", names)
    function.__globals__[hidden] = _watched(bare, kind)
    stack.callback(function.__globals__.pop, hidden)
    stack.callback(setattr, function, "__code__", code)
    function.__code__ = names[function.__name__].__code__.replace(
        co_filename=code.co_filename, co_firstlineno=code.co_firstlineno
    )


def _innermost_cell(function: Any) -> types.CellType | None:
    """The cell in which the innermost decorator holds the bare function; None without decorators."""
    cell = None
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        found = [cell for cell in function.__closure__ or () if cell.cell_contents is inner]
        if not found:
            break
        cell, function = found[0], inner
    return cell


def _fill(cell: types.CellType, function: Function) -> None:
    cell.cell_contents = function


def _parameters_of(function: types.FunctionType) -> tuple[str, str]:
    """'a, b, *, c' and 'a, b, c=c'."""
    parameters = inspect.signature(function).parameters.values()
    assert all(p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters), function
    by_place = [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
    by_name = [p.name for p in parameters if p.kind == p.KEYWORD_ONLY]
    return (
        ", ".join([*by_place, *(["*", *by_name] if by_name else [])]),
        ", ".join([*by_place, *(f"{name}={name}" for name in by_name)]),
    )


def _watched(bare: types.FunctionType, kind: _Kind) -> Function:
    """The function that records a call and makes it."""
    parameters, arguments = _parameters_of(bare)
    own = inspect.signature(bare).parameters
    name = bare.__name__
    default = "world._default_pg"  # default_pg is a property, which costs ten times as much
    given = kind.group or next((parameter for parameter in ("group", "parent_pg") if parameter in own), "None")
    group = f"({default} if {given} is None else {given})"
    code = _TEMPLATE.format(
        name=name,
        parameters=parameters,
        arguments=arguments,
        group=group,
        is_counted=kind.is_counted,
        tensor=kind.tensor or "None",
        detail=kind.detail,
    )
    made: Any = _make(code, name, bare)
    made.__defaults__, made.__kwdefaults__ = bare.__defaults__, bare.__kwdefaults__
    found: Function = made
    return found


def _watched_wait(bare: Function) -> Function:
    return _make(_WAIT_TEMPLATE, "wait", bare)


def _make(code: str, name: str, bare: Any) -> Function:
    names = {**_NAMES, "bare": bare}
    exec(compile(code, _FILE.format(name=name), "exec"), names)
    made = names[name]
    made.__doc__ = bare.__doc__
    made._torchdynamo_disable = True
    found: Function = made
    return found
