"""Two ranks over NCCL that share one GPU, which NCCL 2.30 and later allow: parity, overlap, and lost peers.

TORCHDDP_TEST_NCCL is the path of such a libnccl.so.2 (for tests/gpu/run.sh, also of a folder with its parts); torch may
ship an older one. These tests cover correctness only: one chip does the work of both ranks.
"""

import os
from pathlib import Path

import pytest

from tests.gpu.cases import CASES, LARGE_BYTES
from tests.gpu.device import chosen_device
from tests.gpu.ranks import (
    FAULT_TIMEOUT_S,
    assert_same_as_torch,
    overlap_of_a_step,
    run_all_cases,
    torchs_communicator_after_a_step,
    train_until_fault,
)
from tests.harness import run_outcomes, run_ranks

LIBRARY_ENV = "TORCHDDP_TEST_NCCL"
FIRST_VERSION = (2, 30, 0)
# Both ranks' kernels must run on the chip at the same time, and there is no NVSwitch to reduce for them.
ENVIRONMENT = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4", "NCCL_NVLS_ENABLE": "0"}
# gloo for all other communication, so that our communicator, not torch's, detects a lost peer.
BACKEND = "cpu:gloo,cuda:nccl"
MARGIN_S = 15.0

LAUNCH = {"start_method": "spawn", "backend": BACKEND}


@pytest.fixture(scope="module")
def two_ranks_a_gpu():
    """Set the environment so that new ranks load the newer library."""
    library = os.environ.get(LIBRARY_ENV, "")
    if not library:
        pytest.skip(f"{LIBRARY_ENV} names no NCCL 2.30 or newer, and older ones refuse two ranks on one GPU")
    if not Path(library).is_file():
        pytest.fail(f"{LIBRARY_ENV}: there is no file '{library}'")
    if chosen_device().type != "cuda":
        pytest.skip("needs a GPU, this run is on the CPU")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        # Found before torch's, which has the same name, libnccl.so.2.
        patch.setenv("LD_PRELOAD", str(Path(library).resolve()))
        yield


@pytest.fixture(scope="module", params=[LARGE_BYTES, 0], ids=["large_apart", "packed"])
def outcomes(two_ranks_a_gpu, request):
    return run_ranks(run_all_cases, 2, "nccl", FIRST_VERSION, request.param, timeout=90, **LAUNCH)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.slow])
def test_same_as_torch(outcomes, name):
    assert_same_as_torch(outcomes, name)


@pytest.mark.profiler
def test_collectives_run_beside_the_computation(two_ranks_a_gpu):
    for rank, found in enumerate(run_ranks(overlap_of_a_step, 2, "nccl", timeout=60, **LAUNCH)):
        assert found.collectives >= 8, f"rank {rank}: {found}"
        assert found.on_their_own_stream == found.collectives, f"rank {rank}: {found}"
        # All except the last bucket's, whose gradients are computed last.
        assert found.begun_before_the_end >= found.collectives // 2, f"rank {rank}: {found}"
        assert found.overlapped_us > 0, f"rank {rank}: {found}"


def test_torchs_own_communicator_is_not_created(two_ranks_a_gpu):
    assert run_ranks(torchs_communicator_after_a_step, 2, "nccl", timeout=60, **LAUNCH) == [0, 0]


@pytest.mark.parametrize("fault", ["late", "killed", "stopped"])
def test_a_lost_peer_is_an_error_within_the_timeout(two_ranks_a_gpu, fault):
    """The process then exits by itself; a nonzero exit code counts as an error."""
    first, _ = run_outcomes(train_until_fault, 2, "nccl", fault, timeout=60, needed_ranks=[0], **LAUNCH)
    assert first.error is None, first.error
    types, text, seconds = first.value
    assert "TransportError" in types, f"{types}: {text}"
    assert "rank 0" in text.lower() and "bucket" in text.lower(), text
    assert seconds < FAULT_TIMEOUT_S + MARGIN_S, f"{seconds:.1f} s: {text}"
