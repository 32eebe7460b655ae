"""The server over real sockets on loopback: the pages, and clients that are broken, slow or
hostile."""

from __future__ import annotations

import gc
import gzip
import http.client
import os
import select
import signal
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

import placement
from placement.core.errors import PhaseError, PlacementError
from placement.core.snapshot import Snapshot
from placement.observe.discovery import Identity
from placement.observe.server import MAX_CONNECTIONS, MetricsServer
from tests.observe.managed import make_handle, make_snapshot, managed

Headers = dict[str, str]


@pytest.fixture
def snapshot() -> Snapshot:
    return make_snapshot(make_handle("actor"), make_handle("ref"))


@pytest.fixture
def server(snapshot: Snapshot) -> Iterator[MetricsServer]:
    with MetricsServer(lambda: snapshot) as running:
        yield running
    assert threads_of(running) == 0


def threads_of(server: MetricsServer) -> int:
    """Other tests of this process may have servers of their own."""
    return sum(
        thread.name == f"placement-observe-{server.port}" for thread in threading.enumerate()
    )


def connect(server: MetricsServer) -> socket.socket:
    return socket.create_connection((server.address, server.port), timeout=30)


def request(
    server: MetricsServer, path: str, method: str = "GET", **headers: str
) -> tuple[int, Headers, bytes]:
    connection = http.client.HTTPConnection(server.address, server.port, timeout=30)
    try:
        connection.request(
            method, path, headers={name.replace("_", "-"): value for name, value in headers.items()}
        )
        response = connection.getresponse()
        return (
            response.status,
            {name.lower(): value for name, value in response.getheaders()},
            response.read(),
        )
    finally:
        connection.close()


def read_to_end(client: socket.socket) -> bytes:
    return b"".join(iter(lambda: client.recv(65536), b""))


# Pages


def test_metrics_as_openmetrics_and_compressed(server: MetricsServer) -> None:
    accept = (
        "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"
    )
    _, headers, body = request(
        server, "/metrics", accept=accept, accept_encoding="deflate, gzip;q=0.9"
    )
    assert headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert headers["content-encoding"] == "gzip"
    assert "placement_state" in {
        family.name for family in parse_openmetrics(gzip.decompress(body).decode())
    }


def test_other_pages_and_methods_are_refused(server: MetricsServer) -> None:
    for path in ("/metrics/", "/../metrics", "/state.json"):
        assert request(server, path)[::2] == (404, b"Not Found\n")
    status, headers, _ = request(server, "/metrics", "POST")
    assert (status, headers["allow"]) == (405, "GET, HEAD")
    assert request(server, "/state", "HEAD")[::2] == (200, b"")


def test_state_is_the_snapshot(server: MetricsServer, snapshot: Snapshot) -> None:
    status, headers, body = request(server, "/state")
    assert (status, headers["content-type"]) == (200, "application/json")
    assert Snapshot.model_validate_json(body) == snapshot


def test_healthz_names_what_is_broken(server: MetricsServer) -> None:
    assert request(server, "/healthz")[::2] == (200, b"ok\n")
    broken = make_snapshot(
        make_handle("a"), make_handle("b", broken="secret detail"), make_handle("c", broken="more")
    )
    with MetricsServer(lambda: broken) as unwell:
        assert request(unwell, "/healthz")[::2] == (503, b"broken: b, c\n")


def test_a_failing_read_is_one_clients_error(snapshot: Snapshot) -> None:
    answers: list[Snapshot | Exception] = [RuntimeError("secret detail"), MemoryError(), snapshot]

    def read() -> Snapshot:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with MetricsServer(read) as server:
        assert request(server, "/metrics")[::2] == (500, b"the page failed: RuntimeError\n")
        assert request(server, "/state")[::2] == (500, b"the page failed: MemoryError\n")
        assert request(server, "/metrics")[0] == 200


# Broken and hostile clients


def test_scrapes_are_answered_beside_idle_connections(snapshot: Snapshot) -> None:
    # none of them times out
    with MetricsServer(lambda: snapshot, timeout_seconds=3600) as server, ExitStack() as stack:
        clients = [stack.enter_context(connect(server)) for _ in range(3 * MAX_CONNECTIONS)]
        for path in ("/metrics", "/healthz", "/state"):
            assert request(server, path)[0] == 200
        assert threads_of(server) == 1
        assert clients[0].recv(1) == b""  # the oldest made room
        clients[-1].sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert read_to_end(clients[-1]).endswith(b"ok\n")


def test_a_client_of_one_byte_at_a_time_is_cut_off(snapshot: Snapshot) -> None:
    with MetricsServer(lambda: snapshot, timeout_seconds=0.2) as server, connect(server) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nA: ")
        sent = 0
        while not select.select([client], [], [], 0.01)[0]:  # readable: an answer, or the end
            client.send(b"a")
            sent += 1
            if sent == 5:
                assert request(server, "/healthz")[0] == 200
        assert sent < 1000
        with suppress(ConnectionResetError):  # the byte that crossed the end
            assert client.recv(1) == b""


# Binding and closing


def test_loopback_by_default(server: MetricsServer) -> None:
    assert (server.address, server.url) == ("127.0.0.1", f"http://127.0.0.1:{server.port}")
    with socket.socket() as probe:  # a socket bound to every interface would answer here too
        assert probe.connect_ex(("127.0.0.2", server.port)) != 0


