"""Publish weights in buckets of bounded size.

Buckets are always in torch's own memory, never in a handle's range. CUDA IPC, RDMA and NCCL's user
buffers fail on memory that comes and goes behind fixed addresses, or go on using memory that is no
longer there.
"""

from __future__ import annotations

import math
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar, get_args

import torch

from placement.core.errors import PhaseError, RegistrationError
from placement.core.modes import without_modes
from placement.core.settings import bytes_of
from placement.core.states import State, Trigger
from placement.frameworks.base import Framework, answering
from placement.frameworks.weights import Reader, Weight, weight_of
from placement.publish import lora
from placement.publish.ahead import ReadAhead, plainly
from placement.publish.changes import Changes, Publication
from placement.publish.checkpoint_names import Names, in_checkpoint
from placement.publish.lora import Adapters
from placement.publish.skeleton import Shown, Skeleton, key_of, named_places
from placement.tensors.plain import dtype_of, is_scaled


def publishable(
    root: torch.nn.Module,
    frameworks: Sequence[Framework],
    adapters: Adapters,
    names: Names = "module",
) -> list[tuple[str, Weight]]:
    """Name and weight of everything to publish: parameters, then persistent buffers. A tied weight
    appears once, under its first name; with adapters "separate" under each name that PEFT saves.
    Reads no value, moves nothing and calls no collective. The order is the same on all ranks of a
    sharded module. ValueError: the module has no such adapters or names, or they cannot be
    published so."""
    shown, bare = Shown(root, frameworks), None
    named = shown.named(root)
    # a library changes a copy
    if adapters == "separate" or names == "checkpoint" or _has_adapters(root):
        skeleton = Skeleton(shown)
        bare, weights = skeleton.copy(root), skeleton.weights
        if adapters != "separate" and "peft" in sys.modules:
            unload = lora.Unload(skeleton, adapters)
            bare = unload.of(bare)
            weights = weights | unload.merged()
        places = lora.separate(skeleton, bare) if adapters == "separate" else named_places(bare)
        named = (
            (name, weights[key_of(place)], not isinstance(place, torch.nn.Parameter))
            for name, place in places
        )
    pairs, buffers, seen = [], set[str](), set[int]()
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
    kinds = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    patterns = {
        each.replace("*", ".*")
        for part in root.modules()
        for kind in kinds
        for each in getattr(part, kind, None) or ()
    }
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}


def _keep_dtypes(weights: Sequence[tuple[str, Weight]], names: set[str]) -> None:
    """Mark the weights that one dtype for all does not cast: what has these names, what is stored
    quantised, and the scales beside it."""
    packed = {
        name
        for name, weight in weights
        if weight.dtype in (torch.int8, torch.uint8, torch.int32) and len(weight.shape) > 1
    }
    quantized = {
        name.rpartition(".")[0]
        for name, weight in weights
        if name in packed or weight.is_wrapper or is_scaled(weight.dtype)
    }
    for name, weight in weights:
        path = name.split(".")
        # Scales may also be in a module of their own: `quantizer.scale`, `scales.0`.
        is_scale = ".".join(path[:-1]) in quantized or (quantized and "scale" in "".join(path[-2:]))
        weight.keeps_dtype = bool(is_scale or name in names)


def writable(root: torch.nn.Module, frameworks: Sequence[Framework]) -> dict[str, Weight]:
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
    found = {name: weight_of(buffer) for name, buffer in root.named_buffers(remove_duplicate=False)}
    return found | {name: skeleton.weights[key_of(place)] for name, place in places.items()}


def check_publishable(root: torch.nn.Module, name: str, weights: list[tuple[str, Weight]]) -> None:
    """Raise RegistrationError on all ranks alike if a weight cannot be published; it says which,
    why, and what to do."""
    with_own_export = [
        named for each in answering("with_own_export") for named in each.with_own_export
    ]
    for part in root.modules() if with_own_export else ():
        if any(named.is_of(part) for named in with_own_export):
            cls = type(part).__name__
            raise RegistrationError(
                f"{name!r}: {cls} shards its parameters in its own way; publish them with its own "
                "export"
            )
    for weight_name, weight in weights:
        if (problem := weight.problem) is not None:
            raise RegistrationError(f"{name!r}: {weight_name!r} {problem}.")


