"""Warns of gradients that some ranks changed, or that none averaged, when an optimizer steps: docs/checks.md."""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchddp import _torch
from torchddp.ddp.grad_precision import MAIN_GRAD
from torchddp.ddp.observers import StepObserver
from torchddp.ddp.session import ReducerSession
from torchddp.diagnose.rank_state import ranks_text
from torchddp.errors import UsageWarning, listed, warn_user
from torchddp.transport.agreement import ranks_by
from torchddp.transport.store import Board, try_board

logger = logging.getLogger("torchddp.distributed")

_EACH_UNTIL = 4  # the first steps to check; after them, powers of two
_PATIENCE = 4  # how many steps to wait for the first optimizer, each of which costs a hash of the gradients
_SHOWN_NAMES = 3
_WORDS = {"0": "unchanged", "1": "changed", "2": "set to None", "3": "replaced by another tensor"}


def next_look(step: int) -> int:
    return step + 1 if step < _EACH_UNTIL else int(1 << step.bit_length())


class ChangedGradients(StepObserver):
    """In a few steps, each rank posts, when an optimizer steps, which gradients have changed since backward left them.

    Rank 0 compares them at its next step, after a backward with all ranks, and warns once.
    """

    def __init__(self, session: ReducerSession) -> None:
        self._session = session
        self._has_warned = False
        compares = not (session.is_copy or session.has_owners)  # equally often on all ranks
        self._board = try_board(session.process_group, "gradients", self._cannot_compare) if compares else None
        self._begin = session.reducer.finished_steps  # earlier, ranks may have finished different numbers of steps
        self._ids = _ids_of(session)
        self._due = 1
        self._has_optimizer = False  # one of torch's has stepped
        self._local_after = -1  # the step after which a forward under no_sync() came: its gradients are the rank's own
        self._posted: tuple[int, str] | None = None  # on rank 0: the step and changes to compare the others' with

    # The compiler must not trace into this when a compiled program calls the model.
    @_torch.disable_dynamo(recursive=True)
    def after_forward(self, output: object) -> None:
        session = self._session
        if self._board is None or session.joins or self._has_warned:
            self.close()
            return
        finished = session.reducer.finished_steps - self._begin
        if not session.synchronizes:
            self._local_after = finished
        if not self._has_optimizer and finished - self._due > _PATIENCE:  # the program's may not be torch's
            self._due = next_look(finished)
        if finished + 1 >= self._due:  # under no_sync() too: reduce() has no forward of its own
            if not session.is_captured:
                session.reducer.note_gradients()
                _listening[id(self)] = self
        elif self._has_optimizer and self._posted is None:
            self.close()

    def close(self) -> None:
        _listening.pop(id(self), None)

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        try:
            if self._board is not None and any(id(parameter) in self._ids for parameter in _stepped_by(optimizer)):
                self._look(self._board)
        except RuntimeError as error:
            self._cannot_compare(error)
            self._posted = None

    def _cannot_compare(self, error: RuntimeError) -> None:
        logger.debug("rank %d can't compare its gradients with the other ranks': %s", self._session.rank, error)

    def _look(self, board: Board) -> None:
        self._has_optimizer = True
        step = self._session.reducer.finished_steps - self._begin
        if self._posted is not None and step > self._posted[0]:
            posted, self._posted = self._posted, None
            self._compare(board, *posted)
        # An optimizer that calls a closure, as Lightning's do, steps after the next microbatches' backwards.
        if step != self._local_after and (found := self._session.reducer.changed_gradients()):
            changes = "".join(map(str, found))
            board.post_own(_key(step), [step, changes])
            board.add(_sum_key(step, changes), 1)
            if self._session.rank == 0:
                self._posted = (step, changes)
            self._due = next_look(step)

    def _compare(self, board: Board, step: int, changes: str) -> None:
        differ = board.add(_sum_key(step, changes), 0) < board.size
        answers = board.read_of_ranks(_key(step)) if differ else []
        board.forget(_sum_key(step, changes))
        by_rank = [of_rank[1] if of_rank and of_rank[0] == step else None for of_rank in answers]
        if text := describe(by_rank, [spec.name for spec in self._session.specs]):
            self._has_warned = True  # before the warning, which a filter may turn into an error
            warn_user(f"{text} (synchronized step {step}). {_ADVICE}", UsageWarning)


