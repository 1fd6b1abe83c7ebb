"""The columns of the covering array: options and actions with their values, and what is refused.

A value is the text that a program has for it; the first one of each column is its default. A new option begins here.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.spec.covering import Row

HOOK = "(group, default_hooks.{}_hook)"
HOOKS = {
    HOOK.format("allreduce"): "allreduce",
    HOOK.format("fp16_compress"): "fp16",
    HOOK.format("bf16_compress"): "bf16",
    "(group, debugging_hooks.noop_hook)": "noop",
}
NO, YES = "False", "True"
MIXED = "nn.parallel.distributed._MixedPrecision(torch.bfloat16, torch.float32)"
FLOAT32, BFLOAT16 = "torch.float32", "torch.bfloat16"

# Arguments that change gradients, or how they are computed.
OPTIONS: dict[str, tuple[str, ...]] = {
    "process_group": ("None", "group"),
    "find_unused_parameters": (NO, YES),
    "gradient_as_bucket_view": ("None", YES, NO),
    "static_graph": (NO, YES),
    "skip_all_reduce_unused_params": (NO, YES),
    "transport": ("'shm'", "'c10d'"),
    "weighted": (NO, YES),
    "comm_hook": ("None", *HOOKS),
    "sync": ("None", "'single_auto_sync'", "'multi_auto_sync'", "'forced_sync'"),
    "auto_refresh_trainable": (NO, YES),
    "mixed_precision": ("None", MIXED),
    # The rest must not change any gradient.
    "bucket_cap_mb": ("None", "0.0001", "25", "'auto'"),
    "bucket_cap_mb_list": ("None", "[0.0001, 1]"),
    "batched_grad_copy": (NO, YES),
    "init_sync": (YES, NO),
    "broadcast_buffers": ("None", NO),
    "forward_sync_buffers": ("None", NO),
    "timeout": ("None", "datetime.timedelta(seconds=60)"),
}
# Fields of Precision and Checks.
PRECISION: dict[str, tuple[str, ...]] = {
    "wire": ("None", BFLOAT16),
    "reduce": ("None", FLOAT32),
    "main_grads": ("None", FLOAT32),
    "main_grads_as": ("'main_grad'", "'grad'"),
}
CHECKS: dict[str, tuple[str, ...]] = {
    "zero_weights": ("'raise'", "'zeros'"),
    # The rest must not change any gradient.
    "nonfinite": (NO, YES, "'raise'"),
    "parameters_every": ("None", "1"),
    "stall_report": ("None", "0"),
    "gradient_stats": (NO, YES),
    "traps": (YES, NO),
    "stragglers": (YES, NO),
}
FIELDS = {"precision": PRECISION, "checks": CHECKS}
# What ShardedDataParallel alone takes. Only the first may change a gradient.
SHARDED_OPTIONS: dict[str, tuple[str, ...]] = {
    "reduce_fp16": (NO, YES),
    "reduce_buffer_size": ("2**23", "0", "20"),
    "sync_models_at_startup": (YES, NO),
    "overlap_gather": (YES, NO),
}
# Arguments that have no column, and why.
NOT_DRAWN = {
    "device_ids": "GPUs",
    "output_device": "GPUs",
    "dim": "GPUs",
    "device_mesh": "another form of process_group",
    "check_reduction": "deprecated: does nothing",
    "delay_all_reduce_named_params": "torch starts their reduction and never waits for it: nothing says when it ends",
    "param_to_hook_all_reduce": "goes with delay_all_reduce_named_params",
}

# What the program does.
ACTIONS: dict[str, tuple[str, ...]] = {
    "ranks": ("2", "3", "4", "1"),
    "hosts": ("one", "two"),
    "values": ("random", "exact"),  # gradients whose sums have the same bits in each order
    "model": ("plain", "halves", "large", "sparse", "complex"),
    "use": ("all", "one rank", "never", "first microbatch"),  # of one parameter
    "zero": ("none", "zeros", "keep", "some"),  # before each step
    "edit": ("nothing", "scale", "clip", "drop", "assign before", "keep"),
    "micro": ("one", "no_sync", "each", "loop", "refreshed loop", "reduce", "two forwards", "retain"),
    "weigh": ("never", "equal", "unequal", "some zero", "all zero", "sum"),
    "trainable": ("same", "frozen", "freeze", "thaw"),  # one parameter, before wrapping or after two steps
    "wrapper": ("one", "two at once", "two in turn", "sharded", "replicate"),
    "join": ("never", "all ranks", "ranks left"),  # what uneven inputs are divided by
}
LOOPS = {"loop", "refreshed loop"}
COLUMNS = {**OPTIONS, **PRECISION, **CHECKS, **SHARDED_OPTIONS, **ACTIONS}
DEFAULTS = {name: values[0] for name, values in COLUMNS.items()}
SHARDED_TAKES = {
    "process_group", "find_unused_parameters", "static_graph", "transport", "timeout", "weighted",
    "broadcast_buffers", "auto_refresh_trainable",
}  # fmt: skip
SHARDED_CHECKS = {"zero_weights", "stall_report", "traps", "stragglers"}
# What replicate() doesn't take, or under another name.
REPLICATE_REFUSES = ("broadcast_buffers", "mixed_precision")


@dataclass(frozen=True)
class Exclusion:
    """Values that a row doesn't have together: refused with an error on every rank, or without a meaning."""

    values: dict[str, set[str]]
    error: type[Exception] | None  # None: not refused
    words: str  # in the error's text, or the reason

    def applies(self, row: Row) -> bool:
        return all(row.get(name) in values for name, values in self.values.items())


