"""A small HTTP server for pages about this process. The pages themselves are elsewhere.

It runs inside a training process, so a client must not be able to take much of that process's time. ONE thread serves all connections
through a selector. A client that sends nothing, or one byte a second, occupies a slot but no thread. A connection has
`timeout_seconds` for its whole request head, and as long again for each piece of the answer. When all slots are taken, the oldest
connection is dropped. Only GET and HEAD are served, without request bodies, one request for each connection.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from types import TracebackType
from typing import Self, SupportsIndex

from placement.core.errors import PlacementError
from placement.core.weak_set import WeakIdSet
from placement.observe.messages import MAX_HEAD_BYTES, RefusedError, Request, Response, parse_head, refusal

MAX_CONNECTIONS = 64
TIMEOUT_SECONDS = 5.0
CHORE_SECONDS = 5.0
# SIGPIPE may have its default action: a client that hangs up must not end a training run.
_SEND_FLAGS = getattr(socket, "MSG_NOSIGNAL", 0)

_CLOSED = refusal(HTTPStatus.SERVICE_UNAVAILABLE).encode(with_body=True)

_logger = logging.getLogger("placement.observe")

Page = Callable[[Request], Response]


class _Connection:
    """One client. Its request head is received, then the answer is sent, then remaining input is discarded."""

    def __init__(self, client: socket.socket, deadline: float) -> None:
        self.socket = client
        self.head = bytearray()
        self.answer: memoryview | None = None
        self.rest: Iterator[bytes] = iter(())
        """Pieces of the answer that are made only when the client has taken the earlier ones."""
        self.deadline = deadline


class HttpServer:
    """Answers requests with pages until `close()`. A context manager; a forked child closes its copy.

    Args:
        pages: functions by path. They run on the server's thread, so a page must not wait. A page that raises becomes a 500 response.
        port: the TCP port; 0 lets the system choose, see `port`.
        address: the address to bind, loopback by default. Others make the server reachable from other machines, without authentication.
        timeout_seconds: the limit for the whole request head, and again for each piece of the answer.

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
        self._timeout_seconds = timeout_seconds
        self._chore: Callable[[], object] | None = None
        self._next_chore = 0.0
        self._connections: dict[socket.socket, _Connection] = {}  # oldest first
        self._closing = False
        self._listener = _listen(address, port)
        self.address = address
        self.port: int = self._listener.getsockname()[1]
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, lambda reader: reader.recv(64))
        self._thread = threading.Thread(target=self._serve, name=f"placement-observe-{self.port}", daemon=True)
        _SERVERS.add(self)
        try:
            self._thread.start()
        except RuntimeError as exc:
            self._close_descriptors()
            raise PlacementError(f"cannot serve metrics on {address} port {self.port}: {exc}") from exc

    @property
    def url(self) -> str:
        """`http://host:port`, without a path. A server on every interface shows its loopback address."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.address, self.address)  # noqa: S104 (compared, not bound)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def close(self) -> None:
        """Stop serving and free the port. Idempotent, from any thread. Waits at most `timeout_seconds` for a page in progress.

        A client whose request was not answered yet gets a 503.
        """
        if self._closing and not self._thread.is_alive():
            return
        self._closing = True
        with contextlib.suppress(OSError):  # the thread has ended and closed it
            self._wake_writer.send(b"\0", _SEND_FLAGS)
        if threading.current_thread() is not self._thread:
            self._thread.join(self._timeout_seconds)
        self._listener.close()  # frees the port now, even if the thread still hangs in a page

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # The thread.

    def _serve(self) -> None:
        try:
            while not self._closing:
                ready = self._selector.select(self._seconds_to_next_deadline())
                # The time before pages are made: a client that waited through a slow page is served before it can time out.
                now = time.monotonic()
                for key, _ in ready:
                    key.data(key.fileobj)
                for connection in [c for c in self._connections.values() if c.deadline <= now]:
                    self._drop(connection)
                if self._chore is not None and self._next_chore <= now:
                    self._next_chore = now + CHORE_SECONDS
                    self._do(self._chore)
        finally:
            self._release()

    def do_regularly(self, chore: Callable[[], object]) -> None:
        """Call a short function on the server's thread every `CHORE_SECONDS`, beginning now. Its exceptions are logged."""
        self._chore = chore
        with contextlib.suppress(OSError):  # the server is closed
            self._wake_writer.send(b"\0", _SEND_FLAGS)

    def _do(self, chore: Callable[[], object]) -> None:
        try:
            chore()
        except Exception as exc:
            _logger.debug("%s failed: %s", chore, exc)

    def _seconds_to_next_deadline(self) -> float | None:
        deadlines = [connection.deadline for connection in self._connections.values()]
        if self._chore is not None:
            deadlines.append(self._next_chore)
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _accept(self, listener: socket.socket) -> None:
        try:
            client, _ = listener.accept()
        except BlockingIOError:
            return  # the client has gone
        except OSError as exc:
            _logger.debug("accept failed: %s", exc)
            self._make_room()
            time.sleep(0.05)  # out of file descriptors: the listener stays readable, and the loop must not spin
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            self._make_room()
        client.setblocking(False)
        self._connections[client] = _Connection(client, time.monotonic() + self._timeout_seconds)
        self._selector.register(client, selectors.EVENT_READ, self._advance)

    def _make_room(self) -> None:
        """Drop the oldest connection, preferably one that is not being answered."""
        oldest_first = sorted(self._connections.values(), key=lambda c: bool(c.answer))  # stable
        if oldest_first:
            self._drop(oldest_first[0])

    def _advance(self, client: socket.socket) -> None:
        connection = self._connections.get(client)
        if connection is None:
            return  # it was dropped to make room, earlier in this round
        try:
            if connection.answer is None:
                self._receive(connection)
            elif connection.answer:
                self._send(connection, connection.answer)
            elif not client.recv(65536):
                self._drop(connection)
        except BlockingIOError:
            return
        except OSError as exc:
            _logger.debug("client lost: %s", exc)
            self._drop(connection)

    def _receive(self, connection: _Connection) -> None:
        data = connection.socket.recv(MAX_HEAD_BYTES)
        if not data:
            self._drop(connection)
            return
        connection.head += data
        answer = self._answer(bytes(connection.head))
        if answer is not None:
            connection.answer, connection.rest = memoryview(answer[0]), answer[1]
            connection.deadline = time.monotonic() + self._timeout_seconds
            self._selector.modify(connection.socket, selectors.EVENT_WRITE, self._advance)

    def _send(self, connection: _Connection, answer: memoryview) -> None:
        connection.answer = answer[connection.socket.send(answer, _SEND_FLAGS) :]
        if not connection.answer and (piece := next(connection.rest, b"")):
            connection.answer = memoryview(piece)
            connection.deadline = time.monotonic() + self._timeout_seconds
        elif not connection.answer:
            # Closing with unread input resets the connection, which could destroy the answer before the client has read it.
            connection.socket.shutdown(socket.SHUT_WR)
            connection.deadline = time.monotonic() + self._timeout_seconds
            self._selector.modify(connection.socket, selectors.EVENT_READ, self._advance)

    def _drop(self, connection: _Connection) -> None:
        self._connections.pop(connection.socket, None)
        self._selector.unregister(connection.socket)
        # A child forked a moment ago may hold a copy of the descriptor. A shutdown ends the connection for all copies.
        with contextlib.suppress(OSError):
            connection.socket.shutdown(socket.SHUT_RDWR)
        connection.socket.close()

    def _release(self) -> None:
        for connection in list(self._connections.values()):
            self._dismiss(connection)
            self._drop(connection)
        self._close_descriptors()

    def _dismiss(self, connection: _Connection) -> None:
        """Send a client what it takes at once: the rest of its answer, or a 503."""
        with contextlib.suppress(OSError):
            if connection.answer is None:
                with contextlib.suppress(BlockingIOError):
                    connection.head += connection.socket.recv(MAX_HEAD_BYTES)
                connection.answer = memoryview(_CLOSED if connection.head else b"")
            if connection.answer:
                connection.socket.send(connection.answer, _SEND_FLAGS)

    def _close_descriptors(self) -> None:
        with contextlib.suppress(OSError):  # a kqueue does not survive a fork
            self._selector.close()
        for end in (self._listener, self._wake_reader, self._wake_writer, *self._connections):
            end.close()
        self._connections.clear()

    def _forget_in_child(self) -> None:
        """Close a forked child's copies of the descriptors. The selector is not told, because the parent still uses it."""
        self._closing = True
        self._close_descriptors()

    def _answer(self, head: bytes) -> tuple[bytes, Iterator[bytes]] | None:
        """The encoded response and its remaining pieces; None while the request head is incomplete."""
        with_body = True
        try:
            request = parse_head(head)
            if request is None:
                return None
            with_body = request.method != "HEAD"
            page = self._pages.get(request.path)
            response = page(request) if page else refusal(HTTPStatus.NOT_FOUND)
        except RefusedError as refused:
            response = refused.response
        except Exception as exc:  # an exception in a page is one client's 500, never the end of the server
            _logger.debug("a page raised an exception", exc_info=True)
            # The type alone, because the message may hold secrets, and anybody may reach the port.
            response = Response(HTTPStatus.INTERNAL_SERVER_ERROR, f"the page failed: {type(exc).__name__}\n".encode())
        return response.encode(with_body=with_body), (response.rest if with_body else None) or iter(())


def _listen(address: str, port: int) -> socket.socket:
    try:
        family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(target[:2], family=family, backlog=4 * MAX_CONNECTIONS)
    except OSError as exc:
        raise PlacementError(f"cannot serve metrics on {address} port {port}: {exc}") from exc
    listener.setblocking(False)
    return listener


# Data loaders fork. A child with the listening socket would hold the port after its parent's death, and never answer on it.
_SERVERS: WeakIdSet[HttpServer] = WeakIdSet()


def _forget_all_in_child() -> None:
    for server in _SERVERS:
        server._forget_in_child()


os.register_at_fork(after_in_child=_forget_all_in_child)
