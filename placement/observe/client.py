"""Query workers from outside, for the discovery server and the command line."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path

from placement.core.errors import PlacementError
from placement.observe.discovery import Target, from_json, targets_in

ASK_SECONDS = 2.0
"""How many seconds a worker may take to answer."""

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a worker is never behind a proxy


def ask(url: str, *, timeout_seconds: float = ASK_SECONDS) -> bytes:
    """GET a page of a worker.

    Raises:
        PlacementError: no worker answers at the URL; the message has the reason.
    """
    if not url.startswith(("http://", "https://")):
        raise PlacementError(f"{url!r} is not an http address; write http://host:port")
    try:
        with _OPENER.open(url, timeout=timeout_seconds) as answer:
            body: bytes = answer.read()
            return body
    except urllib.error.HTTPError as error:
        raise PlacementError(f"{url} answers {error.code} {error.reason}: is this the address of a placement worker?") from error
    except urllib.error.URLError as error:
        reason = error.reason.strerror if isinstance(error.reason, OSError) else None
        raise PlacementError(f"{url} does not answer: {reason or error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise PlacementError(f"{url} does not answer: {error}") from error


def find_targets(places: Iterable[str]) -> list[Target]:
    """The workers at the given places: URLs of workers, URLs that end in /targets, and discovery folders.

    Raises:
        PlacementError: a place is none of these, or nobody answers there.
    """
    found: list[Target] = []
    for place in places:
        if place.startswith(("http://", "https://")):
            url = place.rstrip("/")
            if url.endswith("/targets"):
                found += from_json(ask(url), url)
            else:
                address = url.removeprefix("http://").removeprefix("https://")
                found.append(Target(address=address, labels={}))
        elif Path(place).is_dir():
            found += targets_in(place)
        else:
            raise PlacementError(
                f"{place!r} is not a worker's URL (http://host:port), a URL that ends in /targets, or a discovery folder "
                "(workers create it when they announce themselves)"
            )
    return found
