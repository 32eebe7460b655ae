"""Engines that place their own memory, tag by tag, when they are told to: vLLM, SGLang, and whatever has a sleep of its own.

The engine says how; `placement.engines.residency` keeps the book of what is on the device, because not every engine can be asked
and some die of a wrong call.
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
from placement.tensors.owned import Adapter, Owned

InFlight = Literal["wait", "abort"]
"""What becomes of requests that are in flight when the engine is drained: they finish, or they are cut off."""
Verify = Literal["memory", "answer"]
"""How an offload is proved: by the device's free memory, or by the engine's word (it lies on other devices than the manager's)."""
Weights = Literal["keep", "discard"]
"""What an offload does with the weights: the engine keeps a copy on the host, or they are gone until the next sync."""
_HALF_OF_ADAPTERS = "a sync of adapters has begun and not been finished"
"""Of weights whose base is whole: adapters alone fill them."""
Send = Callable[[Sequence[tuple[str, torch.Tensor]]], None]


def send_by(send: Send | None, bucket: Sequence[tuple[str, torch.Tensor]], engine: TaggedEngine) -> None:
    """Bring a bucket of weights to an engine's server.

    Raises:
        EngineError: nobody said how.
    """
    if send is None:
        raise EngineError(
            f"{engine!r} was made without send=, which brings a bucket of weights to the server. Where they come another way, call "
            "weights_filled() when they have come"
        )
    send(bucket)


def checked_in_flight(word: InFlight) -> InFlight:
    """Any other word would be taken for one of the two.

    Raises:
        ValueError: it is none.
    """
    if word not in get_args(InFlight):
        raise ValueError(f"{word!r} is none of {', '.join(get_args(InFlight))}")
    return word


class TaggedEngine(Engine):
    """An engine whose memory is its own, and comes and goes by tags.

    A subclass implements `drain`, `offload`, `load`, `admit` and `receive` in its engine's words. Each returns when the engine has
    done it, within `deadline_seconds`, and raises `EngineError` when nothing was done, `EngineLost` when that cannot be told. They
    are called by the manager, in the right order, never for a tag that is there already; users call `update_weights` and, where
    weights come another way, `weights_filled`.

    Args:
        tags: the parts that it can offload, in the order in which they are loaded: the weights first.
        weights: whether they survive an offload.
        offloaded: the tags that are off the device already.
        tag_bytes: device bytes of each tag on the manager's device, also "14GiB". What is not given is measured as it moves, and
            counts nothing against the budget before.
        verify: see `Verify`.
        deadline_seconds: for each request to the engine, and for draining.

    Raises:
        ValueError: a tag that there is none of, or a number that is none.
    """

    why_nothing_moves = "It may have been started without what lets its memory move."
    """What to tell a user whose engine says that it has offloaded, and whose device says that it has not."""

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
        for word, known in ((weights, ("keep", "discard")), (verify, ("memory", "answer"))):
            if word not in known:
                raise ValueError(f"{word!r} is none of {', '.join(known)}")
        given = {} if tag_bytes is None else {tag: parse_bytes(n) if isinstance(n, str) else n for tag, n in tag_bytes.items()}
        for tag, nbytes in given.items():
            if nbytes < 0:
                raise ValueError(f"tag_bytes of {tag!r} is {nbytes}")
        unknown = [tag for tag in (*tags, *offloaded, *given) if tag not in TAGS or tag not in tags]
        if unknown:
            raise ValueError(f"unknown tags {', '.join(map(repr, unknown))}; this engine's: {', '.join(tags)}; all: {', '.join(TAGS)}")
        self.deadline_seconds = deadline_seconds
        self.residency = Residency(
            self, tuple(tags), offloaded=offloaded, keeps_weights=weights == "keep", given=given, by_memory=verify == "memory"
        )
        self._next_bucket = 0

    # --- what a subclass says in its engine's words

    @abc.abstractmethod
    def drain(self) -> None:
        """No request is in flight after the return, and none begins before `admit`. Again while drained: nothing."""

    @abc.abstractmethod
    def offload(self, tags: Collection[str]) -> None:
        """Take these tags, all of them on the device, off it. Drained before."""

    @abc.abstractmethod
    def load(self, tags: Collection[str]) -> None:
        """Bring these tags, all of them off the device, back to it."""

    @abc.abstractmethod
    def admit(self) -> None:
        """Every tag is on the device and the weights are valid: requests may come."""

    @abc.abstractmethod
    def receive(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Write published weights into the engine's. Of `update_weights`."""

    def forget_cache(self) -> None:
        """The weights are new and the KV cache has stayed on the device: what it remembers belongs to the old ones."""

    def register(self) -> None:
        """A manager is about to take the engine over: see whether it can be moved at all, and is where the book says.

        Raises:
            EngineError: says what is missing.
        """

    # --- what users call

    def modules(self) -> Sequence[torch.nn.Module]:
        """None: its memory is not ours to move."""
        return ()

    def update_weights(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Bring one bucket of `Handle.weights` into the engine, in their order; after the last one its weights are valid.

        From the first bucket to the last the engine's weights are part old and part new, so that what stops in between leaves
        them to be filled again.

        Raises:
            EngineError: the weights are not on the device, a bucket is missing before this one, it brings adapters for base weights
                that were discarded, or the engine refused it.
        """
        residency = self.residency
        if residency.doubt is not None:
            raise EngineError(f"{self!r} is sent nothing more: {residency.doubt}")
        if WEIGHTS not in residency.resident:
            raise EngineError(
                f"the weights of {self!r} are offloaded: update them inside manager.phase('weight_sync') by a plan that has them on the "
                "device; where only= is given it has to name the engine"
            )
        number = getattr(bucket, "number", None)
        is_adapters = getattr(bucket, "adapters", "merged") == "separate"
        if number is not None and number not in (0, self._next_bucket):
            raise EngineError(
                f"bucket {number} of a sync came, and {self._next_bucket} is next: pass every bucket of handle.weights() to "
                "update_weights, in order"
            )
        if is_adapters and residency.stale not in (None, _HALF_OF_ADAPTERS):
            raise EngineError(
                f"the adapters alone cannot fill {self!r}: {residency.stale}. Publish with adapters='merged' or 'base', or make the "
                "engine with weights='keep'"
            )
        if number == 0 or number is None:
            self._next_bucket = 0
            residency.stale = _HALF_OF_ADAPTERS if is_adapters else "a sync has begun and not been finished"
        self.receive(bucket)
        if number is not None:
            self._next_bucket = number + 1
            if getattr(bucket, "is_last", False):
                self.weights_filled()

    def weights_filled(self) -> None:
        """The weights are whole and new: for those that came by another way than `update_weights` (a broadcast, a reload from disk).

        Raises:
            EngineError: they are not on the device.
        """
        self._next_bucket = 0
        self.residency.fill()

    def assume(self, *, offloaded: Collection[str]) -> None:
        """After `EngineLost`, when you know better: which tags are off the device. All weights count as gone until the next sync.

        Raises:
            ValueError: a tag that this engine has not.
        """
        self.residency.assume(frozenset(offloaded))

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


class Follower(TaggedEngine):
    """The place of an engine that another rank of the group leads: the same tags, and nothing is sent.

    An engine that spans several ranks' devices is told once, by one of them. The others register this under the same name, so
    that all ranks make one plan, and wait for the leader at each phase transition.
    """

    def __init__(self, *, tags: Sequence[str] = (WEIGHTS, KV_CACHE), tag_bytes: Mapping[str, int | str] | None = None) -> None:
        super().__init__(tags=tags, tag_bytes=tag_bytes, verify="answer")

    def drain(self) -> None:
        """The leader does."""

    def offload(self, tags: Collection[str]) -> None:
        """The leader does."""

    def load(self, tags: Collection[str]) -> None:
        """The leader does."""

    def admit(self) -> None:
        """The leader does."""

    def receive(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Nothing: every rank takes part in gathering the weights, and the leader sends them."""


class TaggedAdapter(Adapter):
    """An engine that places its own memory: no tensors of ours."""

    kind = "engine"

    def __init__(self, engine: TaggedEngine) -> None:
        self.engine = engine

    def owned(self) -> Iterator[Owned]:
        return iter(())

    def key_objects(self) -> Sequence[Any]:
        """The engine."""
        return (self.engine,)
