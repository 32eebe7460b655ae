"""The manager's record of an engine's tags: which are on the device, whether the weights are valid, and how large each tag is.

Every call to the engine goes through this record. So no tag is offloaded twice, and none is loaded without having been offloaded:
some engines answer such a call with a warning and do nothing, others crash.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from placement.core import interrupts
from placement.core.errors import BrokenHandleError, EngineError, EngineLost, IntegrityError
from placement.core.states import KV_CACHE, WEIGHTS, State
from placement.storage.base import Storage

_FREED_SHARE = 0.5
"""The share of a tag's bytes that the device must show free after an offload. Not all, because others may take memory meanwhile."""
_FREED_SECONDS = 5.0
"""How long to wait for the freed memory. An engine may answer before its last worker has given it back."""
_POLL_SECONDS = (0.001, 0.1)
_DISCARDED_BEFORE = "they were discarded before the engine was registered"


class MovesTags(Protocol):
    """The calls that the record makes to an engine. `TaggedEngine` documents them."""

    deadline_seconds: float
    why_nothing_moves: str

    def register(self) -> None: ...
    def drain(self) -> None: ...
    def offload(self, tags: Collection[str]) -> None: ...
    def load(self, tags: Collection[str]) -> None: ...
    def admit(self) -> None: ...
    def forget_cache(self) -> None: ...


