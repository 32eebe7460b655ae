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
from dataclasses import dataclass, field

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


@dataclass(eq=False)
class _Asked:
    """The request of one thread that waits, and its answer."""

    request: SuspensionRequest
    answer: Future[None] = field(default_factory=Future)


class Suspension:
    """The suspension of one manager, and the threads that ask for it. Any thread may call it.

    `read`: takes a snapshot. `carry_out`: takes every handle off the device, or raises; called with
    the manager's lock held.
    """

    def __init__(
        self,
        lock: TransitionLock,
        phases: OpenPhases,
        handles: Mapping[str, Handle],
        read: Callable[[], Snapshot],
        carry_out: Callable[[], None],
    ) -> None:
        self._lock, self._phases, self._handles = lock, phases, handles
        self._read, self._carry_out = read, carry_out
        self._mutex = threading.Lock()
        self.epoch = 0  # the number of the last suspension; 0: there was none
        self._asked: list[_Asked] = []
        self._taken_up: list[_Asked] = []  # those of them that cannot be taken back any more
        # for each phase that waits: the last suspension that had ended before
        self._waiting: list[int] = []

    @property
    def comes_first(self) -> bool:
        """Whether an outermost phase has to wait: for the end of a suspension, or, without a group,
        for the thread that asks for one."""
        if self._asked and self._lock.vote is None and not self._owes_a_phase:
            return True
        return self._phases.is_suspended

    @property
    def _owes_a_phase(self) -> bool:
        """Whether a phase waits that has waited for a suspension already. It begins before the next
        suspension, so that threads that ask again and again do not keep it out."""
        return not self._phases.is_suspended and any(last != self.epoch for last in self._waiting)

    # --- asking

    def suspend(
        self, request: SuspensionRequest, has_gone: Callable[[], bool] = lambda: False
    ) -> SuspensionStatus:
        """See `Manager.suspend`. `has_gone`: whether the one who asks is no longer there."""
        asked, until = _Asked(request), time.monotonic() + request.deadline_seconds
        with interrupts.deferred():
            self._lock.check_process()
            for phase in self._phases.all:
                if phase.holder in (threading.current_thread(), here()):
                    raise self._refused(
                        f"this thread has phase {phase.name!r} open, and would wait for itself. "
                        "Leave it first, or ask in another thread"
                    )
            try:
                self._ask(asked)
                while not asked.answer.done():
                    self._lock.check_process()
                    self._carry_out_alone()
                    with suppress(TimeoutError):
                        asked.answer.result(_PAUSE_SECONDS)
                    interrupts.check()
                    is_old = (request.epoch or math.inf) <= self.epoch
                    is_over = is_old or time.monotonic() >= until or has_gone()
                    if is_over and self._takes_back(asked):
                        late = f"not possible within {request.deadline_seconds:g} s"
                        raise self._refused(self._other_epoch(request) if is_old else late)
            finally:
                self._takes_back(asked, even_if_taken_up=True)
            asked.answer.result()
        return self.status()

    def _ask(self, asked: _Asked) -> None:
        """Have a thread's request carried out, unless the suspension is on already."""
        epoch = asked.request.epoch
        with self._mutex:
            if self._phases.is_suspended and epoch in (None, self.epoch):
                asked.answer.set_result(None)
            elif self._phases.is_suspended or (epoch or math.inf) <= self.epoch:
                raise self._refused(self._other_epoch(asked.request))
            else:
                self._asked.append(asked)

    def resume(self, epoch: int | None = None) -> SuspensionStatus:
        """See `Manager.resume`."""
        self._lock.check_process()
        last = self.epoch
        if epoch not in (None, last):
            raise PhaseError(f"resume: epoch {epoch} is not the last one, {last}")
        if self._phases.is_suspended and self._lock.vote is not None:
            self._lock.vote.group.note_resumed(last)
        with self._mutex:
            if self.epoch == last:  # another one may have begun meanwhile
                self.end()
        return self.status()

    def end(self) -> None:
        self._phases.suspended_until = -math.inf

    def status(self) -> SuspensionStatus:
        snapshot = self._read()
        return SuspensionStatus(
            epoch=self.epoch,
            suspended=snapshot.suspended,
            resident_bytes=sum(handle.resident_bytes for handle in snapshot.handles),
            snapshot=snapshot,
        )

    def _takes_back(self, asked: _Asked, *, even_if_taken_up: bool = False) -> bool:
        """Forget what a thread asks for, unless it is concluded or taken up."""
        with self._mutex:
            is_open = asked in self._asked and (even_if_taken_up or asked not in self._taken_up)
            if is_open:
                self._asked.remove(asked)
            return is_open

    def _refused(self, reason: str) -> PhaseError:
        names = [handle.name for handle in [*self._handles.values()] if handle.is_on_device]
        phases = " > ".join(phase.name for phase in self._phases.all) or "none"
        on_device = listed(names) or "nothing"
        return PhaseError(f"suspend: {reason} (open phases: {phases}; on the device: {on_device})")

    def _other_epoch(self, request: SuspensionRequest) -> str:
        is_on = "suspended now" if self._phases.is_suspended else "over"
        return f"epoch {request.epoch} cannot begin: the last one, {self.epoch}, is {is_on}"

    # --- carrying it out

    def _carry_out_alone(self) -> None:
        """Take the manager off the device, in the thread that asks. Nothing happens while the lock
        is held or a phase is open: the caller tries again. Errors go to the threads that ask."""
        if self._lock.vote is not None:
            return
        with self._lock.if_free() as is_free:
            if not is_free or not self._lock.is_outside():
                return
            request = self._take_up()
            if request is not None:
                with self.suspending(request), self._lock.transition():
                    self._carry_out()

    def _take_up(self) -> SuspensionRequest | None:
        """The newest suspension that threads ask for, with its epoch; None while there is none, or
        a phase begins before it."""
        with self._mutex:
            self._taken_up = [] if self._owes_a_phase else [*self._asked]
            requests = [asked.request for asked in self._taken_up]
        if not requests:
            return None
        newest = max(requests, key=lambda request: request.epoch or 0)
        return newest.model_copy(update={"epoch": newest.epoch or self.epoch + 1})

    @contextmanager
    def telling(self, vote: GroupVote) -> Iterator[None]:
        """Tell the other ranks, in the proposal of the transition inside, what is asked for here.
        Then `vote.agreed` is what any rank is asked for."""
        group = vote.group
        group.suspension, group.last_suspension = self._take_up(), self.epoch
        try:
            yield
        finally:
            group.suspension = None
            if vote.agreed is None:
                self._taken_up = []
            self.epoch = max(self.epoch, group.last_suspension)  # a rank may have been restarted

    @contextmanager
    def suspending(self, carried_out: SuspensionRequest) -> Iterator[None]:
        """The suspension is carried out inside. Success marks the manager suspended, with the new
        epoch; an error refuses the suspension, and is not raised. Then the threads that ask are
        answered."""
        reason = "it was interrupted"
        try:
            yield
            reason = ""
        except Exception as error:
            reason = str(error) or type(error).__name__
            logger.error("suspend: %s", reason)
        finally:
            with self._mutex:
                concluded, self._asked, self._taken_up = self._asked, [], []
                if not reason:
                    self.epoch = carried_out.epoch or 0
                    seconds = carried_out.resume_after_seconds or math.inf
                    self._phases.suspended_until = time.monotonic() + seconds
            for asked in concluded:
                if not reason and asked.request.epoch in (None, carried_out.epoch):
                    asked.answer.set_result(None)
                else:
                    refused = self._refused(reason or self._other_epoch(asked.request))
                    asked.answer.set_exception(refused)

    # --- waiting

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """An outermost phase waits inside, and then begins."""
        last = -1 if self._phases.is_suspended else self.epoch
        self._waiting.append(last)
        try:
            yield
        finally:
            self._waiting.remove(last)

    def wait(self, phase: str) -> None:
        """Wait until an outermost phase may begin. Ctrl-C ends it. Raises CoordinatorLost: the
        ranks of the group cannot be heard."""
        began, is_logged = time.monotonic(), False
        for _ in interrupts.looks(math.inf, *_LOOK_SECONDS):
            now, vote = time.monotonic(), self._lock.vote
            self._phases.suspended_seconds += now - began
            began = now
            self._lock.check_process()
            if self._phases.is_suspended and vote is not None and vote.group.is_resumed(self.epoch):
                self.end()
            if not self.comes_first:
                return
            if self._phases.is_suspended and not is_logged:
                is_logged = True
                logger.info("phase %s waits: suspended (epoch %d)", phase, self.epoch)
