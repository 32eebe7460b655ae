"""Engines that place their own memory, tag by tag, on request: vLLM, SGLang, and any engine with a sleep of its own.

The engine class knows the calls. `placement.engines.residency` records what is on the device, because not every engine can be
asked and some crash at a wrong call.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch

from placement.core.errors import EngineError
from placement.core.settings import parse_bytes
from placement.core.states import KV_CACHE, TAGS, WEIGHTS
from placement.engines.base import Engine
from placement.engines.residency import Residency
from placement.ownership.adapter import Adapter
from placement.tensors.plain import Owned

InFlight = Literal["wait", "abort"]
"""The fate of requests in flight when the engine is drained: "wait" lets them finish, "abort" cuts them off."""
Verify = Literal["memory", "answer"]
"""How an offload is verified: by the device's free memory, or by the engine's answer (for an engine on other devices)."""
Weights = Literal["keep", "discard"]
"""The effect of an offload on the weights: "keep" leaves a copy on the host, "discard" loses them until the next sync."""
_HALF_OF_ADAPTERS = "a sync of adapters has begun and was not finished"
"""Reason for stale weights whose base is complete: a sync of adapters alone can fill them."""
Send = Callable[[Sequence[tuple[str, torch.Tensor]]], None]


def send_by(send: Send | None, bucket: Sequence[tuple[str, torch.Tensor]], engine: TaggedEngine) -> None:
    """Send a bucket of weights to an engine's server.

    Raises:
        EngineError: the engine was made without `send`.
    """
    if send is None:
        raise EngineError(
            f"{engine!r} was made without send=, which sends a bucket of weights to the server. If weights come another way, call "
            "weights_filled() when they have arrived"
        )
    send(bucket)


def checked_in_flight(word: InFlight) -> InFlight:
    """Return the word after checking it.

    Raises:
        ValueError: it is neither "wait" nor "abort".
    """
    if word not in get_args(InFlight):
        raise ValueError(f"{word!r} is unknown; in_flight is one of {', '.join(get_args(InFlight))}")
    return word


class TaggedEngine(Engine):
    """An engine that places its own memory, in parts named by tags.

    A subclass implements `drain`, `offload`, `load`, `admit` and `receive` with its engine's calls. Each method returns when the engine is
    done, within `deadline_seconds`. It raises `EngineError` when nothing was done, and `EngineLost` when that is unknown. The manager calls
    them in the right order, and never for a tag that is already in the wanted place. Users call `update_weights`, or `weights_filled`
    where weights come another way.

    Args:
        tags: the parts that the engine can offload, in the order of loading: the weights first.
        weights: whether the weights survive an offload.
        offloaded: the tags that are offloaded already.
        tag_bytes: device bytes of each tag on the manager's device, also as "14GiB". A tag that is not given is measured when it moves,
            and does not count against the budget before.
        verify: see `Verify`.
        deadline_seconds: the limit for each request to the engine, and for draining.

    Raises:
        ValueError: a tag is unknown, or a number is out of range.
    """

    why_nothing_moves = "It may have been started without the option that lets its memory move."
    """Advice for an engine that reports an offload while its device shows no freed memory."""

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
            raise ValueError(f"deadline_seconds must be more than 0 and finite, not {deadline_seconds}")
        for argument, word, known in (("weights", weights, ("keep", "discard")), ("verify", verify, ("memory", "answer"))):
            if word not in known:
                raise ValueError(f"{word!r} is unknown; {argument} is one of {', '.join(known)}")
        given = {} if tag_bytes is None else {tag: parse_bytes(n) if isinstance(n, str) else n for tag, n in tag_bytes.items()}
        for tag, nbytes in given.items():
            if nbytes < 0:
                raise ValueError(f"tag_bytes of {tag!r} must be 0 or more, not {nbytes}")
        unknown = [tag for tag in (*tags, *offloaded, *given) if tag not in TAGS or tag not in tags]
        if unknown:
            raise ValueError(f"unknown tags {', '.join(map(repr, unknown))}; this engine has {', '.join(tags)}; all: {', '.join(TAGS)}")
        self.deadline_seconds = deadline_seconds
        self.residency = Residency(
            self, tuple(tags), offloaded=offloaded, keeps_weights=weights == "keep", given=given, by_memory=verify == "memory"
        )
        self._next_bucket = 0

    # --- what a subclass implements with its engine's calls

    @abc.abstractmethod
    def drain(self) -> None:
        """Return when no request is in flight; none may begin before `admit`. Does nothing if the engine is drained."""

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
    def receive(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Write published weights into the engine. Called by `update_weights`."""

    def forget_cache(self) -> None:
        """Drop cached results of the old weights. Called when weights were filled while the KV cache stayed on the device."""

    def register(self) -> None:
        """Check that the engine can be moved, and that it agrees with the record. Called before a manager takes the engine over.

        Raises:
            EngineError: says what is missing.
        """

    # --- what users call

    def modules(self) -> Sequence[torch.nn.Module]:
        """No modules: placement does not move this engine's memory."""
        return ()

    def update_weights(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Send one bucket of `Handle.weights` to the engine, in the order of the buckets. After the last one the weights are valid.

        Between the first and the last bucket the weights are part old and part new. If the sync stops there, they must be filled again.

        Raises:
            EngineError: the weights are not on the device, an earlier bucket is missing, the bucket has adapters for discarded base
                weights, or the engine refused it.
        """
        residency = self.residency
        if residency.doubt is not None:
            raise EngineError(f"{self!r} takes no weights any more: {residency.doubt}")
        if WEIGHTS not in residency.resident:
            raise EngineError(
                f"the weights of {self!r} are offloaded: update them inside manager.phase('weight_sync') with a plan that puts them on the "
                "device; if only= is given, it must name the engine"
            )
        number = getattr(bucket, "number", None)
        is_adapters = getattr(bucket, "adapters", "merged") == "separate"
        if number is not None and number not in (0, self._next_bucket):
            raise EngineError(
                f"got bucket {number} of a sync, but bucket {self._next_bucket} is next: pass every bucket of handle.weights() to "
                "update_weights, in order"
            )
        if is_adapters and residency.stale not in (None, _HALF_OF_ADAPTERS):
            raise EngineError(
                f"the adapters alone cannot fill {self!r}: {residency.stale}. Publish with adapters='merged' or 'base', or make the "
                "engine with weights='keep'"
            )
        if number == 0 or number is None:
            self._next_bucket = 0
            residency.stale = _HALF_OF_ADAPTERS if is_adapters else "a sync has begun and was not finished"
        self.receive(bucket)
        if number is not None:
            self._next_bucket = number + 1
            if getattr(bucket, "is_last", False):
                self.weights_filled()

    @property
    def needs_weights(self) -> bool:
        """Whether a weight sync must come before the engine can generate: its weights were discarded, or a sync was cut off."""
        return self.residency.stale is not None

    def weights_filled(self) -> None:
        """Record that the weights are complete and new. Call it for weights that came another way (a broadcast, a reload from disk).

        Raises:
            EngineError: the weights are not on the device.
        """
        self._next_bucket = 0
        self.residency.fill()

    def assume(self, *, offloaded: Collection[str]) -> None:
        """Say after `EngineLost` which tags are offloaded, if you know. The weights count as lost until the next sync.

        Raises:
            ValueError: the engine does not have a tag.
        """
        self.residency.assume(frozenset(offloaded))

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


class Follower(TaggedEngine):
    """Stands on this rank for an engine that another rank of the group leads. It has the same tags, and sends nothing.

    An engine that spans several ranks' devices takes its orders from one of them. The other ranks register a follower under the same
    name. So all ranks make the same plan, and wait for the leader at each phase transition.
    """

    def __init__(self, *, tags: Sequence[str] = (WEIGHTS, KV_CACHE), tag_bytes: Mapping[str, int | str] | None = None) -> None:
        super().__init__(tags=tags, tag_bytes=tag_bytes, verify="answer")

    def drain(self) -> None:
        """Nothing: the leader drains the engine."""

    def offload(self, tags: Collection[str]) -> None:
        """Nothing: the leader offloads the engine."""

    def load(self, tags: Collection[str]) -> None:
        """Nothing: the leader loads the engine."""

    def admit(self) -> None:
        """Nothing: the leader opens the engine."""

    def receive(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Nothing: every rank takes part in gathering the weights, and the leader sends them."""


class TaggedAdapter(Adapter):
    """The adapter for an engine that places its own memory. It has no tensors."""

    kind = "engine"

    def __init__(self, engine: TaggedEngine) -> None:
        self.engine = engine

    def owned(self) -> Iterator[Owned]:
        return iter(())

    def key_objects(self) -> Sequence[Any]:
        """The engine itself."""
        return (self.engine,)
