"""How ranks share an exception, and which exceptions only follow from another rank's."""

import json
import pickle

import torch.distributed as dist

from torchddp import PeerFailedError, TransportError
from torchddp.diagnose.fail_together import FailTogether, Failure, is_consequence


def failure_of(error: BaseException, step: int | None = 7) -> Failure:
    try:
        raise error
    except BaseException as caught:
        return Failure.of(caught, 3, step)


def test_an_exception_survives_serialisation():
    posted = json.loads(json.dumps(failure_of(ValueError("no such file")).to_json()))
    error = Failure(**posted).error()
    assert str(error) == "rank 3 failed at step 7: ValueError: no such file"
    assert (error.rank, error.exception_type, error.message, error.step) == (3, "ValueError", "no such file", 7)
    assert "test_peer_failure.py" in error.remote_traceback
    assert isinstance(error, TransportError) and isinstance(error, RuntimeError)
    assert str(failure_of(KeyError("x"), None).error()) == "rank 3 failed: KeyError: 'x'"
    assert len(json.dumps(failure_of(ValueError("x" * 1_000_000)).to_json())) < 20_000
    raised_in_a_thread = FailTogether(None, 1.0)._error_class(failure_of(ValueError("no such file")))()
    for given in (error, raised_in_a_thread):
        copy = pickle.loads(pickle.dumps(given))
        assert type(copy) is PeerFailedError and str(copy) == str(error) and copy.rank == 3


def test_which_exceptions_are_consequences():
    for error, expected in (
        (TransportError("rank 0, step 3: bucket 1"), True),
        (PeerFailedError(1, "ValueError", "x"), True),
        (dist.DistNetworkError("failed to recv"), True),
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), True),
        (RuntimeError("Int8 on rank 0, step 3, bucket 1 (w): TransportError: rank 2 gave up"), True),
        (RuntimeError("CUDA error: out of memory"), False),
        (ValueError("gloo"), False),
        (KeyboardInterrupt(), False),
    ):
        assert is_consequence(error) is failure_of(error).is_consequence is expected, error