@dataclass(frozen=True, slots=True)
class WeightInfo:
    """Name, shape and dtype of one published weight."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


Dtype = torch.dtype | str | None
Cast = Dtype | Mapping[str, Dtype] | Callable[[str, WeightInfo], Dtype]
"""One dtype for all weights that may be cast, one for each named weight, or a function of a
weight's name and description."""
Transform = Callable[[str, torch.Tensor], torch.Tensor | Sequence[tuple[str, torch.Tensor]]]
"""A function of a weight's published name and full value, which returns what is published in its
place."""


class Bucket(list[tuple[str, torch.Tensor]]):
    """A list of (published name, tensor). When the next bucket is asked for, the list is emptied,
    so that its memory can be reused."""

    _is_over = False
    is_last = False  # whether this is the last bucket of the publishing

    def __init__(
        self, number: int, adapters: Adapters, announced: Sequence[WeightInfo] = ()
    ) -> None:
        """Begin a bucket: its number in the publishing, from 0; the part of a PEFT model that is
        published; all weights of all buckets."""
        super().__init__()
        self.number, self.adapters, self.announced = number, adapters, announced

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

    def __reduce_ex__(
        self, _: Any
    ) -> tuple[Callable[..., Any], tuple[list[tuple[str, torch.Tensor]]]]:
        # a plain list, so that a receiving process need not import placement
        return list, (list(self),)


_Bucket = TypeVar("_Bucket")
Publisher = Any  # a `Handle`, whose room is above this one


def weights_info(
    handle: Publisher, *, dtype: Cast, adapters: Adapters, names: Names, transform: Transform | None
) -> list[WeightInfo]:
    """See `Handle.weights_info`."""
    announced = _announced(_to_publish(handle, adapters, names), dtype)
    if transform is None:
        return announced
    pieces: list[tuple[str, torch.Tensor]] = []
    seen: set[str] = set()
    for info in announced:
        try:
            pieces += _transformed(
                transform, info.name, torch.empty(info.shape, dtype=info.dtype, device="meta"), seen
            )
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"transform= cannot be run on {info.name!r} without values, on the meta device "
                f"({error}); weights_info() needs that, weights() does not"
            ) from error
    return [WeightInfo(name, tuple(piece.shape), piece.dtype) for name, piece in pieces]


def _transformed(
    transform: Transform, name: str, value: torch.Tensor, seen: set[str]
) -> Sequence[tuple[str, torch.Tensor]]:
    """The pieces that the user's function makes of one weight, whose names are added to those seen.
    TypeError: they are no such pieces."""
    with torch.inference_mode(False), torch.no_grad():
        made = transform(name, value)
    pieces = [(name, made)] if isinstance(made, torch.Tensor) else made
    if not isinstance(pieces, list | tuple) or not all(
        isinstance(each, tuple)
        and len(each) == 2
        and isinstance(each[0], str)
        and isinstance(each[1], torch.Tensor)
        for each in pieces
    ):
        raise TypeError(
            f"transform= must return a tensor, or a list of (name, tensor); for {name!r} it "
            f"returned {made!r:.200}"
        )
    for each, _ in pieces:
        if each in seen:
            raise ValueError(
                f"transform= returned the name {each!r} twice: a receiver would take only one of "
                "the two"
            )
        seen.add(each)
    return pieces


