"""The pages of one manager (/metrics, /healthz, /state, /trace, /workers and the status page), over
HTTP.

They are served by prometheus_client's WSGI server with a thread for each connection. It runs inside
a training process, so clients are limited: MAX_CONNECTIONS connections, beyond which the oldest is
dropped; `timeout_seconds` for each wait for a client, and twice that for a whole connection. Only
GET and HEAD are served, and POST of the paths of control.
"""

from __future__ import annotations

import contextlib
import hmac
import importlib.resources
import io
import json
import logging
import math
import os
import select
import socket
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, SupportsIndex
from urllib.parse import parse_qs
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.exposition import ThreadingWSGIServer

from placement.core.errors import PlacementError
from placement.core.journal import Journal
from placement.core.snapshot import Snapshot, SuspensionRequest, SuspensionStatus
from placement.observe.collector import make_registry
from placement.observe.discovery import Announcement, Identity, Target
from placement.observe.trace import encoded_trace

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

MAX_CONNECTIONS = 128
TIMEOUT_SECONDS = 5.0
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


def refusal(status: HTTPStatus, reason: str = "", **headers: str) -> Response:
    body = f"{reason or status.phrase}\n".encode(errors="backslashreplace")
    return Response(status, body, headers=tuple(headers.items()))


Page = Callable[["WSGIEnvironment"], Response]
# how long to work before other threads may run. The interpreter would make a waiting thread wait
# for 5 ms.
_REST_SECONDS = 0.0003


