"""Publish weights in buckets of bounded size.

Buckets are always in torch's own memory, never in a handle's range. CUDA IPC, RDMA and NCCL's user
buffers fail on memory that comes and goes behind fixed addresses, or go on using the old memory.
"""

from __future__ import annotations

import math
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, get_args

import torch

from placement.core.errors import PhaseError, RegistrationError
from placement.core.modes import without_modes
from placement.core.settings import bytes_of
from placement.core.states import State, Trigger
from placement.frameworks.base import Framework, Named, answering
from placement.frameworks.weights import Reader, Weight, weight_of
from placement.publish import lora
from placement.publish.ahead import ReadAhead, plainly
from placement.publish.changes import Changes, Publication
from placement.publish.checkpoint_names import Names, in_checkpoint
from placement.publish.lora import Adapters
from placement.publish.skeleton import Shown, Skeleton, key_of, named_places
from placement.tensors.plain import dtype_of, is_scaled

# dtypes in which quantised weights are packed
_PACKED = (torch.int8, torch.uint8, torch.int32)


def publishable(
    root: torch.nn.Module,
    frameworks: Sequence[Framework],
    adapters: Adapters,
    names: Names = "module",
) -> list[tuple[str, Weight]]:
    """Name and weight of everything to publish: parameters, then persistent buffers.

    A tied weight appears once, under its first name; with adapters "separate" under each name that
    PEFT saves. Reads no value, moves nothing and calls no collective. The order is the same on all
    ranks of a sharded module. ValueError: the module has no such adapters or names, or they cannot
    be published so.
    """
    shown = Shown(root, frameworks)
    bare = None  # a copy of the structure, which libraries may change
    if adapters == "separate" or names == "checkpoint" or _has_adapters(root):
        skeleton = Skeleton(shown)
        bare = skeleton.copy(root)
        weights = skeleton.weights
        if adapters == "separate":
            places = lora.separate(skeleton, bare)
        else:
            if "peft" in sys.modules:
                unload = lora.Unload(skeleton, adapters)
                bare = unload.of(bare)
                weights = weights | unload.merged()
            places = [*named_places(bare)]
        named = [
            (name, weights[key_of(place)], not isinstance(place, torch.nn.Parameter))
            for name, place in places
        ]
    else:
        named = [*shown.named(root)]
    pairs = []
    buffers = set()
    seen = set()
    for name, weight, is_buffer in named:
        if adapters == "separate" or id(weight) not in seen:
            pairs.append((name, weight))
            if is_buffer:
                buffers.add(name)
        seen.add(id(weight))
    _keep_dtypes(pairs, buffers | _kept_in_float32(root, [name for name, _ in pairs]))
    return in_checkpoint(bare, pairs) if names == "checkpoint" else pairs


def _has_adapters(root: torch.nn.Module) -> bool:
    return "peft" in sys.modules and any(lora.has_adapters(part) for part in root.modules())


def _kept_in_float32(root: torch.nn.Module, names: Iterable[str]) -> set[str]:
    """The names of weights that transformers keeps in float32, matched as it matches them: anywhere
    in the name, with * as a wildcard."""
    patterns: set[str] = set()
    for part in root.modules():
        patterns.update(getattr(part, "_keep_in_fp32_modules", None) or ())
        patterns.update(getattr(part, "_keep_in_fp32_modules_strict", None) or ())
    expressions = [re.compile(pattern.replace("*", ".*")) for pattern in patterns]
    return {name for name in names if any(regex.search(name) for regex in expressions)}


def _keep_dtypes(weights: Sequence[tuple[str, Weight]], names: set[str]) -> None:
    """Mark the weights that one dtype for all does not cast: those with these names, those that are
    stored quantised, and the scales beside these."""
    # the paths of modules with quantised weights
    quantized = set()
    for name, weight in weights:
        is_packed = weight.dtype in _PACKED and len(weight.shape) > 1
        if is_packed or weight.is_wrapper or is_scaled(weight.dtype):
            quantized.add(name.rpartition(".")[0])
    for name, weight in weights:
        path, _, own_name = name.rpartition(".")
        # Scales may also be in a module of their own: `quantizer.scale`, `scales.0`.
        is_scale = "scale" in own_name or "scale" in path.rpartition(".")[2]
        is_beside = path in quantized or (bool(quantized) and is_scale)
        weight.keeps_dtype = is_beside or name in names


