"""Two threads that run one model at once get an error, and the process lives on."""

import threading

import pytest
import torch
from torch import nn

from tests.harness import on_ranks, over_both

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drawback")


class Paused(nn.Module):
    """Its backward pauses in the middle, in one thread."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.arrived, self.goes_on = threading.Event(), threading.Event()

    def pause(self, grad):
        self.arrived.set()
        assert self.goes_on.wait(60)

    def forward(self, x, pauses=False):
        inner = self.first(x)
        if pauses:
            inner.register_hook(self.pause)
        return self.last(inner).sum()


def beside(backward, module, during):
    """Call `during` while the backward in another thread pauses; the errors of both, if any."""
    errors = []

    def attempt(call):
        try:
            call()
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=attempt, args=[backward])
    thread.start()
    assert module.arrived.wait(60)
    attempt(during)
    module.goes_on.set()
    thread.join(60)
    assert not thread.is_alive()
    return errors


@over_both
@on_ranks(2)
def test_two_threads_in_one_backward(rank, ddp_class, transport):
    model = ddp_class(Paused(), transport=transport)
    losses = [model(torch.ones(1, 3), pauses) for pauses in (True, False)]
    errors = beside(losses[0].backward, model.module, losses[1].backward)
    assert any("mark a variable ready only once" in text for text in errors), errors


@over_both
@on_ranks(2)
def test_a_forward_during_a_backward(rank, ddp_class, transport):
    model = ddp_class(Paused(), transport=transport)
    loss = model(torch.ones(1, 3), True)
    errors = beside(loss.backward, model.module, lambda: model(torch.ones(1, 3)))
    assert len(errors) == 1 and "Expected to have finished reduction" in errors[0], errors
