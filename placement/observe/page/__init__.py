"""The status page: one HTML file and its script. It loads nothing from other sites."""

from __future__ import annotations

import importlib.resources
from http import HTTPStatus
from typing import TYPE_CHECKING

from placement.observe.http import Page, Response

if TYPE_CHECKING:
    from wsgiref.types import WSGIEnvironment

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
        body = importlib.resources.files(__package__).joinpath(name).read_bytes()
        return Response(HTTPStatus.OK, body, content_type, _HEADERS)

    return page