def writable(
    root: torch.nn.Module,
    frameworks: Sequence[Framework],
) -> dict[str, Weight]:
    """The weights of a module by its own and all published names, to write published values into.
    ValueError: adapters are merged into the base weights; unmerging them later would change the
    values written there."""
    skeleton = Skeleton(Shown(root, frameworks))
    bare = skeleton.copy(root)
    places = dict(named_places(bare))
    if _has_adapters(root):
        # several active adapters, or a mixed model: adapters alone have no published names
        with suppress(ValueError, AttributeError):
            places.update(lora.separate(skeleton, bare))
        places.update(named_places(lora.Unload(skeleton, "base").of(bare)))
    weights: dict[str, Weight] = {}
    for name, buffer in root.named_buffers(remove_duplicate=False):
        weights[name] = weight_of(buffer)
    for name, place in places.items():
        weights[name] = skeleton.weights[key_of(place)]
    return weights


def check_publishable(
    root: torch.nn.Module,
    handle_name: str,
    weights: list[tuple[str, Weight]],
) -> None:
    """Raise RegistrationError on all ranks alike if a weight cannot be published; it names the
    weight, the reason, and the advice."""
    with_own_export: list[Named] = []
    for framework in answering("with_own_export"):
        with_own_export += framework.with_own_export
    if with_own_export:
        for part in root.modules():
            if any(named.is_of(part) for named in with_own_export):
                raise RegistrationError(
                    f"{handle_name!r}: {type(part).__name__} shards its parameters in its own way; "
                    "publish them with its own export"
                )
    for name, weight in weights:
        problem = weight.problem
        if problem is not None:
            raise RegistrationError(f"{handle_name!r}: {name!r} {problem}.")


