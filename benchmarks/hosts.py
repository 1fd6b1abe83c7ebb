"""Two emulated hosts: network namespaces with a slow link between them. No interface of the machine is touched."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from torchddp.harness.launch import THIS_HOST, Place
from torchddp.harness.variants import ArgumentError

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
# The first host's namespace is new and used by nothing else, so every port is free there.
STORE_PORT = 29500
# The timeouts of launches suit links of at least this many bits per second; on slower links they are scaled up.
FULL_SPEED = 1_000_000_000
# Lets the last acknowledgements leave.
SETTLE_S = 0.02
CLONE_NEWNET = 0x40000000
# Addresses in a namespace have no names: silence the warnings and shorten DNS lookups, which no server answers.
ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": INTERFACE,
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "RES_OPTIONS": "attempts:1 timeout:1",
}

# The place without a link.
HOST = "host"
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


@dataclass(frozen=True, kw_only=True)
class TwoHosts(Place):
    """The place of ranks on both hosts: the first `ranks_per_host` on the first host, the others on the second."""

    hosts: tuple[Host, Host]
    ranks_per_host: int

    def init_method(self, folder: str) -> str:
        return f"tcp://{self.hosts[0].address}:{STORE_PORT}"

    def enter(self, rank: int) -> None:
        """Move this thread, and those that it will start, into the rank's namespace."""
        namespace = self.hosts[rank // self.ranks_per_host].namespace
        with open(f"/run/netns/{namespace}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) != 0:
                raise NoNetworkError(f"Cannot enter namespace {namespace}: {os.strerror(ctypes.get_errno())}.")


def sent_by_host() -> int:
    """Bytes that this host has sent over the link, as the kernel counts them."""
    (line,) = re.findall(rf"^\s*{INTERFACE}:(.*)$", Path("/proc/self/net/dev").read_text(), re.MULTILINE)
    return int(line.split()[8])


def quiet_count() -> int:
    """Collective: bytes that this host has sent, read while no rank sends."""
    dist.barrier()
    time.sleep(SETTLE_S)
    count = sent_by_host()
    dist.barrier()
    return count


def parse_place(text: str) -> int | None:
    """'host' -> None, one host; '1gbit', '2.5gbit', '100mbit' -> two hosts, joined by this many bits per second."""
    return None if text == HOST else parse_rate(text)


def place_text(rate: int | None) -> str:
    """'one host' or '1 Gbit/s'."""
    if rate is None:
        return "one host"
    return f"{rate / 1e9:g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:g} Mbit/s"


def parse_rate(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(mbit|gbit)", text.strip().lower())
    rate = round(float(found[1]) * _UNITS[found[2]]) if found else 0
    if not MIN_RATE <= rate <= MAX_RATE:
        raise ArgumentError(f"must be '{HOST}', or a rate of 10mbit to 100gbit like 500mbit or 2.5gbit, not '{text}'")
    return rate


def make_hosts(pid: int) -> tuple[Host, Host]:
    """The two hosts of process `pid`; their namespace names are unique to this run."""
    first, second = (Host(f"torchddp-{pid}-{index}", address) for index, address in enumerate(ADDRESSES))
    return first, second


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
    return commands


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
def two_hosts(rate: int, world_size: int = 2) -> Iterator[TwoHosts]:
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
        patience = max(1.0, FULL_SPEED / rate)
        yield TwoHosts(environment=ENVIRONMENT, patience=patience, hosts=hosts, ranks_per_host=world_size // 2)
    finally:
        cleaner.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            cleaner.wait(COMMAND_TIMEOUT_S)


@contextlib.contextmanager
def place_at(rate: int | None, world_size: int) -> Iterator[Place]:
    """One host, or two with a link of this rate."""
    if rate is None:
        yield THIS_HOST
        return
    with two_hosts(rate, world_size) as place:
        yield place