def _refused(error: type[Exception], words: str, **values: str | set[str]) -> Exclusion:
    return Exclusion({name: {v} if isinstance(v, str) else v for name, v in values.items()}, error, words)


def _meaningless(words: str, **values: str | set[str]) -> Exclusion:
    return Exclusion({name: {v} if isinstance(v, str) else v for name, v in values.items()}, None, words)


def _but(name: str, *values: str) -> set[str]:
    return set(COLUMNS[name]) - set(values)


NOOP = "(group, debugging_hooks.noop_hook)"
# What is wrong today: no row has these values. Remove a fault when it is mended (`test_known_faults` then fails).
FAULTS: list[Exclusion] = []
EXCLUSIONS = [
    # Options among themselves.
    _refused(ValueError, "has no effect without main_grads=", main_grads="None", main_grads_as="'grad'"),
    _refused(ValueError, "conflicts with gradient_as_bucket_view=True", reduce=FLOAT32, main_grads="None",
             gradient_as_bucket_view=YES),
    _refused(ValueError, "conflicts with gradient_as_bucket_view=False", main_grads=FLOAT32,
             main_grads_as="'main_grad'", gradient_as_bucket_view=NO),
    _refused(ValueError, "leave bucket_cap_mb_list out", bucket_cap_mb="'auto'", bucket_cap_mb_list="[0.0001, 1]"),
    _refused(ValueError, "conflicts with mixed_precision=", mixed_precision=MIXED, main_grads=FLOAT32,
             wrapper=_but("wrapper", "sharded", "replicate")),
    _refused(ValueError, "conflicts with mixed_precision=", mixed_precision=MIXED, reduce=FLOAT32,
             main_grads="None", wrapper=_but("wrapper", "sharded", "replicate")),
    _refused(RuntimeError, "cpu backend doesn't support events", mixed_precision=MIXED),
    _refused(RuntimeError, "Precision(wire=) needs shared memory", wire=BFLOAT16, transport="'c10d'"),
    _refused(RuntimeError, "no two ranks are on the same host", hosts="two", transport="'shm'", ranks="2"),
    _refused(RuntimeError, "no two ranks are on the same host", hosts="two", transport="'shm'", process_group="group",
             ranks="4"),
    _meaningless("ranks without a peer on their host", hosts="two", transport="'shm'", process_group="group",
                 ranks="3"),
    # Options and models.
    _refused(ValueError, "needs dense gradients", model="sparse", main_grads=FLOAT32, main_grads_as="'main_grad'"),
    _refused(NotImplementedError, "aten::linalg_vector_norm", model="sparse", edit="clip", use="all", trainable="same",
             wrapper=_but("wrapper", "sharded")),
    _meaningless("clip_grad_norm_ doesn't take sparse gradients", model="sparse", edit="clip"),
    _meaningless("gloo doesn't add sparse tensors of 16 bits", model="sparse",
                 comm_hook={HOOK.format("fp16_compress"), HOOK.format("bf16_compress")}),
    # Parameters that are left out.
    _refused(RuntimeError, "find_unused_parameters=True", use="never", find_unused_parameters=NO, static_graph=NO,
             micro=_but("micro", "reduce")),
    _meaningless("raises on some ranks", use={"one rank", "first microbatch"}, find_unused_parameters=NO,
                 static_graph=NO, micro=_but("micro", "reduce")),
    _meaningless(
        "raises on the owners alone, in the middle of a loop", wrapper="sharded", micro=LOOPS, zero={"keep", "some"}
    ),
    _meaningless(
        "each wrapper refreshes in its own forward",
        wrapper="two in turn",
        auto_refresh_trainable=YES,
        trainable={"freeze", "thaw"},
    ),
    _meaningless(
        "two reducers send their buckets in different orders, as torch's do",
        wrapper="two at once",
        use=_but("use", "all", "never"),
    ),
    _meaningless("nothing is reduced", use=_but("use", "all"), find_unused_parameters=NO, static_graph=NO,
                 join=_but("join", "never")),
    _refused(RuntimeError, "mark a variable ready only once", use="first microbatch", find_unused_parameters=YES,
             micro="two forwards", trainable={"same", "freeze"}),
    _meaningless("mark a variable ready only once", use="first microbatch", find_unused_parameters=YES,
                 micro="two forwards"),
    _meaningless("a static graph is the same in each step and on each rank", static_graph=YES,
                 use={"one rank", "first microbatch"}),
    _meaningless("a static graph is the same in each step and on each rank", static_graph=YES,
                 micro={"two forwards", "retain"}),
    _meaningless("ranks must leave out the same parameters in all steps", skip_all_reduce_unused_params=YES,
                 use={"one rank", "first microbatch"}),
    # Weights.
    _refused(RuntimeError, "so their weights are unknown", auto_refresh_trainable=YES, trainable="thaw",
             weigh=_but("weigh", "never"), micro={"no_sync", "reduce", *LOOPS}, use=_but("use", "never")),
    _refused(RuntimeError, "so the weights of its parts are unknown", micro="retain", zero={"keep", "some"},
             edit={"scale", "clip"}, weigh=_but("weigh", "never")),
    _meaningless("both wrappers would need every weight", weigh=_but("weigh", "never"),
                 wrapper={"two at once", "two in turn"}),
    _refused(RuntimeError, "whose weight is unknown", weighted=YES, weigh="never"),
    _meaningless("does not average", comm_hook=NOOP, weigh=_but("weigh", "never")),
    # Two wrappers.
    _refused(RuntimeError, "wrap once", wrapper="two at once", main_grads=FLOAT32, main_grads_as="'main_grad'",
             micro=_but("micro", "reduce")),
    # Uneven inputs.
    _refused(RuntimeError, "can't be used with join()", nonfinite="'raise'", join=_but("join", "never")),
    _refused(RuntimeError, "must be made with weighted=True", weighted=NO, weigh=_but("weigh", "never"),
             join=_but("join", "never")),
    # Sharded models.
    *(
        _refused(TypeError, f"unexpected keyword argument '{name}'", wrapper="sharded",
                 **{name: _but(name, DEFAULTS[name])})
        for name in OPTIONS if name not in SHARDED_TAKES
    ),
    *(
        _refused(TypeError, "unexpected keyword argument 'precision'", wrapper="sharded",
                 **{name: _but(name, DEFAULTS[name])})
        for name in PRECISION
    ),
    *(
        _refused(ValueError, f"Checks({name}=", wrapper="sharded", **{name: _but(name, DEFAULTS[name])})
        for name in CHECKS if name not in SHARDED_CHECKS
    ),
    *(
        _refused(TypeError, f"unexpected keyword argument '{name}'", wrapper=_but("wrapper", "sharded", "replicate"),
                 **{name: _but(name, DEFAULTS[name])})
        for name in SHARDED_OPTIONS
    ),
    _refused(RuntimeError, "sparse gradients", wrapper="sharded", model="sparse"),
    _refused(RuntimeError, "use SINGLE_AUTO_SYNC", wrapper="sharded", find_unused_parameters=YES, micro=LOOPS,
             weigh=_but("weigh", "never")),
    _refused(RuntimeError, "can't be used with join()", wrapper={"sharded", "replicate"}, join=_but("join", "never")),
    # Replicated modules.
    *(
        _refused(TypeError, f"unexpected keyword argument '{name}'", wrapper="replicate",
                 **{name: _but(name, DEFAULTS[name])})
        for name in (*REPLICATE_REFUSES, *SHARDED_OPTIONS)
    ),
    _refused(ValueError, "MixedPrecisionPolicy", wrapper="replicate", reduce=FLOAT32, main_grads="None"),
    _refused(ValueError, "no main gradients", wrapper="replicate", main_grads=FLOAT32),
]  # fmt: skip


