"""Deliberately broken DDP classes, each with the checks of tests/behaviours that must notice it.

A suite that passes on one of these would not have noticed the bug in the real class either.
"""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.parallel.distributed as torch_ddp
from torch import Tensor, nn

from tests.harness import class_under_test

CONF_MUTANTS_PATH = Path(__file__).resolve().parent / "conformance" / "conf_mutants.py"

Base: Any = class_under_test()


def _on_each_grad(module: nn.Module, change: Any) -> None:
    for p in module.parameters():
        if p.requires_grad:
            p.register_hook(change)


class DoubleGrad(Base):
    """Gradients twice too large."""

    broken = {"gradients_are_averaged", "no_sync_keeps_gradients_local", "training_equals_one_process"}

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        _on_each_grad(module, lambda grad: grad * 2)


class SumNotMean(Base):
    """The sum over ranks instead of their mean."""

    broken = {"gradients_are_averaged", "training_equals_one_process", "join_averages_over_the_initial_world"}

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        world_size = dist.get_world_size(self.process_group)
        _on_each_grad(module, lambda grad: grad * world_size if self.require_backward_grad_sync else grad)


class SlightlyOff(Base):
    """A millionth too much on one rank."""

    broken = {
        "gradients_are_averaged",
        "gradients_are_averaged_in_each_of_several_steps",
        "gradients_are_the_same_on_all_ranks",
        "gradients_accumulate_without_zero_grad",
        "training_equals_one_process",
    }

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        if dist.get_rank(self.process_group) == 1:
            _on_each_grad(module, lambda grad: grad * (1 + 1e-6))


class NoAllReduce(Base):
    """Each rank keeps its own gradients."""

    broken = {"gradients_are_averaged", "gradients_are_the_same_on_all_ranks", "comm_hook_sees_each_gradient_once"}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.no_sync():
            return super().forward(*args, **kwargs)


class OnlyFirstStep(Base):
    """Stops all-reducing after the first step, as a static graph with accumulation once did."""

    broken = {
        "gradients_are_averaged_in_each_of_several_steps",
        "training_equals_one_process",
        "unused_parameters_differ_per_rank",
        "training_from_different_seeds_ends_equal",
    }
    forwards = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.forwards += 1
        if self.forwards == 1:
            return super().forward(*args, **kwargs)
        with self.no_sync():
            return super().forward(*args, **kwargs)


class ForgetsOneParameter(Base):
    """The first parameter is never reduced."""

    broken = {"gradients_are_averaged", "parameters_start_as_on_rank_zero", "comm_hook_sees_each_gradient_once"}

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        first = next(name for name, _ in module.named_parameters())
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        module._ddp_params_and_buffers_to_ignore = ignored | {first}  # type: ignore[assignment]
        super().__init__(module, *args, **kwargs)


class DropsAccumulated(Base):
    """What was accumulated before the synchronised step is lost."""

    broken = {
        "no_sync_then_sync_averages_the_sum",
        "gradients_accumulate_without_zero_grad",
        "globally_unused_parameters_keep_their_gradient",
    }

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.require_backward_grad_sync:
            self.zero_grad()
        return super().forward(*args, **kwargs)


class NoInitSync(Base):
    """Ranks start with their own parameters and buffers."""

    broken = {
        "parameters_start_as_on_rank_zero",
        "buffers_start_as_on_rank_zero",
        "training_from_different_seeds_ends_equal",
        "ignored_parameters_keep_their_value",
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "init_sync": False})


class NoBufferSync(Base):
    """Buffers are never broadcast after construction."""

    broken = {
        "buffers_of_mixed_dtypes_follow_rank_zero",
        "running_statistics_follow_rank_zero",
        "reassigned_buffer_follows_rank_zero",
        "ignored_buffers_stay_local",
    }

    def _sync_buffers(self) -> None:
        pass


class BuffersFromLastRank(Base):
    """Buffers follow the last rank instead of rank 0."""

    broken = {
        "buffers_of_mixed_dtypes_follow_rank_zero",
        "running_statistics_follow_rank_zero",
        "reassigned_buffer_follows_rank_zero",
    }

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        super()._sync_module_buffers(dist.get_world_size(self.process_group) - 1)


class AlwaysSyncsBuffers(Base):
    """Buffers that the user wanted local, or ignored, are broadcast all the same."""

    broken = {"buffers_stay_local_when_told_so", "ignored_buffers_stay_local", "ignored_gradients_stay_local"}

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if hasattr(module, "_ddp_params_and_buffers_to_ignore"):
            module._ddp_params_and_buffers_to_ignore = set()  # type: ignore[assignment]
        super().__init__(module, *args, **{**kwargs, "forward_sync_buffers": True})


class IgnoresNoSync(Base):
    """no_sync does nothing."""

    broken = {
        "no_sync_keeps_gradients_local",
        "no_sync_then_sync_averages_the_sum",
        "no_sync_communicates_nothing",
    }

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield


