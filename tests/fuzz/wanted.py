"""The intended differences from torch's class, each with its reason. Any other difference is a failure.

In these cases torch's behavior is undefined or wrong; draw.py excludes programs that can't be compared at all.
"""

from collections.abc import Callable

from tests.fuzz.compare import Difference, Strictness
from tests.fuzz.program import Part, Program

# With three or more ranks, gloo's ring adds in an order that depends on an element's place in the bucket, and the two
# classes lay out buckets differently; later values inherit the error. By the coarsest dtype of the program, relative to
# the largest element or to one, the magnitude of a part's gradients before averaging.
TOLERANCE = {"float64": 1e-9, "complex128": 1e-9, "float32": 2e-4, "complex64": 2e-4, "float16": 3e-2, "bfloat16": 2e-1}


def _part_of(program: Program, difference: Difference) -> Part:
    return program.parts[int(difference.name.split(".")[1])]  # "parts.3.weight"


ENDED_ITSELF = "end of torch's class"  # the kind of difference

# By reason.
ACCEPTED: dict[str, Callable[[Program, Difference], bool]] = {
    "torch's class itself ends the process, or does not come back: there is nothing to compare with": (
        lambda program, difference: difference.kind == ENDED_ITSELF
    ),
    "torch's class has no sparse zeros to send for parameters that a rank has not used, and raises; ours trains on": (
        lambda program, difference: (
            "Expected sparse gradient to be defined" in difference.want and difference.got == "goes on"
        )
    ),
    "torch's class meets a bug of its own: unused parameters, over accumulation or a retained graph; ours trains on": (
        lambda program, difference: (
            "This indicates a bug in DDP implementation" in difference.want
            # The program's hook may fail on the None that both classes pass for outputs that are not in the loss.
            and (
                difference.got == "goes on"
                or any(words in difference.got for words in ("'NoneType'", "a fault of a hook"))
            )
        )
    ),
    "a hook that raises, and a dense gradient where sparse ones were promised: which bucket comes first is layout": (
        lambda program, difference: (
            program.comm_hook == "failing" and "own fault" in difference.want and "sparse gradient" in difference.got
        )
    ),
    "torch's class waits in vain: another of its ranks has met one of its own errors; ours trains on": (
        lambda program, difference: (
            any(words in difference.want for words in ("Timed out waiting", "pair closure"))
            and difference.got == "goes on"
        )
    ),
    "torch's class can't average gradients that have a graph, nor detach its views: ours can": (
        lambda program, difference: (
            any(words in difference.want for words in ("a leaf Variable that requires grad", "Can't detach views"))
            and difference.got == "goes on"
        )
    ),
    "torch's class with batched_grad_copy divides gradients that are part of a graph (create_graph) twice": (
        lambda program, difference: (
            difference.kind == "gradient"
            and program.options.get("batched_grad_copy", False)
            and any("create_graph" in line for line in lines_of(program))
        )
    ),
    "with views, which gradients are part of a graph (create_graph) depends on when torch's class lays out its views": (
        lambda program, difference: (
            program.options.get("gradient_as_bucket_view") is True
            and any("create_graph" in line for line in lines_of(program))
            and difference.want.removesuffix(" requires_grad") == difference.got.removesuffix(" requires_grad")
        )
    ),
    "gradients that can't be added to: torch's class replaces those it finds when it lays out its views again": (
        lambda program, difference: (
            program.options.get("gradient_as_bucket_view") is True
            and any(
                words in difference.got and any(way in line for line in lines_of(program))
                for words, way in (
                    ("more than one element of the written-to tensor", "expand_as"),
                    ("Inplace update to inference tensor", "inference_mode(): halves"),
                )
            )
        )
    ),
    "_foreach_zero_ takes no .conj() of a tensor; torch's class resolves them in gradients that no rank used": (
        lambda program, difference: (
            "with conjugate inputs" in difference.got and any(".conj()" in line for line in lines_of(program))
        )
    ),
    "gloo can't sum this dtype: through torchddp_shm, the error also names rank and operation": (
        lambda program, difference: (
            program.backend != "gloo"
            and all("not implemented for" in text for text in (difference.want, difference.got))
        )
    ),
    "torch's class reduces gradients that no rank used, if they are views: only those equal on all ranks keep values": (
        lambda program, difference: (
            difference.kind == "gradient"
            and (
                program.comm_hook == "sum"
                or program.options.get("skip_all_reduce_unused_params")  # divided, and not reduced
                or any("[rank : " in line for line in lines_of(program))
            )
            and program.options.get("gradient_as_bucket_view") is True
            and program.options.get("find_unused_parameters", False)
            and (_part_of(program, difference).used != "always" or "freeze()" in lines_of(program))
        )
    ),
    "torch's class multiplies by 1 / world_size as a complex number, whose zero makes nan of inf and spreads nan": (
        lambda program, difference: (
            difference.kind == "gradient"
            and _part_of(program, difference).dtype.startswith("complex")
            and difference.want.startswith("nan ")
        )
    ),
}


def reason_for(program: Program, difference: Difference) -> str | None:
    """Why this difference is intended, or None if it is a failure."""
    return next((reason for reason, applies in ACCEPTED.items() if applies(program, difference)), None)


def lines_of(program: Program) -> list[str]:
    return [line for step in program.steps for line in step]


def strictness_for(program: Program) -> Strictness:
    """How closely the two classes are compared in this program."""
    return Strictness(
        tolerance=_tolerance(program),
        # By default our gradients are views of their buckets: a tensor that the program assigns to p.grad is then
        # replaced, as in torch's class with views, by a gradient with its parameter's layout.
        strides=not any(
            word in line for word in ("contiguous_format", "assign_flat", "expand_as") for line in lines_of(program)
        ),
        # With gradient_as_bucket_view=True kept gradients share the bucket in torch's class too: their later values
        # depend on its layout.
        kept=program.options.get("gradient_as_bucket_view") is not True,
        # A step without some gradients leaves others unreduced, until the next forward raises.
        values=not _lacks_gradients(program),
    )


def _lacks_gradients(program: Program) -> bool:
    copes = {"find_unused_parameters", "static_graph"} & program.options.keys()
    reentrant = any(part.kind == "checkpointed_reentrant" for part in program.parts)
    if reentrant and any("inputs=" in line for line in lines_of(program)):
        return True  # that backward runs no reentrant checkpoint
    return not copes and any(part.used != "always" or not part.in_loss for part in program.parts)


def _tolerance(program: Program) -> float:
    """Zero for up to two ranks: a sum of two numbers doesn't depend on order, and halving is exact."""
    if program.world_size <= 2:
        return 0.0
    dtypes = {part.dtype for part in program.parts}
    if any("autocast" in line for line in lines_of(program)):
        dtypes.add("bfloat16")
    if program.comm_hook in ("fp16", "builtin_fp16"):
        dtypes.add("float16")
    if any(part.kind in ("convolution", "buffered") for part in program.parts):
        dtypes.add("float32")
    return max(TOLERANCE[dtype] for dtype in dtypes)
