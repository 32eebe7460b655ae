"""Suspensions: a manager leaves the device because another process needs it, and its next phase
waits until it is resumed.

Alone, the thread that asks carries it out as soon as no phase is open; an outermost phase that is
about to begin waits for that. Ranks of a group tell each other what they are asked for as they
begin or leave an outermost phase, and carry it out together. A resumption is noted on the group's
board, where the ranks that wait look for it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress

from placement.core import interrupts
from placement.core.errors import PhaseError, listed
from placement.core.journal import logger
from placement.core.snapshot import Snapshot, SuspensionRequest, SuspensionStatus
from placement.group.vote import GroupVote
from placement.phases.phase import OpenPhases, TransitionLock, here
from placement.registration.handle import Handle

# how long a thread that asks waits before it tries again
_PAUSE_SECONDS = 0.05
# pause between two looks of a phase that waits: the first pause, and the longest
_LOOK_SECONDS = (0.001, 0.05)


class Suspension:
    """The suspension of one manager, and the threads that ask for it. Any thread may call it.

    `carry_out`: takes every handle off the device; called with the manager's lock held.
    """

    def __init__(
        self,
        lock: TransitionLock,
        phases: OpenPhases,
        handles: Mapping[str, Handle],
        carry_out: Callable[[], list[Exception]],
    ) -> None:
        self._lock, self._phases, self._handles = lock, phases, handles
        self._carry_out = carry_out
        self._mutex = threading.Lock()
        self.epoch = 0  # the number of the last suspension; 0: there was none
        # what threads ask for while they wait, and how it ends
        self._asked: list[tuple[SuspensionRequest, Future[None]]] = []
        self._is_told = False  # whether the other ranks may know it: nothing can be taken back

    @property
    def is_on(self) -> bool:
        return self._phases.is_suspended

    # --- asking

    def suspend(
        self,
        read: Callable[[], Snapshot],
        request: SuspensionRequest,
        has_gone: Callable[[], bool] = lambda: False,
    ) -> SuspensionStatus:
        """See `Manager.suspend`. `has_gone`: whether the one who asks is no longer there."""
        for phase in self._phases.all:
            if phase.holder in (threading.current_thread(), here()):
                raise self._refused(
                    f"this thread has phase {phase.name!r} open, and would wait for itself. Leave "
                    "it first, or ask in another thread"
                )
        until = time.monotonic() + request.deadline_seconds
        answer: Future[None] = Future()
        asked = request, answer
        with self._mutex:
            if self.is_on and request.epoch in (None, self.epoch):
                answer.set_result(None)
            elif self.is_on or (request.epoch or math.inf) <= self.epoch:
                raise self._refused(self._other_epoch(request))
            else:
                self._asked.append(asked)
        try:
            while not answer.done():
                self._lock.check_process()
                self._carry_out_alone()
                with suppress(TimeoutError):
                    answer.result(_PAUSE_SECONDS)
                is_over = time.monotonic() >= until or has_gone()
                if is_over and self._takes_back(asked):
                    raise self._refused(f"not possible within {request.deadline_seconds:g} s")
        finally:
            self._takes_back(asked, even_if_told=True)
        answer.result()
        return self.status(read)

    def resume(self, read: Callable[[], Snapshot], epoch: int | None = None) -> SuspensionStatus:
        """See `Manager.resume`."""
        if epoch not in (None, self.epoch):
            raise PhaseError(f"resume: epoch {epoch} is not the last one, {self.epoch}")
        if self.is_on and self._lock.vote is not None:
            self._lock.vote.group.note_resumed(self.epoch)
        self.end()
        return self.status(read)

    def end(self) -> None:
        self._phases.suspended_until = -math.inf

    def status(self, read: Callable[[], Snapshot]) -> SuspensionStatus:
        snapshot = read()
        return SuspensionStatus(
            epoch=self.epoch,
            suspended=self.is_on,
            resident_bytes=sum(handle.resident_bytes for handle in snapshot.handles),
            snapshot=snapshot,
        )

    def _takes_back(
        self, asked: tuple[SuspensionRequest, Future[None]], *, even_if_told: bool = False
    ) -> bool:
        """Forget what a thread asks for, unless it is concluded, or the other ranks know it."""
        with self._mutex:
            is_open = asked in self._asked and (even_if_told or not self._is_told)
            if is_open:
                self._asked.remove(asked)
            return is_open

    def _refused(self, reason: str) -> PhaseError:
        names = [handle.name for handle in [*self._handles.values()] if handle.is_on_device]
        phases = " > ".join(phase.name for phase in self._phases.all) or "none"
        held = listed(names) or "nothing"
        return PhaseError(f"suspend: {reason} (open phases: {phases}; on the device: {held})")

    def _other_epoch(self, request: SuspensionRequest) -> str:
        is_on = "suspended now" if self.is_on else "over"
        return f"epoch {request.epoch} cannot begin: the last one, {self.epoch}, is {is_on}"

    # --- carrying it out

    def _carry_out_alone(self) -> None:
        """Take the manager off the device, in the thread that asks, if no phase is open."""
        if self._lock.vote is not None:
            return
        with self._lock.if_free() as is_free:
            if is_free and self._lock.is_outside():
                with self._lock.transition():
                    if (wanted := self._wanted()) is not None:
                        self.conclude(wanted, self._carry_out())

    def _wanted(self) -> SuspensionRequest | None:
        """The newest suspension that threads ask for, with its epoch."""
        with self._mutex:
            requests = [request for request, _ in self._asked]
        if not requests:
            return None
        newest = max(requests, key=lambda request: request.epoch or 0)
        return newest.model_copy(update={"epoch": newest.epoch or self.epoch + 1})

    @contextmanager
    def telling(self, vote: GroupVote) -> Iterator[None]:
        """Tell the other ranks, in the proposal of the transition inside, what is asked for here.
        Then `vote.agreed` is what any rank is asked for."""
        self._is_told = True  # first: what is taken back now is not told
        vote.group.suspension = self._wanted()
        try:
            yield
        finally:
            vote.group.suspension, self._is_told = None, vote.agreed is not None

    def conclude(self, wanted: SuspensionRequest, failures: list[Exception]) -> None:
        """A suspension has been carried out, or has failed. Answer the threads that ask."""
        with self._mutex:
            asked, self._asked, self._is_told = self._asked, [], False
            if not failures:
                self.epoch = wanted.epoch or 0
                seconds = wanted.resume_after_seconds or math.inf
                self._phases.suspended_until = time.monotonic() + seconds
        for request, answer in asked:
            if failures:
                answer.set_exception(self._refused(f"{failures[0]}"))
            elif request.epoch in (None, wanted.epoch):
                answer.set_result(None)
            else:
                answer.set_exception(self._refused(self._other_epoch(request)))
        if failures:
            logger.error("suspend: %s", str(failures[0]))

    # --- waiting

    def wait(self, phase: str) -> None:
        """Wait, before an outermost phase begins, until the manager is resumed. Ctrl-C ends it."""
        if not self.is_on and not self._asked:
            return
        vote = self._lock.vote
        began, is_logged = time.monotonic(), False
        for _ in interrupts.looks(math.inf, *_LOOK_SECONDS):
            now = time.monotonic()
            self._phases.suspended_seconds += now - began
            began = now
            if not self.is_on and (vote is not None or not self._asked):
                return
            self._lock.check_process()
            if self.is_on and not is_logged:
                is_logged = True
                logger.info("phase %s waits: suspended (epoch %d)", phase, self.epoch)
            if vote is not None and vote.group.is_resumed(self.epoch):
                self.end()