class UnaveragedGradients(StepObserver):
    """Rank 0 warns once of an optimizer whose first step has no averaged gradients, or not those of all parameters."""

    def __init__(self, session: ReducerSession) -> None:
        self._reducer, self._session = session.reducer, session
        self._ids = _ids_of(session)
        with_spec = zip(session.parameters, session.specs, strict=True)
        self._of_others = {id(p) for p, spec in with_spec if session.has_owners and spec.owner != session.rank}
        precision = session.options.precision
        self._has_main_grads = precision.main_grads is not None and precision.main_grads_as == MAIN_GRAD
        self._steps_left = 2 if self._of_others or self._has_main_grads else 0
        self._unaveraged = 0  # optimizer's steps, each after a forward of its own
        self._is_over = session.rank != 0 or session.process_group.size() == 1

    @_torch.disable_dynamo(recursive=True)
    def after_forward(self, output: object) -> None:
        if self._is_over:
            return
        if not self._session.synchronizes:
            _listening.pop(id(self), None)
            return
        self._steps_left -= 1
        if self._steps_left >= 0 or self._reducer.records_graph():
            _listening[id(self)] = self
        else:
            self.close()

    def close(self) -> None:
        self._is_over = True
        _listening.pop(id(self), None)

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        stepped = [p for p in _stepped_by(optimizer) if id(p) in self._ids]
        if stepped and _torch.graph_task() is None and (problem := self._problem_of(optimizer, stepped, has_closure)):
            self.close()  # before the warning, which a filter may turn into an error
            warn_user(problem, UsageWarning)

    def _problem_of(self, optimizer: torch.optim.Optimizer, stepped: Sequence[torch.Tensor], has_closure: bool) -> str:
        kind = type(optimizer)
        # The recording ends with the first backward from the outputs of forward: never, if the loss has another origin.
        if self._reducer.records_graph() and any(p.grad is not None for p in stepped):
            self._unaveraged += 1
            _listening.pop(id(self), None)  # until the next forward
            return _NOT_AVERAGED if self._unaveraged == 2 else ""  # the first may follow a forward without a backward
        if not kind.__module__.startswith("torch.optim"):
            return ""  # it may step the right one, or know of main gradients
        if any(id(p) in self._of_others for p in stepped):
            return f"{kind.__name__} {_NOT_SHARDED}"
        if not self._has_main_grads or has_closure or optimizer._optimizer_step_pre_hooks:
            return ""  # or .grad may be there when it steps
        without = [p for p in stepped if p.grad is None and getattr(p, MAIN_GRAD, None) is not None]
        return f"{kind.__name__} {_IN_MAIN_GRAD}" if without else ""


_NOT_AVERAGED = (
    "An optimizer steps with gradients that were not averaged. With static_graph=True, the loss must be computed from "
    "tensors that forward returns, alone or in tuples, lists and dictionaries. If it comes from a tensor in a "
    "dataclass or another object, or from one kept in an attribute, gradients are never averaged."
)
_NOT_SHARDED = (
    "steps parameters of a ShardedDataParallel, but each gradient is on its owner's rank alone, so the ranks' weights "
    "drift apart. Call step() of the OSS that the model was created with."
)
_IN_MAIN_GRAD = (
    "steps parameters whose .grad is None, so it leaves them unchanged: Precision(main_grads=) keeps their gradients "
    "in parameter.main_grad. Give the optimizer fp32 copies of the parameters, with main_grad as their .grad, or pass "
    'main_grads_as="grad".'
)
_ADVICE = (
    "It happened between the end of backward and the optimizer's step; from then on the ranks' weights drift apart, "
    "without an error. Do the same on all ranks: averaged gradients are equal everywhere, and stay equal if all ranks "
    "clip or scale them the same way. Whatever should differ between ranks belongs in the loss, before the average. "
    "checks=Checks(parameters_every=N) finds weights that differ."
)


def describe(changes: Sequence[str | None], names: Sequence[str]) -> str:
    """Describe which ranks changed which gradients; "" if all ranks did the same.

    ``changes``: by rank, one digit per parameter (the reducer's `changed_gradients()`); None: unknown.
    """
    known = {rank: own for rank, own in enumerate(changes) if own is not None}
    differ = [index for index in range(len(names)) if len({own[index] for own in known.values()}) > 1]
    if not differ:
        return ""
    ranks = list(known)
    kinds = ranks_by(known[rank][differ[0]] for rank in ranks)
    by_kind = "; ".join(
        f"{_WORDS[kind]} on {ranks_text([ranks[at] for at in places])}"
        for kind, places in sorted(kinds.items(), reverse=True)
    )
    others = [f"'{names[index]}'" for index in differ[1:]]
    also = f"; ranks also differ on {listed(others, _SHOWN_NAMES - 1)}" if others else ""
    return f"Ranks treat averaged gradients differently: '{names[differ[0]]}' was {by_kind}{also}"


def _key(step: int) -> str:
    return f"gradients{step % 2}"  # ranks are at most a step apart


def _sum_key(step: int, changes: str) -> str:
    return f"gradients/{step}/{hashlib.sha256(changes.encode()).hexdigest()[:16]}"


def _ids_of(session: ReducerSession) -> set[int]:
    return {id(parameter) for parameter in (*session.parameters, *(p for _, p in session.named_parameters()))}


def _stepped_by(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


_listening: weakref.WeakValueDictionary[int, ChangedGradients | UnaveragedGradients] = weakref.WeakValueDictionary()


@_torch.disable_dynamo(recursive=True)
def _before_optimizer_step(
    optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    has_closure = any(given is not None for given in (*args[1:], kwargs.get("closure")))
    for reference in _listening.valuerefs():
        if (check := reference()) is not None:
            check.before_optimizer_step(optimizer, has_closure)


# Once, forever: torch's optimizers raise if a hook comes or goes while one of them, on another thread, calls them.
register_optimizer_step_pre_hook(_before_optimizer_step)
