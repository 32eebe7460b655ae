"""The weights that verl reads from an engine for a sync, and their end where the sync fails.

Nobody reads on then, but whoever keeps the error keeps its frames, and they keep the iterators: all that verl's worker had opened, which
are two for LoRA that is not merged. So each ends when placement learns of the failure: from the rollout's adapter where it shares the
worker's device, and from the asyncio task in which verl's worker opened it (a sync through a checkpoint engine passes no adapter).
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from placement.core.errors import PlacementError
from placement.core.weak_set import WeakIdSet
from placement.integrations.verl.log import logger
from placement.phases.phase import Hold


class Publication(Iterator[tuple[Any, ...]]):
    """An engine's weights, with the hold under which they are read. It ends like `Hold.around`, and when the sync fails.

    Args:
        hold: the phase in which the model is held.
        weights: a generator of weights.
    """

    def __init__(self, hold: Hold, weights: Iterator[tuple[Any, ...]]) -> None:
        self._hold, self._weights = hold, weights
        self._around = hold.around(weights)
        self._is_cut_off = False
        _publications.add(self)
        if (task := _current_task()) is not None:
            task.add_done_callback(partial(_task_ended, weakref.ref(self)))

    @property
    def is_open(self) -> bool:
        """Whether the model is held for it."""
        return self._hold.is_open

    def __next__(self) -> tuple[Any, ...]:
        if self._is_cut_off:  # not StopIteration: half of the weights would be taken for all
            raise PlacementError("these weights ended with the sync that failed: ask the engine for new ones")
        return next(self._around)

    def close(self) -> None:
        """Give the rest of the weights up. Idempotent."""
        self._around.close()  # type: ignore[attr-defined] # the iterator of `Hold.around` has it

    def cut_off(self, error: BaseException) -> None:
        """End it because the sync has failed with `error`. Failures of ending become notes on that."""
        if not self.is_open:
            return
        self._is_cut_off = True
        with noted(error):
            self._weights.close()  # type: ignore[attr-defined] # a generator; first, as it may refer to the model's memory
        with noted(error):
            self._hold.release(error)


_publications: WeakIdSet[Publication] = WeakIdSet()
"""Those of all engines of this process."""


def cut_off_all(weights: Any, error: BaseException) -> None:
    """End all publications of this process because a sync has failed. Failures of ending become notes on its error.

    Args:
        weights: what the sync was reading: a publication, or somebody's generator around one.
        error: the error of the sync.
    """
    if not isinstance(weights, Publication) and hasattr(weights, "close"):
        with noted(error):
            weights.close()
    for publication in _publications:
        publication.cut_off(error)


@contextmanager
def noted(error: BaseException) -> Iterator[None]:
    """Make what the block raises a note on `error`, which is on its way and says more."""
    try:
        yield
    except Exception as failure:
        with suppress(Exception):  # an exception that is a frozen dataclass refuses notes
            error.add_note(f"placement: {type(failure).__name__}: {failure}")


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs in this thread
        return None


def _task_ended(reference: weakref.ref[Publication], task: asyncio.Task[Any]) -> None:
    """The task that opened a publication has ended. After an error in it nobody reads on."""
    publication = reference()
    if publication is None or not publication.is_open:
        return
    error = asyncio.CancelledError() if task.cancelled() else task.exception()
    if error is not None:
        # Said here, too, because asyncio now counts the exception as retrieved.
        logger.warning("a sync of weights has failed, so the phase of its model ends: %s: %s", type(error).__name__, error)
        publication.cut_off(error)
