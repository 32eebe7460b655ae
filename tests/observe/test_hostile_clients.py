"""A worker goes on while its port is abused: idle and slow clients, garbage, endless requests."""

from __future__ import annotations

import http.client
import socket
import threading
from contextlib import ExitStack, suppress

from torch import nn

import placement
from placement.observe.server import MAX_CONNECTIONS
from placement.testing import SimulatedDevice, assert_nothing_resident

IDLE = 100
SCRAPES = 20


def test_scrapes_and_transitions_go_on() -> None:
    manager = placement.Manager(device=SimulatedDevice(1 << 20, chunk_bytes=4096))
    model = nn.Linear(32, 32)
    manager.register("actor", model, role="actor")
    threads = set(threading.enumerate())  # one of an earlier test may end during this one
    ended = threading.Event()

    def abuse(port: int, sent: bytes) -> None:
        while not ended.is_set():
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as client:
                client.sendall(sent)
                client.recv(1000)

    with manager.serve() as server, ExitStack() as stack:
        assert len(set(threading.enumerate()) - threads) == 1
        for _ in range(IDLE):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        slow = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        bodies = (b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\n\r\n", b"\x00\xff\x16\x03\x01garbage\r\n\r\n", b"POST / HTTP/1.1\r\n\r\n")
        abusers = [threading.Thread(target=abuse, args=(server.port, body)) for body in bodies]
        for thread in abusers:
            thread.start()
        try:
            for _ in range(SCRAPES):
                with suppress(OSError):  # it is cut off in time, as it should be
                    slow.sendall(b"G")
                with manager.phase("log_prob"):
                    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)  # of a second on an idle machine
                    connection.request("GET", "/metrics")
                    page = connection.getresponse().read()
                    connection.close()
                    assert b'placement_state{handle="actor",kind="module",state="GPU_RESIDENT"} 1.0' in page
                assert_nothing_resident(manager)
            assert len(set(threading.enumerate()) - threads) <= 1 + len(abusers) + MAX_CONNECTIONS
        finally:
            ended.set()
            for thread in abusers:
                thread.join(10)
    assert manager.handles["actor"].counters.transitions[placement.Trigger.LOAD] == SCRAPES
    assert not manager.handles["actor"].counters.failures
