"""Ways to misuse a DistributedDataParallel, in addition to those in tests/fault/test_bad_input.py."""

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join

from tests.fault.test_bad_input import used_twice
from tests.harness import future_of

Case = Callable[[Any, int], Any]


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 4)


class Heads(nn.Module):
    """Two layers; a forward uses those named in `used`."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.r = linear(), linear()

    def forward(self, x: torch.Tensor, used: str) -> list[torch.Tensor]:
        return [getattr(self, name)(x).sum() for name in used]


def steps(model: Any, *used_in_each: str) -> Any:
    for used in used_in_each:
        sum(model(torch.ones(2, 4), used)).backward()
    return model


def trained(model: Any, steps: int = 3) -> Any:
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
    return model


CASES: dict[str, Case] = {
    # arguments of the constructor
    "a_mesh_that_is_none": lambda cls, rank: cls(linear(), device_mesh="cpu"),
    "a_group_without_this_rank": lambda cls, rank: cls(linear(), process_group=dist.new_group([0])),
    "a_group_that_is_none": lambda cls, rank: cls(linear(), process_group="gloo"),
    "a_module_that_is_none": lambda cls, rank: cls(torch.ones(2)),
    "no_module": lambda cls, rank: cls(None),
    "a_model_on_meta": lambda cls, rank: cls(linear().to("meta")),
    "an_argument_that_is_not_known": lambda cls, rank: cls(linear(), bucket_size=3),
    "too_many_arguments": lambda cls, rank: cls(linear(), *[None] * 30),
    "a_cap_as_text": lambda cls, rank: cls(linear(), bucket_cap_mb="large"),
    "a_cap_in_a_list_as_text": lambda cls, rank: cls(linear(), bucket_cap_mb_list=["large"]),
    "a_cap_of_numpys": lambda cls, rank: cls(
        linear(), bucket_cap_mb=numpy.int64(1), bucket_cap_mb_list=[numpy.float32(1)]
    ),
    "a_cap_that_is_negative": lambda cls, rank: cls(linear(), bucket_cap_mb=-1),
    "a_cap_of_zero": lambda cls, rank: cls(linear(), bucket_cap_mb=0),
    "a_cap_and_a_list_of_caps": lambda cls, rank: cls(linear(), bucket_cap_mb=1, bucket_cap_mb_list=[1]),
    "a_list_of_caps_that_is_a_number": lambda cls, rank: cls(linear(), bucket_cap_mb_list=3),
    "synchronized_batch_norm_on_the_cpu": lambda cls, rank: cls(nn.Sequential(linear(), nn.SyncBatchNorm(4))),
    "mixed_precision_that_is_none": lambda cls, rank: cls(linear(), mixed_precision="bf16"),
    "models_of_other_shapes": lambda cls, rank: cls(nn.Linear(4, 4 + rank)),
    "models_of_other_lengths": lambda cls, rank: cls(nn.Sequential(*(linear() for _ in range(1 + rank)))),
    "a_hook_for_a_delay_without_one": lambda cls, rank: cls(m := linear(), param_to_hook_all_reduce=m.weight),
    # hooks
    "registers_a_builtin_that_is_none": lambda cls, rank: cls(linear())._register_builtin_comm_hook("allreduce"),
    "registers_a_hook_after_steps": lambda cls, rank: trained(cls(linear())).register_comm_hook(None, all_reduced),
    "registers_a_buffer_hook_that_is_none": lambda cls, rank: cls(linear())._register_buffer_comm_hook(None, 3),
    # steps and other calls
    "a_static_graph_set_late": lambda cls, rank: trained(cls(linear()))._set_static_graph(),
    "a_forward_without_its_arguments": lambda cls, rank: cls(linear())(),
    "a_sampling_rate_of_zero": lambda cls, rank: cls(linear())._set_ddp_runtime_logging_sample_rate(0),
    "a_sampling_rate_that_is_text": lambda cls, rank: cls(linear())._set_ddp_runtime_logging_sample_rate("often"),
    "keys_that_do_not_fit": lambda cls, rank: cls(linear()).load_state_dict({"weight": torch.ones(4, 4)}),
    "a_fused_optimizer_that_is_not_known": lambda cls, rank: cls(linear())._register_fused_optim(torch.optim.LBFGS),
    "another_group_that_is_none": lambda cls, rank: cls(linear())._update_process_group("gloo"),
    "a_parameter_left_out": lambda cls, rank: steps(cls(Heads()), "l", "l", "l"),
    "a_parameter_left_out_is_asked_for": lambda cls, rank: steps(cls(Heads()), "l")._check_reducer_finalized(),
    "a_static_graph_uses_less": lambda cls, rank: steps(cls(Heads(), static_graph=True), "lr", "l", "l", "l"),
    "a_static_graph_uses_more": lambda cls, rank: steps(cls(Heads(), static_graph=True), "l", "lr", "lr", "lr"),
    "an_error_in_forward": lambda cls, rank: cls(linear())(torch.ones(2, 3)),
    "a_pickle_with_another_group": lambda cls, rank: pickle.dumps(cls(linear(), process_group=dist.new_group([0, 1]))),
    "a_copy_with_another_group": lambda cls, rank: copy.deepcopy(cls(linear(), process_group=dist.new_group([0, 1]))),
    "parameters_that_have_no_name": lambda cls, rank: (m := cls(linear()))._build_debug_param_to_name_mapping(
        [*m.parameters(), nn.Parameter(torch.ones(1))]
    ),
    "names_that_have_no_parameter": lambda cls, rank: (m := cls(linear()))._build_debug_param_to_name_mapping(
        [m.module.weight]
    ),
    "checkpoints_that_share_a_layer": used_twice,
    "an_attribute_that_is_not_there": lambda cls, rank: cls(linear()).no_such_thing,
}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


@case
def all_parameters_ignored(cls, rank):
    module = linear()
    cls._set_params_and_buffers_to_ignore_for_model(module, ["weight", "bias"])
    cls(module)


@case
def python_reducer_with_a_list_of_caps(cls, rank):
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        cls(linear(), bucket_cap_mb_list=[1])


def all_reduced(state, bucket):
    return default_hooks.allreduce_hook(dist.group.WORLD, bucket)


def raises(error: Exception) -> Any:
    raise error


def registering(name: str, hook: Any, *more: Any) -> None:
    def register(cls: Any, rank: int) -> None:
        model = cls(linear())
        for one in (hook, *more):
            if isinstance(one, dist.BuiltinCommHookType):
                model._register_builtin_comm_hook(one)
            else:
                model.register_comm_hook(None, one)
        trained(model, 2)

    CASES[f"registers_{name}"] = register


def right_text(state: "Any", bucket: "dist.GradBucket") -> "torch.futures.Future[torch.Tensor]":
    return all_reduced(state, bucket)


def wrong_text(state: "Any", bucket: "int") -> "int":
    pass


registering("none", None)
registering("right_annotations_as_text", right_text)
registering("wrong_annotations_as_text", wrong_text)
registering("another_name_for_the_bucket", lambda state, b: all_reduced(state, b))
registering("a_hook_without_arguments", lambda: None)
registering("a_hook_of_three", lambda state, bucket, more: None)
registering("a_partial", functools.partial(all_reduced))
registering("a_class", dict)
registering("a_builtin_function", max)
registering("a_hook_after_a_builtin", dist.BuiltinCommHookType.ALLREDUCE, all_reduced)
registering("a_builtin_after_a_hook", all_reduced, dist.BuiltinCommHookType.ALLREDUCE)
registering("two_builtins", dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS)
registering("bf16_on_the_cpu", default_hooks.bf16_compress_hook)


def returning(name: str, make: Callable[[dist.GradBucket], Any]) -> None:
    def run(cls: Any, rank: int) -> None:
        model = cls(linear())
        model.register_comm_hook(None, lambda state, bucket: make(bucket))
        trained(model, 2)

    CASES[f"a_hook_returns_{name}"] = run


class OfTwoArguments(Exception):
    def __init__(self, one: Any, two: Any) -> None:
        super().__init__(one, two)


returning("nothing", lambda bucket: None)
returning("a_tensor", lambda bucket: bucket.buffer())
returning("a_number", lambda bucket: 3)
returning("the_work", lambda bucket: dist.all_reduce(bucket.buffer(), async_op=True))
returning("a_future_of_nothing", lambda bucket: future_of(None))
returning("a_future_of_a_number", lambda bucket: future_of(3))
returning("a_future_of_no_tensor", lambda bucket: future_of([]))
returning("a_future_of_a_list", lambda bucket: future_of([bucket.buffer()]))
returning("a_future_of_two", lambda bucket: future_of([bucket.buffer(), bucket.buffer()]))
returning("a_future_of_a_tuple", lambda bucket: future_of((bucket.buffer(),)))
returning("a_shorter_tensor", lambda bucket: future_of(bucket.buffer()[:-1]))
returning("a_longer_tensor", lambda bucket: future_of(torch.cat([bucket.buffer(), bucket.buffer()])))
returning("an_empty_tensor", lambda bucket: future_of(torch.empty(0)))
returning("another_shape", lambda bucket: future_of(bucket.buffer().view(2, -1)))
returning("another_dtype", lambda bucket: future_of(bucket.buffer().double()))
returning("another_device", lambda bucket: future_of(bucket.buffer().to("meta")))
returning("a_future_with_an_error", lambda bucket: future_of(None, ValueError("of the hook")))
returning("a_future_with_an_odd_error", lambda bucket: future_of(None, OfTwoArguments(1, 2)))
returning("an_error_in_then", lambda bucket: future_of(1).then(lambda f: raises(ValueError("of the hook"))))
for _error in (KeyError, RuntimeError, StopIteration):
    returning(f"never_but_raises_{_error.__name__}", lambda bucket, error=_error: raises(error("of the hook")))
returning("never_but_exits", lambda bucket: raises(SystemExit(3)))  # type: ignore[arg-type]
returning("never_but_is_interrupted", lambda bucket: raises(KeyboardInterrupt()))  # type: ignore[arg-type]


@case
def a_backward_with_inputs(cls, rank):
    model = cls(linear())
    model(torch.ones(2, 4)).sum().backward(inputs=[model.module.weight])
    trained(model)


@case
def frozen_after_wrapping(cls, rank):
    model = cls(Heads())
    model.module.l.requires_grad_(False)
    steps(model, "lr", "lr", "lr")


@case
def a_sparse_gradient_as_a_view(cls, rank):
    model = cls(nn.Embedding(4, 4, sparse=True), gradient_as_bucket_view=True)
    for _ in range(2):
        model(torch.tensor([0, 1])).sum().backward()


@case
def a_join_that_ends_early(cls, rank):
    model = cls(linear())
    with model.join(throw_on_early_termination=True):
        trained(model, 1 + rank)


@case
def a_join_of_two_groups(cls, rank):
    models = [cls(linear()), cls(linear(), process_group=dist.new_group([0, 1]))]
    with Join(models):
        pass


@case
def a_join_with_an_argument_that_is_not_known(cls, rank):
    with cls(linear()).join(divide=True):
        pass
