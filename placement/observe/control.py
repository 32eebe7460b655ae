"""What a client that has the token may ask of a worker: `POST /suspend` and `POST /resume`."""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING

from pydantic import ValidationError

from placement.core.errors import PlacementError
from placement.core.snapshot import SuspensionRequest, SuspensionStatus

if TYPE_CHECKING:
    from wsgiref.types import WSGIEnvironment

PATHS = ("/suspend", "/resume")
_MOST_BYTES = 64 << 10
_TOKEN = re.compile(r"[!-~]+")


class _Refused(Exception):
    """A status of HTTP, and the reason."""


class Control:
    """Suspends and resumes one manager for clients that have the token.

    `suspend`, `resume`: see `Suspension`. Raises ValueError: the token is no token.
    """

    def __init__(
        self,
        token: str,
        suspend: Callable[[SuspensionRequest, Callable[[], bool]], SuspensionStatus],
        resume: Callable[[int | None], SuspensionStatus],
    ) -> None:
        if not _TOKEN.fullmatch(token):
            raise ValueError("control: the token must be visible ASCII characters, no blanks")
        self._token = token.encode()
        self._suspend = suspend
        self._resume = resume

    def answer(
        self, environ: WSGIEnvironment, has_gone: Callable[[], bool]
    ) -> tuple[HTTPStatus, bytes]:
        """Do what a client asks for. Returns the status and the body of the answer, as JSON."""
        try:
            self._check_token(environ)
            request = _read(environ)
            if environ["PATH_INFO"] == "/resume":
                status = self._resume(request.epoch)
            else:
                status = self._suspend(request, has_gone)
            return HTTPStatus.OK, status.model_dump_json().encode()
        except _Refused as refused:
            code, reason = refused.args
        except PlacementError as error:
            code, reason = HTTPStatus.CONFLICT, str(error)
        return code, json.dumps({"error": reason}).encode()

    def _check_token(self, environ: WSGIEnvironment) -> None:
        scheme, _, token = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
        is_right = hmac.compare_digest(token.encode("latin-1"), self._token)
        if not is_right or scheme.lower() != "bearer":
            raise _Refused(HTTPStatus.UNAUTHORIZED, "send the token: Authorization: Bearer TOKEN")


def _read(environ: WSGIEnvironment) -> SuspensionRequest:
    """The body of a request. One that is too long is not read."""
    length = environ.get("CONTENT_LENGTH") or "0"
    if not length.isdecimal() or "HTTP_TRANSFER_ENCODING" in environ:
        raise _Refused(HTTPStatus.BAD_REQUEST, "the body needs a Content-Length")
    if int(length) > _MOST_BYTES:
        reason = f"the body has more than {_MOST_BYTES} bytes"
        raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, reason)
    body = environ["wsgi.input"].read(int(length))
    try:
        return SuspensionRequest.model_validate_json(body or b"{}")
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise _Refused(HTTPStatus.BAD_REQUEST, "; ".join(problems)) from None
