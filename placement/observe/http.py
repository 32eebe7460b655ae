"""A small HTTP server for pages about this process. No page in here.

It lives inside a training process, so a client must not be able to cost it more than a trickle. ONE thread serves every
connection through a selector: a client that says nothing, or a byte a second, holds a slot and no thread; a connection has
`timeout_seconds` for its whole request head and as long again for each piece of the answer; when all slots are taken the oldest
one makes room. Only GET and HEAD, no request body, one request a connection.
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
from typing import Self

from placement.core.errors import PlacementError
from placement.core.weak_set import WeakIdSet
from placement.observe.messages import MAX_HEAD_BYTES, RefusedError, Request, Response, parse_head, refusal

MAX_CONNECTIONS = 64
TIMEOUT_SECONDS = 5.0
CHORE_SECONDS = 5.0
# The process may have SIGPIPE at its default: a client that hangs up must not end a training run.
_SEND_FLAGS = getattr(socket, "MSG_NOSIGNAL", 0)

_CLOSED = refusal(HTTPStatus.SERVICE_UNAVAILABLE).encode(with_body=True)

_logger = logging.getLogger("placement.observe")

Page = Callable[[Request], Response]


class _Connection:
    """One client: its head as it comes in, then the answer as it goes out, then a pause for what it still sends."""

    def __init__(self, client: socket.socket, deadline: float) -> None:
        self.socket = client
        self.head = bytearray()
        self.answer: memoryview | None = None
        self.rest: Iterator[bytes] = iter(())
        """What of the answer is made only when the client has taken what was before it."""
        self.deadline = deadline


class HttpServer:
    """Answers requests with pages until `close()`. A context manager; also closed in forked children.

    Args:
        pages: by path; called on the server's thread, so a page must not wait for anything. What it raises is a 500 for that client.
        port: TCP port; 0 lets the system choose, see `port`.
        address: loopback by default. Name another one to be reachable from other machines; there is no authentication.
        timeout_seconds: for the request head as a whole, and again for every piece of the answer.

    Raises:
        PlacementError: the address and port cannot be bound.
        ValueError: an empty address, or a port outside 0..65535.
    """

    def __init__(
        self, pages: Mapping[str, Page], *, port: int = 0, address: str = "127.0.0.1", timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        if not address:
            raise ValueError("address is empty, which would mean every interface; name one, such as 127.0.0.1")
        if not 0 <= port <= 65535:
            raise ValueError(f"port {port} is outside 0..65535")
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
        """`http://host:port`, without a path; a server on every interface is named by its loopback address."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.address, self.address)  # noqa: S104 (compared, not bound)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def close(self) -> None:
        """Stop serving and free the port. Idempotent, from any thread; waits at most `timeout_seconds` for a page that is being made.

        Who has asked and was not answered yet gets a 503.
        """
        if self._closing and not self._thread.is_alive():
            return
        self._closing = True
        with contextlib.suppress(OSError):  # closed by the thread, which has ended
            self._wake_writer.send(b"\0", _SEND_FLAGS)
        if threading.current_thread() is not self._thread:
            self._thread.join(self._timeout_seconds)
        self._listener.close()  # even where the thread is still held up in read(): the port is free now

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # The thread.

    def _serve(self) -> None:
        try:
            while not self._closing:
                ready = self._selector.select(self._seconds_to_next_deadline())
                # Taken before the pages are made: a client that waited while read() was slow is looked at before it is dropped.
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
        """Call something short on the server's thread every `CHORE_SECONDS`, beginning now. What it raises is logged."""
        self._chore = chore
        with contextlib.suppress(OSError):  # closed already
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
            return  # the client has gone again
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
        """Drop the oldest connection, one that is not being answered where there is one."""
        oldest_first = sorted(self._connections.values(), key=lambda c: bool(c.answer))  # stable
        if oldest_first:
            self._drop(oldest_first[0])

    def _advance(self, client: socket.socket) -> None:
        connection = self._connections.get(client)
        if connection is None:
            return  # dropped to make room, earlier in this round
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
            # Closing with unread input resets the connection, which can take the answer from the client before it has read it.
            connection.socket.shutdown(socket.SHUT_WR)
            connection.deadline = time.monotonic() + self._timeout_seconds
            self._selector.modify(connection.socket, selectors.EVENT_READ, self._advance)

    def _drop(self, connection: _Connection) -> None:
        self._connections.pop(connection.socket, None)
        self._selector.unregister(connection.socket)
        # A child forked a moment ago may hold a copy of the descriptor: shutdown ends the connection for all of them.
        with contextlib.suppress(OSError):
            connection.socket.shutdown(socket.SHUT_RDWR)
        connection.socket.close()

    def _release(self) -> None:
        for connection in list(self._connections.values()):
            self._dismiss(connection)
            self._drop(connection)
        self._close_descriptors()

    def _dismiss(self, connection: _Connection) -> None:
        """The last words to a client, as much of them as it takes at once: what was left of its answer, or that there will be none."""
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
        """In a forked child: give up the copies of the descriptors, without a word to the selector, which the parent still uses."""
        self._closing = True
        self._close_descriptors()

    def _answer(self, head: bytes) -> tuple[bytes, Iterator[bytes]] | None:
        """The encoded response and what of it is still to be made; None while the head is incomplete."""
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
        except Exception as exc:  # whatever a page raises is one client's 500, never the end of the server
            _logger.debug("the page cannot be made", exc_info=True)
            # The type alone: a message may hold what is not for everybody who can reach the port.
            response = Response(HTTPStatus.INTERNAL_SERVER_ERROR, f"no page: {type(exc).__name__}\n".encode())
        return response.encode(with_body=with_body), (response.rest if with_body else None) or iter(())


def _listen(address: str, port: int) -> socket.socket:
    try:
        family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(target[:2], family=family, backlog=4 * MAX_CONNECTIONS)
    except OSError as exc:
        raise PlacementError(f"cannot serve metrics on {address} port {port}: {exc}") from exc
    listener.setblocking(False)
    return listener


# Data loaders fork. A child that kept the listening socket would hold the port after its parent's death and never answer on it.
_SERVERS: WeakIdSet[HttpServer] = WeakIdSet()


def _forget_all_in_child() -> None:
    for server in _SERVERS:
        server._forget_in_child()


os.register_at_fork(after_in_child=_forget_all_in_child)