def weights(
    handle: Publisher,
    *,
    bucket_bytes: int | str,
    dtype: Cast,
    adapters: Adapters,
    names: Names,
    transform: Transform | None,
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """See `Handle.weights`."""
    if transform is not None and not callable(transform):
        raise TypeError(f"transform= is a function of (name, tensor), not {transform!r:.200}")
    nbytes = _checked_bytes(handle, bucket_bytes)
    described = _described(handle, _to_publish(handle, adapters, names), dtype)
    buckets = _buckets(handle, described, adapters, nbytes, transform, _times_begun(handle))
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
    dtype: Cast,
    adapters: Adapters,
    names: Names,
) -> Iterator[Changes]:
    """See `Handle.weight_changes`."""
    nbytes = _checked_bytes(handle, bucket_bytes)
    described = _described(handle, _to_publish(handle, adapters, names), dtype)
    last = (
        handle.published
        if handle.published is not None and handle.published.version == since
        else None
    )
    with plainly():
        publication = Publication(
            handle.storage, [(info.name, weight, info.dtype) for info, weight in described], last
        )
    buckets = _changes(handle, publication, nbytes, _times_begun(handle))
    return _noting_the_end(handle, buckets, adapters)


def _changes(
    handle: Publisher, publication: Publication, bucket_bytes: int, begun: int
) -> Iterator[Changes]:
    handle.published = None
    for bucket in publication.buckets(handle.modules_adapter.compute_device, bucket_bytes):
        _require_syncing(handle, begun)
        yield bucket
    handle.published = publication.published


def _checked_bytes(handle: Publisher, bucket_bytes: int | str) -> int:
    """The bytes of a bucket, if the handle can be published now."""
    nbytes = bytes_of("bucket_bytes", bucket_bytes)
    if nbytes <= 0:
        raise ValueError(f"bucket_bytes must be positive, not {nbytes}")
    _require_syncing(handle)
    return nbytes


def _to_publish(handle: Publisher, adapters: Adapters, names: Names) -> list[tuple[str, Weight]]:
    """Name and weight of everything to publish. Empty while the object is not built, and after it
    was garbage-collected."""
    for word, given, known in (
        ("adapters", adapters, get_args(Adapters)),
        ("names", names, get_args(Names)),
    ):
        if given not in known:
            raise ValueError(f"{word}={given!r} must be one of {', '.join(known)}")
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


def _described(
    handle: Publisher, found: list[tuple[str, Weight]], dtype: Cast
) -> list[tuple[WeightInfo, Weight]]:
    """Each weight with what is announced of it. Raises RegistrationError: one cannot be
    published."""
    for root in handle.modules():
        check_publishable(root, handle.name, found)
    return [
        (info, weight) for info, (_, weight) in zip(_announced(found, dtype), found, strict=True)
    ]


def _announced(found: Sequence[tuple[str, Weight]], given: Cast) -> list[WeightInfo]:
    """Each weight in the dtype that is published. Raises ValueError for an unknown name, and for a
    cast that cannot be."""
    own = {name: WeightInfo(name, tuple(weight.shape), weight.dtype) for name, weight in found}
    wanted: Mapping[str, object]
    if isinstance(given, Mapping):
        if own and (unknown := [name for name in given if name not in own]):
            raise ValueError(
                f"dtype: {unknown[0]!r} is not the name of a published weight; weights_info() has "
                "the names"
            )
        wanted = given
    elif callable(given) and not isinstance(given, type):
        wanted = {
            name: given(name, info) for name, info in own.items() if info.dtype.is_floating_point
        }
    else:
        _cast(WeightInfo("all weights", (), torch.get_default_dtype()), given)
        wanted = {
            name: given
            for name, weight in found
            if weight.dtype.is_floating_point and not weight.keeps_dtype
        }
    return [
        _cast(own[name], wanted.get(name), is_wrapper=weight.is_wrapper) for name, weight in found
    ]


def _cast(info: WeightInfo, given: object, *, is_wrapper: bool = False) -> WeightInfo:
    try:
        dtype = dtype_of(given) or info.dtype
    except ValueError as error:
        raise ValueError(f"dtype of {info.name!r}: {error}") from None
    for each in (info.dtype, dtype) if dtype is not info.dtype else ():
        if is_wrapper or is_scaled(each) or not each.is_floating_point:
            how = (
                ("stands for values only with its scales")
                if is_wrapper or is_scaled(each)
                else "is not floating-point"
            )
            raise ValueError(
                f"dtype of {info.name!r}: {info.dtype} is not cast to {dtype}, because {each} "
                f"{how}; write None to keep it"
            )
    return info if dtype is info.dtype else replace(info, dtype=dtype)