class _Paced(CollectorRegistry):
    """A registry that lets other threads run in between, so that a phase that begins meanwhile does
    not wait for the whole page."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__()
        self._whole = registry

    def collect(self) -> Iterator[Metric]:
        rested = time.perf_counter()
        # all families come from one snapshot, however slowly they are written
        for family in list(self._whole.collect()):
            yield family
            if time.perf_counter() - rested > _REST_SECONDS:
                time.sleep(0)
                rested = time.perf_counter()


_HEADERS = (
    (
        "Content-Security-Policy",
        (
            "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; connect-src 'self'; "
            "img-src data:"
        ),
    ),
    ("X-Content-Type-Options", "nosniff"),
)


def _file(name: str, kind: str) -> Page:
    def page(_: WSGIEnvironment) -> Response:
        body = importlib.resources.files(__package__).joinpath("page", name).read_bytes()
        return Response(HTTPStatus.OK, body, f"{kind}; charset=utf-8", _HEADERS)

    return page


Control = Callable[[SuspensionRequest, Callable[[], bool]], SuspensionStatus]
_MOST_BYTES = 64 << 10  # the longest body that is read


class MetricsServer(ThreadingWSGIServer):
    """Serves the snapshots of `read()` over HTTP until `close()`. A context manager; a forked child
    closes its copy.

    `/metrics`: Prometheus text or OpenMetrics, as the client asks, gzip if it accepts that.
    `/healthz`: 200 "ok", or 503 with the broken handles' names. `/state`: the snapshot as JSON.
    `/trace`: the journal as a Chrome trace; `?seconds=60` limits it to the last minute. `/workers`:
    see `worker_view`. `/`: the status page. Any other path is a 404. A page that fails is a 500 for
    that client.

    Args:
        read: returns the snapshot; called on the server's threads once a request, never at
            construction.
        is_over: returns whether the manager is closed. Then every page is a 503.
        journal: the journal that `/trace` shows; None: an empty one.
        port: the TCP port; 0 lets the system choose, see `port`.
        address: the address to bind, loopback by default. Others make the server reachable from
            other machines, without authentication.
        control: what a POST of a path calls. `token`: who has it may ask; None: no one, a 404.
        timeout_seconds: the limit of each wait for a client; a whole connection may last twice as
            long.

    Raises:
        PlacementError: the address and port cannot be bound.
        TypeError: the port is no number.
        ValueError: the address is empty, or the port is outside 0..65535.
    """

    # with the standard library's 5, a sixth at once waits a second, until its TCP tries again
    request_queue_size = 2 * MAX_CONNECTIONS

    def __init__(
        self,
        read: Callable[[], Snapshot],
        *,
        is_over: Callable[[], bool] = lambda: False,
        journal: Journal | None = None,
        port: int = 0,
        address: str = "127.0.0.1",
        timeout_seconds: float = TIMEOUT_SECONDS,
        control: Mapping[str, Control] | None = None,
        token: str | None = None,
    ) -> None:
        if not address:
            raise ValueError(
                "address is empty, which would mean every interface; name one, such as 127.0.0.1"
            )
        if not isinstance(port, SupportsIndex):
            raise TypeError(
                f"port={port!r} is no number; write port=8000, or port=0 for a free one"
            )
        if not 0 <= port <= 65535:
            raise ValueError(f"port {port} is outside 0..65535; 0 takes a free one")
        self._read = read
        self._is_over = is_over
        self._journal = journal if journal is not None else Journal()
        self.address = address
        self.timeout_seconds = timeout_seconds
        # the address and labels under which this worker is scraped; None before it is announced
        self.target: Target | None = None
        self._announcement: Announcement | None = None
        self._exposition = make_wsgi_app(_Paced(make_registry(read)))
        self._pages: dict[str, Page] = {
            "/": _file("index.html", "text/html"),
            "/page.js": _file("page.js", "text/javascript"),
            "/metrics": self._metrics,
            "/healthz": self._healthz,
            "/state": self._state,
            "/trace": self._trace,
            "/workers": self._workers,
        }
        self._control, self._token = control or {}, token or ""
        if token:
            self._pages |= dict.fromkeys(self._control, self._do)
        self._is_closed = False
        # the time at which each open connection began, oldest first
        self._clients: dict[socket.socket, float] = {}
        try:
            addresses: Any = socket.getaddrinfo(
                address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            self.address_family, *_, socket_address = addresses[0]
            super().__init__(socket_address[:2], _Handler)
        except OSError as exc:
            raise PlacementError(f"cannot serve metrics on {address} port {port}: {exc}") from exc
        self.set_app(self._application)
        self.port: int = self.server_port
        self._thread = threading.Thread(
            target=self.serve_forever,
            args=(_POLL_SECONDS,),
            name=f"placement-observe-{self.port}",
            daemon=True,
        )
        _SERVERS.add(self)
        self._thread.start()

    @property
    def url(self) -> str:
        """`http://host:port`, without a path. A server on every interface shows its loopback
        address."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.address, self.address)  # noqa: S104 (compared, not bound)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def announce(self, folder: str | os.PathLike[str] | None, identity: Identity) -> None:
        """Set this worker's `target`, and keep its file in a discovery folder (None: no file) until
        `close()`.

        Raises:
            PlacementError: the folder cannot be written.
        """
        host = f"[{self.address}]" if ":" in self.address else self.address
        if self.address in ("0.0.0.0", "::"):  # noqa: S104 (compared, not bound)
            host = socket.gethostname()
        self.target = Target.of(f"{host}:{self.port}", identity)
        if folder is not None:
            self._announcement = Announcement(folder, self.target)

    def close(self) -> None:
        """Stop serving and free the port. Idempotent, from any thread. Open connections are
        closed."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._announcement is not None:
            self._announcement.close()
        # a garbage collection there ended the manager: `shutdown` would wait for itself
        if threading.current_thread() is self._thread:
            threading.Thread(target=self.shutdown, daemon=True).start()
        else:
            self.shutdown()
        self.server_close()
        self._drop(list(self._clients))

    def __exit__(self, *_: object) -> None:
        self.close()

    def _application(
        self, environ: WSGIEnvironment, start_response: StartResponse
    ) -> Iterable[bytes]:
        method = environ["REQUEST_METHOD"]
        methods = ("POST",) if environ["PATH_INFO"] in self._control else ("GET", "HEAD")
        if method in methods:
            response = self._answer({**environ, "REQUEST_METHOD": "GET"})
        else:
            response = refusal(HTTPStatus.METHOD_NOT_ALLOWED, Allow=", ".join(methods))
        headers = [
            ("Content-Type", response.content_type),
            ("Cache-Control", "no-store"),
            *response.headers,
        ]
        if isinstance(response.body, bytes):
            headers.append(("Content-Length", str(len(response.body))))
        start_response(f"{response.status.value} {response.status.phrase}", headers)
        if method == "HEAD":
            return []
        return [response.body] if isinstance(response.body, bytes) else response.body

    def _answer(self, environ: WSGIEnvironment) -> Response:
        page = self._pages.get(environ["PATH_INFO"])
        if page is None:
            return refusal(HTTPStatus.NOT_FOUND)
        try:
            if not self._is_over():
                response = page(environ)
                if not self._is_over():  # the manager may have been closed while the page was made
                    return response
            return refusal(HTTPStatus.SERVICE_UNAVAILABLE)
        # an exception in a page is one client's 500, never the end of the server
        except Exception as exc:
            _logger.debug("a page raised an exception", exc_info=True)
            # The type alone, because the message may hold secrets, and the port may be open to all.
            return Response(
                HTTPStatus.INTERNAL_SERVER_ERROR,
                f"the page failed: {type(exc).__name__}\n".encode(),
            )

    # --- the pages

    def _metrics(self, environ: WSGIEnvironment) -> Response:
        headers: dict[str, str] = {}

        def start_response(_: str, response_headers: Any, *__: Any) -> None:
            headers.update(response_headers)

        body = b"".join(self._exposition(environ, start_response))
        return Response(
            HTTPStatus.OK,
            body,
            headers.pop("Content-Type"),
            (("Vary", "Accept, Accept-Encoding"), *headers.items()),
        )

    def _healthz(self, _: WSGIEnvironment) -> Response:
        broken = [handle.name for handle in self._read().handles if handle.broken is not None]
        if broken:
            return Response(
                HTTPStatus.SERVICE_UNAVAILABLE, f"broken: {', '.join(broken)}\n".encode()
            )
        return Response(HTTPStatus.OK, b"ok\n")

    def _state(self, _: WSGIEnvironment) -> Response:
        return Response(HTTPStatus.OK, self._read().model_dump_json().encode(), JSON)

    def _trace(self, environ: WSGIEnvironment) -> Response:
        try:
            seconds = float(parse_qs(environ["QUERY_STRING"]).get("seconds", ["inf"])[-1])
        except ValueError:
            seconds = math.nan
        if not seconds >= 0:
            return refusal(HTTPStatus.BAD_REQUEST)
        return Response(HTTPStatus.OK, encoded_trace(self._journal, last_seconds=seconds), JSON)

    def _workers(self, _: WSGIEnvironment) -> Response:
        name = f"process {os.getpid()}"
        labels = dict[str, str]()
        if self.target is not None:
            name = self.target.name
            labels.update(self.target.labels)
        view = worker_view(self._read(), self._journal, name=name, labels=labels)
        return Response(HTTPStatus.OK, json.dumps([view]).encode(), JSON)

    def _do(self, environ: WSGIEnvironment) -> Response:
        """Carry out a client's request."""
        scheme, _, token = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
        is_right = hmac.compare_digest(token.encode("latin-1"), self._token.encode())
        if scheme.lower() != "bearer" or not is_right:
            return refusal(HTTPStatus.UNAUTHORIZED, **{"WWW-Authenticate": "Bearer"})
        try:
            length = environ.get("CONTENT_LENGTH") or "0"
            if not length.isdecimal() or "HTTP_TRANSFER_ENCODING" in environ:
                raise ValueError("the body needs a Content-Length")
            if len(length) > 9 or int(length) > _MOST_BYTES:
                return refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"over {_MOST_BYTES} bytes")
            body = environ["wsgi.input"].read(int(length))
            if len(body) < int(length):
                raise ValueError("the body ends before its Content-Length")
            request = SuspensionRequest.model_validate_json(body or b"{}")
            status = self._control[environ["PATH_INFO"]](request, environ["placement.has_gone"])
        except ValueError as error:
            return refusal(HTTPStatus.BAD_REQUEST, str(error))
        except PlacementError as error:
            return refusal(HTTPStatus.CONFLICT, str(error))
        return Response(HTTPStatus.OK, status.model_dump_json().encode(), JSON)

    # --- the standard library's server calls these

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError:
            # out of file descriptors: the listener stays readable, and the loop must not spin
            time.sleep(0.05)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._clients) >= MAX_CONNECTIONS:
            self._drop(list(self._clients)[:1])
        self._clients[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._clients.pop(request, None)
        super().shutdown_request(request)

    def _drop(self, clients: Iterable[socket.socket]) -> None:
        for client in clients:
            self._clients.pop(client, None)
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def service_actions(self) -> None:
        earliest = time.monotonic() - 2 * self.timeout_seconds
        clients = list(self._clients.items())
        self._drop([client for client, began in clients if began < earliest])

    def handle_error(self, request: Any, client_address: Any) -> None:
        _logger.debug("client lost", exc_info=True)


class _Handler(WSGIRequestHandler):
    server: MetricsServer

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(self.server.timeout_seconds)

    def get_environ(self) -> WSGIEnvironment:
        return {**super().get_environ(), "placement.has_gone": self._has_gone}

    def _has_gone(self) -> bool:
        """Whether the client has closed its connection, or was dropped."""
        self.server._clients[self.connection] = time.monotonic()  # one that is there may wait on
        poll = select.poll()
        poll.register(self.connection, select.POLLRDHUP)
        return bool(poll.poll(0))

    def log_message(self, *arguments: Any) -> None:
        _logger.debug(*arguments)

    def get_stderr(self) -> Any:  # wsgiref prints the traceback of a client that hangs up
        return io.StringIO()


_SERVERS: weakref.WeakSet[MetricsServer] = weakref.WeakSet()


def _forget_all_in_child() -> None:
    """Close a forked child's copies of the sockets. A data loader with the listening one would hold
    the port after its parent's death."""
    for server in list(_SERVERS):
        server._is_closed = True
        for copied_socket in (server.socket, *server._clients):
            copied_socket.close()


os.register_at_fork(after_in_child=_forget_all_in_child)


_Span = list[Any]  # name, begin and end

HISTORY_SECONDS = 300.0
_LAST = 20  # the number of state transitions and failures shown
_MOST_SPANS = 500  # the limit for each track. More spans than a page has pixels only make it slow.


def worker_view(
    snapshot: Snapshot, journal: Journal, *, name: str, labels: dict[str, str]
) -> dict[str, Any]:
    """The view of one worker.

    Returns:
        `name`, `labels` and `snapshot` (as JSON). `timeline`: for each handle its states in the
            last `HISTORY_SECONDS` as [state, begin, end]. `phases`: [phase, begin, end].
            `transitions` and `failures`: the last ones, newest first. Times are Unix time in
            seconds.
    """
    last = time.monotonic()
    first = last - HISTORY_SECONDS
    offset = time.time() - last
    records = list(journal)
    since: dict[str, tuple[str, float]] = {}
    timeline: defaultdict[str, list[_Span]] = defaultdict(list)
    phases: list[_Span] = []

    def add(spans: list[_Span], span_name: str, begin: float, end: float) -> None:
        if end >= first:
            shown_begin = round(max(begin, first) + offset, 3)
            spans.append([span_name, shown_begin, round(end + offset, 3)])

    births = dict[str, float]()
    for handle in snapshot.handles:
        births[handle.name] = last - sum(handle.state_seconds.values())
    for record in records:
        birth = births.get(record.handle, first)
        state, begin = since.get(record.handle, (record.source.value, birth))
        add(timeline[record.handle], state, begin, record.at_seconds)
        since[record.handle] = record.target.value, record.at_seconds
    for handle in snapshot.handles:
        birth = births[handle.name]
        state, begin = since.get(handle.name, (handle.state.value, birth))
        add(timeline[handle.name], state, begin, last)
    for span in journal.phase_spans():
        add(phases, span.phase, span.begin_seconds, span.end_seconds)
    return {
        "name": name,
        "labels": labels,
        "snapshot": snapshot.model_dump(mode="json"),
        "timeline": {
            handle.name: timeline[handle.name][-_MOST_SPANS:] for handle in snapshot.handles
        },
        "phases": phases[-_MOST_SPANS:],
        "transitions": [
            _picked(record, _OF_RECORD) | {"bytes": record.nbytes}
            for record in records[: -_LAST - 1 : -1]
        ],
        "failures": [
            _picked(failure, _OF_FAILURE) for failure in list(journal.failures)[: -_LAST - 1 : -1]
        ],
    }


_OF_RECORD = ("timestamp_seconds", "handle", "trigger", "phase", "skipped_bytes", "seconds")
_OF_FAILURE = ("timestamp_seconds", "handle", "trigger", "reason")


def _picked(source: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}
