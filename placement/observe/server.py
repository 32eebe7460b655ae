"""The pages of one manager: /metrics, /healthz, /state, /trace, /workers and the status page."""

from __future__ import annotations

import functools
import json
import math
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import Metric

from placement.core.journal import Journal
from placement.core.snapshot import Snapshot
from placement.observe.collector import make_registry
from placement.observe.discovery import Announcement, Identity, Target, reap
from placement.observe.http import JSON, TIMEOUT_SECONDS, HttpServer, Page, Response, refusal, status_pages
from placement.observe.trace import encoded_trace

if TYPE_CHECKING:
    from wsgiref.types import WSGIEnvironment

_REST_SECONDS = 0.0003
"""How long to work before other threads may run. The interpreter would make a waiting thread wait for 5 ms."""


class _Paced(CollectorRegistry):
    """A registry that lets other threads run now and then, so that a phase that begins meanwhile does not wait for the whole page."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__()
        self._whole = registry

    def collect(self) -> Iterator[Metric]:
        rested = time.perf_counter()
        for family in list(self._whole.collect()):  # all families come from one snapshot, however slowly they are written
            yield family
            if time.perf_counter() - rested > _REST_SECONDS:
                time.sleep(0)
                rested = time.perf_counter()


class MetricsServer(HttpServer):
    """Serves the snapshots of `read()` over HTTP until `close()`; see `HttpServer`.

    `/metrics`: Prometheus text or OpenMetrics, as the client asks, gzip if it accepts that. `/healthz`: 200 "ok", or 503 with the
    broken handles' names. `/state`: the snapshot as JSON. `/trace`: the journal as a Chrome trace; `?seconds=60` limits it to the last
    minute. `/workers`: see `worker_view`. `/`: the status page. Any other path is a 404. A failing `read()` is a 500 for that client.

    Args:
        read: returns the snapshot; called on the server's thread once a request, never at construction.
        is_over: returns whether the manager is closed. Then every page is a 503.
        journal: the journal that `/trace` shows; None: an empty one.
        worker_info: further labels of `placement_worker_info`.
    """

    def __init__(
        self,
        read: Callable[[], Snapshot],
        *,
        is_over: Callable[[], bool] = lambda: False,
        journal: Journal | None = None,
        port: int = 0,
        address: str = "127.0.0.1",
        timeout_seconds: float = TIMEOUT_SECONDS,
        worker_info: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._read = read
        self._is_over = is_over
        self._journal = journal if journal is not None else Journal(1)
        self.target: Target | None = None
        """The address and labels under which this worker is scraped; None before it is announced."""
        self._announcement: Announcement | None = None
        self._exposition = make_wsgi_app(_Paced(make_registry(read, worker_info)))
        pages: dict[str, Page] = {"/metrics": self._metrics, "/healthz": self._healthz, "/state": self._state, "/trace": self._trace}
        pages["/workers"] = self._workers
        pages = {path: functools.partial(self._unless_over, page) for path, page in (pages | status_pages()).items()}
        super().__init__(pages, port=port, address=address, timeout_seconds=timeout_seconds)

    def announce(self, folder: str | os.PathLike[str] | None, identity: Identity) -> Target:
        """Set this worker's identity, and keep its file in a discovery folder (None: no file) until `close()`.

        Returns:
            The worker's target, for a list of your own, such as a `DiscoveryServer`'s.

        Raises:
            PlacementError: the folder cannot be written.
        """
        everywhere = self.address in ("0.0.0.0", "::")  # noqa: S104 (compared, not bound)
        host = socket.gethostname() if everywhere else f"[{self.address}]" if ":" in self.address else self.address
        self.target = Target.of(f"{host}:{self.port}", identity)
        if folder is not None:
            self._announcement = Announcement(folder, self.target)
            self.do_regularly(functools.partial(reap, folder))
        return self.target

    def close(self) -> None:
        if self._announcement is not None:
            self._announcement.close()
        super().close()

    def _unless_over(self, page: Page, environ: WSGIEnvironment) -> Response:
        if not self._is_over():
            response = page(environ)
            if not self._is_over():  # the manager may have been closed while the page was made
                return response
        return refusal(HTTPStatus.SERVICE_UNAVAILABLE)

    def _metrics(self, environ: WSGIEnvironment) -> Response:
        headers: dict[str, str] = {}
        body = b"".join(self._exposition(environ, lambda _, given, *__: headers.update(given)))
        return Response(HTTPStatus.OK, body, headers.pop("Content-Type"), (("Vary", "Accept, Accept-Encoding"), *headers.items()))

    def _healthz(self, _: WSGIEnvironment) -> Response:
        broken = [handle.name for handle in self._read().handles if handle.broken is not None]
        if broken:
            return Response(HTTPStatus.SERVICE_UNAVAILABLE, f"broken: {', '.join(broken)}\n".encode())
        return Response(HTTPStatus.OK, b"ok\n")

    def _state(self, _: WSGIEnvironment) -> Response:
        return Response(HTTPStatus.OK, self._read().model_dump_json().encode(), JSON)

    def _trace(self, environ: WSGIEnvironment) -> Response:
        given = parse_qs(environ["QUERY_STRING"]).get("seconds", ["inf"])[-1]
        try:
            seconds = float(given)
        except ValueError:
            return refusal(HTTPStatus.BAD_REQUEST)
        if not seconds >= 0:
            return refusal(HTTPStatus.BAD_REQUEST)
        return Response(HTTPStatus.OK, encoded_trace(self._journal, last_seconds=None if seconds == math.inf else seconds), JSON)

    def _workers(self, _: WSGIEnvironment) -> Response:
        target = self.target
        name, labels = (f"process {os.getpid()}", {}) if target is None else (target.name, dict(target.labels))
        view = worker_view(self._read(), self._journal, name=name, labels=labels)
        return Response(HTTPStatus.OK, json.dumps([view]).encode(), JSON)


HISTORY_SECONDS = 300.0
_LAST = 20
"""The number of state transitions and failures shown."""
_MOST_SPANS = 500
"""The limit for each track. More spans than a page has pixels only make it slow."""


def worker_view(snapshot: Snapshot, journal: Journal, *, name: str, labels: dict[str, str]) -> dict[str, Any]:
    """The view of one worker.

    Returns:
        `name`, `labels` and `snapshot` (as JSON). `timeline`: for each handle its states in the last `HISTORY_SECONDS` as
        [state, begin, end]. `phases`: [phase, begin, end]. `transitions` and `failures`: the last ones, newest first. Times are Unix time
        in seconds.
    """
    now = time.monotonic()
    offset, start = time.time() - now, now - HISTORY_SECONDS
    records = list(journal)
    since: dict[str, tuple[str, float]] = {}
    timeline: defaultdict[str, list[list[Any]]] = defaultdict(list)

    def add(handle: str, state: str, begin: float, end: float) -> None:
        if end >= start:
            timeline[handle].append([state, round(max(begin, start) + offset, 3), round(end + offset, 3)])

    born = {handle.name: now - sum(handle.state_seconds.values()) for handle in snapshot.handles}
    for record in records:
        state, begin = since.get(record.handle, (record.source.value, born.get(record.handle, start)))
        add(record.handle, state, begin, record.at_seconds)
        since[record.handle] = record.target.value, record.at_seconds
    for handle in snapshot.handles:
        state, begin = since.get(handle.name, (handle.state.value, born[handle.name]))
        add(handle.name, state, begin, now)
    shown = {handle.name: timeline[handle.name][-_MOST_SPANS:] for handle in snapshot.handles}
    phases = [
        [span.phase, round(max(span.begin_seconds, start) + offset, 3), round(span.end_seconds + offset, 3)]
        for span in journal.phase_spans()
        if span.end_seconds >= start
    ]
    return {
        "name": name,
        "labels": labels,
        "snapshot": snapshot.model_dump(mode="json"),
        "timeline": shown,
        "phases": phases[-_MOST_SPANS:],
        "transitions": [
            {
                "timestamp_seconds": record.timestamp_seconds,
                "handle": record.handle,
                "trigger": record.trigger.value,
                "phase": record.phase,
                "bytes": record.nbytes,
                "skipped_bytes": record.skipped_bytes,
                "seconds": record.seconds,
            }
            for record in records[: -_LAST - 1 : -1]
        ],
        "failures": [
            {"timestamp_seconds": f.timestamp_seconds, "handle": f.handle, "trigger": f.trigger.value, "reason": f.reason}
            for f in list(journal.failures)[: -_LAST - 1 : -1]
        ],
    }
