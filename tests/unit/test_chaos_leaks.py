"""What chaos trials look at after a job, and the fault that needs care: connections that are closed."""

import os
import socket
import time

from benchmarks.chaos.fault import close_sockets
from benchmarks.chaos.leaks import Inventory, footprint, open_sockets
from benchmarks.chaos.outcome import Footprint


def listening() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def connected(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection."""
    return socket.create_connection(listener.getsockname()), listener.accept()[0]


def is_shut(end: socket.socket) -> bool:
    end.settimeout(0.2)
    try:
        return end.recv(1) == b""
    except TimeoutError:
        return False


def test_listening_sockets_are_seen_until_they_are_closed() -> None:
    before = frozenset(open_sockets().values())
    inventory = Inventory()
    with listening() as server:
        mine = footprint(before)
        assert len(mine.listening) == 1
        assert any("listening socket" in text for text in inventory.leaks([mine]))
        assert footprint(frozenset(open_sockets().values())) == Footprint()
        ours, theirs = connected(server)
        assert footprint(before).listening == mine.listening  # connections do not listen
    ours.close()
    theirs.close()
    assert inventory.leaks([mine]) == []


def test_a_process_that_is_left_is_told_and_ended() -> None:
    inventory = Inventory()
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    (found,) = inventory.leaks([])
    assert found.startswith(f"process {pid} (")
    assert inventory.leaks([]) == []


def test_connections_are_shut_but_for_the_stores_and_older_ones() -> None:
    with listening() as store, listening() as peer:
        old = connected(peer)
        spared = frozenset(open_sockets().values())
        to_store, to_peer = connected(store), connected(peer)
        pair = socket.socketpair()
        assert close_sockets(spared, store.getsockname()[1]) == 4  # both ends are of this process
        assert [is_shut(ends[0]) for ends in (old, to_store, to_peer, pair)] == [False, False, True, True]
        for end in (*old, *to_store, *to_peer, *pair):
            end.close()