@dataclass(frozen=True, slots=True)
class WeightInfo:
    """Name, shape and dtype of one published weight."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


Dtype = torch.dtype | str | None
Convert = Callable[[str, torch.Tensor], torch.Tensor]
"""A function of a weight's published name and full value, which returns what is published in its
place."""


class Described(NamedTuple):
    """A weight to publish, its announcement, and the dtype to which it is cast."""

    info: WeightInfo
    weight: Weight
    dtype: torch.dtype


class Bucket(list[tuple[str, torch.Tensor]]):
    """A list of (published name, tensor). When the next bucket is asked for, the list is emptied,
    so that its memory can be reused. The last bucket is not."""

    _is_over = False
    is_last = False  # whether this is the last bucket of the publishing

    def __init__(
        self, number: int, adapters: Adapters, announced: Sequence[WeightInfo] = ()
    ) -> None:
        """Begin a bucket: its number in the publishing, from 0; the part of a PEFT model that is
        published; all weights of all buckets."""
        super().__init__()
        self.number = number
        self.adapters = adapters
        self.announced = announced

    def end(self) -> None:
        self.clear()
        self._is_over = True

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._is_over:
            raise PhaseError(
                "this bucket of weights is over: use it, or copy its tensors, before asking for "
                "the next one"
            )
        return super().__iter__()

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        # a plain list, so that a receiving process need not import placement
        return list, (list(self),)


_Bucket = TypeVar("_Bucket")
Publisher = Any  # a `Handle`, whose room is above this one


def weights_info(
    handle: Publisher, *, dtype: Dtype, adapters: Adapters, names: Names, convert: Convert | None
) -> list[WeightInfo]:
    """See `Handle.weights_info`."""
    pairs = _to_publish(handle, adapters, names)
    return [described.info for described in _described(pairs, dtype, convert)]


def weights(
    handle: Publisher,
    *,
    bucket_bytes: int | str,
    dtype: Dtype,
    adapters: Adapters,
    names: Names,
    convert: Convert | None,
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """See `Handle.weights`."""
    nbytes = _checked_bytes(handle, bucket_bytes)
    described = _publishable(handle, adapters, names, dtype, convert)
    buckets = _buckets(handle, described, adapters, nbytes, convert, _sync_number(handle))
    return _noting_the_end(handle, buckets, adapters)


def _noting_the_end(
    handle: Publisher, buckets: Iterator[_Bucket], adapters: Adapters
) -> Iterator[_Bucket]:
    yield from buckets
    if adapters != "separate":  # these alone do not replace the weights of an engine
        handle.note_published()


def weight_changes(
    handle: Publisher,
    *,
    since: int | None,
    bucket_bytes: int | str,
    dtype: Dtype,
    adapters: Adapters,
    names: Names,
) -> Iterator[Changes]:
    """See `Handle.weight_changes`."""
    nbytes = _checked_bytes(handle, bucket_bytes)
    described = _publishable(handle, adapters, names, dtype, None)
    weights = [(info.name, weight, cast) for info, weight, cast in described]
    last = handle.published
    if last is not None and last.version != since:
        last = None
    with plainly():
        publication = Publication(handle.storage, weights, last)
    buckets = _changes(handle, publication, nbytes, _sync_number(handle))
    return _noting_the_end(handle, buckets, adapters)


def _changes(
    handle: Publisher, publication: Publication, bucket_bytes: int, sync_number: int
) -> Iterator[Changes]:
    handle.published = None
    for bucket in publication.buckets(handle.modules_adapter.compute_device, bucket_bytes):
        _require_syncing(handle, sync_number)
        yield bucket
    handle.published = publication.published


def _checked_bytes(handle: Publisher, bucket_bytes: int | str) -> int:
    """The bytes of a bucket, if the handle can be published now."""
    nbytes = bytes_of("bucket_bytes", bucket_bytes)
    if nbytes <= 0:
        raise ValueError(f"bucket_bytes must be positive, not {nbytes}")
    _require_syncing(handle)
    return nbytes


def _to_publish(
    handle: Publisher,
    adapters: Adapters,
    names: Names,
) -> list[tuple[str, Weight]]:
    """Name and weight of everything to publish. Empty while the object is not built, and after it
    was garbage-collected."""
    for option, word, permitted in (
        ("adapters", adapters, get_args(Adapters)),
        ("names", names, get_args(Names)),
    ):
        if word not in permitted:
            raise ValueError(f"{option}={word!r} must be one of {', '.join(permitted)}")
    if adapters == "separate" and names == "checkpoint":
        raise ValueError(
            "names='checkpoint': the adapters alone have PEFT's names; publish names='module'"
        )
    modules = handle.modules()
    if handle.object is None:
        return []
    if len(modules) != 1:
        many = f" with {len(modules)} modules" if len(modules) > 1 else ""
        raise RegistrationError(
            f"{handle.name!r} has kind {handle.kind}{many} and publishes no weights: publish a "
            "handle of one module"
        )
    with without_modes():
        return publishable(modules[0], handle.modules_adapter.frameworks, adapters, names)


def _publishable(
    handle: Publisher, adapters: Adapters, names: Names, dtype: Dtype, convert: Convert | None
) -> list[Described]:
    """Everything to publish. Raises RegistrationError: a weight cannot be published."""
    pairs = _to_publish(handle, adapters, names)
    for root in handle.modules():
        check_publishable(root, handle.name, pairs)
    return _described(pairs, dtype, convert)


def _described(
    pairs: Sequence[tuple[str, Weight]], dtype: Dtype, convert: Convert | None
) -> list[Described]:
    """Each weight with its announcement, and the dtype to which it is cast. Raises ValueError:
    `dtype` is no floating-point dtype, or `convert` needs values."""
    if convert is not None and not callable(convert):
        raise TypeError(f"convert= is a function of (name, tensor), not {convert!r:.200}")
    try:
        wanted = dtype_of(dtype)
    except ValueError as error:
        raise ValueError(f"dtype: {error}") from None
    if wanted is not None and (is_scaled(wanted) or not wanted.is_floating_point):
        raise ValueError(
            f"dtype: weights are not cast to {wanted}, which stands for values only with scales or "
            "is not floating-point. Quantise the tensors of each bucket, or write convert="
        )
    described = []
    for name, weight in pairs:
        is_cast = wanted and weight.dtype.is_floating_point and not weight.keeps_dtype
        cast = wanted if wanted and is_cast else weight.dtype
        info = WeightInfo(name, tuple(weight.shape), cast)
        if convert is not None:
            info = _converted_info(convert, info)
        described.append(Described(info, weight, cast))
    return described


def _converted_info(convert: Convert, info: WeightInfo) -> WeightInfo:
    placeholder = torch.empty(info.shape, dtype=info.dtype, device="meta")
    try:
        converted = _converted(convert, info.name, placeholder)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"convert= cannot be run on {info.name!r} without values, on the meta device "
            f"({error}). Buckets are planned by the shapes and dtypes that it returns: change the "
            "tensors of each bucket instead"
        ) from error
    return WeightInfo(info.name, tuple(converted.shape), converted.dtype)


def _converted(convert: Convert, name: str, value: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        result = convert(name, value)
    if not isinstance(result, torch.Tensor):
        raise TypeError(f"convert= must return a tensor; for {name!r} it returned {result!r:.200}")
    return result


def _buckets(
    handle: Publisher,
    described: list[Described],
    adapters: Adapters,
    bucket_bytes: int,
    convert: Convert | None,
    sync_number: int,
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """One publishing of a handle's weights, in the sync of this number."""
    waiting = deque(described)
    announced = [info for info, *_ in described]
    bucket = Bucket(0, adapters, announced)
    size = 0
    device = handle.modules_adapter.compute_device
    reader = Reader(device)
    streamed = []
    if handle.is_streaming:
        reader = Reader(device, handle.storage.read_host)
        streamed = [(weight, dtype) for _, weight, dtype in described]
    ahead = ReadAhead(reader, streamed, bucket_bytes)
    try:
        while waiting:
            _require_syncing(handle, sync_number)
            info, weight, dtype = waiting[0]
            if bucket and size + _nbytes(info) > bucket_bytes:
                yield bucket
                bucket.end()
                bucket = Bucket(bucket.number + 1, adapters, announced)
                size = 0
                continue
            waiting.popleft()
            with plainly():
                if not bucket or convert is not None:
                    ahead.fetch()
                value = weight.whole(reader, dtype)
            ahead.used(weight.shape.numel() * dtype.itemsize)
            if convert is not None:
                try:
                    value = _converted(convert, info.name, value)
                except Exception:
                    _take_part(handle, reader, waiting, sync_number)
                    raise
            bucket.append((info.name, value))
            del value  # the bucket alone keeps it
            size += _nbytes(info)
        if bucket:
            bucket.is_last = True
            yield bucket  # the last one is not emptied, because nothing needs its memory
    except GeneratorExit:
        _take_part(handle, reader, waiting, sync_number)
        raise
    finally:
        ahead.end()


