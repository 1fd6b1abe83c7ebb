"""Parameter groups, as in torch's optimizers, and the optimizers of this rank's: one for each class that they name."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch.optim import LBFGS, Muon, Optimizer
from torch.optim.optimizer import ParamsT

from torchddp.errors import nearest_name
from torchddp.transport.agreement import in_words

Group = Mapping[str, Any]

# Keys of a parameter group that OSS and the optimizers each keep for themselves; the rest are shared.
OWN_KEYS = ("params", "param_names", "optim")


def options_of(group: Group) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in OWN_KEYS}


def groups_of(params: ParamsT) -> list[dict[str, Any]]:
    """The groups that torch's constructor makes of its first argument. TypeError if that is a tensor or a module."""
    for kind, hint in ((torch.Tensor, ""), (torch.nn.Module, ": pass its parameters()")):
        if isinstance(params, kind):
            raise TypeError(f"params must be an iterable of Tensors or dicts, got {torch.typename(params)}{hint}")
    given: list[Any] = list(params)
    if given and not isinstance(given[0], dict):
        return [{"params": given}]
    if any(not isinstance(group, dict) for group in given):
        raise TypeError("params holds groups and other things: all must be dicts")
    return given  # not copies: as in torch, the program's dicts become the groups


def options_in_words(groups: Iterable[Group]) -> dict[str, str]:
    return {
        f"{key} of group {number}": in_words(value)
        for number, group in enumerate(groups)
        for key, value in options_of(group).items()
    }


def copy_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    for theirs, ours in zip(source, target, strict=True):
        ours.update(options_of(theirs))


# Arguments of torch.distributed.optim.ZeroRedundancyOptimizer, and what takes their place here.
_OF_ZERO_REDUNDANCY = {
    "optimizer_class": "give optim=",
    "process_group": "give group=",
    "parameters_as_bucket_view": "leave it out",
    "overlap_with_ddp": "wrap the model in ShardedDataParallel",
}
Factory = Callable[..., Optimizer]  # an optimizer's class, or a function that makes one of a list of groups
State = defaultdict[torch.Tensor, Any]


def is_stack(kind: type[Optimizer], param: torch.Tensor) -> bool:
    """Whether this is a stack of matrices (experts, fused projections) for an optimizer that takes only matrices."""
    return kind is Muon and param.dim() == 3


