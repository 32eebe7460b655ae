"""An engine behind a server, and the client for it: one request at a time, each with a deadline for
the whole request."""

from __future__ import annotations

import abc
import contextlib
import http.client
import json
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args
from urllib.parse import urlencode, urlsplit

import torch

from placement.core.errors import EngineError, EngineLost
from placement.core.interrupts import BoundedCalls
from placement.core.journal import logger
from placement.engines.tagged import TaggedEngine, check_word

InFlight = Literal["wait", "abort"]
"""The fate of requests in flight when the engine is drained: "wait" lets them finish, "abort" cuts
them off."""
Send = Callable[[Sequence[tuple[str, torch.Tensor]]], object]
"""Sends a bucket to an engine. Its result is that of `TaggedEngine.receive`."""
_MAX_BYTES = 16 << 20
_ANSWER_SECONDS = 2.0  # for an engine that was lost: phases go on without it
_SHOWN = 500  # the number of characters of an answer that a message quotes


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's answer to one request, of any status."""

    request: str  # the request as it was sent: "POST http://host:port/sleep?level=1"
    status: int
    body: bytes

    @property
    def is_ok(self) -> bool:
        return self.status == 200

    @property
    def fields(self) -> dict[str, Any]:
        """The body as a JSON object; empty where it is none (some versions of vLLM send empty
        bodies)."""
        try:
            fields = json.loads(self.body)
        except (ValueError, RecursionError):
            return {}
        return fields if isinstance(fields, dict) else {}

    def __str__(self) -> str:
        text = self.body.decode(errors="replace").strip()
        return f"{self.request} was answered with {self.status} {text[:_SHOWN]!r}"


class Server:
    """An engine's server at a base URL (a path is kept as a prefix). `deadline_seconds` is the
    limit for connecting, sending and reading the whole answer together. `api_key` is sent as a
    bearer token, and no message shows it. Raises ValueError: `url` is no http address."""

    def __init__(
        self,
        url: str,
        *,
        deadline_seconds: float,
        api_key: str | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ValueError(f"{url!r} is not the address of a server; write http://host:port")
        self.url = url.rstrip("/")
        self._is_https = parts.scheme == "https"
        self._host = parts.hostname
        self._port = parts.port
        self._prefix = parts.path.rstrip("/")
        self._deadline_seconds = deadline_seconds
        self.has_ended = False  # whether it refused a connection since a manager took it over
        self._headers = {"Accept": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def ask(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str | Iterable[str]] | None = None,
        body: Any = None,
        seconds: float | None = None,
    ) -> Answer:
        """Send one request, with `body` as JSON unless it is None, and read the whole answer, of
        any status. `seconds`: a limit that is shorter than the deadline.

        EngineError: the address cannot be reached, so nothing was sent; or a GET, which changes
        nothing, was not answered. EngineLost: no complete answer came within the deadline, so it is
        not known what the server did; or a request that is no GET was refused: the server has
        ended.
        """
        target = f"{path}?{urlencode(query, doseq=True)}" if query else path
        request = f"{method} {self.url}{target}"
        limit = self._deadline_seconds if seconds is None else min(seconds, self._deadline_seconds)
        deadline = time.monotonic() + limit
        connection = self._connect(request, limit)
        sock = connection.sock
        payload = None
        headers = self._headers
        if body is not None:
            payload = json.dumps(body).encode()
            headers = {**headers, "Content-Type": "application/json"}

        def exchange() -> Answer:
            with contextlib.closing(connection):
                connection.request(method, self._prefix + target, body=payload, headers=headers)
                with connection.getresponse() as response:
                    return Answer(request, response.status, _whole_body(response))

        try:
            return BoundedCalls("placement-http", deadline - time.monotonic())(exchange)
        except (OSError, http.client.HTTPException) as error:  # a timeout is an OSError
            problem = f"{request}: the connection broke ({error!r})"
            if isinstance(error, TimeoutError):
                problem = f"{request}: no answer within {limit:g} s"
            if method == "GET":
                raise EngineError(problem) from error
            raise EngineLost(f"{problem}; it is not known what the server did") from error
        finally:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # a thread that still reads from it ends

    def _connect(self, request: str, limit_seconds: float) -> http.client.HTTPConnection:
        """A connection for this request. Raises EngineError and EngineLost as `ask` does."""
        kind = http.client.HTTPSConnection if self._is_https else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=limit_seconds)
        try:
            connection.connect()
        except (OSError, UnicodeError) as error:  # UnicodeError: the host name cannot exist
            connection.close()
            problem = (
                f"{request}: nobody answers there ({error}). Is it running, and is this its "
                "address?"
            )
            self.has_ended |= isinstance(error, ConnectionRefusedError)
            if isinstance(error, ConnectionRefusedError) and not request.startswith("GET "):
                raise EngineLost(problem) from error
            raise EngineError(problem) from error
        return connection


def _whole_body(response: http.client.HTTPResponse) -> bytes:
    content = response.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise http.client.HTTPException(f"the answer has more than {_MAX_BYTES:,} bytes")
    if response.length:
        raise http.client.IncompleteRead(content, response.length)
    return content


class ServedEngine(TaggedEngine):
    """An engine behind an HTTP server. Raises ValueError: `url` is not an http address, or an
    option does not fit."""

    def __init__(
        self,
        url: str,
        *,
        send: Send | None = None,
        in_flight: InFlight = "wait",
        api_key: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        check_word("in_flight", in_flight, get_args(InFlight))
        self._server = Server(url, deadline_seconds=self.deadline_seconds, api_key=api_key)
        self._send, self._in_flight = send, in_flight
        self._started: Any = None

    @abc.abstractmethod
    def _start(self, seconds: float | None = None) -> Any:
        """When the server was started, as it says itself; None where it does not say. Raises
        EngineError: no answer within these seconds."""

    def _take_over(self, seconds: float | None = None) -> None:
        """The server that answers now is the one that is registered."""
        self._started = self._start(seconds)
        self._server.has_ended = False

    def assume(self, *, offloaded: Collection[str]) -> None:
        """See `TaggedEngine.assume`. The assumption holds for the server process that runs now,
        until it is restarted. A server that has ended holds nothing; a later load raises
        `EngineLost`."""
        with contextlib.suppress(EngineError):  # it has ended
            self._take_over(_ANSWER_SECONDS)
        super().assume(offloaded=offloaded)

    def reattach(self) -> None:
        """Take an engine back that was lost and restarted, in the state in which it is found. The
        next phase does so by itself. The weights count as lost until the next sync. Raises
        EngineError, with nothing changed: it does not answer, or was not restarted."""
        started = self._start(_ANSWER_SECONDS)
        is_another = None not in (started, self._started) and started != self._started
        if not is_another and not self._server.has_ended:
            raise EngineError(
                f"{self!r} was not restarted, or does not say so: what it has on the device is "
                "unknown. Restart it, or call assume(offloaded=[...])"
            )
        self.assume(offloaded=self._tags_asleep())
        logger.info("%r was restarted; on the device: %s", self, [*self.residency.resident_tags])

    def _tags_asleep(self) -> Collection[str]:
        """The tags that a server has offloaded after its restart."""
        return ()

    def receive(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> object:
        if self._send is None:
            raise EngineError(
                f"{self!r} was made without send=, which sends a bucket of weights to the server. "
                "If weights come another way, call weights_filled() when they have arrived"
            )
        return self._send(bucket)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._server.url}>"