class IgnoresIgnored(Base):
    """Parameters and buffers to be left alone are handled like all others."""

    broken = {
        "ignored_parameters_keep_their_value",
        "ignored_gradients_stay_local",
        "ignored_buffers_stay_local",
        "ignored_parameters_may_be_unused",
    }

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if hasattr(module, "_ddp_params_and_buffers_to_ignore"):
            del module._ddp_params_and_buffers_to_ignore
        super().__init__(module, *args, **kwargs)


class NoBucketView(Base):
    """Gradients are never views of their bucket."""

    broken = {
        "bucket_view_gradients_share_their_bucket",
        "bucket_view_alias_survives_in_place_zeroing",
        "comm_hook_writes_reach_bucket_view_gradients",
        "bucket_view_option_is_shown",
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "gradient_as_bucket_view": False})


class AlwaysBucketView(Base):
    """Gradients share their bucket whether this was asked for or not: what is kept of them changes."""

    broken = {
        "kept_gradients_do_not_change",
        "assigned_gradients_get_the_averages",
        "explicit_copy_is_honoured",
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "gradient_as_bucket_view": True})


class HookIgnored(Base):
    """Communication hooks are accepted and never called."""

    broken = {
        "comm_hook_result_becomes_the_gradient",
        "comm_hook_sees_each_gradient_once",
        "fp16_hook_rounds_the_gradients",
        "builtin_fp16_hook_rounds_the_gradients",
        "second_comm_hook_is_refused",
        "logging_tells_the_comm_hook",
    }

    def register_comm_hook(self, state: object, hook: Any) -> None:
        pass

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        pass


class HookResultLost(Base):
    """The hook runs on a copy: what it returns is thrown away and rank-local gradients stay."""

    broken = {
        "comm_hook_result_becomes_the_gradient",
        "fp16_hook_rounds_the_gradients",
        "comm_hook_writes_reach_bucket_view_gradients",
    }

    def register_comm_hook(self, state: object, hook: Any) -> None:
        def lost(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            kept = bucket.buffer().clone()
            bucket.set_buffer(bucket.buffer().clone())
            return hook(state, bucket).then(lambda _: kept)

        super().register_comm_hook(state, lost)


class NoUnusedSearch(Base):
    """find_unused_parameters is never on."""

    broken = {
        "unused_parameters_differ_per_rank",
        "partial_use_of_the_outputs",
        "globally_unused_parameters_keep_their_gradient",
        "options_are_shown_as_given",
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "find_unused_parameters": False})


class AlwaysUnusedSearch(Base):
    """find_unused_parameters is always on."""

    broken = {
        "unused_parameter_without_search_is_an_error",
        "output_is_handed_through_without_search",
        "logging_tells_the_unused_search",
        "options_are_shown_as_given",
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "find_unused_parameters": not kwargs.get("static_graph", False)})


class NoStaticGraph(Base):
    """static_graph does nothing."""

    broken = {
        "static_graph_allows_repeated_checkpoints",
        "static_graph_allows_unused_parameters",
        "static_graph_allows_unused_checkpoints",
        "static_graph_is_logged",
        "options_are_shown_as_given",
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "static_graph": False})

    def _set_static_graph(self) -> None:
        pass


class NoJoinShadow(Base):
    """A rank that has joined no longer takes part in what the others still send."""

    broken = {
        "join_averages_over_the_initial_world",
        "join_averages_over_those_left",
        "join_ends_with_the_last_ranks_model",
        "join_shadows_buffers",
    }

    def join_hook(self, **kwargs: Any) -> Any:
        from torch.distributed.algorithms.join import JoinHook

        return JoinHook()


class OnlyTensorOutputs(Base):
    """The search for unused parameters looks at bare tensors only."""

    broken = {
        "dict_output_with_unused_search",
        "dataclass_output_with_unused_search",
        "tuple_output_with_static_graph",
    }

    def _post_forward(self, output: Any) -> Any:
        return super()._post_forward(output) if isinstance(output, Tensor) else output


class NoLogging(Base):
    """Nothing is told."""

    broken = {
        "logging_tells_the_construction",
        "logging_tells_the_training",
        "logging_tells_the_comm_hook",
        "static_graph_is_logged",
    }

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return {}


MUTANTS: dict[str, Any] = {
    name: value
    for name, value in list(globals().items())
    if isinstance(value, type) and issubclass(value, Base) and value is not Base
}


def load_conformance_mutants(path: Path = CONF_MUTANTS_PATH) -> dict[str, Any]:
    """The mutants that show what the conformance tests can't see, derived from the class under test."""
    spec = importlib.util.spec_from_file_location("conf_mutants", path)
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules["conf_mutants"] = module
    original = torch_ddp.DistributedDataParallel
    torch_ddp.DistributedDataParallel = Base  # type: ignore[misc]
    try:
        spec.loader.exec_module(module)
    finally:
        torch_ddp.DistributedDataParallel = original  # type: ignore[misc]
    return {name: getattr(module, name) for name in module.MUTANTS}
