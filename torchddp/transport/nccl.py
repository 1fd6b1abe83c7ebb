"""How the ranks of a process group make a NCCL communicator of their own: over the group's store, and all or none."""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from torchddp import _C
from torchddp.transport.agreement import Peer, StoreExchange, connect_all, part_of_store

# From here on NCCL takes several ranks of one GPU, if this variable is 1.
_SHARED_GPU_VERSION = 23000
_SHARED_GPU_ENV = "NCCL_MULTI_RANK_GPU_ENABLE"
_CONNECT_TIMEOUT = datetime.timedelta(minutes=2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NcclPeer(Peer):
    """See `Peer`."""

    size: int
    device: str  # equal only for one and the same GPU
    version: int  # of NCCL, as 22907
    shares_gpu: bool  # NCCL was told to take several ranks of one GPU
    id: str  # rank 0's: what all are to connect with

    @classmethod
    def of_this_rank(cls, process_group: dist.ProcessGroup, device: torch.device) -> NcclPeer:
        """This rank's own. Never raises: what went wrong is the problem."""
        version, identity, own_id, problem = 0, "", b"", ""
        try:
            if (versions := _C.nccl_versions()) is None:
                raise RuntimeError("this torchddp was built without CUDA")
            if unfit := _C.nccl_version_problem(*versions):
                raise RuntimeError(unfit)
            version = versions[0]
            bound = getattr(process_group, "bound_device_id", None)
            if bound is not None and bound.index is not None and bound.index != _index_of(device):
                raise ValueError(f"the process group is bound to {bound}, but the model is on {device}")
            identity = _C.device_identity(_index_of(device))
            own_id = _C.make_nccl_id() if process_group.rank() == 0 else b""
        except (RuntimeError, ValueError) as error:
            problem = str(error)
        return cls(
            problem=problem,
            size=process_group.size(),
            device=identity,
            version=version,
            shares_gpu=os.environ.get(_SHARED_GPU_ENV) == "1",
            id=own_id.hex(),
        )


def reason_against(peers: Sequence[NcclPeer]) -> str:
    """Why these ranks can't make a communicator, the same on all of them; or nothing."""
    for rank, peer in enumerate(peers):
        if peer.size != len(peers):
            return f"rank {rank} counts {peer.size} ranks in the process group, which has {len(peers)}"
        if peer.version != peers[0].version:
            return f"rank 0 runs NCCL {_text(peers[0].version)}, rank {rank} {_text(peer.version)}"
    first_on: dict[str, int] = {}
    for rank, peer in enumerate(peers):
        other = first_on.setdefault(peer.device, rank)
        if other != rank and not (peer.shares_gpu and peer.version >= _SHARED_GPU_VERSION):
            return (
                f"ranks {other} and {rank} are on the same GPU ({peer.device}); NCCL takes one rank a GPU (from 2.30 "
                f"on several, with {_SHARED_GPU_ENV}=1; this is {_text(peer.version)})"
            )
    return ""


def connect(
    process_group: dist.ProcessGroup,
    device: torch.device,
    timeout: datetime.timedelta,
    exchange: StoreExchange | None = None,
) -> _C.NcclTransport | str:
    """Collective. A transport on every rank, or on every rank the same reason why not.

    Args:
        device: the CUDA device of this rank's model.
        timeout: how long an operation may take once the device has got to it.
        exchange: None: over the group's store.
    """
    rank, size = process_group.rank(), process_group.size()

    def join(peers: Sequence[NcclPeer]) -> _C.NcclTransport:
        return _C.NcclTransport(
            bytes.fromhex(peers[0].id),
            rank=rank,
            size=size,
            device_index=_index_of(device),
            connect_timeout=_CONNECT_TIMEOUT,
            timeout=timeout,
        )

    if exchange is None:
        # What a rank has to say may have taken it as long as connecting may.
        store = part_of_store(process_group, "nccl")
        exchange = StoreExchange(store, rank, size, 2 * _CONNECT_TIMEOUT, "the set-up of NCCL")
    return connect_all(exchange, NcclPeer.of_this_rank(process_group, device), reason_against, join)


def _index_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _text(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
