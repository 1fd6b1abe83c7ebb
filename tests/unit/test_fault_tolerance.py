"""torchddp.fault_tolerance without a manager: lazy imports, public names, the lighthouse's address."""

import importlib.util
import socket

import pytest

from tests.programs import python
from torchddp import fault_tolerance
from torchddp.fault_tolerance.manager import check_lighthouse


def test_torchft_is_imported_only_on_use_and_reported_if_missing():
    done = python(
        "-c",
        "import sys, torchddp, torchddp.fault_tolerance\n"
        "print([m for m in sys.modules if m.startswith('torchft') or m.startswith('torchddp.fault_tolerance.')])\n"
        "sys.modules['torchft'] = None\n"
        "from torchddp.fault_tolerance import state_dict",
    )
    assert done.stdout.strip() == "[]", done.stderr
    assert done.returncode == 1
    assert done.stderr.endswith("ImportError: torchddp.fault_tolerance.state_dict needs torchft: pip install torchft\n")


def test_public_names_are_complete(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)  # as if torchft were installed
    assert all(callable(getattr(fault_tolerance, name)) for name in fault_tolerance.__all__)
    with pytest.raises(AttributeError, match="no attribute 'LocalSGD'"):
        _ = fault_tolerance.LocalSGD


def test_the_lighthouse_must_be_set_valid_and_reachable(monkeypatch):
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    with pytest.raises(ValueError, match="there is no lighthouse.*TORCHFT_LIGHTHOUSE"):
        check_lighthouse()
    for address in ("127.0.0.1:29510", "nonsense", "http://host", "http://host:port"):
        with pytest.raises(ValueError, match=f"a lighthouse's address is http://host:port, got .*{address}"):
            check_lighthouse(address)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(RuntimeError, match=f"no lighthouse answers at {address}"):
            check_lighthouse(address)
        listener.listen()
        monkeypatch.setenv("TORCHFT_LIGHTHOUSE", address)
        assert check_lighthouse() == address
