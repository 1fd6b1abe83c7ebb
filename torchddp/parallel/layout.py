"""Which ranks hold which part: what a config means in a world of a given size. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from torchddp.parallel.config import ParallelConfig


@dataclass(frozen=True)
class Layout:
    """What to do, and the two sizes whose product is the number of ranks.

    Rank r is number ``r % model_parallel`` of its model-parallel group, which is neighbours, and number
    ``r // model_parallel`` of its data-parallel group.
    """

    kind: str  # none, ddp, sharded, fsdp, hsdp
    data_parallel: int
    model_parallel: int
    replicates: bool = False  # fsdp: by a mesh whose second dimension is one rank
    reshard_after_forward: bool = True

    def __post_init__(self) -> None:
        assert self.data_parallel >= 1 and self.model_parallel >= 1

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.data_parallel * self.model_parallel


def plan_layout(config: ParallelConfig, world_size: int, ranks_of_a_host: int, tensor_parallel: bool) -> Layout:
    """The layout of ``config`` among ``world_size`` ranks.

    ``ranks_of_a_host``: what a model-parallel group of HSDP is by default. ``tensor_parallel``: the model's parameters
    are DTensors already. Raises ValueError if sizes don't multiply to the world size, for model parallelism that
    neither HSDP nor the model's own plan gives, and for a plan of its own with a kind that can't take it.
    """
    kind = config.chosen_kind
    wanted = config.model_parallel
    if wanted is None:
        # Of several hosts that have equally many ranks; else one group of all.
        even = world_size % ranks_of_a_host == 0
        wanted = (ranks_of_a_host if even else world_size) if kind == "hsdp" else 1
    data_parallel, model_parallel = _sizes(config, world_size, wanted)
    if world_size > 1:
        _check_plan(kind, model_parallel, tensor_parallel)
    if world_size == 1 or (kind == "ddp" and data_parallel == 1):
        kind = "none"  # nothing to average
    strategy = config.sharding_strategy
    return Layout(
        kind,
        data_parallel,
        model_parallel,
        replicates=strategy == "NO_SHARD",
        reshard_after_forward=strategy not in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2", "NO_SHARD"),
    )


def _sizes(config: ParallelConfig, world_size: int, model_parallel: int) -> tuple[int, int]:
    """(data_parallel, model_parallel)."""
    data_parallel = config.data_parallel
    if data_parallel is not None and config.model_parallel is None and config.chosen_kind == "hsdp":
        model_parallel = max(1, world_size // data_parallel)
    if data_parallel is None:
        data_parallel = max(1, world_size // model_parallel)
    if data_parallel * model_parallel != world_size:
        raise ValueError(
            f"data_parallel {data_parallel} x model_parallel {model_parallel} is {data_parallel * model_parallel}, but "
            f"there are {world_size} ranks: their product must be the number of ranks (leave data_parallel out to have "
            "it computed)"
        )
    return data_parallel, model_parallel


def _check_plan(kind: str, model_parallel: int, tensor_parallel: bool) -> None:
    if tensor_parallel:
        if kind in ("sharded", "hsdp"):
            raise ValueError(
                f"kind '{kind}' on a model whose parameters are DTensors already: allowed: 'ddp' and 'fsdp' over the "
                "data-parallel dimension of the mesh"
            )
        if model_parallel == 1:
            raise ValueError(
                "the model's parameters are DTensors, but model_parallel is 1: set it to the number of ranks of the "
                "model's tensor parallel plan"
            )
    elif model_parallel > 1 and kind in ("ddp", "fsdp", "sharded"):
        raise ValueError(
            f"model_parallel {model_parallel} with kind '{kind}' on a model without a tensor parallel plan: call "
            "parallelize_module(model, torchddp.parallel.device_mesh(config)['mp'], plan) first, or take kind 'hsdp' "
            "to shard each copy over these ranks"
        )