class GroupOptimizers:
    """Optimizers of several classes that step one list of groups, and share one dictionary of state.

    ``default`` makes the optimizer of all groups that don't name another in ``"optim"``.
    """

    def __init__(self, default: Factory) -> None:
        self._default = default
        self._optimizers: dict[Factory, Optimizer] = {}
        self._kinds: dict[Factory, type[Optimizer]] = {}  # what each has made
        self._places: list[tuple[Optimizer, int]] = []  # of each group: its optimizer, and its number there
        self.state: State = defaultdict(dict)

    @property
    def single(self) -> Optimizer | None:
        """The optimizer of all groups, if they have the same."""
        return next(iter(self._optimizers.values())) if len(self._optimizers) == 1 else None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [optimizer.param_groups[number] for optimizer, number in self._places]

    @property
    def kinds(self) -> list[type[Optimizer]]:
        """Each group's class."""
        return [type(optimizer) for optimizer, _ in self._places]

    @property
    def are_torchs(self) -> bool:
        return all(kind.__module__.startswith("torch.optim") for kind in self.kinds)

    def kind(self, group: Group) -> type[Optimizer]:
        """The class of a group that is `complete`."""
        return self._kinds[self.factory(group)]

    @property
    def default_kind(self) -> type[Optimizer] | None:
        """None if no group takes the default."""
        return self._kinds.get(self._default)

    @property
    def has_step_hooks(self) -> bool:
        return any(o._optimizer_step_pre_hooks or o._optimizer_step_post_hooks for o in self._optimizers.values())

    def factory(self, group: Group) -> Factory:
        found: Factory = group.get("optim", self._default)
        return found

    def complete(self, group: dict[str, Any], names: Sequence[str]) -> Optimizer:
        """Add the options that the group's class sets, and return an optimizer of that class.

        ``names``: of the parameters. ValueError, with a parameter's name, if the class refuses its shape.
        """
        factory = self.factory(group)
        made = _make(factory, [{**options_of(group), "params": []}])
        self._kinds[factory] = type(made)
        shown: set[tuple[torch.Size, torch.dtype]] = set()
        for param, name in zip(group["params"], names, strict=False):
            if (param.shape, param.dtype) in shown:
                continue
            shown.add((param.shape, param.dtype))
            example = param[0].detach() if is_stack(type(made), param) else param
            try:
                _make(factory, [{**options_of(group), "params": [example]}])
            except (TypeError, ValueError, RuntimeError) as error:
                raise ValueError(
                    f"{type(made).__name__} refuses {name}, of shape {list(param.shape)}: {error}"
                ) from error
        group |= {key: value for key, value in options_of(made.param_groups[0]).items() if key not in group}
        return made

    def add(self, group: Group) -> None:
        """Add a group without parameters."""
        factory, empty = self.factory(group), {**options_of(group), "params": []}
        optimizer = self._optimizers.get(factory)
        if optimizer is None:
            optimizer = self._optimizers[factory] = _make(factory, [empty])
            optimizer.state = self.state
        else:
            optimizer.add_param_group(empty)
        self._places.append((optimizer, len(optimizer.param_groups) - 1))

    def initial_state(self, groups: Iterable[Group], among: set[torch.Tensor]) -> dict[torch.Tensor, Any]:
        """The state that the classes give to these parameters before any step."""
        by_factory: dict[Factory, list[dict[str, Any]]] = {}
        for group in groups:
            kind = self.kind(group)
            if params := [param for param in group["params"] if param in among and not is_stack(kind, param)]:
                by_factory.setdefault(self.factory(group), []).append({**options_of(group), "params": params})
        return dict(chain.from_iterable(_make(factory, own).state.items() for factory, own in by_factory.items()))

    def step(self) -> None:
        with self._matrices():
            for optimizer in self._optimizers.values():
                optimizer.step()

    def switch(self, mode: str) -> None:
        """Call ``train`` or ``eval`` of those that have it."""
        for optimizer in self._optimizers.values():
            if self.switches(mode, optimizer):
                getattr(optimizer, mode)()

    def switches(self, mode: str, *among: Optimizer) -> bool:
        return any(callable(getattr(optimizer, mode, None)) for optimizer in among or self._optimizers.values())

    def load_state_dict(self, state: Mapping[Any, Any], groups: Sequence[dict[str, Any]]) -> None:
        """``state``: by parameter index, or by a key of the optimizer's own. ``groups``: with the indices."""
        loaded: State = defaultdict(dict)
        for optimizer in self._optimizers.values():
            own = [group for group, (other, _) in zip(groups, self._places, strict=True) if other is optimizer]
            others = {i for group in groups for i in group["params"]} - {i for group in own for i in group["params"]}
            kept = {key: value for key, value in state.items() if key not in others}
            optimizer.load_state_dict({"state": kept, "param_groups": own})
            loaded.update(optimizer.state)
        self.state = loaded
        for optimizer in self._optimizers.values():
            optimizer.state = loaded

    @contextmanager
    def holding(self, params: Sequence[Sequence[torch.Tensor]]) -> Iterator[None]:
        """A context in which the groups hold these parameters."""
        groups = self.param_groups
        whole = [group["params"] for group in groups]
        try:
            for group, own in zip(groups, params, strict=True):
                group["params"] = list(own)
            yield
        finally:
            for group, before in zip(groups, whole, strict=True):
                group["params"] = before

    @contextmanager
    def _matrices(self) -> Iterator[None]:
        """A context in which the matrices of stacks take the place of these, with views of gradients and state."""
        stacks: dict[torch.Tensor, list[torch.Tensor]] = {}
        held: list[list[torch.Tensor]] = []
        for group, kind in zip(self.param_groups, self.kinds, strict=True):
            own = {param: list(param.detach().unbind()) for param in group["params"] if is_stack(kind, param)}
            held.append([matrix for param in group["params"] for matrix in own.get(param, [param])])
            stacks |= own
        if not stacks:
            yield
            return
        for param, matrices in stacks.items():
            for index, matrix in enumerate(matrices):
                matrix.grad = None if param.grad is None else param.grad[index]
                if param in self.state:
                    self.state[matrix] = {key: value[index] for key, value in self.state[param].items()}
        try:
            with self.holding(held):
                yield
        finally:
            for param, matrices in stacks.items():
                states = [self.state.pop(matrix) for matrix in matrices if matrix in self.state]
                if param not in self.state and len(states) == len(matrices):
                    self.state[param] = {key: torch.stack([state[key] for state in states]) for key in states[0]}


def check_factory(optim: object, where: str) -> None:
    """TypeError unless this is a class of optimizers that treat parameters independently, or may make one."""
    if isinstance(optim, type) and issubclass(optim, Optimizer):
        if hasattr(optim, "consolidate_state_dict"):
            raise TypeError(f"{where} must be the class of the optimizer to shard, not {optim.__name__} itself")
        if issubclass(optim, LBFGS):
            raise TypeError("LBFGS uses all parameters together, so its state can't be sharded")
    elif isinstance(optim, type) or not callable(optim):
        made = isinstance(optim, Optimizer)
        got = f"an object of class {type(optim).__name__}: pass the class itself" if made else f"{optim!r:.80}"
        raise TypeError(
            f"{where} must be a subclass of torch.optim.Optimizer, or a function that makes one; got {got}. For "
            "example: torch.optim.AdamW"
        )


def check_defaults(optim: Factory, defaults: Mapping[str, object]) -> None:
    """TypeError for an argument that the optimizer doesn't take."""
    try:
        taken = inspect.signature(optim)
    except ValueError:
        return  # none is known: the call will tell
    for name in defaults:
        try:
            taken.bind_partial(**{name: None})
        except TypeError:
            if advice := _OF_ZERO_REDUNDANCY.get(name):
                text = f"OSS has no argument {name}, which is ZeroRedundancyOptimizer's: {advice}"
                raise TypeError(text) from None
            near = nearest_name(name, ["optim", *taken.parameters])
            meant = f"; did you mean '{near}'?" if near else ""
            who = getattr(optim, "__name__", "the optimizer")
            raise TypeError(f"neither OSS nor {who} has an argument '{name}'{meant}") from None


def _make(factory: Factory, groups: list[dict[str, Any]]) -> Optimizer:
    made = factory(groups)
    if not isinstance(made, Optimizer):
        raise TypeError(f"the function given as optim must return a torch.optim.Optimizer, got {type(made).__name__}")
    if not isinstance(factory, type):
        check_factory(type(made), "optim")
    return made
