"""Faults to put into the package, each of which the tests named with it must catch.

A pytest plugin: `TORCHDDP_TEST_MUTATION=NAME pytest -p tests.mutations TESTS`. Broken classes are in tests/mutants.py;
these are faults of what a class is made of. Those of the extension are compiled into a copy of the checkout, all at
once, and chosen by the same variable.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torchddp.ddp import wrapper
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
    wrapper.link_wrappers = nothing


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
    weights_are_lost_with_a_hook: TESTS + "weighted_means.py::test_large_gradients_and_those_of_a_hook",
    hooks_see_averages: TESTS + "gradients_of_the_program.py::test_a_registered_hook_sees_this_ranks_gradients",
    wrappers_do_not_know_each_other: "tests/spec/test_spec.py::test_named_programs[two wrappers in one backward]",
    options_are_not_compared: TESTS + "ranks_that_differ.py::test_hooks_that_differ_are_named",
    errors_stay_on_their_rank: TESTS + "ranks_that_differ.py::test_an_error_of_one_rank_reaches_all",
    keys_are_those_of_earlier_groups: UNIT + "agreement.py::test_keys_belong_to_one_attempt_and_one_life_of_a_group",
    connections_stay_open: TESTS + "other_groups.py::test_a_group_and_its_models_leave_no_thread_and_no_descriptor",
    hooks_stay_after_a_refresh: TESTS + "gradients_of_the_program.py::test_a_refresh_leaves_nothing_behind",
    reducing_after_backward_makes_zeros: TESTS + "sync.py::test_forced_sync_and_untouched_gradients",
    what_optimizers_write_stays_on_a_rank: TESTS + "oss_state.py::test_ranks_keep_what_one_process_would_have_written",
}


class InExtension(NamedTuple):
    """An expression that occurs once in a file of csrc, what replaces it, and the test that must fail."""

    file: str
    text: str
    instead: str
    test: str


IN_EXTENSION = {
    "a_fork_shares_buckets": InExtension(
        "shm/segment.cpp",
        "kFlags | (area.fd < 0 ? MAP_ANONYMOUS : 0)",
        "MAP_SHARED | MAP_FIXED | (area.fd < 0 ? MAP_ANONYMOUS : 0)",
        TESTS + "gradients_of_the_program.py::test_a_forked_child_has_its_own_gradients",
    ),
    "threads_mix_steps": InExtension(
        "reducer/reducer.cpp",
        "before != Mark::kNone",
        "false",
        TESTS + "threads.py::test_two_threads_in_one_backward",
    ),
    "threads_begin_steps": InExtension(
        "reducer/reducer.cpp",
        "!parts_.step.is_unfinished()",
        "true",
        TESTS + "threads.py::test_a_forward_during_a_backward",
    ),
    "buckets_stay_where_they_were": InExtension(
        "reducer/reduce/layout.cpp",
        "bucket->is_displaced()",
        "false",
        TESTS + "gradients_of_the_program.py::test_storage_that_moves_to_torchs_shared_memory",
    ),
    "a_scale_is_dropped": InExtension(
        "reducer/reduce/reductions.cpp",
        "bucket.take_scale()",
        "bucket.take_scale() * 0 + 1",
        TESTS + "weighted_means.py::test_large_gradients_and_those_of_a_hook",
    ),
    "a_scale_is_applied_twice": InExtension(
        "reducer/pack/packers.cpp",
        "place.bucket->leave_scale(rules_.step.scale())",
        "place.bucket->leave_scale(rules_.step.scale() * rules_.step.scale())",
        TESTS + "weighted_means.py::test_large_gradients_and_those_of_a_hook",
    ),
    "main_gradients_keep_old_slots": InExtension(
        "reducer/base/main_grads.cpp",
        "std::fill(slots_.begin(), slots_.end(), nullptr)",
        "void()",
        TESTS + "main_grads.py::test_a_refused_refresh_changes_nothing",
    ),
    "hooks_see_averages_in_buckets": InExtension(
        "reducer/pack/pack_rules.cpp",
        "(has_hooks_ || has_hooks) && context_.has_own_storage() && !context_.owned && !left_to_optimizer_",
        "false",
        TESTS + "gradients_of_the_program.py::test_a_registered_hook_sees_this_ranks_gradients",
    ),
    "lost_writes_are_silent": InExtension(
        "reducer/pack/pack_rules.cpp",
        "std::exchange(written_, {})",
        "std::vector<int64_t>()",
        TESTS + "gradients_of_the_program.py::test_a_lost_write_is_a_warning",
    ),
    "writes_leave_no_mark": InExtension(
        "reducer/base/grad_marks.cpp",
        "has(param, grad) && marks_[param].version == version_of(param, grad)",
        "has(param, grad)",
        TESTS + "weighted_means.py::test_gradients_that_are_changed_between_backwards_of_a_step",
    ),
    "owners_take_any_gradient_for_an_average": InExtension(
        "reducer/pack/hand_back.cpp",
        "!marks_.has(param, grad)",
        "!grad.defined()",
        "tests/spec/test_spec.py::test_named_programs[an owner sets gradients]",
    ),
    "wrappers_share_a_sparse_gradient": InExtension(
        "reducer/pack/packers.cpp",
        "stays ? grad.copy_(grad.detach()) : grad.clone()",
        "grad",
        TESTS + "gradients_of_the_program.py::test_a_sparse_gradient_of_several_wrappers",
    ),
}
SWITCH = """
#pragma once
#include <cstdlib>
#include <string_view>
inline bool is_mutated(std::string_view name) {
  const char* const chosen = std::getenv("%s");
  return chosen != nullptr && name == chosen;
}
"""


def build_mutated(root: Path, tree: Path) -> None:
    """Copy the checkout and compile the copy, with each mutation of the extension behind a switch."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True).stdout
    subprocess.run(["xargs", "-0", "cp", "--parents", "-t", tree], cwd=root, check=True, input=files)
    (tree / ".venv").symlink_to(sys.prefix)  # for ccache, as in the checkout
    (tree / "csrc" / "mutated.h").write_text(SWITCH % NAME_ENV)
    for name, mutation in IN_EXTENSION.items():
        file = tree / "csrc" / mutation.file
        switched = f'(is_mutated("{name}") ? ({mutation.instead}) : ({mutation.text}))'
        file.write_text('#include "mutated.h"\n' + file.read_text().replace(mutation.text, switched))
    environment = {**os.environ, "CCACHE_BASEDIR": str(tree), "CCACHE_NOHASHDIR": "1"}
    command = [tree / ".venv/bin/python", "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(command, cwd=tree, env=environment, check=True)


for mutation in CAUGHT_BY:
    if mutation.__name__ == os.environ.get(NAME_ENV):
        mutation()
