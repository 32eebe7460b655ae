"""A client for an engine's server: one request at a time, each with a deadline for the whole request."""

from __future__ import annotations

import functools
import http.client
import io
import json
import math
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit

from placement.core import interrupts
from placement.core.errors import EngineError, EngineLost

_MAX_BYTES = 16 << 20
_POLL_SECONDS = 0.5
_SHOWN = 500
"""The number of characters of an answer that a message quotes."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's answer to one request."""

    request: str
    """The request as it was sent: "POST http://host:port/sleep?level=1"."""
    status: int
    body: bytes

    @property
    def is_ok(self) -> bool:
        return self.status == 200

    def json(self) -> Any:
        """The body as JSON; None where it is not JSON (vLLM 0.11 sends empty bodies)."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None

    def field(self, name: str) -> Any:
        """A field of a JSON object; None where the body is no object or lacks the field."""
        found = self.json()
        return found.get(name) if isinstance(found, dict) else None

    def __str__(self) -> str:
        text = self.body.decode(errors="replace").strip()
        return f"{self.request} was answered with {self.status} {text[:_SHOWN]!r}"


class Server:
    """An engine's server at a base URL.

    Args:
        url: "http://127.0.0.1:8000"; a path is kept as a prefix.
        deadline_seconds: the limit for connecting, sending and reading the whole answer together.
        api_key: sent as a bearer token; no message shows it.

    Raises:
        ValueError: `url` is not an http address.
    """

    def __init__(self, url: str, *, deadline_seconds: float, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ValueError(f"{url!r} is not the address of a server; write http://host:port")
        self.url = url.rstrip("/")
        self._is_https = parts.scheme == "https"
        self._host, self._port, self._prefix = parts.hostname, parts.port, parts.path.rstrip("/")
        self._deadline_seconds = deadline_seconds
        self._headers = {"Accept": "application/json"} | ({} if api_key is None else {"Authorization": f"Bearer {api_key}"})

    def ask(self, method: str, path: str, *, query: Mapping[str, str | Iterable[str]] | None = None, body: Any = None) -> Answer:
        """Send one request and read the whole answer, whatever its status.

        Args:
            body: sent as JSON unless it is None.

        Raises:
            EngineError: the address cannot be reached, so nothing was sent; or a GET, which changes nothing, was not answered.
            EngineLost: no complete answer came within the deadline, so it is not known what the server did; or something is to be changed
                and nobody listens there: the server has ended.
        """
        target = f"{path}?{urlencode(query, doseq=True)}" if query else path
        request = f"{method} {self.url}{target}"
        began, limit = time.monotonic(), self._deadline_seconds
        kind = http.client.HTTPSConnection if self._is_https else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=limit)
        try:
            try:
                connection.connect()
            except (OSError, UnicodeError) as error:  # UnicodeError: the host name cannot exist
                said = f"{request}: nobody answers there ({error}). Is it running, and is this its address?"
                if isinstance(error, ConnectionRefusedError) and method != "GET":
                    raise EngineLost(said) from error
                raise EngineError(said) from error
            payload = None if body is None else json.dumps(body).encode()
            headers = self._headers if body is None else {**self._headers, "Content-Type": "application/json"}
            until = began + limit
            try:
                _limit(connection.sock, until)
                connection.request(method, self._prefix + target, body=payload, headers=headers)
                # The type stub asks for a class; the library only calls it.
                connection.response_class = functools.partial(_response, until)  # type: ignore[assignment]
                return _answer(request, connection)
            except (OSError, http.client.HTTPException) as error:  # a timeout is an OSError
                what = f"no answer within {limit:g} s" if isinstance(error, TimeoutError) else f"the connection broke ({error!r})"
                if method == "GET":
                    raise EngineError(f"{request}: {what}") from error
                raise EngineLost(f"{request}: {what}; it is not known what the server did") from error
        finally:
            connection.close()


def _answer(request: str, connection: http.client.HTTPConnection) -> Answer:
    response = connection.getresponse()
    chunks: list[bytes] = []
    size = 0
    while chunk := response.read1(1 << 16):
        chunks.append(chunk)
        size += len(chunk)
        if size > _MAX_BYTES:
            raise http.client.HTTPException(f"the answer has more than {_MAX_BYTES:,} bytes")
    if response.length:
        raise http.client.IncompleteRead(b"".join(chunks), response.length)
    return Answer(request, response.status, b"".join(chunks))


class _Reader(io.RawIOBase):
    """Reads from a socket until a fixed moment. A server that drips bytes would outlast a limit on each single read.

    It wakes up now and then, so that a noted interrupt is raised.
    """

    def __init__(self, sock: socket.socket, until: float) -> None:
        self._sock, self._until = sock, until
        self._open = sock.makefile("rb", buffering=0)  # keeps the socket open where the connection gives it up after the headers

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        while True:
            _limit(self._sock, self._until, _POLL_SECONDS)
            try:
                return self._sock.recv_into(buffer)
            except TimeoutError:
                interrupts.check()

    def makefile(self, _: str) -> io.BufferedReader:
        """The only method that `HTTPResponse` calls on its socket."""
        return io.BufferedReader(self)

    def close(self) -> None:
        self._open.close()
        super().close()


def _response(until: float, sock: socket.socket, *args: Any, **keywords: Any) -> http.client.HTTPResponse:
    # The response calls only `makefile` on its socket, which the type stub does not know.
    return http.client.HTTPResponse(_Reader(sock, until), *args, **keywords)  # type: ignore[arg-type]


def _limit(sock: socket.socket, until: float, most: float = math.inf) -> None:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    sock.settimeout(min(left, most))
