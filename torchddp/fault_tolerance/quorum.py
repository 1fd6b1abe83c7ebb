"""Who takes part in a step, and what to say when nobody can tell."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from torchddp.errors import TransportError
from torchddp.fault_tolerance.lighthouse import ADDRESS_ENV, why_unreachable
from torchddp.fault_tolerance.manager_check import Manager

__all__ = ["count_participants"]


def count_participants(manager: Manager) -> int:
    """Over how many replicas this step averages; waits for the quorum, as long as the manager's time limits allow.

    Raises:
        RuntimeError: no quorum was started.
        TransportError: there is none, the lighthouse for instance is gone.
    """
    try:
        count = manager.num_participants()
    except Exception as error:
        raise TransportError(_no_quorum(manager, error)) from error
    if count < 1 and manager.errored() is None:
        raise RuntimeError(
            "backward() before manager.start_quorum(): start every step with it, or wrap the optimizer "
            "(torchft.Optimizer(manager, optimizer)) and call its zero_grad() before forward"
        )
    return max(count, 1)


def _no_quorum(manager: Any, error: Exception) -> str:
    replica = getattr(manager, "_replica_id", None)
    step = manager.current_step()
    text = f"replica {replica or '?'}, step {step}: torchft found no quorum: {error}"
    address = os.environ.get(ADDRESS_ENV, "")
    with contextlib.suppress(ValueError):
        if address and (problem := why_unreachable(address)):
            text += f". {problem[0].upper()}{problem[1:]}"
    return f"{text}. Restart the lighthouse, then this replica: the others heal it."
