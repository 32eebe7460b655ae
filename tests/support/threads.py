"""Bodies that run side by side: ranks, or jobs of one process, as threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

HANG_SECONDS = 60.0


def until(condition: Callable[[], Any]) -> None:
    """Wait for what another thread does and tells nobody."""
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the other thread did not come to it"
        time.sleep(0.001)


def in_a_thread(call: Callable[[], Any]) -> Any:
    """Call in another thread, "helper_0"; what it returns or raises comes out here."""
    with ThreadPoolExecutor(1, thread_name_prefix="helper") as pool:
        return pool.submit(call).result()


def in_threads(*bodies: Callable[[], Any]) -> list[Any]:
    """All at once; what each returned or raised."""
    results: list[Any] = [None] * len(bodies)

    def run(number: int) -> None:
        try:
            results[number] = bodies[number]()
        except BaseException as error:
            results[number] = error

    threads = [
        threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(bodies))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
        assert not thread.is_alive()
    return results


def on_all(ranks: Iterable[Any], do: Callable[[Any], Any]) -> list[Any]:
    """`do(rank)` for all at once; what each returned or raised, by rank."""
    return in_threads(*(lambda rank=rank: do(rank) for rank in ranks))  # type: ignore[misc]
