"""Serve pages about this process over HTTP, by the standard library's WSGI server with a thread for each connection.

The server runs inside a training process, so clients are limited: MAX_CONNECTIONS connections, beyond which the oldest is dropped;
`timeout_seconds` for each wait for a client, and twice that for a whole connection. Only GET and HEAD are served.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import io
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, SupportsIndex
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client.exposition import ThreadingWSGIServer

from placement.core.errors import PlacementError

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

MAX_CONNECTIONS = 64
TIMEOUT_SECONDS = 5.0
CHORE_SECONDS = 5.0
_POLL_SECONDS = 0.1
TEXT = "text/plain; charset=utf-8"
JSON = "application/json"

_logger = logging.getLogger("placement.observe")


@dataclass(frozen=True, slots=True)
class Response:
    """The response of a page. A body in pieces is made while the client takes it."""

    status: HTTPStatus
    body: bytes | Iterable[bytes]
    content_type: str = TEXT
    headers: tuple[tuple[str, str], ...] = ()


def refusal(status: HTTPStatus) -> Response:
    """A plain-text response with the standard phrase of the status."""
    headers = (("Allow", "GET, HEAD"),) if status is HTTPStatus.METHOD_NOT_ALLOWED else ()
    return Response(status, f"{status.phrase}\n".encode(), headers=headers)


Page = Callable[["WSGIEnvironment"], Response]


class HttpServer:
    """Answers requests with pages until `close()`. A context manager; a forked child closes its copy.

    Args:
        pages: functions by path. A page that raises becomes a 500 response.
        port: the TCP port; 0 lets the system choose, see `port`.
        address: the address to bind, loopback by default. Others make the server reachable from other machines, without authentication.
        timeout_seconds: the limit of each wait for a client; a whole connection may last twice as long.

    Raises:
        PlacementError: the address and port cannot be bound.
        TypeError: the port is no number.
        ValueError: the address is empty, or the port is outside 0..65535.
    """

    def __init__(
        self, pages: Mapping[str, Page], *, port: int = 0, address: str = "127.0.0.1", timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        if not address:
            raise ValueError("address is empty, which would mean every interface; name one, such as 127.0.0.1")
        if not isinstance(port, SupportsIndex):
            raise TypeError(f"port={port!r} is no number; write port=8000, or port=0 for a free one")
        if not 0 <= port <= 65535:
            raise ValueError(f"port {port} is outside 0..65535; 0 takes a free one")
        self._pages = dict(pages)
        self._server = _listening(address, port, timeout_seconds)
        self._server.set_app(self._application)
        self.address = address
        self.port: int = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_SECONDS,), name=f"placement-observe-{self.port}", daemon=True
        )
        _SERVERS.add(self._server)
        try:
            self._thread.start()
        except RuntimeError as exc:
            self._server.server_close()
            raise PlacementError(f"cannot serve metrics on {address} port {self.port}: {exc}") from exc

    @property
    def url(self) -> str:
        """`http://host:port`, without a path. A server on every interface shows its loopback address."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.address, self.address)  # noqa: S104 (compared, not bound)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def close(self) -> None:
        """Stop serving and free the port. Idempotent, from any thread. Open connections are closed."""
        if self._server.is_closed:
            return
        self._server.is_closed = True
        if threading.current_thread() is self._thread:  # a chore: `shutdown` would wait for itself
            threading.Thread(target=self._server.shutdown, daemon=True).start()
        else:
            self._server.shutdown()
        self._server.server_close()
        self._server.drop(list(self._server.clients))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def do_regularly(self, chore: Callable[[], object]) -> None:
        """Call a short function on the server's thread every `CHORE_SECONDS`, beginning now. Its exceptions are logged."""
        self._server.chore, self._server.next_chore = chore, 0.0

    def _application(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        method = environ["REQUEST_METHOD"]
        served = method in ("GET", "HEAD")
        response = self._answer({**environ, "REQUEST_METHOD": "GET"}) if served else refusal(HTTPStatus.METHOD_NOT_ALLOWED)
        headers = [("Content-Type", response.content_type), ("Cache-Control", "no-store"), *response.headers]
        if isinstance(response.body, bytes):
            headers.append(("Content-Length", str(len(response.body))))
        start_response(f"{response.status.value} {response.status.phrase}", headers)
        if method == "HEAD":
            return []
        return [response.body] if isinstance(response.body, bytes) else response.body

    def _answer(self, environ: WSGIEnvironment) -> Response:
        page = self._pages.get(environ["PATH_INFO"])
        try:
            return page(environ) if page else refusal(HTTPStatus.NOT_FOUND)
        except Exception as exc:  # an exception in a page is one client's 500, never the end of the server
            _logger.debug("a page raised an exception", exc_info=True)
            # The type alone, because the message may hold secrets, and anybody may reach the port.
            return Response(HTTPStatus.INTERNAL_SERVER_ERROR, f"the page failed: {type(exc).__name__}\n".encode())


class _Handler(WSGIRequestHandler):
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(self.server.timeout_seconds)

    def log_message(self, *arguments: Any) -> None:
        _logger.debug(*arguments)

    def get_stderr(self) -> Any:  # wsgiref prints the traceback of a client that hangs up
        return io.StringIO()


class _Server(ThreadingWSGIServer):
    """prometheus_client's server, with limits on its clients."""

    request_queue_size = 2 * MAX_CONNECTIONS  # of the standard library's 5, the sixth of a burst waits a second, until its TCP tries again
    timeout_seconds = TIMEOUT_SECONDS
    is_closed = False
    chore: Callable[[], object] | None = None
    next_chore = 0.0

    def __init__(self, *arguments: Any) -> None:
        self.clients: dict[socket.socket, float] = {}
        """The time at which each open connection began, oldest first."""
        super().__init__(*arguments)

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError:
            time.sleep(0.05)  # out of file descriptors: the listener stays readable, and the loop must not spin
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self.clients) >= MAX_CONNECTIONS:
            self.drop(list(self.clients)[:1])
        self.clients[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.clients.pop(request, None)
        super().shutdown_request(request)

    def drop(self, clients: Iterable[socket.socket]) -> None:
        for client in clients:
            self.clients.pop(client, None)
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def service_actions(self) -> None:
        now = time.monotonic()
        self.drop([client for client, began in list(self.clients.items()) if now - began > 2 * self.timeout_seconds])
        if self.chore is not None and self.next_chore <= now:
            self.next_chore = now + CHORE_SECONDS
            try:
                self.chore()
            except Exception as exc:
                _logger.debug("%s failed: %s", self.chore, exc)

    def handle_error(self, request: Any, client_address: Any) -> None:
        _logger.debug("client lost", exc_info=True)

    def forget_in_child(self) -> None:
        """Close a forked child's copies of the sockets."""
        self.is_closed = True
        for each in (self.socket, *self.clients):
            each.close()


def _listening(address: str, port: int, timeout_seconds: float) -> _Server:
    try:
        family, *_, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        kind = type("_Server", (_Server,), {"address_family": family, "timeout_seconds": timeout_seconds})
        server: _Server = kind(target[:2], _Handler)
    except OSError as exc:
        raise PlacementError(f"cannot serve metrics on {address} port {port}: {exc}") from exc
    return server


# Data loaders fork. A child with the listening socket would hold the port after its parent's death, and never answer on it.
_SERVERS: weakref.WeakSet[_Server] = weakref.WeakSet()


def _forget_all_in_child() -> None:
    for server in list(_SERVERS):
        server.forget_in_child()


os.register_at_fork(after_in_child=_forget_all_in_child)


_FILES = {"/": ("index.html", "text/html; charset=utf-8"), "/page.js": ("page.js", "text/javascript; charset=utf-8")}
_HEADERS = (
    ("Content-Security-Policy", "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"),
    ("X-Content-Type-Options", "nosniff"),
)


def status_pages() -> dict[str, Page]:
    """The page and its script, by path, for a server that also serves `/workers`."""
    return {path: _page(name, content_type) for path, (name, content_type) in _FILES.items()}


def _page(name: str, content_type: str) -> Page:
    def page(_: WSGIEnvironment) -> Response:
        body = importlib.resources.files(__package__).joinpath("page", name).read_bytes()
        return Response(HTTPStatus.OK, body, content_type, _HEADERS)

    return page