def _buckets(
    handle: Publisher,
    found: list[tuple[WeightInfo, Weight]],
    adapters: Adapters,
    bucket_bytes: int,
    transform: Transform | None,
    begun: int,
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """One publishing of a handle's weights, in the sync that began as number `begun`."""
    waiting = deque(found)
    # the transformed pieces of one weight that are in no bucket yet
    pieces: deque[tuple[str, torch.Tensor]] = deque()
    seen: set[str] = set()
    known = [info for info, _ in found] if transform is None else ()
    bucket, size = Bucket(0, adapters, known), 0
    reader = Reader(
        handle.modules_adapter.compute_device,
        handle.storage.read_host if handle.is_streaming else None,
    )
    ahead = ReadAhead(
        reader,
        ((weight, info.dtype) for info, weight in waiting if handle.is_streaming),
        bucket_bytes,
    )
    try:
        while waiting or pieces:
            _require_syncing(handle, begun)
            if transform is not None and not pieces:
                info, weight = waiting.popleft()
                with plainly():
                    ahead.fetch()
                    value = weight.whole(reader, info.dtype)
                ahead.used(_nbytes(info))
                try:
                    pieces.extend(_transformed(transform, info.name, value, seen))
                except Exception:
                    _take_part(handle, reader, waiting, begun)
                    raise
                del value  # not kept while buckets of its pieces are out
                continue
            nbytes = pieces[0][1].nbytes if pieces else _nbytes(waiting[0][0])
            if bucket and size + nbytes > bucket_bytes:
                yield bucket
                bucket.end()
                bucket, size = Bucket(bucket.number + 1, adapters, known), 0
                continue
            if pieces:
                bucket.append(pieces.popleft())
            else:
                info, weight = waiting.popleft()
                with plainly():
                    if not bucket:
                        ahead.fetch()
                    bucket.append((info.name, weight.whole(reader, info.dtype)))
                ahead.used(nbytes)
            size += nbytes
        if bucket:
            bucket.is_last = True
            yield bucket  # the last one is not emptied, because nothing needs its memory
    except GeneratorExit:
        _take_part(handle, reader, waiting, begun)
        raise
    finally:
        ahead.end()


def _nbytes(info: WeightInfo) -> int:
    return math.prod(info.shape) * info.dtype.itemsize


def _take_part(
    handle: Publisher, reader: Reader, waiting: Iterable[tuple[WeightInfo, Weight]], begun: int
) -> None:
    """Take part in the remaining collectives after an early end on this rank, so that ranks that go
    on are not left waiting."""
    for info, weight in waiting:
        if handle.state is not State.SYNCING or begun != _times_begun(handle):
            break
        if weight.is_collective:
            with plainly():
                weight.whole(reader, info.dtype)


_BEGIN = (Trigger.BEGIN_SYNC, Trigger.BEGIN_STREAM, Trigger.TRAIN_TO_SYNC)


def _times_begun(handle: Publisher) -> int:
    """The number of times that the handle has entered SYNCING, which identifies a sync."""
    return sum(handle.counters.transitions[trigger] for trigger in _BEGIN)


def _require_syncing(handle: Publisher, begun: int | None = None) -> None:
    if handle.state is not State.SYNCING:
        advice = (
            "with manager.phase('weight_sync')"
            if handle.phase_now() != "weight_sync"
            else f"the plan of this phase leaves it out (its role is {handle.role!r}), "
            "or "
            "it "
            "was "
            "unregistered: use the handle of the last "
            "register(). The shipped policies publish handles with the role "
            "'actor', "
            "and "
            "if "
            "only= is given, only those that it names"
        )
        raise PhaseError(
            f"{handle.name!r} is {handle.state} in phase {handle.phase_now()!r}; weights are "
            f"published while SYNCING: {advice}"
        )
    if begun is not None and begun != _times_begun(handle):
        raise PhaseError(
            f"this generator of {handle.name!r} began in an earlier sync, and values may have "
            "changed: call weights() again"
        )
