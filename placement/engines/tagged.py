"""Engines that place their own memory, tag by tag, on request: vLLM, SGLang, and any engine with a
sleep of its own.

The engine class knows the calls. Its `Residency` records what is on the device, because not every
engine can be asked and some crash at a wrong call.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from typing import Any, Literal, get_args

import torch

from placement.core import interrupts
from placement.core.errors import BrokenHandleError, EngineError, EngineLost, IntegrityError
from placement.core.journal import logger
from placement.core.settings import parse_bytes
from placement.core.states import KV_CACHE, TAGS, WEIGHTS, State
from placement.engines.base import HALF, HALF_OF_ADAPTERS, Engine
from placement.engines.mirror import PLACEMENT
from placement.ownership.adapter import Adapter
from placement.storage.base import Storage
from placement.tensors.plain import Owned

Verify = Literal["memory", "answer"]
"""How an offload is verified: by the device's free memory, or by the engine's answer (for an engine
on other devices)."""
Weights = Literal["keep", "discard"]
"""The effect of an offload on the weights: "keep" leaves a copy on the host, "discard" loses them
until the next sync."""
# the share of a tag's bytes that must be free after an offload. Others may take memory meanwhile.
_FREED_SHARE = 0.5
# how long to wait for the freed memory. An engine may answer before its last worker has given it
# back.
_FREED_SECONDS = 5.0
# pause between two looks at the free memory: the first pause, and the longest
_PAUSE_SECONDS = (0.001, 0.1)
_DISCARDED_BEFORE = "they were discarded before the engine was registered"


class Residency(Storage):
    """The manager's record of an engine's tags: which are on the device, whether the weights are
    valid, and how large each tag is.

    Every call to the engine goes through it. So no tag is offloaded twice, and none is loaded
    without having been offloaded: some engines answer such a call with a warning and do nothing,
    others crash. The manager's lock is held to change it; fields are replaced whole.
    """

    def __init__(
        self,
        engine: TaggedEngine,
        tags: tuple[str, ...],
        *,
        offloaded: Collection[str],
        keeps_weights: bool,
        tag_bytes: Mapping[str, int],
        verifies_memory: bool,
    ) -> None:
        self._engine = engine
        self.tags = tags
        self.resident_tags = frozenset(tags) - frozenset(offloaded)
        # why the weights are invalid until they are published again; None while they are valid
        self.stale: str | None = None
        # why it is unknown which tags are on the device; None while it is known
        self.doubt: str | None = None
        self._declared_bytes = dict(tag_bytes)
        self._measured_bytes: dict[frozenset[str], int] = {}
        self._verifies_memory = verifies_memory
        self.free_bytes: Callable[[], int] = int
        self._is_drained: bool | None = bool(offloaded)
        """Whether the engine is drained and serves no request; None: unknown. An engine with an
        offloaded tag was drained before."""
        self._is_taken = False
        self.has_mirror = False  # whether the engine has its weights on the host
        # the mirror's size, as the engine reported it at the last offload; None where it cannot
        self._reported_mirror_bytes: int | None = None
        # as the engine reported it; None: not yet
        self.moved_by: str | None = None
        self.weights_are_kept(keeps_weights)

    def weights_are_kept(self, kept: bool) -> None:
        """Set whether the weights survive an offload, where only the engine itself knows."""
        self.keeps_weights = kept
        self.has_mirror = kept and (self.has_mirror or WEIGHTS in self.offloaded_tags)
        if self._is_taken or WEIGHTS not in self.offloaded_tags:
            return
        if self.stale in (None, _DISCARDED_BEFORE):
            self.stale = None if kept else _DISCARDED_BEFORE

    def attach(self, free_bytes: Callable[[], int]) -> None:
        """Let a manager take the engine over. `free_bytes` gives the free bytes of its device. An
        engine that was lost must have been restarted, with everything on the device. EngineError:
        it cannot be moved, differs from this record, or is registered already."""
        if self._is_taken:
            raise EngineError(f"{self._engine!r} is registered already; unregister it there first")
        before = self.resident_tags, self.stale, self.doubt
        if self.doubt is not None:
            self.assume(frozenset())
        try:
            self._engine.register()
        except BaseException:
            self.resident_tags, self.stale, self.doubt = before
            raise
        self._learn_mover()
        if self.moved_by == PLACEMENT:  # it has reserved its mirror already
            self._measure_mirror()
        self.free_bytes = free_bytes
        self._is_taken = True

    def detach(self) -> None:
        self._is_taken = False
        self.moved_by = None

    @property
    def on_device(self) -> bool:
        return bool(self.resident_tags)

    def is_consistent_in(self, state: State) -> bool:
        return False  # never known without asking the engine, so a phase transition always does

    def check(self, name: str, state: State) -> None:
        if self.doubt is None and self.on_device is (state is State.CPU_OFFLOADED):
            raise IntegrityError(
                f"{name!r} is {state}, but of its tags {sorted(self.resident_tags)} are on the "
                "device"
            )

    @property
    def leftovers(self) -> str | None:
        if not self.resident_tags:
            return None
        return f"its tags {_listed(self.resident_tags)} are on the device"

    def bytes_by_tag(self) -> dict[str, int]:
        """Device bytes of each tag; 0 while not known."""
        return {tag: self._bytes_of(frozenset({tag})) for tag in self.tags}

    def sizes(self) -> tuple[int, int, int]:
        return self._bytes_of(frozenset(self.tags)), self._bytes_of(self.resident_tags), 0

    @property
    def mirror_bytes(self) -> int:
        if self._reported_mirror_bytes is not None:
            return self._reported_mirror_bytes
        return self._bytes_of(frozenset({WEIGHTS})) if self.keeps_weights else 0

    @property
    def host_bytes(self) -> int:
        return self.mirror_bytes if self.has_mirror else 0

    def _bytes_of(self, tags: frozenset[str]) -> int:
        nbytes = 0
        for tag in tags:
            measured = self._measured_bytes.get(frozenset({tag}), 0)
            nbytes += self._declared_bytes.get(tag, measured)
        if tags <= self._declared_bytes.keys():
            return nbytes
        return max(nbytes, self._measured_bytes.get(tags, 0))

    def offload(self, tags: frozenset[str]) -> int:
        """Drain the engine and offload these tags. Returns the bytes copied to the host: the
        weights, if the engine keeps them. EngineError: it refused (nothing has changed), or the
        device shows that the memory is still held. EngineLost: effect unknown."""
        leaving = tags & self.resident_tags
        if not leaving:
            return 0
        try:
            with self._asking(f"offload {_listed(leaving)}"):
                self._drain()
                before = self.free_bytes()
                self._engine.offload(self._in_order(leaving)[::-1])
                if WEIGHTS in leaving:
                    self._weights_have_left()
                self.resident_tags -= leaving
        except EngineError:
            if self.doubt is None:  # the engine goes on as before, so it takes requests again
                self._open()
            raise
        self._wait_until_freed(leaving, before)
        return self._copied_bytes(leaving)

    def _weights_have_left(self) -> None:
        if not self.keeps_weights:
            self.stale = (
                "they were discarded when they were offloaded, and no sync has filled them since"
            )
        self._measure_mirror()

    def load(self, tags: frozenset[str]) -> int:
        """Load these tags, the weights first, and open the engine when it is whole and valid.
        Returns the bytes copied. EngineError: it refused a tag; those before are on the device.
        EngineLost: its effect is unknown."""
        coming = tags - self.resident_tags
        had_mirror = self.has_mirror
        for tag in self._in_order(coming):
            before = self.free_bytes()
            try:
                with self._asking(f"load {tag}"):
                    self._engine.load([tag])
                    self.resident_tags |= {tag}
            except EngineError:
                # vLLM itself drops a block's host copy as soon as the block is back, so that a
                # half-finished load cannot be undone
                if tag == WEIGHTS and self.moved_by != PLACEMENT:
                    self.stale = "loading them failed half-way, so they are not valid"
                raise
            self._measure(frozenset({tag}), before - self.free_bytes())
            if tag == WEIGHTS:
                stays = self.moved_by == PLACEMENT or self._engine.mirror_stays
                self.has_mirror = self.has_mirror and stays
        self._learn_mover()
        self._open()
        return self._copied_bytes(coming) if had_mirror else 0

    def fill(self) -> None:
        """Record that the weights are valid from now on. Raises EngineError: they are offloaded, or
        the engine did not drop its cache."""
        if WEIGHTS not in self.resident_tags:
            raise EngineError(
                f"the weights of {self._engine!r} are offloaded, so they cannot have been filled: "
                "use phase('weight_sync')"
            )
        if KV_CACHE in self.resident_tags:
            self._engine.forget_cache()
        self.stale = None
        self._open()

    def assume(self, offloaded: frozenset[str]) -> None:
        """Take the user's word for which tags are offloaded. Raises ValueError: the engine does not
        have a tag."""
        unknown = offloaded - frozenset(self.tags)
        if unknown:
            raise ValueError(
                f"{self._engine!r} has no tags {_listed(unknown)}; it has {', '.join(self.tags)}"
            )
        self.resident_tags = frozenset(self.tags) - offloaded
        self.has_mirror = self.keeps_weights and WEIGHTS in offloaded
        self.stale = "it is unknown what happened to them while the engine was lost"
        self.doubt = None
        self._is_drained = True if offloaded else None

    def reopen(self) -> None:
        """Open an engine that is whole and valid but closed, because an earlier opening was refused
        or interrupted."""
        if self.stale is None and self.doubt is None:
            self._open()

    def _learn_mover(self) -> None:
        """Ask the engine for the mover of its bytes, until it has reported one."""
        if self.moved_by is not None:
            return
        with suppress(EngineError):
            self.moved_by = self._engine.moved_by()
        if self.moved_by is not None:
            logger.info("the bytes of %r are moved by %s", self._engine, self.moved_by)

    def _measure_mirror(self) -> None:
        self._reported_mirror_bytes = self._engine.mirror_bytes()
        self.has_mirror = self.mirror_bytes > 0 or self.keeps_weights

    def _drain(self) -> None:
        if not self._is_drained:
            self._engine.drain()
            self._is_drained = True

    def _open(self) -> None:
        """Admit requests once every tag is on the device and valid. An engine that is whole but
        stale must stay closed."""
        if self.offloaded_tags:
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
    def _asking(self, request: str) -> Iterator[None]:
        """Guard one or a few requests. If they end without an answer the engine is in doubt, and is
        never sent anything again."""
        if self.doubt is not None:
            raise BrokenHandleError(f"{self._engine!r} cannot {request}: {self.doubt}")
        try:
            yield
        except EngineLost as lost:
            self.doubt = (
                f"{lost}. Restart the engine: the next phase takes a server back, another engine "
                "is registered anew. Or call engine.assume(offloaded=[...]) with the offloaded tags"
            )
            raise
        except EngineError:
            raise
        except BaseException as error:
            self.doubt = (
                f"it was interrupted ({type(error).__name__}) during {request!r}; restart the "
                "engine and register it anew"
            )
            raise

    def _copied_bytes(self, tags: frozenset[str]) -> int:
        if WEIGHTS not in tags or not self.keeps_weights:
            return 0
        return self._bytes_of(frozenset({WEIGHTS}))

    def _wait_until_freed(self, tags: frozenset[str], free_before: int) -> None:
        """Wait until the device shows the memory of these tags as free. Raises EngineError; the
        tags are recorded as offloaded then."""
        if not self._verifies_memory or not self._engine.frees_when_asked:
            return
        wanted = max(1, int(self._bytes_of(tags) * _FREED_SHARE))
        limit_seconds = min(_FREED_SECONDS, self._engine.deadline_seconds)
        freed = 0
        for _ in interrupts.looks(limit_seconds, *_PAUSE_SECONDS):
            freed = self.free_bytes() - free_before
            if freed >= wanted:
                self._measure(tags, freed)
                return
        raise EngineError(
            f"{self._engine!r} reports {_listed(tags)} as offloaded, but the device has only "
            f"{freed:,} more free bytes, and they hold {self._bytes_of(tags):,}. "
            f"{self._engine.why_nothing_moves} If the engine uses other devices than this "
            "manager's, make it with verify='answer'"
        )

    def _measure(self, tags: frozenset[str], nbytes: int) -> None:
        if self._verifies_memory and nbytes > 0:
            self._measured_bytes[tags] = nbytes

    def _in_order(self, tags: Collection[str]) -> list[str]:
        return [tag for tag in self.tags if tag in tags]


def _listed(tags: Collection[str]) -> str:
    return ", ".join(sorted(tags))


def check_word(option: str, word: str, permitted: Sequence[str]) -> None:
    if word not in permitted:
        raise ValueError(f"{word!r} is unknown; {option} is one of {', '.join(permitted)}")


class TaggedEngine(Engine):
    """An engine that places its own memory, in parts named by tags.

    A subclass implements `drain`, `offload`, `load`, `admit` and `receive` with its engine's calls.
    Each method returns when the engine is done, within `deadline_seconds`. It raises `EngineError`
    when nothing was done, and `EngineLost` when that is unknown. The manager calls them in the
    right order, and never for a tag that is already in the wanted place. Users call
    `update_weights`, or `weights_filled` where weights come another way.

    Args:
        tags: the parts that the engine can offload, in the order of loading: the weights first.
        weights: whether the weights survive an offload.
        offloaded: the tags that are offloaded already.
        tag_bytes: device bytes of each tag on the manager's device, also as "14GiB". A tag that is
            not given is measured when it moves, and does not count against the budget before.
        verify: see `Verify`.
        deadline_seconds: the limit for each request to the engine, and for draining.

    Raises:
        ValueError: a tag is unknown, or a number is out of range.

    Example:
        ::

            class MyEngine(TaggedEngine):
                def drain(self):
                    self.client.post("/pause")

                def offload(self, tags):
                    self.client.post("/sleep", tags=list(tags))

                def load(self, tags):
                    self.client.post("/wake", tags=list(tags))

                def admit(self):
                    self.client.post("/resume")

                def receive(self, bucket):
                    self.client.send(bucket)
    """

    why_nothing_moves = "It may have been started without the option that lets its memory move."
    """Advice for an engine that reports an offload while its device shows no freed memory."""
    frees_when_asked = True
    """Whether an offload frees the memory, so that the device shows more free memory after it. Else
    it was free before."""

    can_discard = False
    """Whether an offload discards the weights whenever `residency.keeps_weights` is false."""

    def __init__(
        self,
        *,
        tags: Sequence[str] = (WEIGHTS, KV_CACHE),
        weights: Weights = "keep",
        offloaded: Collection[str] = (),
        tag_bytes: Mapping[str, int | str] | None = None,
        verify: Verify = "memory",
        deadline_seconds: float = 300.0,
    ) -> None:
        if not 0 < deadline_seconds < math.inf:
            raise ValueError(
                f"deadline_seconds must be more than 0 and finite, not {deadline_seconds}"
            )
        check_word("weights", weights, get_args(Weights))
        check_word("verify", verify, get_args(Verify))
        declared: dict[str, int] = {}
        for tag, size in (tag_bytes or {}).items():
            declared[tag] = parse_bytes(size) if isinstance(size, str) else size
            if declared[tag] < 0:
                raise ValueError(f"tag_bytes of {tag!r} must be 0 or more, not {size}")
        permitted = set(TAGS) & set(tags)
        unknown = [tag for tag in (*tags, *offloaded, *declared) if tag not in permitted]
        if unknown:
            raise ValueError(
                f"unknown tags {', '.join(map(repr, unknown))}; this engine has {', '.join(tags)}; "
                f"all: {', '.join(TAGS)}"
            )
        self.deadline_seconds = deadline_seconds
        self.residency = Residency(
            self,
            tuple(tags),
            offloaded=offloaded,
            keeps_weights=weights == "keep",
            tag_bytes=declared,
            verifies_memory=verify == "memory",
        )
        self._next_bucket = 0
        self._skipped: list[str] = []  # the names of this sync that the engine says it did not take

    # --- methods that a subclass implements with its engine's calls

    @abc.abstractmethod
    def drain(self) -> None:
        """Return when no request is in flight; none may begin before `admit`. Does nothing if the
        engine is drained."""

    @abc.abstractmethod
    def offload(self, tags: Collection[str]) -> None:
        """Offload these tags. They are all on the device, and the engine is drained."""

    @abc.abstractmethod
    def load(self, tags: Collection[str]) -> None:
        """Load these tags. They are all offloaded."""

    @abc.abstractmethod
    def admit(self) -> None:
        """Take requests from now on. Every tag is on the device and the weights are valid."""

    @abc.abstractmethod
    def receive(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> object:
        """Write published weights into the engine. Called by `update_weights`.

        A set that it returns has the names that the engine took; the others of the bucket were
        skipped. Anything else: it took all.
        """

    def unfilled(self) -> Collection[str]:
        """Names of the engine's own weights that the buckets of this sync have not filled (a draft
        model's). Asked after the last one."""
        return ()

    def forget_cache(self) -> None:
        """Drop cached results of the old weights. Called when weights were filled while the KV
        cache stayed on the device."""

    mirror_stays = True
    """Whether the host memory of weights that were kept stays with the engine when they are back on
    the device."""

    def mirror_bytes(self) -> int | None:
        """Host bytes that the engine's own copies take, asked after each offload of the weights.
        None: as many as the weights take on the device, if an offload keeps them."""
        return None

    def moved_by(self) -> str | None:
        """The mover of the engine's bytes, as the engine reports it: "placement" (a plug-in of
        placement), or the engine's own allocator ("cumem" in vLLM, "torch_memory_saver" in SGLang).
        None: it does not report one, and is asked again after the next load."""
        return None

    def register(self) -> None:
        """Check that the engine can be moved, and that it agrees with the record. Called before a
        manager takes the engine over.

        Raises:
            EngineError: says what is missing.
        """

    # --- methods for users

    def modules(self) -> Sequence[torch.nn.Module]:
        """No modules: placement does not move this engine's memory."""
        return ()

    def update_weights(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Send one bucket of `Handle.weights` to the engine, in the order of the buckets. After the
        last one the weights are valid.

        Between the first and the last bucket the weights are part old and part new. If the sync
        stops there, they must be filled again.

        Raises:
            EngineError: the weights are not on the device, an earlier bucket is missing, the bucket
                has adapters for discarded base weights, or the engine refused it. After the last
                one: the engine says that it skipped names, or has weights that none has filled. It
                generates nothing before a sync that fills all of them.
        """
        residency = self.residency
        number = getattr(bucket, "number", None)
        is_adapters = getattr(bucket, "adapters", "merged") == "separate"
        self._check_takes(number, is_adapters=is_adapters)
        if not number:
            self._next_bucket = 0
            self._skipped = []
            residency.stale = HALF_OF_ADAPTERS if is_adapters else HALF
        taken = self.receive(bucket)
        if isinstance(taken, Set):
            self._skipped += [name for name, _ in bucket if name not in taken]
        if number is not None:
            self._next_bucket = number + 1
            if getattr(bucket, "is_last", False):
                self._check_all_filled()
                self.weights_filled()

    def _check_takes(self, number: int | None, *, is_adapters: bool) -> None:
        """Raise EngineError unless the engine can take this bucket now."""
        residency = self.residency
        if residency.doubt is not None:
            raise EngineError(f"{self!r} takes no weights any more: {residency.doubt}")
        if WEIGHTS not in residency.resident_tags:
            raise EngineError(
                f"the weights of {self!r} are offloaded: update them inside "
                "manager.phase('weight_sync') with a plan that puts them on the device; if only= "
                "is given, it must name the engine"
            )
        if number is not None and number not in (0, self._next_bucket):
            raise EngineError(
                f"got bucket {number} of a sync, but bucket {self._next_bucket} is next: pass "
                "every bucket of handle.weights() to update_weights, in order"
            )
        if is_adapters and residency.stale not in (None, HALF_OF_ADAPTERS):
            raise EngineError(
                f"the adapters alone cannot fill {self!r}: {residency.stale}. Publish with "
                "adapters='merged' or 'base', or make the engine with weights='keep'"
            )

    def _check_all_filled(self) -> None:
        problems = []
        for problem, names in (
            ("it did not take", self._skipped),
            ("no published weight fills", [*self.unfilled()]),
        ):
            if names:
                more = f" and {len(names) - 4} more" if names[4:] else ""
                problems.append(f"{problem} {', '.join(names[:4])}{more}")
        if problems:
            self.residency.stale = "; ".join(problems)
            raise EngineError(
                f"the weights of {self!r} are not valid: {self.residency.stale}. Publish under the "
                "names that it loads (names='checkpoint'), and its draft model's weights as well"
            )

    @property
    def stale(self) -> str | None:
        return self.residency.stale

    @stale.setter
    def stale(self, why: str | None) -> None:
        self.residency.stale = why

    def weights_filled(self) -> None:
        """See `Engine.weights_filled`.

        Raises:
            EngineError: the weights are not on the device.
        """
        self._next_bucket = 0
        self.residency.fill()

    def assume(self, *, offloaded: Collection[str]) -> None:
        """Say after `EngineLost` which tags are offloaded, if you know. The weights count as lost
        until the next sync.

        Raises:
            ValueError: the engine does not have a tag.
        """
        self.residency.assume(frozenset(offloaded))

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


class Follower(TaggedEngine):
    """Stands on this rank for an engine that another rank of the group leads. It has the same tags,
    and sends nothing.

    An engine that spans several ranks' devices takes its orders from one of them. The other ranks
    register a follower under the same name. So all ranks make the same plan, and wait for the
    leader at each phase transition.

    Example:
        ::

            engine = VllmServer(url) if rank == 0 else Follower()
            manager.register("rollout", engine)
    """

    can_discard = True  # as its leader does

    def __init__(
        self,
        *,
        tags: Sequence[str] = (WEIGHTS, KV_CACHE),
        tag_bytes: Mapping[str, int | str] | None = None,
        weights: Weights = "keep",
    ) -> None:
        super().__init__(tags=tags, tag_bytes=tag_bytes, weights=weights, verify="answer")

    # The leader does all of it.

    def drain(self) -> None: ...

    def offload(self, tags: Collection[str]) -> None: ...

    def load(self, tags: Collection[str]) -> None: ...

    def admit(self) -> None: ...

    def receive(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None: ...


class TaggedAdapter(Adapter):
    """The adapter for an engine that places its own memory. It has no tensors."""

    kind = "engine"

    def __init__(self, engine: TaggedEngine) -> None:
        self.engine = engine

    def owned(self) -> Iterator[Owned]:
        return iter(())

    def key_objects(self) -> Sequence[Any]:
        return (self.engine,)