FORBIDDEN = [exclusion.values for exclusion in (*EXCLUSIONS, *FAULTS)]


# What the reference says of torch's class: its own options, and what a program can do with it.
_TORCH_OPTIONS = {
    "process_group", "find_unused_parameters", "gradient_as_bucket_view", "static_graph", "bucket_cap_mb", "comm_hook",
    "skip_all_reduce_unused_params", "batched_grad_copy", "bucket_cap_mb_list", "broadcast_buffers",
    "forward_sync_buffers", "init_sync",
}  # fmt: skip
TORCH_COLUMNS = {
    **{name: values if name in _TORCH_OPTIONS else values[:1] for name, values in COLUMNS.items()},
    **ACTIONS,
    "bucket_cap_mb": ("None", "0.0001", "25"),
    "transport": ("'c10d'",),
    "hosts": ("one",),
    "weigh": ("never",),
    "micro": ("one", "no_sync", "each", "loop", "two forwards", "retain"),
    "trainable": ("same", "frozen"),
    "wrapper": ("one", "two at once", "two in turn"),
}
TORCH_FAULTS = [
    _meaningless(
        "a rank without inputs uses all parameters",
        find_unused_parameters=YES,
        join=_but("join", "never"),
        use=_but("use", "all"),
    ),
    _meaningless(
        "waits for buckets that others skip", skip_all_reduce_unused_params=YES, join=_but("join", "never"), use="never"
    ),
    _meaningless(
        "waits for a message that a static graph doesn't send",
        static_graph=YES,
        find_unused_parameters=YES,
        join=_but("join", "never"),
    ),
    _meaningless("two wrappers can't share views", gradient_as_bucket_view=YES, wrapper={"two at once", "two in turn"}),
    _meaningless(
        "raises if what a second backward has used was cleared",
        find_unused_parameters=YES,
        micro="retain",
        use={"one rank"},
    ),
    _meaningless("stops reducing", static_graph=YES, wrapper={"two at once", "two in turn"}),
    _meaningless("meets a bug of its own", find_unused_parameters=YES, wrapper="two in turn", use=_but("use", "all")),
    _meaningless("crashes, or stops reducing", static_graph=YES, micro=_but("micro", "one")),
    _meaningless("has no sparse zeros to send", model="sparse", use=_but("use", "all")),
    _meaningless("refuses this hook on CPUs", comm_hook=HOOK.format("bf16_compress")),
]
