"""Serve all workers of a run in one place: the list of targets for Prometheus, and the status of every worker."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placement.core.errors import PlacementError
from placement.observe.discovery import Target, as_json, from_json, targets_in
from placement.observe.server import JSON, STATUS_PAGES, TIMEOUT_SECONDS, HttpServer, Response

if TYPE_CHECKING:
    from wsgiref.types import WSGIEnvironment

ASK_SECONDS = 2.0  # how many seconds a worker may take to answer

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a worker is never behind a proxy


def ask(url: str, *, timeout_seconds: float = ASK_SECONDS) -> bytes:
    """GET a page of a worker. Raises PlacementError: no worker answers at the URL; the message has the reason."""
    try:
        with _OPENER.open(url, timeout=timeout_seconds) as answer:
            body: bytes = answer.read()
            return body
    except urllib.error.HTTPError as error:
        raise PlacementError(f"{url} answers {error.code} {error.reason}: is this the address of a placement worker?") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)  # of urllib's own error
        raise PlacementError(f"{url} does not answer: {getattr(reason, 'strerror', None) or reason}") from error


def find_targets(places: Iterable[str]) -> list[Target]:
    """The workers at the given places: URLs of workers, URLs that end in /targets, and discovery folders. Raises PlacementError: a place is
    none of these, or nobody answers there."""
    found: list[Target] = []
    for place in places:
        url = place.rstrip("/")
        if url.startswith(("http://", "https://")) and url.endswith("/targets"):
            found += from_json(ask(url), url)
        elif url.startswith("http://"):  # a worker serves no TLS
            found.append(Target(address=url.removeprefix("http://"), labels={}))
        elif Path(place).is_dir():
            found += targets_in(place)
        else:
            raise PlacementError(
                f"{place!r} is not a worker's URL (http://host:port), a URL that ends in /targets, or a discovery folder "
                "(workers create it when they announce themselves)"
            )
    return found


_FRESH_SECONDS = 1.0  # how long the views of the workers are given to everybody who asks
_AT_ONCE = 64  # the number of workers that are asked at once: so many may hang before a page waits longer than `ASK_SECONDS`


def views_of(targets: Sequence[Target], pool: concurrent.futures.Executor) -> list[dict[str, Any]]:
    """Every worker's view (see `worker_view`). A worker that does not answer has an `error` in its place."""

    def one(target: Target) -> list[dict[str, Any]]:
        mine = {"name": target.name, "labels": dict(target.labels)}
        try:
            return [view | mine for view in json.loads(ask(f"{target.url}/workers"))]
        except (PlacementError, ValueError, TypeError) as error:
            return [mine | {"error": str(error)}]

    return [view for views in pool.map(one, targets) for view in views]


class DiscoveryServer(HttpServer):
    """Serves the targets of a run: `/targets` for Prometheus' `http_sd_configs`, `/workers` with the views of all workers, `/` with the
    status page of all.

    Args:
        find: returns the present targets; called on the server's threads.
        port, address, timeout_seconds: see `HttpServer`.
    """

    def __init__(
        self, find: Callable[[], list[Target]], *, port: int = 0, address: str = "127.0.0.1", timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        self._find = find
        self._views = b"[]"
        self._seen_seconds = -_FRESH_SECONDS
        self._asking = threading.Lock()
        self._pool = concurrent.futures.ThreadPoolExecutor(_AT_ONCE, "placement-fleet")
        pages = {"/targets": self._targets, "/workers": self._workers, "/healthz": self._healthz}
        super().__init__(pages | STATUS_PAGES, port=port, address=address, timeout_seconds=timeout_seconds)

    def close(self) -> None:
        super().close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _targets(self, _: WSGIEnvironment) -> Response:
        return Response(HTTPStatus.OK, as_json(self._find()).encode(), JSON)

    def _healthz(self, _: WSGIEnvironment) -> Response:
        return Response(HTTPStatus.OK, b"ok\n")

    def _workers(self, _: WSGIEnvironment) -> Response:
        with self._asking:  # on the thread of one connection, for all that wait
            if time.monotonic() - self._seen_seconds >= _FRESH_SECONDS:
                try:
                    views = views_of(self._find(), self._pool)
                except (PlacementError, OSError) as error:  # of a folder that is being written
                    views = [{"name": "discovery", "labels": {}, "error": str(error)}]
                self._views, self._seen_seconds = json.dumps(views).encode(), time.monotonic()
            return Response(HTTPStatus.OK, self._views, JSON)
