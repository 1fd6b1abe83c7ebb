"""Faults to put into the package, each of which the tests named with it must catch.

A pytest plugin: `TORCHDDP_TEST_MUTATION=NAME pytest -p tests.mutations TESTS`. Broken classes are in tests/mutants.py;
these are faults of what a class is made of.
"""

import os
from collections.abc import Callable
from typing import Any

from torchddp.ddp import model
from torchddp.ddp.session import ReducerSession
from torchddp.sharded.written_options import WrittenOptions
from torchddp.transport import shm, store
from torchddp.transport.agreement import Agreement

NAME_ENV = "TORCHDDP_TEST_MUTATION"
TESTS = "tests/distributed/test_"
UNIT = "tests/unit/test_"


def nothing(*args: Any, **kwargs: Any) -> None:
    pass


def weights_are_lost_with_a_hook() -> None:
    weigh = ReducerSession.weigh

    def lost(self: ReducerSession, weight: float, count: float, **how: Any) -> None:
        weigh(self, *((1, 1) if self.has_comm_hook else (weight, count)), **how)

    ReducerSession.weigh = lost  # type: ignore[method-assign]


def hooks_see_averages() -> None:
    ReducerSession.has_backward_hooks = property(lambda self: False)  # type: ignore[method-assign, assignment]


def wrappers_do_not_know_each_other() -> None:
    model.meet_siblings = nothing


def options_are_not_compared() -> None:
    Agreement.check_options = nothing  # type: ignore[method-assign, assignment]


def errors_stay_on_their_rank() -> None:
    def leave(self: Agreement, *error: object) -> None:
        self.is_over = True

    Agreement.__exit__ = leave  # type: ignore[method-assign, assignment]


def keys_are_those_of_earlier_groups() -> None:
    store.begin_life = shm.begin_life = lambda store, name, rank: name


def connections_stay_open() -> None:
    store.StoreLink._look = nothing  # type: ignore[method-assign, assignment]


def hooks_stay_after_a_refresh() -> None:
    def close(self: ReducerSession) -> None:
        self._is_open = False
        kept.append(self.reducer)

    kept: list[object] = []
    ReducerSession.close = close  # type: ignore[method-assign]


def reducing_after_backward_makes_zeros() -> None:
    ReducerSession._without_gradient = lambda self: []  # type: ignore[method-assign]


def what_optimizers_write_stays_on_a_rank() -> None:
    WrittenOptions.end_step = nothing  # type: ignore[method-assign, assignment]


# The tests that must fail.
CAUGHT_BY: dict[Callable[[], None], str] = {
    weights_are_lost_with_a_hook: TESTS + "weighted_means.py::test_a_hook_gets_weighted_gradients",
    hooks_see_averages: TESTS + "gradients_during_backward.py::test_a_registered_hook_sees_this_ranks_gradients",
    wrappers_do_not_know_each_other: "tests/spec/test_spec.py::test_pairs[1-0]",
    options_are_not_compared: TESTS + "ranks_that_differ.py::test_hooks_that_differ_are_named",
    errors_stay_on_their_rank: TESTS + "ranks_that_differ.py::test_an_error_of_one_rank_reaches_all",
    keys_are_those_of_earlier_groups: UNIT + "agreement.py::test_keys_belong_to_one_attempt_and_one_life_of_a_group",
    connections_stay_open: TESTS + "groups_that_end.py::test_a_group_and_its_models_leave_no_thread_and_no_descriptor",
    hooks_stay_after_a_refresh: TESTS + "gradients_of_the_program.py::test_a_refresh_leaves_nothing_behind",
    reducing_after_backward_makes_zeros: TESTS + "sync.py::test_forced_sync_and_untouched_gradients",
    what_optimizers_write_stays_on_a_rank: TESTS
    + "oss_written_options.py::test_ranks_keep_what_one_process_would_have_written",
}

for mutation in CAUGHT_BY:
    if mutation.__name__ == os.environ.get(NAME_ENV):
        mutation()
