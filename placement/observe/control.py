"""Requests of a client that has the token: `POST /suspend` and `POST /resume`."""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

from pydantic import ValidationError

from placement.core.errors import PlacementError
from placement.core.snapshot import SuspensionRequest, SuspensionStatus

if TYPE_CHECKING:
    from wsgiref.types import WSGIEnvironment

PATHS = ("/suspend", "/resume")
_MOST_BYTES = 64 << 10  # the longest body that is read
TOKEN = re.compile(r"[!-~]+")
Answer = tuple[HTTPStatus, bytes]


@dataclass(frozen=True, repr=False)
class Control:
    """Suspends and resumes one manager for clients that have the token.
    `suspend`, `resume`: see `Suspension`.
    Raises ValueError: the token is empty, or has other characters than visible ASCII."""

    token: str
    suspend: Callable[[SuspensionRequest, Callable[[], bool]], SuspensionStatus]
    resume: Callable[[int | None], SuspensionStatus]

    def __post_init__(self) -> None:
        if not TOKEN.fullmatch(self.token):
            raise ValueError("control: the token must be visible ASCII characters, no blanks")

    def answer(self, environ: WSGIEnvironment, has_gone: Callable[[], bool]) -> Answer:
        """Carry out a client's request. Returns the status and the body of the answer, as JSON.
        `has_gone`: whether the client has closed its connection."""
        scheme, _, token = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
        is_right = hmac.compare_digest(token.encode("latin-1"), self.token.encode())
        if scheme.lower() != "bearer" or not is_right:
            return _refused(HTTPStatus.UNAUTHORIZED, "send Authorization: Bearer TOKEN")
        length = environ.get("CONTENT_LENGTH") or "0"
        if not length.isdecimal() or "HTTP_TRANSFER_ENCODING" in environ:
            return _refused(HTTPStatus.BAD_REQUEST, "the body needs a Content-Length")
        if len(length) > 9 or int(length) > _MOST_BYTES:
            reason = f"the body has more than {_MOST_BYTES} bytes"
            return _refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, reason)
        body = environ["wsgi.input"].read(int(length))
        if len(body) < int(length):
            return _refused(HTTPStatus.BAD_REQUEST, "the body ends before its Content-Length")
        try:
            request = SuspensionRequest.model_validate_json(body or b"{}")
            if environ["PATH_INFO"] == "/suspend":
                status = self.suspend(request, has_gone)
            else:
                status = self.resume(request.epoch)
        except ValidationError as error:
            return _refused(HTTPStatus.BAD_REQUEST, str(error))
        except PlacementError as error:
            return _refused(HTTPStatus.CONFLICT, str(error))
        return HTTPStatus.OK, status.model_dump_json().encode()


def _refused(status: HTTPStatus, reason: str) -> Answer:
    return status, json.dumps({"error": reason}).encode()
