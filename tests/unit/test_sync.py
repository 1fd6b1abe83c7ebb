"""Sync strategies, the parts of the microbatch loop that need no ranks, and comm_hook arguments."""

import pytest
import torch

from tests.harness import each
from torchddp.comm_hooks import resolve
from torchddp.sync import DDPSyncStrategy, accumulate, prepare_ddp_module, sync_context


def test_sync_strategies_are_accepted_in_any_case_and_others_refused():
    for name in ("single_auto_sync", "MULTI_AUTO_SYNC", "Forced_Sync"):
        assert DDPSyncStrategy(name) is DDPSyncStrategy[name.upper()]
        assert DDPSyncStrategy(DDPSyncStrategy(name)) == name.lower()
    for value in each(("sync", "", None, 3)):
        with pytest.raises(ValueError, match=r"'single_auto_sync', 'multi_auto_sync', 'forced_sync'"):
            DDPSyncStrategy(value)
    module = torch.nn.Linear(2, 2)
    for strategy in (None, *DDPSyncStrategy):
        assert list(accumulate(module, 3, strategy)) == [0, 1, 2], strategy
    with pytest.raises(ValueError, match="unknown sync strategy 'often'"), sync_context(module, True, "often"):
        pass


@pytest.mark.parametrize(("steps", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_an_invalid_number_of_microbatches_is_refused(steps, error):
    with pytest.raises(error, match=r"steps must be .*got"):
        accumulate(torch.nn.Linear(2, 2), steps)  # raised at once, not when the loop starts


def test_prepare_ddp_module_needs_a_process_group():
    with pytest.raises(RuntimeError, match=r"prepare_ddp_module\(\) needs a process group"):
        prepare_ddp_module(torch.nn.Linear(2, 2), False)


def test_comm_hook_is_a_function_or_a_pair_of_state_and_function():
    def hook(state, bucket):
        raise NotImplementedError

    state = object()
    assert resolve(hook) == (None, hook)
    assert resolve((state, hook)) == (state, hook)
    for wrong in each((3, (hook,), (state, 3), (state, hook, 1), [state, hook])):
        with pytest.raises(TypeError, match="comm_hook must be"):
            resolve(wrong)
