"""Different hooks for different parameters."""

# No `from __future__ import annotations`: torch's register_comm_hook() compares a hook's annotations with types.

import fnmatch
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from typing_extensions import Unpack

from torchddp import _torch
from torchddp.comm_hooks.exchange import Exchange, Hierarchical
from torchddp.comm_hooks.hook import CommHook, HookOptions, Parameters
from torchddp.comm_hooks.layout import Layout, Piece, Slot
from torchddp.durations import Duration
from torchddp.errors import listed

# A glob on names, "norms", "biases", "vectors", a module class, or a function of name and parameter.
Which = str | type[nn.Module] | Callable[[str, nn.Parameter], bool]
_NORMS = (_torch.BatchNormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


class PerParameter(CommHook):
    """Reduces each parameter with the hook of the first matching rule, or else with ``default``.

    A bucket is split (copied) by hook, and each part reduced in turn; None sums exactly in fp32.

    Example:

        hooks = torchddp.comm_hooks
        rules = [("norms", None), (torch.nn.Embedding, hooks.BF16())]
        model = torchddp.DistributedDataParallel(module, comm_hook=hooks.PerParameter(hooks.Int8(), rules))

    Args:
        default: a hook, or None.
        rules: pairs of a selector and a hook or None. A selector is a glob on the parameter's name ("encoder.*");
            "norms" (of normalization layers), "biases" (by name), or "vectors" (at most one dimension); a module class
            (``torch.nn.Embedding``: the parameters directly in such modules); or a function ``(name, parameter) ->
            bool``, which must answer the same on all ranks. A hook may be in several rules.
        hierarchical, timeout: as for :class:`CommHook`. They apply to all the hooks given here, whose own are ignored.

    Raises:
        TypeError: a value that is neither a hook nor None, or an invalid rule.
        ValueError: at :meth:`attach`, a glob that matches no parameter's name, trained or frozen; in the next forward,
            a function that chooses differently on some ranks.
    """

    def __init__(
        self,
        default: CommHook | None,
        rules: Sequence[tuple[Which, CommHook | None]],
        *,
        hierarchical: Hierarchical = "auto",
        timeout: Duration | None = None,
    ) -> None:
        super().__init__(hierarchical=hierarchical, timeout=timeout)
        self.default = default
        self.rules = list(rules)
        self.hooks: list[CommHook] = []  # each once
        for hook in (default, *(hook for _, hook in self.rules)):
            if not isinstance(hook, CommHook | None):
                raise TypeError(f"PerParameter takes hooks of torchddp.comm_hooks or None, got {hook!r}")
            if hook is not None and hook not in self.hooks:
                self.hooks.append(hook)
        for which, _ in self.rules:
            if not (isinstance(which, str) or callable(which)):
                raise TypeError(f"a rule's selector must be a glob, a module class or a function, got {which!r}")
        self._hook_of: dict[str, CommHook | None] = {}
        self.choices = ""  # a digest of these, which the ranks compare as they do options
        self._parts: dict[Layout, list[tuple[CommHook | None, tuple[Slot, ...], Layout]]] = {}

    def _setup(self, exchange: Exchange, parameters: Parameters, module: nn.Module) -> None:
        super()._setup(exchange, parameters, module)
        self._parts.clear()
        self._hook_of = self._choose(parameters, module)
        order = [*self.hooks, None]
        chosen = [(name, order.index(hook)) for name, hook in self._hook_of.items()]
        self.choices = f"{zlib.crc32(repr(chosen).encode()):08x}"
        for hook in self.hooks:
            hook._setup(exchange, {n: p for n, p in parameters.items() if self._hook_of[n] is hook}, module)

    def _check(self, parameters: Parameters, module: nn.Module) -> None:
        chosen = self._choose(parameters, module)
        for hook in self.hooks:
            hook._check({n: p for n, p in parameters.items() if chosen[n] is hook}, module)

    def _choose(self, parameters: Parameters, module: nn.Module) -> dict[str, CommHook | None]:
        chosen: dict[str, CommHook | None] = dict.fromkeys(parameters, self.default)
        for which, hook in reversed(self.rules):  # reversed, so that the first match wins
            chosen.update(dict.fromkeys(_chosen(which, parameters, module), hook))
        return chosen

    def _follow(self, lead: int) -> None:
        for hook in self.hooks:
            hook._follow(lead)

    def _reduce(self, piece: Piece) -> None:
        for hook, slots, packed in self._take_apart(piece.layout):
            flat = torch.cat([piece.slot(slot) for slot in slots])
            if hook is None:
                self._average_exactly(flat)
            else:
                hook._reduce(Piece(packed, flat, piece.step))
            for slot, values in zip(slots, flat.split([slot.numel for slot in slots]), strict=True):
                piece.slot(slot).copy_(values)

    def _take_apart(self, layout: Layout) -> list[tuple[CommHook | None, tuple[Slot, ...], Layout]]:
        if layout not in self._parts:
            by_hook = [
                (hook, tuple(slot for slot in layout.slots if self._hook_of[slot.name] is hook))
                for hook in (*self.hooks, None)
            ]
            self._parts[layout] = [(hook, slots, Layout.packed(slots)) for hook, slots in by_hook if slots]
        return self._parts[layout]

    def _state(self) -> dict[str, Any]:
        return {"hooks": [hook._named_state() for hook in self.hooks]}

    def _load_state(self, state: Mapping[str, Any]) -> None:
        kinds = [type(hook).__name__ for hook in self.hooks]
        theirs = [part["hook"] for part in state["hooks"]]
        if kinds != theirs:
            raise ValueError(f"this is the state of PerParameter with hooks {theirs}, not with {kinds}")
        for hook, part in zip(self.hooks, state["hooks"], strict=True):
            hook._load_state(part)


def without_norms_and_biases(hook: CommHook, **options: Unpack[HookOptions]) -> PerParameter:
    """``hook`` for everything except normalization layers and biases, which are small and sensitive and are summed in
    fp32. The options are those of :class:`PerParameter`.
    """
    return PerParameter(hook, [("norms", None), ("biases", None)], **options)


def _chosen(which: Which, parameters: Parameters, module: nn.Module) -> list[str]:
    if which == "biases":
        return [name for name in parameters if name.rpartition(".")[2].startswith("bias")]
    if which == "vectors":
        return [name for name, param in parameters.items() if param.dim() <= 1]
    if which == "norms" or isinstance(which, type):
        kinds = which if isinstance(which, type) else _NORMS
        held = {id(p) for m in module.modules() if isinstance(m, kinds) for p in m.parameters(recurse=False)}
        return [name for name, param in parameters.items() if id(param) in held]
    if isinstance(which, str):
        fitting = [name for name in parameters if fnmatch.fnmatchcase(name, which)]
        if not fitting and not any(fnmatch.fnmatchcase(name, which) for name, _ in module.named_parameters()):
            raise ValueError(f"the rule {which!r} matches no parameter; the model has {listed([*parameters], 8)}")
        return fitting
    return [name for name, param in parameters.items() if which(name, param)]
