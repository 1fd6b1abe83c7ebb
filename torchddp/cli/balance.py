"""How the updates of a model would be shared out among ranks, for `torchddp doctor --model`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from torchddp.harness.model_names import check_model_name
from torchddp.harness.models import make_model
from torchddp.harness.tables import bytes_text, ranks_text
from torchddp.harness.variants import ArgumentError
from torchddp.sharded.cost import modelled
from torchddp.sharded.partition import ParameterPartition, Share
from torchddp.simulate.network import MAX_RANKS


@dataclass(frozen=True)
class Balance:
    matrices: int
    shares: list[Share]


def hidden_matrices(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that Muon is for: of two or three dimensions, without embeddings and the output head."""
    embeddings = [part.weight for part in module.modules() if isinstance(part, nn.Embedding)]
    head = [part.weight for part in module.modules() if isinstance(part, nn.Linear)][-1:]
    others = {*embeddings, *head}
    return [p for p in module.parameters() if p.dim() in (2, 3) and p.requires_grad and p not in others]


def balance_of(model: str, ranks: int) -> Balance:
    """With Muon on hidden matrices and AdamW on the rest, as `torchddp.optim.OSS` chooses owners."""
    if not 1 <= ranks <= MAX_RANKS:
        raise ArgumentError(f"--world-size must be 1 to {MAX_RANKS}, not {ranks}.")
    check_model_name(model)
    module = make_model(model)
    matrices = hidden_matrices(module)
    chosen = set(matrices)
    others = [param for param in module.parameters() if param.requires_grad and param not in chosen]
    partition = ParameterPartition(0, ranks)
    partition.set_groups([{"params": matrices}, {"params": others}])
    costs = [modelled("Muon", param.shape, {}) for param in matrices]
    partition.costs = [*costs, *(modelled("AdamW", param.shape, {}) for param in others)]
    wanted = partition.trainable()
    partition.assign(partition.plan(wanted), wanted)
    return Balance(len(matrices), partition.shares())


def balance_title(found: Balance) -> str:
    matrices = f"{found.matrices} {'matrix' if found.matrices == 1 else 'matrices'}"
    return f"Muon on {matrices} and AdamW on the rest, {ranks_text(len(found.shares))}"


def balance_rows(found: Balance) -> list[tuple[str, str]]:
    whole = sum(share.cost for share in found.shares)
    rows = [
        (f"rank {s.rank}", f"{s.cost / whole:.1%} of the cost, {s.elements:,} elements, {bytes_text(s.bytes)}")
        for s in found.shares
    ]
    highest = max(s.cost for s in found.shares) * len(found.shares) / whole
    return [*rows, ("largest", f"{highest:.2f} times the mean cost")]
