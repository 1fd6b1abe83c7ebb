"""What a model counts against what the kernel counts, between two network namespaces."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.two_hosts.launch import STORE_PORT, worker_environment
from benchmarks.two_hosts.network import NoNetworkError, inside, two_hosts

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.beyond_torch("torch counts no bytes")
def test_counted_bytes_are_those_of_the_interface() -> None:
    try:
        with two_hosts(1_000_000_000) as hosts:
            ranks = [
                subprocess.Popen(
                    inside(
                        host.namespace,
                        [sys.executable, "-m", "tests.wire_worker", str(rank), hosts[0].address, str(STORE_PORT)],
                    ),
                    cwd=ROOT,
                    env={**worker_environment(), "PYTHONPATH": str(ROOT)},
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for rank, host in enumerate(hosts)
            ]
            try:
                said = [rank.communicate(timeout=120)[0] for rank in ranks]
            finally:
                for rank in ranks:
                    rank.kill()
                    rank.wait()
    except NoNetworkError as error:
        pytest.skip(str(error))
    assert [rank.returncode for rank in ranks] == [0, 0], said
    for text in said:
        for name, bytes_of in json.loads(text.splitlines()[-1]).items():
            # Headers and acknowledgements come on top.
            assert 0.95 < bytes_of["sent"] / bytes_of["counted"] < 1.10, (name, bytes_of)
