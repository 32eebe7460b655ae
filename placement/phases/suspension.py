"""Suspensions: a manager leaves the device because another process needs it, and its next phase
waits until it is resumed.

It is carried out by the thread that leaves the outermost phase, or, where none is open, by the
thread that asks. Ranks of a group tell each other what they are asked for as they begin or leave an
outermost phase, and carry it out together. A resumption is noted on the group's board, where the
ranks that wait look for it.
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
from placement.group.vote import GroupVote, Suspended
from placement.phases.engines import droppable
from placement.phases.phase import OpenPhases, TransitionLock, here
from placement.registration.handle import Handle

# pause between two looks of a thread that waits: the first pause, and the longest
_PAUSE_SECONDS = (0.001, 0.05)


@dataclass(eq=False)
class Suspension:
    """The suspension of one manager, and the threads that ask for it. Any thread may call it.

    `read`: takes a snapshot. `leave_the_device`: takes every handle off the device, on all ranks or
    on none, or raises.
    """

    _lock: TransitionLock
    _phases: OpenPhases
    _handles: Mapping[str, Handle]
    _read: Callable[[], Snapshot]
    _leave_the_device: Callable[[SuspensionRequest], None]
    epoch: int = 0  # the number of the last suspension; 0: there was none
    _dropped: tuple[str, ...] = ()  # the engines that it has dropped
    _mutex: threading.RLock = field(default_factory=threading.RLock)
    asked: dict[Future[None], SuspensionRequest] = field(default_factory=dict)
    """The requests of threads, by the futures of their answers. One that runs is taken up, and
    cannot be taken back any more."""
    _waiting: list[threading.Thread] = field(default_factory=list)  # those whose phases wait

    # --- asking

    def suspend(
        self, request: SuspensionRequest, has_gone: Callable[[], bool] = lambda: False
    ) -> SuspensionStatus:
        """See `Manager.suspend`. `has_gone`: whether the one who asks is no longer there."""
        answer: Future[None] = Future()
        until = time.monotonic() + request.deadline_seconds
        with interrupts.deferred():
            self._lock.check_process()
            droppable(self._handles, request.drop)
            for phase in self._phases.all:
                if phase.holder in (threading.current_thread(), here()):
                    raise self._refused(
                        f"this thread has phase {phase.name!r} open, and would wait for itself. "
                        "Leave it first, or ask in another thread"
                    )
            try:
                with self._mutex:
                    self.asked[answer] = request
                    if self._phases.is_suspended:
                        self._answer()
                    elif (request.epoch or math.inf) <= self.epoch:
                        raise self._refused(self._other_epoch(request))
                for _ in interrupts.looks(math.inf, *_PAUSE_SECONDS):
                    self._lock.check_process()
                    if self._lock.vote is None:
                        self.carry_out()
                    if answer.done():
                        break
                    is_over = time.monotonic() >= until or has_gone()
                    if is_over and self._takes_back(answer):
                        raise self._refused(f"not possible within {request.deadline_seconds:g} s")
            finally:
                with self._mutex:
                    self.asked.pop(answer, None)  # a second Ctrl-C may have cut its answer short
        answer.result()
        return self.status()

    def _takes_back(self, answer: Future[None]) -> bool:
        """Forget what a thread asks for, unless it is taken up."""
        with self._mutex:
            return not answer.running() and self.asked.pop(answer, None) is not None

    def resume(self, epoch: int | None = None) -> SuspensionStatus:
        """See `Manager.resume`."""
        self._lock.check_process()
        with self._mutex:
            if epoch not in (None, self.epoch):
                raise PhaseError(f"resume: epoch {epoch} is not the last one, {self.epoch}")
            if self._phases.is_suspended and self._lock.vote is not None:
                self._lock.vote.group.note_resumed(self.epoch)
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

    def _refused(self, reason: str) -> PhaseError:
        names = [handle.name for handle in [*self._handles.values()] if handle.is_on_device]
        phases = " > ".join(phase.name for phase in self._phases.all) or "none"
        on_device = listed(names) or "nothing"
        return PhaseError(f"suspend: {reason} (open phases: {phases}; on the device: {on_device})")

    def _is_last(self, request: SuspensionRequest) -> bool:
        """Whether the last suspension is what is asked for."""
        return request.epoch in (None, self.epoch) and {*request.drop} <= {*self._dropped}

    def _other_epoch(self, request: SuspensionRequest) -> str:
        is_on = "suspended now" if self._phases.is_suspended else "over"
        if request.drop:
            is_on += f", and has dropped {listed(self._dropped) or 'nothing'}"
        asked = "another one" if request.epoch is None else f"epoch {request.epoch}"
        return f"{asked} cannot begin: the last one, {self.epoch}, is {is_on}"

    # --- carrying it out

    def carry_out(self) -> None:
        """Carry out what threads ask for. Nothing happens while the lock is held, or a phase is
        open: its end tries again. In a group: carry out what all ranks have agreed on."""
        vote = self._lock.vote
        if vote is not None:
            with interrupts.deferred():
                agreed, vote.agreed = vote.agreed, None
                self._suspend(agreed)
        elif self.asked:
            with self._lock.if_free() as is_free:
                if is_free and self._lock.is_outside():
                    self._suspend(self._take_up())

    @contextmanager
    def telling(self, vote: GroupVote) -> Iterator[None]:
        """Tell the other ranks, in the proposals inside, what is asked for here. Then `vote.agreed`
        is what any rank is asked for."""
        vote.agreed, vote.group.suspension = None, self._take_up()
        try:
            yield
        finally:
            vote.group.suspension = None
            if vote.agreed is None:
                self._answer("the ranks have not agreed on it")

    def _take_up(self) -> SuspensionRequest | None:
        """The newest suspension that threads ask for, with its number. None while there is none, or
        a phase waits: it begins before the next suspension, so that threads that ask again and
        again do not keep it out."""
        with self._mutex:
            if self._waiting or not self.asked:
                return None
            for answer in self.asked:
                if not answer.running():  # an interrupt may have left some unanswered
                    answer.set_running_or_notify_cancel()
            newest = max(self.asked.values(), key=lambda request: request.epoch or 0)
            return newest.model_copy(update={"epoch": newest.epoch or self.epoch + 1})

    def _suspend(self, request: SuspensionRequest | None) -> None:
        """Carry out a suspension, and answer the threads that ask. An error refuses it, and is not
        raised."""
        if request is None:
            return
        try:
            self._leave_the_device(request)
        except BaseException as error:
            reason = str(error) or type(error).__name__
            logger.error("suspend: %s", reason)
            self._answer(reason)
            if not isinstance(error, Exception):
                raise
            return
        with self._mutex:
            self.epoch, self._dropped = request.epoch or 0, request.drop
            seconds = request.resume_after_seconds or math.inf
            self._phases.suspended_until = time.monotonic() + seconds
            logger.info("suspended (epoch %d): the next phase waits", self.epoch)
            self._answer()

    def _answer(self, reason: str = "") -> None:
        """Answer the threads whose requests were taken up. `reason`: why they are refused; empty:
        the manager was suspended, and those who have asked meanwhile are answered, too."""
        with self._mutex:
            for answer, request in [*self.asked.items()]:
                if reason and not answer.running():
                    continue
                del self.asked[answer]
                if not reason and self._is_last(request):
                    answer.set_result(None)
                else:
                    answer.set_exception(self._refused(reason or self._other_epoch(request)))

    # --- waiting

    def enter(self, begin: Callable[[], None]) -> None:
        """Enter an outermost phase before which there is a suspension. Ctrl-C ends the wait.
        `begin`: begins the phase, or raises that there is another suspension. Raises
        CoordinatorLost: the ranks of the group cannot be heard."""
        phases, vote = self._phases, self._lock.vote
        group = None if vote is None else vote.group
        thread = threading.current_thread()
        looked = time.monotonic()
        with interrupts.deferred():
            self._waiting.append(thread)
            try:
                for _ in interrupts.looks(math.inf, *_PAUSE_SECONDS):
                    self._lock.check_process()
                    self.carry_out()
                    now = time.monotonic()
                    phases.suspended_seconds += now - looked
                    looked = now
                    if phases.is_suspended and group is not None and group.is_resumed(self.epoch):
                        self.end()
                    if not phases.is_suspended:
                        with suppress(Suspended):
                            return begin()
            finally:
                self._waiting.remove(thread)