class Residency(Storage):
    """The record of which parts of an engine are on the device. The manager's lock is held to change it; fields are replaced whole."""

    tags: tuple[str, ...] = ()
    stale: str | None = None
    """Why the weights are invalid and must be filled before use; None while they are valid."""
    keeps_weights = True

    def __init__(
        self,
        engine: MovesTags,
        tags: tuple[str, ...],
        *,
        offloaded: Collection[str],
        keeps_weights: bool,
        given: Mapping[str, int],
        by_memory: bool,
    ) -> None:
        self._engine = engine
        self.tags = tags
        self.resident = frozenset(tags) - frozenset(offloaded)
        self.stale = None
        self.doubt: str | None = None
        """Why it is unknown what is on the device; None while it is known."""
        self._given = dict(given)
        self._measured: dict[frozenset[str], int] = {}
        self._by_memory = by_memory
        self._free_bytes: Callable[[], int] = int
        self._is_drained: bool | None = bool(offloaded)
        """Whether the engine is drained and serves no request; None: unknown. An engine with an offloaded tag was drained before."""
        self._is_taken = False
        self.weights_are_kept(keeps_weights)

    def weights_are_kept(self, kept: bool) -> None:
        """Set whether the weights survive an offload, where only the engine itself knows."""
        self.keeps_weights = kept
        if WEIGHTS in self.offloaded and not self._is_taken and self.stale in (None, _DISCARDED_BEFORE):
            self.stale = None if kept else _DISCARDED_BEFORE

    def attach(self, free_bytes: Callable[[], int]) -> None:
        """Let a manager take the engine over. `free_bytes` gives the free bytes of the manager's device.

        An engine that was lost must have been restarted by now, as its error asked, with everything on the device.

        Raises:
            EngineError: the engine cannot be moved, differs from this record, or is registered with another manager.
        """
        if self._is_taken:
            raise EngineError(f"{self._engine!r} is registered already; unregister it there first")
        lost = self.resident, self.stale, self.doubt
        if self.doubt is not None:
            self.assume(frozenset())
        try:
            self._engine.register()
        except BaseException:
            self.resident, self.stale, self.doubt = lost
            raise
        self._free_bytes, self._is_taken = free_bytes, True

    def detach(self) -> None:
        """Let the manager give the engine back, as it is now."""
        self._is_taken = False

    # --- what is asked

    @property
    def on_device(self) -> bool:
        return bool(self.resident)

    @property
    def resident_tags(self) -> frozenset[str]:
        return self.resident

    @property
    def offloaded_tags(self) -> frozenset[str]:
        return self.offloaded

    def is_consistent_in(self, state: State) -> bool:
        """Never known without asking the engine, so a phase transition always does."""
        return False

    def check(self, name: str, state: State) -> None:
        if self.doubt is None and self.on_device is (state is State.CPU_OFFLOADED):
            raise IntegrityError(f"{name!r} is {state}, but of its tags {sorted(self.resident)} are on the device")

    @property
    def leftovers(self) -> str | None:
        return f"its tags {', '.join(sorted(self.resident))} are on the device" if self.resident else None

    def bytes_by_tag(self) -> dict[str, int]:
        """Device bytes of each tag; 0 while not known."""
        return {tag: self._bytes_of(frozenset({tag})) for tag in self.tags}

    @property
    def num_bytes(self) -> int:
        """Device bytes of all tags, as far as they are known."""
        return self._bytes_of(frozenset(self.tags))

    @property
    def resident_bytes(self) -> int:
        """Device bytes of the resident tags, as far as they are known."""
        return self._bytes_of(self.resident)

    @property
    def offloaded(self) -> frozenset[str]:
        return frozenset(self.tags) - self.resident

    def _bytes_of(self, tags: frozenset[str]) -> int:
        known = {tag: self._given.get(tag, self._measured.get(frozenset({tag}), 0)) for tag in tags}
        return max(self._measured.get(tags, 0) if not all(tag in self._given for tag in tags) else 0, sum(known.values()))

    # --- what is done

    def offload(self, tags: frozenset[str]) -> int:
        """Drain the engine and offload these tags. Returns the bytes copied to the host: the weights, if the engine keeps them.

        Raises:
            EngineError: the engine refused (nothing has changed), or the device shows that the memory is still held.
            EngineLost: it is unknown what the engine did.
        """
        leaving = tags & self.resident
        if not leaving:
            return 0
        try:
            with self._asking(f"offload {_listed(leaving)}"):
                self._drain()
                before = self._free_bytes()
                self._engine.offload(self._in_order(leaving)[::-1])
                if WEIGHTS in leaving and not self.keeps_weights:
                    self.stale = "they were discarded when they were offloaded, and no sync has filled them since"
                self.resident -= leaving
        except EngineError:
            if self.doubt is None:  # the engine goes on as before, so it takes requests again
                self._open()
            raise
        self._see_freed(leaving, before)
        return self._copied(leaving)

    def load(self, tags: frozenset[str]) -> int:
        """Load these tags, the weights first, and open the engine when it is whole and valid. Returns the bytes copied.

        Raises:
            EngineError: the engine refused a tag. Tags before that one are on the device.
            EngineLost: it is unknown what the engine did.
        """
        coming = tags - self.resident
        for tag in self._in_order(coming):
            before = self._free_bytes()
            try:
                with self._asking(f"load {tag}"):
                    self._engine.load([tag])
                    self.resident |= {tag}
            except EngineError:
                if tag == WEIGHTS:  # vLLM drops a block's host copy as soon as the block is back, so a half-finished load cannot be undone
                    self.stale = "loading them failed half-way, so they are not valid"
                raise
            self._measure(frozenset({tag}), before - self._free_bytes())
        self._open()
        return self._copied(coming)

    def fill(self) -> None:
        """Record that the weights are valid from now on.

        Raises:
            EngineError: the weights are not on the device, or the engine refused to drop its cache.
        """
        if WEIGHTS not in self.resident:
            raise EngineError(f"the weights of {self._engine!r} are offloaded, so they cannot have been filled: use phase('weight_sync')")
        if KV_CACHE in self.resident:
            self._engine.forget_cache()
        self.stale = None
        self._open()

    def assume(self, offloaded: frozenset[str]) -> None:
        """Take the user's word for which tags are offloaded.

        Raises:
            ValueError: the engine does not have a tag.
        """
        if unknown := offloaded - frozenset(self.tags):
            raise ValueError(f"{self._engine!r} has no tags {_listed(unknown)}; it has {', '.join(self.tags)}")
        self.resident = frozenset(self.tags) - offloaded
        self.stale = "it is unknown what happened to them while the engine was lost"
        self.doubt = None
        self._is_drained = True if offloaded else None

    def reopen(self) -> None:
        """Open an engine that is whole and valid but closed, because an earlier opening was refused or interrupted.

        Raises:
            EngineError: the engine refused again.
        """
        if self.stale is None and self.doubt is None:
            self._open()

    # --- inside

    def _drain(self) -> None:
        if not self._is_drained:
            self._engine.drain()
            self._is_drained = True

    def _open(self) -> None:
        """Admit requests once every tag is on the device and valid. An engine that is whole but stale must stay closed."""
        if self.offloaded:
            return
        if self.stale is not None:
            self._is_drained = False  # some engines open by themselves as soon as every tag is back
            with self._asking("close until the weights are filled"):
                self._drain()
        elif self._is_drained is not False:
            with self._asking("open"):
                self._engine.admit()
                self._is_drained = False

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        """Guard one or a few requests. If they end without an answer the engine is in doubt, and is never sent anything again."""
        if self.doubt is not None:
            raise BrokenHandleError(f"{self._engine!r} cannot {what}: {self.doubt}")
        try:
            yield
        except EngineLost as lost:
            self.doubt = f"{lost}. Restart the engine and register it anew, or call engine.assume(offloaded=[...]) with the offloaded tags"
            raise
        except EngineError:
            raise
        except BaseException as error:
            self.doubt = f"it was interrupted ({type(error).__name__}) during {what!r}; restart the engine and register it anew"
            raise

    def _copied(self, tags: frozenset[str]) -> int:
        return self._bytes_of(frozenset({WEIGHTS})) if WEIGHTS in tags and self.keeps_weights else 0

    def _see_freed(self, tags: frozenset[str], before: int) -> None:
        """Wait until the device shows the memory of these tags as free.

        Raises:
            EngineError: the memory stays in use. The engine has reported success, so the tags are recorded as offloaded.
        """
        if not self._by_memory:
            return
        wanted = max(1, int(self._bytes_of(tags) * _FREED_SHARE))
        until, pause = time.monotonic() + min(_FREED_SECONDS, self._engine.deadline_seconds), _POLL_SECONDS[0]
        while (freed := self._free_bytes() - before) < wanted:
            if time.monotonic() >= until:
                raise EngineError(
                    f"{self._engine!r} reports {_listed(tags)} as offloaded, but the device has only {freed:,} more free bytes, and they "
                    f"hold {self._bytes_of(tags):,}. {self._engine.why_nothing_moves} If the engine uses other devices than this "
                    "manager's, make it with verify='answer'"
                )
            time.sleep(pause)
            interrupts.check()
            pause = min(pause * 2, _POLL_SECONDS[1])
        self._measure(tags, freed)

    def _measure(self, tags: frozenset[str], nbytes: int) -> None:
        if self._by_memory and nbytes > 0:
            self._measured[tags] = nbytes

    def _in_order(self, tags: Collection[str]) -> list[str]:
        return [tag for tag in self.tags if tag in tags]


def _listed(tags: Collection[str]) -> str:
    return ", ".join(sorted(tags))
