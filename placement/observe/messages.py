"""The subset of HTTP that the server speaks: a strict request head of bounded length in, a response out. Contains no socket code."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import parse_qs

MAX_REQUEST_LINE_BYTES = 4096
MAX_HEAD_BYTES = 16384
METHODS = ("GET", "HEAD")
TEXT = "text/plain; charset=utf-8"
JSON = "application/json"

_HEAD_END = re.compile(rb"\r?\n\r?\n")
_REQUEST_LINE = re.compile(r"([A-Z]{1,16}) (/[!-~]*) HTTP/1\.[01]")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([^\x00-\x08\x0a-\x1f\x7f]*)")


@dataclass(frozen=True, slots=True)
class Request:
    """A request without a body."""

    method: str
    path: str
    """The path without the query."""
    headers: Mapping[str, str]
    """Headers by name in lower case."""
    query: str = ""

    def number(self, name: str) -> float | None:
        """A value of the query as a number; None where it is not given.

        Raises:
            RefusedError: the value is not a finite number of at least zero.
        """
        given = parse_qs(self.query).get(name)
        if given is None:
            return None
        try:
            value = float(given[-1])
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf:
            raise RefusedError(HTTPStatus.BAD_REQUEST)
        return value


@dataclass(frozen=True, slots=True)
class Response:
    """The response to a client."""

    status: HTTPStatus
    body: bytes
    content_type: str = TEXT
    headers: tuple[tuple[str, str], ...] = ()
    rest: Iterator[bytes] | None = None
    """The rest of a body that is too long to hold at once, in pieces after `body`. The end of the connection ends the body."""

    def encode(self, *, with_body: bool) -> bytes:
        """The bytes to send. A HEAD request gets GET's headers without the body."""
        head = [
            f"HTTP/1.1 {self.status.value} {self.status.phrase}",
            f"Content-Type: {self.content_type}",
            *([f"Content-Length: {len(self.body)}"] if self.rest is None else []),
            "Connection: close",
            "Cache-Control: no-store",
            *(f"{name}: {value}" for name, value in self.headers),
        ]
        return "\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + (self.body if with_body else b"")


class RefusedError(Exception):
    """A request that is refused; `response` has the reason."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.response = refusal(status)


def refusal(status: HTTPStatus) -> Response:
    """A plain-text response with the standard phrase of the status."""
    headers = (("Allow", ", ".join(METHODS)),) if status is HTTPStatus.METHOD_NOT_ALLOWED else ()
    return Response(status, f"{status.phrase}\n".encode(), headers=headers)


def parse_head(head: bytes) -> Request | None:
    """Parse `head`, all bytes received so far. Returns the request; None while the end of its head is missing.

    Raises:
        RefusedError: the bytes are no request, use a method that is not served, or are too long. Raised as early as possible.
    """
    line_end = head.find(b"\n")
    if (line_end if line_end >= 0 else len(head)) > MAX_REQUEST_LINE_BYTES:
        raise RefusedError(HTTPStatus.REQUEST_URI_TOO_LONG)
    if line_end < 0:
        return None
    request_line = _REQUEST_LINE.fullmatch(head[:line_end].decode("latin-1").removesuffix("\r"))
    if request_line is None:
        raise RefusedError(HTTPStatus.BAD_REQUEST)
    if request_line[1] not in METHODS:
        raise RefusedError(HTTPStatus.METHOD_NOT_ALLOWED)
    end = _HEAD_END.search(head)
    if (end.start() if end else len(head)) > MAX_HEAD_BYTES:
        raise RefusedError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
    if end is None:
        return None
    path, _, query = request_line[2].partition("?")
    return Request(request_line[1], path, _parse_headers(head[line_end + 1 : end.start()]), query)


def _parse_headers(lines: bytes) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines.decode("latin-1").split("\n") if lines else ():
        # Folded lines and control characters are refused, because part of the Accept header is echoed in the answer's Content-Type.
        header = _HEADER.fullmatch(line.removesuffix("\r"))
        if header is None:
            raise RefusedError(HTTPStatus.BAD_REQUEST)
        headers[header[1].lower()] = header[2].strip()
    return headers
