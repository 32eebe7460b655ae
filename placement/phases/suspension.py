"""Suspensions: a manager leaves the device because another process needs it, and its next phase
waits until it is resumed.

The thread that leaves the outermost phase carries it out, or the one that asks, where none is open.
Ranks of a group tell each other what they are asked for as they begin or leave an outermost phase,
and carry it out together. A resumption is noted on the group's board, where waiting ranks look.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

from placement.core import interrupts
from placement.core.errors import PhaseError, listed
from placement.core.journal import logger
from placement.core.snapshot import Snapshot, SuspensionRequest, SuspensionStatus
from placement.group.vote import GroupVote
from placement.phases.engines import droppable
from placement.phases.phase import LastSuspension, OpenPhases, TransitionLock, here
from placement.registration.handle import Handle

_PAUSE_SECONDS = (0.001, 0.05)  # between two looks of a thread that waits: the first, the longest


@dataclass(eq=False)
class Suspension:
    """Suspends one manager, and resumes it. Any thread may call it. `_offload_all`: takes every
    handle off the device, on all ranks or on none, or raises; see `PhaseStack`."""

    _lock: TransitionLock
    _phases: OpenPhases
    _handles: Mapping[str, Handle]
    _read: Callable[[], Snapshot]
    _offload_all: Callable[[str, Sequence[str]], None]
    # the requests of threads, by their answers: the reason of a refusal, or an empty text
    asked: dict[Future[str], SuspensionRequest] = field(default_factory=dict)
    _taken: dict[Future[str], SuspensionRequest] = field(default_factory=dict)  # being carried out

    def suspend(
        self, request: SuspensionRequest, has_gone: Callable[[], bool] = lambda: False
    ) -> SuspensionStatus:
        """See `Manager.suspend`. `has_gone`: whether the one who asks is no longer there."""
        answer: Future[str] = Future()
        until = time.monotonic() + request.deadline_seconds
        with interrupts.deferred():
            self._lock.check_process()
            droppable(self._handles, request.drop)
            for phase in self._phases.all:
                if phase.holder in (threading.current_thread(), here()):
                    raise self._refused(f"phase {phase.name!r} is open here: ask in another thread")
            try:
                self.asked[answer] = request
                for _ in interrupts.looks(math.inf, *_PAUSE_SECONDS):
                    self._lock.check_process()
                    if self._lock.vote is None:
                        self.carry_out()
                    reason = self._verdict(request)
                    if reason is None and (has_gone() or time.monotonic() >= until):
                        reason = f"not possible within {request.deadline_seconds:g} s"
                    if reason is not None and self.asked.pop(answer, None) is not None:
                        answer.set_result(reason)
                    if answer.done():
                        break
            finally:
                self.asked.pop(answer, None)
        if answer.result():
            raise self._refused(answer.result())
        return self._status()

    def _refused(self, reason: str) -> PhaseError:
        names = [handle.name for handle in [*self._handles.values()] if handle.is_on_device]
        phases = " > ".join(phase.name for phase in self._phases.all) or "none"
        on_device = listed(names) or "nothing"
        return PhaseError(f"suspend: {reason} (open phases: {phases}; on the device: {on_device})")

    def _verdict(self, request: SuspensionRequest) -> str | None:
        """The answer to a request: see `_mismatch`. None: a new suspension may begin."""
        last = self._phases.suspension
        is_over = last.until_seconds <= time.monotonic()
        if is_over and (request.epoch or math.inf) > last.epoch:
            return None
        return self._mismatch(request, is_over)

    def _mismatch(self, request: SuspensionRequest, was_over: bool = False) -> str:
        """Why the last suspension is not what is asked for; empty if it is, and was not over."""
        last = self._phases.suspension
        is_same = request.epoch in (None, last.epoch) and {*request.drop} <= {*last.drop}
        if is_same and not was_over:
            return ""
        asked = "another one" if request.epoch is None else f"epoch {request.epoch}"
        state = "on" if self._phases.is_suspended else "over"
        dropped = listed(last.drop) or "nothing"
        return f"{asked} cannot begin: the last one, {last.epoch}, dropped {dropped} and is {state}"

    def resume(self, epoch: int | None = None) -> SuspensionStatus:
        """See `Manager.resume`."""
        self._lock.check_process()
        last = self._phases.suspension  # another one may begin meanwhile, and goes on
        if epoch not in (None, last.epoch):
            raise PhaseError(f"resume: epoch {epoch} is not the last one, {last.epoch}")
        if self._phases.is_suspended and self._lock.vote is not None:
            self._lock.vote.group.note_resumed(last.epoch)
        last.until_seconds = -math.inf
        return self._status()

    def _status(self) -> SuspensionStatus:
        snapshot = self._read()
        held = sum(handle.resident_bytes for handle in snapshot.handles)
        epoch = self._phases.suspension.epoch
        return SuspensionStatus(
            epoch=epoch, suspended=snapshot.suspended, resident_bytes=held, snapshot=snapshot
        )

    def carry_out(self) -> None:
        """Carry out what threads ask for. Nothing happens while the lock is held, or a phase is
        open: its end tries again. In a group: carry out what all ranks have agreed on."""
        vote = self._lock.vote
        if vote is not None:
            with interrupts.deferred():
                agreed, vote.agreed = vote.agreed, None
                self._suspend(agreed)
        elif self.asked or self._taken:
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
        """The newest suspension that threads ask for, with its number; None: there is none."""
        for answer, request in [*self.asked.items()]:
            if self._verdict(request) is None and self.asked.pop(answer, None) is not None:
                self._taken[answer] = request
        if not self._taken:
            return None
        newest = max(self._taken.values(), key=lambda request: request.epoch or 0)
        epoch = newest.epoch or self._phases.suspension.epoch + 1
        return newest.model_copy(update={"epoch": epoch})

    def _suspend(self, request: SuspensionRequest | None) -> None:
        """Carry out a suspension, and answer the threads that ask. An error only refuses it."""
        if request is None:
            return
        reason = "it was interrupted"
        try:
            self._offload_all("suspend", ())
            if request.drop:
                # Not before every rank has left: an engine comes back, and may be on their devices.
                self._offload_all(f"drop {', '.join(request.drop)}", request.drop)
            until = time.monotonic() + (request.resume_after_seconds or math.inf)
            logger.info("suspended (epoch %d): the next phase waits", request.epoch)
            self._phases.suspension = LastSuspension(request.epoch or 0, request.drop, until)
            reason = ""
        except Exception as error:
            reason = str(error) or type(error).__name__
            logger.error("suspend: %s", reason)
        finally:
            self._answer(reason)

    def _answer(self, reason: str = "") -> None:
        """Answer the requests that were taken up. `reason`: why they are refused; empty: the last
        suspension was carried out for them, though it may be over again."""
        while self._taken:
            answer, request = self._taken.popitem()
            answer.set_result(reason or self._mismatch(request))

    def wait(self) -> None:
        """Wait for the end of a suspension, or Ctrl-C. CoordinatorLost: no rank can be heard."""
        phases, vote = self._phases, self._lock.vote
        looked = time.monotonic()
        for _ in interrupts.looks(math.inf, *_PAUSE_SECONDS):
            self._lock.check_process()
            self.carry_out()
            now = time.monotonic()
            phases.suspended_seconds += now - looked
            looked, last = now, phases.suspension
            if phases.is_suspended and vote and vote.group.is_resumed(last.epoch):
                last.until_seconds = -math.inf
            if not phases.is_suspended:
                return
