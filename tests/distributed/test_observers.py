"""Step observers: the one that docs/architecture.md adds in one file and one line, and the events that all get."""

import importlib
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness import logged, on_ranks
from tests.pages import blocks_of
from torchddp import DDP
from torchddp.ddp import observers
from torchddp.ddp.observers import StepObserver


def step_on(model):
    model(torch.ones(2, 3)).sum().backward()


@on_ranks(1, 2, 3)
def test_the_observer_of_the_docs(rank, tmp_path, monkeypatch):
    """One file and one line of registration. Steps under no_sync() don't count, and each model has its own observer."""
    file, line = blocks_of("architecture.md", "Add a step observer")
    assert file.count("\n") < 30 and line.count("\n") == 0
    folder = tmp_path / str(rank)
    folder.mkdir()
    (folder / "step_rate.py").write_text(file)
    monkeypatch.syspath_prepend(folder)
    lines = logged()
    exec(line, {"observers": observers})
    assert "step_rate" not in sys.modules  # until a model uses it
    assert DDP(nn.Linear(3, 2), static_graph=True).observers.get("step_rate") is None
    model, other = (DDP(nn.Linear(3, 2)) for _ in range(2))
    importlib.import_module("step_rate").StepRate.EVERY = 3
    for _ in range(7):
        step_on(model)
    with model.no_sync():
        step_on(model)
    step_on(other)
    assert [each.observers.get("step_rate")._steps for each in (model, other)] == [1, 1]
    assert sum("steps a second" in text for text in lines) == (2 if rank == 0 else 0), lines


class Told(StepObserver):
    told = []

    def __init__(self, session):
        self.session = session
        self.told.append(f"group of {session.process_group.size()}")

    def before_step(self):
        self.told.append("reduced" if self.session.synchronizes else "kept")

    def on_error(self, error):
        self.told.append(type(error).__name__)

    def close(self):
        self.told.append("closed")


@on_ranks(2)
def test_events_of_observers(rank):
    """Steps with and without synchronization, errors, groups, the end of a group; nothing in evaluation."""
    observers.register("told", Told)
    model = DDP(nn.Linear(3, 2))
    told = Told.told
    step_on(model)
    with model.no_sync():
        step_on(model)
    with torch.no_grad():
        model(torch.ones(1, 3))
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 5))
    assert told == ["group of 2", "reduced", "kept", "reduced", "RuntimeError"]
    told.clear()
    step_on(model)
    alone = [dist.new_group([each]) for each in range(2)]
    model.update_process_group(alone[rank])
    step_on(model)
    model.update_process_group(dist.group.WORLD)
    model.update_process_group(alone[1 - rank])
    assert told == ["reduced", "closed", "group of 1", "reduced", "closed", "group of 2", "closed"]
    observers.unregister("told")
    assert DDP(nn.Linear(3, 2)).observers.get("told") is None


@on_ranks(2)
def test_errors(rank):
    """An observer's errors end the forward. One that can't be loaded is skipped only if it is a default."""
    strict = mock.Mock(spec_set=StepObserver)
    strict.before_step.side_effect = [None, ValueError("two steps are enough"), None]
    observers.register("strict", lambda session: strict)
    model = DDP(nn.Linear(3, 2))
    step_on(model)
    with pytest.raises(ValueError, match="two steps are enough"):
        step_on(model)
    step_on(model)
    assert strict.before_step.call_count == 3
    fail = mock.Mock(side_effect=OSError(24, "Too many open files"))
    observers.register("hang_reports", fail, is_optional=True)
    assert DDP(nn.Linear(3, 2)).observers.get("hang_reports") is None
    observers.register("hang_reports", fail)
    with pytest.raises(OSError, match="Too many open files"):
        DDP(nn.Linear(3, 2))