def _nbytes(info: WeightInfo) -> int:
    return math.prod(info.shape) * info.dtype.itemsize


def _take_part(
    handle: Publisher,
    reader: Reader,
    waiting: Iterable[Described],
    sync_number: int,
) -> None:
    """Take part in the remaining collectives after an early end on this rank, so that ranks that go
    on are not left waiting."""
    for _, weight, dtype in waiting:
        if handle.state is not State.SYNCING or sync_number != _sync_number(handle):
            break
        if weight.is_collective:
            with plainly():
                weight.whole(reader, dtype)


_BEGIN = (Trigger.BEGIN_SYNC, Trigger.BEGIN_STREAM, Trigger.TRAIN_TO_SYNC)


def _sync_number(handle: Publisher) -> int:
    """The number of times that the handle has entered SYNCING, which identifies a sync."""
    return sum(handle.counters.transitions[trigger] for trigger in _BEGIN)


def _require_syncing(handle: Publisher, sync_number: int | None = None) -> None:
    if handle.state is not State.SYNCING:
        phase = handle.phase_now()
        advice = "with manager.phase('weight_sync')"
        if phase == "weight_sync":
            advice = (
                f"the plan of this phase leaves it out (its role is {handle.role!r}), or it was "
                "unregistered: use the handle of the last register(). The shipped policies publish "
                "handles with the role 'actor', and if only= is given, only those that it names"
            )
        raise PhaseError(
            f"{handle.name!r} is {handle.state} in phase {phase!r}; weights are published while "
            f"SYNCING: {advice}"
        )
    if sync_number is not None and sync_number != _sync_number(handle):
        raise PhaseError(
            f"this generator of {handle.name!r} began in an earlier sync, and values may have "
            "changed: call weights() again"
        )
