"""All-reduces of other packages. A package that is missing or can't run is skipped, and the report says why."""

from __future__ import annotations

from torchddp.bench.collective.implementations import GLOO, OPENINGS, SHM, SHM_BACKEND, Local, Opening
from torchddp.bench.collective.peers.deepspeed_shm import DeepspeedShm
from torchddp.bench.collective.peers.mpi import MPICH_LIBRARY, OPEN_MPI_LIBRARY, Companions
from torchddp.bench.collective.peers.vllm_shm import VllmShm

MPICH, OPEN_MPI, VLLM, DEEPSPEED = MPICH_LIBRARY.name, OPEN_MPI_LIBRARY.name, "vllm", "deepspeed"

_PEERS: tuple[Opening, ...] = (
    (MPICH, lambda meet: Companions(MPICH_LIBRARY)),
    (OPEN_MPI, lambda meet: Companions(OPEN_MPI_LIBRARY)),
    (VLLM, lambda meet: Local(VllmShm(VLLM), meet)),
    (DEEPSPEED, lambda meet: Local(DeepspeedShm(DEEPSPEED), meet)),
)
_HERE = dict(OPENINGS)
# In the order of the table. Without the c10d transport, which here would just be gloo again.
OPENINGS_WITH_PEERS: tuple[Opening, ...] = (
    (GLOO, _HERE[GLOO]),
    *_PEERS,
    *((name, _HERE[name]) for name in (SHM, SHM_BACKEND)),
)
