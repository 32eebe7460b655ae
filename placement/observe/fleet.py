"""Ask the workers of a run how they are."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from placement.core.errors import PlacementError
from placement.observe.discovery import Target, targets_in

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
    """The workers at the given places: URLs of workers, and discovery folders. Raises PlacementError: a place is neither."""
    found: list[Target] = []
    for place in places:
        url = place.rstrip("/")
        if url.startswith("http://"):  # a worker serves no TLS
            found.append(Target(address=url.removeprefix("http://"), labels={}))
        elif Path(place).is_dir():
            found += targets_in(place)
        else:
            raise PlacementError(
                f"{place!r} is no worker's URL (http://host:port) and no discovery folder (workers create it when they announce themselves)"
            )
    return found


def views_of(targets: Sequence[Target], pool: concurrent.futures.Executor) -> list[dict[str, Any]]:
    """Every worker's view (see `worker_view`). A worker that does not answer has an `error` in its place."""

    def one(target: Target) -> list[dict[str, Any]]:
        mine = {"name": target.name, "labels": dict(target.labels)}
        try:
            return [view | mine for view in json.loads(ask(f"{target.url}/workers"))]
        except (PlacementError, ValueError, TypeError) as error:
            return [mine | {"error": str(error)}]

    return [view for views in pool.map(one, targets) for view in views]
