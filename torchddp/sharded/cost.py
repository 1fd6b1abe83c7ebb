"""What it costs to update a parameter, by which `OSS` chooses its owner."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch.optim import Optimizer

from torchddp.sharded.group_optimizers import Factory, Group, GroupOptimizers, is_stack, options_of
from torchddp.transport.agreement import Agreement, in_words
from torchddp.transport.message_cost import seconds_of

CostFunction = Callable[[torch.Tensor, Group], float]
CostChoice = Literal["model", "measure"] | CostFunction

_MOST_STEPS, _LONG_ENOUGH = 10, 0.02  # seconds that one shape is timed

NEWTON_SCHULZ_STEPS = 5  # of an optimizer whose groups don't say


def newton_schulz(shape: Sequence[int], group: Group) -> int:
    """Multiply-adds of Muon's orthogonalization, matrix by matrix in a stack of them (Jordan et al. 2024)."""
    if len(shape) < 2 or group.get("use_muon") is False:
        return math.prod(shape)
    *stacked, rows, columns = shape
    short, long = sorted((rows, columns))
    steps = int(group.get("ns_steps", NEWTON_SCHULZ_STEPS))
    return math.prod(stacked) * steps * (2 * short**2 * long + short**3)


def kronecker_factors(shape: Sequence[int], group: Group) -> float:
    """Multiply-adds of Shampoo and SOAP: each side of length n has an n x n factor (Gupta et al. 2018).

    Updating and applying a factor takes n per element each, its root or eigenvectors n^3, every few steps in SOAP.
    """
    elements = math.prod(shape)
    if len(shape) == 1 and group.get("precondition_1d") is False:
        return elements
    largest: float
    every: int
    largest, every = group.get("max_precondition_dim", math.inf), group.get("precondition_frequency", 1)
    return elements + sum(2 * n * elements + n**3 / every for n in shape if 1 < n <= largest)


# By a word in the class's name, because packages have many variants of each.
MODELS = {"muon": newton_schulz, "shampoo": kronecker_factors, "soap": kronecker_factors}


def modelled(name: str, shape: Sequence[int], group: Group) -> float:
    """The cost model's answer for a class's name, a parameter's shape and its group's options."""
    model = next((model for word, model in MODELS.items() if word in name.lower()), None)
    return float(math.prod(shape) if model is None else model(shape, group))


class Costs:
    """The costs of parameters, from the model of each class, measured, or from a function of the program."""

    def __init__(self, choice: CostChoice) -> None:
        if not callable(choice) and choice not in ("model", "measure"):
            raise ValueError(f"cost must be 'model', 'measure' or a function of (parameter, group), got {choice!r}")
        self._choice = choice
        self._measured: dict[str, float] = {}  # ms

    def __str__(self) -> str:
        return in_words(self._choice)

    def of(self, groups: Sequence[Group], optimizers: GroupOptimizers, ranks: Agreement) -> list[float]:
        """Of all parameters, in the order of the groups. Collective over ``ranks`` if costs are measured."""
        listed = [(group, optimizers.kind(group)) for group in groups]
        if self._choice == "model":
            return [modelled(kind.__name__, param.shape, group) for group, kind in listed for param in group["params"]]
        if callable(self._choice):
            return [
                _checked(self._choice(param, group), place, number, param)
                for number, group in enumerate(groups)
                for place, param in enumerate(group["params"])
            ]
        cases = [
            (_key(kind, group, param), partial(milliseconds, optimizers.factory(group), kind, group, param))
            for group, kind in listed
            for param in group["params"]
        ]
        missing = {key: measure for key, measure in cases if key not in self._measured}
        with ranks:
            own = {key: measure() for number, (key, measure) in enumerate(missing.items()) if ranks.is_turn(number)}
            for theirs in ranks.gather(own) or [own]:
                self._measured.update(theirs)
        return [self._measured[key] for key, _ in cases]


def milliseconds(factory: Factory, kind: type[Optimizer], group: Group, param: torch.Tensor) -> float:
    """The time of a step of a parameter like this one, with an optimizer and random values of its own: the fastest of
    some, without the first.
    """
    count, shape = (len(param), param.shape[1:]) if is_stack(kind, param) else (1, param.shape)
    generator = torch.Generator(param.device).manual_seed(0)
    values = torch.empty(2, *shape, dtype=param.dtype, device=param.device).normal_(generator=generator)
    copy = torch.nn.Parameter(values[0].clone())
    copy.grad = values[1].clone()
    optimizer = factory([{**options_of(group), "params": [copy]}])
    taken: list[float] = []
    while len(taken) < 2 or (sum(taken) < _LONG_ENOUGH and len(taken) < _MOST_STEPS):
        taken.append(seconds_of(optimizer.step, param.device))
    return count * min(taken[1:]) * 1e3


def _checked(cost: object, place: int, number: int, param: torch.Tensor) -> float:
    if not isinstance(cost, int | float) or not 0 <= cost < math.inf:
        where = f"parameter {place} of group {number}, of shape {list(param.shape)}"
        raise ValueError(f"cost() must return a number from 0, got {cost!r} for {where}")
    return float(cost)


def _key(kind: type[Optimizer], group: Group, param: torch.Tensor) -> str:
    return f"{kind.__qualname__} {list(param.shape)} {param.dtype} {param.device.type} {in_words(options_of(group))}"
