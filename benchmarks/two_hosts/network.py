"""Two network namespaces and the slow link between them. Touches no interface of the machine itself."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchddp.harness.variants import ArgumentError

RANKS_PER_HOST = 2
# The same name at both ends; the pair is created inside the namespaces and never visible outside.
INTERFACE = "slow0"
ADDRESSES = ("10.213.77.1", "10.213.77.2")
MIN_RATE, MAX_RATE = 10_000_000, 100_000_000_000
# The burst size: a millisecond's worth, and at least one packet of the kernel's maximum size.
MIN_BURST_BYTES = 64 * 1024
BURST_S = 0.001
# A packet that would queue for longer is dropped, as in a switch with a deep buffer.
QUEUE_MS = 50
COMMAND_TIMEOUT_S = 10.0

_UNITS = {"mbit": 1e6, "gbit": 1e9}
# Its stdin closes when the benchmark ends, however it ends; then it deletes the namespaces, and with them the link.
_CLEAN_UP = 'cat > /dev/null; for name; do ip netns del "$name"; done'


class NoNetworkError(ArgumentError):
    """The emulated network can't be created on this machine or by this user. The message is one sentence."""


@dataclass(frozen=True)
class Host:
    """One side of the link."""

    namespace: str
    address: str


def parse_rate(text: str) -> int:
    """'1gbit', '2.5gbit', '100mbit' -> bits per second."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(mbit|gbit)", text.strip().lower())
    rate = round(float(found[1]) * _UNITS[found[2]]) if found else 0
    if not MIN_RATE <= rate <= MAX_RATE:
        raise ArgumentError(f"--rate must be 10mbit to 100gbit, like 500mbit or 2.5gbit, not '{text}'.")
    return rate


def make_hosts(pid: int) -> tuple[Host, Host]:
    """The two hosts of process `pid`; their namespace names are unique to this run."""
    first, second = (Host(f"torchddp-{pid}-{index}", address) for index, address in enumerate(ADDRESSES))
    return first, second


def inside(namespace: str, command: Sequence[str]) -> list[str]:
    """Wraps the command to run in a namespace, with that namespace's /sys."""
    return ["ip", "netns", "exec", namespace, *command]


def burst_bytes(rate: int) -> int:
    """The bucket size of the rate limit."""
    return max(MIN_BURST_BYTES, round(rate / 8 * BURST_S))


def setup_commands(hosts: Sequence[Host], rate: int) -> list[list[str]]:
    """The commands that build the network: each end sends at most `rate` bits per second."""
    first, second = hosts
    peer = ["peer", "name", INTERFACE, "netns", second.namespace]
    commands = [["ip", "netns", "add", host.namespace] for host in hosts]
    commands.append(["ip", "-n", first.namespace, "link", "add", INTERFACE, "type", "veth", *peer])
    for host in hosts:
        limit = f"rate {rate}bit burst {burst_bytes(rate)} latency {QUEUE_MS}ms".split()
        commands += [
            ["ip", "-n", host.namespace, "addr", "add", f"{host.address}/30", "dev", INTERFACE],
            ["tc", "-n", host.namespace, "qdisc", "add", "dev", INTERFACE, "root", "tbf", *limit],
            ["ip", "-n", host.namespace, "link", "set", "lo", "up"],
            ["ip", "-n", host.namespace, "link", "set", INTERFACE, "up"],
        ]
    # Fails early if entering a namespace with its own /sys is forbidden, even though creating one is allowed.
    commands += [inside(host.namespace, ["cat", tx_bytes_path()]) for host in hosts]
    return commands


def tx_bytes_path() -> str:
    """The kernel's counter of bytes sent by this side of the link, as a path inside the namespace."""
    return f"/sys/class/net/{INTERFACE}/statistics/tx_bytes"


def check_supported() -> None:
    """Checks for root and the required tools; raises `NoNetworkError` naming what is missing."""
    if os.geteuid() != 0:
        raise NoNetworkError("Two emulated hosts need network namespaces, which require root: run this as root.")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise NoNetworkError(f"The program '{tool}' was not found; on Debian: apt-get install iproute2.")


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoNetworkError(f"Cannot build the emulated network: {error}.") from error
    if done.returncode != 0:
        said = " ".join(done.stderr.split()).rstrip(".") or f"exit code {done.returncode}"
        raise NoNetworkError(f"This kernel refused the emulated network: '{shlex.join(command)}' said: {said}.")


@contextlib.contextmanager
def two_hosts(rate: int) -> Iterator[tuple[Host, Host]]:
    """Provides the network during the block, and removes it however the block, or the whole process, ends."""
    check_supported()
    hosts = make_hosts(os.getpid())
    # In its own session, where Ctrl-C does not reach it.
    cleaner = subprocess.Popen(
        ["sh", "-c", _CLEAN_UP, "sh", *(host.namespace for host in hosts)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert cleaner.stdin is not None
    try:
        for command in setup_commands(hosts, rate):
            _run(command)
        yield hosts
    finally:
        cleaner.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            cleaner.wait(COMMAND_TIMEOUT_S)