@pytest.mark.parametrize(
    ("address", "host"), [("0.0.0.0", "127.0.0.1"), ("localhost", "localhost"), ("::1", "[::1]")]
)
def test_other_addresses(snapshot: Snapshot, address: str, host: str) -> None:
    try:
        server = MetricsServer(lambda: snapshot, address=address)
    except PlacementError:
        if ":" in address:
            pytest.skip("no IPv6 here")
        raise
    with server:
        assert server.url == f"http://{host}:{server.port}"
        with socket.create_connection((host.strip("[]"), server.port)) as client:
            client.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
            assert read_to_end(client).endswith(b"ok\n")


def test_what_cannot_be_bound_is_named(server: MetricsServer, snapshot: Snapshot) -> None:
    with pytest.raises(PlacementError, match=rf"127\.0\.0\.1 port {server.port}: .*[Ii]n use"):
        MetricsServer(lambda: snapshot, port=server.port)
    # an address that no machine has
    with pytest.raises(PlacementError, match=r"192\.0\.2\.1 port 0"):
        MetricsServer(lambda: snapshot, address="192.0.2.1")
    assert request(server, "/healthz")[0] == 200


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"port": "8000"}, TypeError, "port='8000' is no number; write port=8000"),
        ({"port": 65536}, ValueError, r"outside 0\.\.65535"),
        ({"address": ""}, ValueError, "every interface"),
    ],
)
def test_plain_mistakes(
    snapshot: Snapshot, arguments: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        MetricsServer(lambda: snapshot, **arguments)


def test_close_frees_the_port_and_ends_everything(snapshot: Snapshot) -> None:
    server = MetricsServer(lambda: snapshot)
    with connect(server) as idle:
        request(server, "/healthz")
        server.close()
        server.close()
        assert idle.recv(1) == b""
    assert threads_of(server) == 0
    with pytest.raises(ConnectionRefusedError):
        connect(server)
    with MetricsServer(lambda: snapshot, port=server.port) as again:
        assert again.port == server.port
        assert request(again, "/healthz")[0] == 200


# The manager behind it


def served(tmp_path: Path) -> tuple[placement.Manager, torch.nn.Module, MetricsServer, Path]:
    """A manager with an offloaded model, its server, and the file that announces it."""
    manager, model = managed()
    server = manager.serve(discovery=tmp_path, identity=Identity(rank=3))
    (announced,) = tmp_path.glob("*.json")
    return manager, model, server, announced


def assert_gone(server: MetricsServer, announced: Path) -> None:
    server._thread.join(60)
    assert not server._thread.is_alive()
    assert not announced.exists()
    with pytest.raises(ConnectionRefusedError):
        connect(server)
    server.close()


@pytest.mark.parametrize("opened", [False, True])
def test_a_served_manager_that_is_dropped_closes_as_any_other(tmp_path: Path, opened: bool) -> None:
    manager, model, server, announced = served(tmp_path)
    values = manager.handles["actor"].state_dict()["weight"].clone()
    if opened:
        manager.enter("log_prob")
    request(server, "/state")
    alive = weakref.ref(manager)
    del manager
    gc.collect()
    assert alive() is None
    assert model.weight.equal(values)
    assert_gone(server, announced)


def test_a_served_manager_may_end_on_its_servers_own_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a collection that finds it happens to run."""
    manager, model, server, announced = served(tmp_path)
    values = manager.handles["actor"].state_dict()["weight"].clone()
    cycle: list[object] = [manager]
    cycle.append(cycle)
    del manager, cycle
    monkeypatch.setattr(server, "service_actions", gc.collect)
    assert_gone(server, announced)
    assert model.weight.equal(values)


def test_closing_the_manager_closes_every_server_of_it(tmp_path: Path) -> None:
    manager, _, server, announced = served(tmp_path)
    other = manager.serve()
    early = manager.serve()
    early.close()
    assert request(other, "/healthz")[0] == 200
    with manager.phase("log_prob"):
        with pytest.raises(PhaseError, match="is open"):
            manager.close()
        # refused: everything goes on
        assert [request(each, "/healthz")[0] for each in (server, other)] == [200, 200]
    manager.close()
    for each in (server, other, early):
        assert_gone(each, announced)
    manager.close()
    with pytest.raises(PlacementError, match="closed"):
        manager.serve()


def test_a_page_that_is_being_made_when_its_manager_closes_is_none(snapshot: Snapshot) -> None:
    over = threading.Event()

    def read() -> Snapshot:
        over.set()
        return snapshot

    with MetricsServer(read, is_over=over.is_set) as server:
        assert request(server, "/state")[0] == 503


# Forks


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_does_not_hold_the_port(snapshot: Snapshot) -> None:
    server = MetricsServer(lambda: snapshot)
    pending = connect(server)
    pending.sendall(b"GET /healthz HTTP/1.1\r\n")
    request(server, "/healthz")  # so that `pending` has been accepted
    child = os.fork()
    if child == 0:
        try:
            pending.close()
            server.close()  # nothing left to do
            os.kill(os.getpid(), signal.SIGSTOP)  # alive until the parent has done
        finally:
            os._exit(1)
    try:
        assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
        # The child's copies went without a trace: the parent serves on, the half-sent request too.
        assert request(server, "/healthz")[0] == 200
        pending.sendall(b"\r\n")
        assert read_to_end(pending).endswith(b"ok\n")
        server.close()
        with pytest.raises(ConnectionRefusedError):
            connect(server)
        with MetricsServer(lambda: snapshot, port=server.port) as again:
            assert request(again, "/healthz")[0] == 200
    finally:
        server.close()
        pending.close()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
