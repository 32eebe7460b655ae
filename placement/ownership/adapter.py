"""The contract of adapters: an adapter knows which tensors an object owns now.

An adapter never moves a byte and never changes its object. It answers anew each time, because
parameters are added, state is created at the first step, and gradients come and go. What a
framework knows of the object's modules callers ask of `frameworks`.

`Steady` and `SteadyState` check that a module tree, or an optimizer's state, is unchanged since the
last walk, by passes over flat lists that run in C. Models of experts have tens of thousands of
tensors, and every phase transition that moves an object must know that no tensor of it was added,
replaced or given a gradient. The number of Python calls does not depend on how many tensors there
are.
"""

from __future__ import annotations

import abc
import itertools
import operator
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from placement.core.call_guard import GuardedForward
from placement.core.errors import RegistrationError
from placement.core.weak import WeakIdSet, reference
from placement.frameworks.base import Framework
from placement.tensors.plain import (
    OBJECT_LEVELS,
    Owned,
    has_fields,
    is_leaf,
    nbytes_of,
    nested_tensors,
    problem_of_any,
    version_of,
)

MODULE_FIELDS = tuple(vars(torch.nn.Module()))
"""Bookkeeping of torch.nn.Module itself: hooks and registries, never tensors of the model but in
its three registries."""
_KNOWN = frozenset({*MODULE_FIELDS, *dir(torch.nn.Module)})
"""Names under which a module has no tensor beside those in its registries: under a method's name
lies what replaces it (a guard)."""
_FIELDS, _VERSION = operator.attrgetter("__dict__"), operator.attrgetter("_version")
_REGISTRIES = ("_parameters", "_buffers", "_modules")
_FORWARDS = {type(None), GuardedForward, types.FunctionType, types.MethodType, partial}
"""The types of values under the name `forward` in a module. Guards come and go with each move. No
tensor is in these."""
_ALIVE: Any = weakref.ref.__call__
_FEW = 8  # the number of parameters that tell whether there are gradients

HANDED_BACK: WeakIdSet[torch.Tensor] = WeakIdSet()
"""State that optimizers got back on the CPU when they left placement. It is not there on purpose:
it moves again where the optimizer is registered again."""

TRACK = "or register it with external=True to have it tracked and never moved"


Noted = tuple[str, weakref.ref[torch.Tensor]]  # a tensor's name and the tensor


def refusal(found: str, supported: str, advice: str) -> RegistrationError:
    """The error for an object that is not supported."""
    return RegistrationError(
        f"{found} is not supported now. Supported: {supported}. What to do: {advice}."
    )


class Seen(NamedTuple):
    """The owned tensors in the order of the walk, with facts about each."""

    tensors: list[torch.Tensor]
    versions: list[int]
    addresses: list[int]
    """The `data_ptr()` of each tensor."""


class Adapter(abc.ABC):
    """The contract of every adapter.

    `owned()` yields EVERY tensor object through which the object reaches a storage, including
    aliases (tied weights, views of one buffer, plain tensor attributes), because adoption by
    rebinding needs each of them. Its order follows the object's own registration, so two calls
    agree, and all ranks. The call creates nothing (no empty entries in an optimizer's state).
    """

    kind: str  # the kind: "module", "optimizer" or "engine"
    compute_device: torch.device
    _name: str
    _sparse: Iterable[torch.Tensor] = ()
    # gradients that the last walk has found and that cannot be moved
    _immovable: Sequence[Noted] = ()
    # what the last walk has found on the device, in objects that a module holds, and that cannot be
    # moved
    _left: Sequence[Noted] = ()
    # a record of the last `owned()`, where a quick check can tell whether it has changed since
    steady: Steady | SteadyState | None = None
    hands_back: bool = False
    """Whether the object is being handed back. Then `owned()` leaves out what cannot be moved, and
    refuses nothing."""
    external: str | None = None
    """Why the framework itself places the bytes, which placement then tracks but never moves; None
    when placement moves them."""
    # the frameworks that have a part in the object's modules. Each is asked what it does with them.
    frameworks: Sequence[Framework] = ()

    @abc.abstractmethod
    def owned(self) -> Iterator[Owned]:
        """Every tensor that moves with the object. Tensors that stay on the CPU on purpose are not
        included."""

    @abc.abstractmethod
    def key_objects(self) -> Sequence[Any]:
        """The objects whose identity identifies this registration: the module and what it wraps,
        the leaf optimizers, the engine."""

    def check(self, owned: Iterable[Owned]) -> None:
        """Raise RegistrationError if one of these tensors, which the first `owned()` has yielded,
        has to be moved and cannot be."""
        for each in owned if self.external is None else ():
            if (problem := problem_of_any(each.tensor, self.compute_device)) is not None:
                # moves; a weight could never be trained
                is_cache = type(each.tensor) is torch.Tensor and each.tensor.is_inference()
                if self.kind == "optimizer" or not is_cache:
                    raise RegistrationError(f"{self._name!r}: {each.name!r} {problem}.")
        for path, problem in self.immovable() if self.external is None else ():
            raise RegistrationError(f"{self._name!r}: {path!r} {problem}.")

    def unchanged(self) -> Seen | None:
        """The tensors of the last `owned()`, in order, if a quick check shows that they are the
        same, none loose or wrapped; else None."""
        return self.steady.look() if isinstance(self.steady, Steady) else None

    def record_if_current(self) -> object | None:
        """A record of the last `owned()`, to be compared by `==` with that of another call: equal
        if there was no walk between. None where a gradient or an entry of optimizer state has come
        since, or it cannot be told. Only a few tensors are looked at."""
        return self.steady if self.steady is not None and self.steady.seems_current() else None

    def other_names(self) -> Mapping[str, str]:
        """Further names of tensors that the last `owned()` yielded once (tied weights), by the
        yielded name."""
        return {}

    def with_gradients(self) -> Iterator[torch.Tensor]:
        """The tensors of the object that have a gradient now."""
        return (
            each.tensor
            for each in self.owned()
            if is_leaf(each.tensor) and each.tensor.grad is not None
        )

    def borrowed(self) -> Iterator[torch.Tensor]:
        """Tensors of the object in storages of other objects (a shard of a model's buffer). They
        are known here, but never move with it."""
        return iter(())

    def lent_gradients(self) -> set[int]:
        """Storages (`_cdata`) of modules' gradients that are also an optimizer's state, as of the
        last walk. State outlives gradients."""
        return set()

    def lasting_gradients(self) -> set[int]:
        """The storages (`_cdata`) of gradients that frameworks go on using when the gradients are
        dropped."""
        return {
            buffer.untyped_storage()._cdata
            for framework in self.frameworks
            for buffer in framework.gradient_buffers()
        }

    def stepped(self) -> Iterator[torch.Tensor]:
        """The plain parts of the parameters that an optimizer steps: it holds them even when their
        module is gone."""
        return iter(())

    def sparse(self) -> Iterator[torch.Tensor]:
        """The sparse tensors of the last walk, which may use storages of other objects: see
        `own_storages`."""
        return iter(self._sparse)

    def immovable(self) -> Iterator[tuple[str, str]]:
        """Name and problem of gradients that cannot be moved as bytes, as of the last walk. They
        stay where they are."""
        for path, tensor in _living(self._immovable):
            if (problem := problem_of_any(tensor, self.compute_device)) is not None:
                yield path, problem

    @property
    def gathers(self) -> str | None:
        """Why the object's own `state_dict()` gathers its values on the device; None where the host
        copy can stand in for them."""
        return next(filter(None, (each.gathers for each in self.frameworks)), None)

    def away(self) -> str | None:
        """Why an external object cannot be used now (its framework has offloaded it) and what to
        do; None while it can be used."""
        return next(filter(None, (each.away() for each in self.frameworks)), None)

    def kept_by_framework(self) -> Iterator[tuple[str, int]]:
        """Name and bytes of device memory that is kept for the object and cannot be moved: by a
        framework, or as a tensor."""
        staying = (
            ((f"{path} ({_form_of(tensor)})"), nbytes_of(tensor))
            for path, tensor in _living((*self._immovable, *self._left))
        )
        return itertools.chain(*(each.kept_by_framework() for each in self.frameworks), staying)

    def ready(self) -> None:
        """Release what frameworks gathered for computing. Called before an offload, with the device
        synchronised. Idempotent."""
        for each in self.frameworks:
            each.ready()

    def drop_caches(self) -> None:
        """Drop caches that frameworks rebuild on demand. Called once the object is on the host."""
        for each in self.frameworks:
            each.drop_caches()

    def unmoved(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor of what the object holds and `owned()` does not find. Looks everywhere,
        so it is for audits only."""
        return iter(())

    def expected_sizes(self) -> Sequence[int] | None:
        """Sizes in bytes of storages that will be created (optimizer state); None when they cannot
        be predicted. Asked once."""
        return ()

    def unborn_sizes(self) -> Sequence[int]:
        """The `expected_sizes` of storages that do not exist yet, as of the last
        `follow_param_groups`. May look at every parameter."""
        return ()

    def follow_param_groups(self) -> bool:
        """Whether an optimizer steps other parameters than at the last call. From now on
        `unborn_sizes` is about these."""
        return False

    def num_entries(self) -> int:
        """A number that changes when some of these storages are created. Costs nothing."""
        return 0


def _living(noted: Iterable[Noted]) -> Iterator[tuple[str, torch.Tensor]]:
    return ((path, tensor) for path, alive in noted if (tensor := alive()) is not None)


def _form_of(tensor: torch.Tensor) -> str:
    return (
        "nested"
        if tensor.is_nested
        else str(tensor.layout)
        if tensor.layout is not torch.strided
        else type(tensor).__qualname__
    )


# --- whether anything has changed since the last walk


class Steady:
    """A record of a module tree as of the last walk, which found `owned`, none of it loose or part
    of a wrapper. `containers`: identities of attributes that may come to contain tensors. It keeps
    no tensor and no module alive. Raises KeyError: one has a method's name."""

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        owned: Sequence[torch.Tensor],
        containers: frozenset[int],
    ) -> None:
        same: dict[tuple[str, ...], list[weakref.ref[torch.nn.Module]]] = {}
        for module in modules:
            same.setdefault(tuple(vars(module)), []).append(weakref.ref(module))
        read = {
            names: [*_REGISTRIES, *(name for name in names if name not in _KNOWN)] for names in same
        }
        self._alike = [
            (operator.itemgetter(*read[names]), len(read[names]), those)
            for names, those in same.items()
        ]
        """For modules with the same attributes: what reads registries and all but bookkeeping, how
        many these are, and the modules."""
        self._lengths, _, values = self._read()
        self._ids, self._types = list(map(id, values)), list(map(type, values))
        place = _places(self._ids)
        self._owned = list(map(place.__getitem__, map(id, owned)))
        self._others = sorted(
            {*itertools.compress(itertools.count(), _are_tensors(self._types))}.difference(
                self._owned
            )
        )
        self._forms_of_others = _forms(map(values.__getitem__, self._others))
        self._containers = list(map(place.__getitem__, containers))
        self._hung = _types_hung_on(owned)  # none of them has tensors, else they were containers
        self._versions: list[int] = []  # the versions of the owned tensors at the last look
        self._watched: tuple[list[weakref.ref[torch.nn.Module]], list[str]] | None = None
        """The modules and names of a few parameters that are trained, spread over the tree."""

    def look(self) -> Seen | None:
        """The present tensors, if nothing changed and none of them has a gradient or a graph; else
        None."""
        try:
            lengths, forwards, values = self._read()
            if not forwards <= _FORWARDS or (
                lengths != self._lengths and not self._have_only_guards_come()
            ):
                return None
        # a module is gone; an attribute was deleted, and another one added
        except (AttributeError, KeyError):
            return None
        if list(map(id, values)) != self._ids or list(map(type, values)) != self._types:
            return None
        # one of them may have to move now
        if _forms(map(values.__getitem__, self._others)) != self._forms_of_others:
            return None
        seen = seen_now(list(map(values.__getitem__, self._owned)), self._versions)
        if seen is None or not _types_hung_on(seen.tensors) <= self._hung:
            return None
        if any(
            next(nested_tensors(values[each], "", OBJECT_LEVELS), None) is not None
            for each in self._containers
        ):
            return None
        self._lengths, self._versions = lengths, seen.versions
        return seen

    def _have_only_guards_come(self) -> bool:
        """Whether the modules have no more attributes than at the last walk, but for what is called
        in place of methods."""
        found = [
            (fields, fields.keys() - MODULE_FIELDS, n)
            for _, n, those in self._alike
            for fields in map(_FIELDS, map(_ALIVE, those))
        ]
        come = [fields[name] for fields, names, _ in found for name in names & _KNOWN]
        are_methods = all(map(callable, come)) and not any(map(has_fields, map(type, come)))
        return are_methods and all(
            len(names - _KNOWN) == count - len(_REGISTRIES) for _, names, count in found
        )

    def seems_current(self) -> bool:
        """Whether no parameter has a gradient, as far as a few tell: the walk has found none, and
        `zero_grad()` drops those of all."""
        # a weak reference to each parameter would be quicker, but torch swaps no tensor that has
        # one
        try:
            if self._watched is None:
                own = [
                    (alive, key, each)
                    for *_, at in self._alike
                    for alive in at
                    for key, each in _ALIVE(alive)._parameters.items()
                ]
                trained = [
                    (alive, key)
                    for alive, key, each in own
                    if each is not None and each.requires_grad
                ]
                few = trained[:: -(-len(trained) // _FEW) or 1]
                self._watched = [alive for alive, _ in few], [name for _, name in few]
            parameters = map(operator.attrgetter("_parameters"), map(_ALIVE, self._watched[0]))
            found: list[Any] = list(map(dict.get, parameters, self._watched[1]))
        except AttributeError:  # a module is gone
            return False
        return (
            all(map(operator.is_not, found, itertools.repeat(None)))
            and _are_leaves(found)
            and not _has_gradient(found)
        )

    def _read(self) -> tuple[list[int], set[type], list[Any]]:
        """How many attributes each module has beside `forward`, the types of what lies under that
        name, and every value of every module. No pass makes a container for each module: that would
        start the garbage collector."""
        lengths, forwards, values = list[int](), set[type](), list[Any]()
        for read, count, modules in self._alike:
            fields = list(map(_FIELDS, map(_ALIVE, modules)))
            attributes = list(itertools.chain.from_iterable(map(read, fields)))
            values += attributes
            for index in range(len(_REGISTRIES)):
                # most are empty
                values += itertools.chain.from_iterable(
                    map(dict.values, filter(None, attributes[index::count]))
                )
            own = list(map(dict.get, fields, itertools.repeat("forward")))
            forwards.update(map(type, own))
            lengths += map(
                operator.sub, map(len, fields), map(operator.is_not, own, itertools.repeat(None))
            )
        return lengths, forwards, values


class SteadyState:
    """A record of plain optimizers' state as of the last walk, which found `owned` to move. It
    holds no tensor."""

    def __init__(self, optimizers: Sequence[Any], owned: Sequence[torch.Tensor]) -> None:
        self._optimizers = list(map(reference, optimizers))
        self._counts = _counts(optimizers)
        self._holders, values = _state(optimizers)
        self._ids, self._types = list(map(id, values)), list(map(type, values))
        self._owned = list(map(_places(self._ids).__getitem__, map(id, owned)))
        # not moved
        self._staying = list(
            map(
                operator.gt,
                _are_tensors(self._types),
                map({*map(id, owned)}.__contains__, self._ids),
            )
        )
        self.leaves_numbers_alone = self._leaves_numbers_alone(values)

    def seems_current(self) -> bool:
        """Whether they have as many parameters and entries as at the last walk, and the same in the
        first entry: a load replaces all."""
        optimizers = [alive() for alive in self._optimizers]
        return None not in optimizers and _counts(optimizers) == self._counts

    def look(self, optimizers: Sequence[Any]) -> Seen | None:
        """The present tensors, if nothing changed and every state tensor that stayed on the CPU is
        still a number there; else None."""
        holders, values = _state(optimizers)
        if (
            holders != self._holders
            or list(map(id, values)) != self._ids
            or list(map(type, values)) != self._types
        ):
            return None
        return (
            seen_now(list(map(values.__getitem__, self._owned)))
            if self._leaves_numbers_alone(values)
            else None
        )

    def _leaves_numbers_alone(self, values: list[Any]) -> bool:
        """Whether all tensors of the state that are not moved are numbers on the CPU. Any other may
        have to move."""
        staying = list(itertools.compress(values, self._staying))
        return all(map(operator.attrgetter("is_cpu"), staying)) and not any(
            map(torch.Tensor.dim, staying)
        )

    @staticmethod
    def fits(optimizers: Sequence[Any]) -> bool:
        """Whether every entry of every state is a plain dictionary by text that holds nothing with
        further tensors."""
        entries = [
            *itertools.chain.from_iterable(optimizer.state.values() for optimizer in optimizers)
        ]
        are_plain = {*map(type, entries)} <= {dict} and {
            *map(type, itertools.chain.from_iterable(entries))
        } <= {str}
        return (
            are_plain
            and {*map(type, itertools.chain.from_iterable(map(dict.values, entries)))} <= _SIMPLE
        )


_SIMPLE = {torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None)}
# options of a parameter group that decide on which device torch keeps its counters
_WHERE_COUNTERS_ARE = ("fused", "capturable")


def _places(identities: list[int]) -> dict[int, int]:
    """The first place of each identity in a list."""
    return dict(zip(reversed(identities), range(len(identities) - 1, -1, -1), strict=True))


def _are_tensors(kinds: Sequence[type]) -> Iterator[bool]:
    """Whether each of these types is that of a tensor."""
    return map({kind for kind in {*kinds} if issubclass(kind, torch.Tensor)}.__contains__, kinds)


def _types_hung_on(tensors: Iterable[torch.Tensor]) -> set[type]:
    """The types of what lies in attributes of tensors."""
    fields = filter(None, map(_FIELDS, tensors))
    return {*map(type, itertools.chain.from_iterable(map(dict.values, fields)))}


def _forms(tensors: Iterable[torch.Tensor]) -> list[tuple[bool, int]]:
    """Whether each tensor is on the CPU, and how many elements it has."""
    return [(each.is_cpu, each.numel()) for each in tensors]


def _counts(optimizers: Sequence[Any]) -> list[int]:
    """The identity of each optimizer and of all in its first entry, how many entries it has, and
    parameters in each group."""
    counts: list[int] = []
    for optimizer in optimizers:
        counts += (
            id(optimizer),
            len(optimizer.state),
            *(len(group["params"]) for group in optimizer.param_groups),
        )
        first = next(iter(optimizer.state.values()), None)
        counts += map(id, first.values()) if isinstance(first, dict) else ()
    return counts


def _state(optimizers: Sequence[Any]) -> tuple[tuple[list[int], list[Any]], list[Any]]:
    """The identities of the objects that hold the state with the names in its entries, and all its
    values, in a fixed order."""
    holders, names, values = list[Any](), list[Any](), list[Any]()
    for optimizer in optimizers:
        holders.append(optimizer)
        for group in optimizer.param_groups:
            holders += (group, *map(bool, map(group.get, _WHERE_COUNTERS_ARE)), *group["params"])
        state: Mapping[Any, dict[str, Any]] = optimizer.state
        entries = list(state.values())
        holders += (*state, *entries)
        # else one has come that was not here before, and the holders tell
        if {*map(type, entries)} <= {dict}:
            names += itertools.chain.from_iterable(entries)
            values += itertools.chain.from_iterable(map(dict.values, entries))
    return (list(map(id, holders)), names), values


def seen_now(tensors: list[torch.Tensor], before: list[int] | None = None) -> Seen | None:
    """The tensors with their versions and addresses. With `before` (versions at the last look),
    None if one has a gradient or a graph."""
    try:  # both in one pass: most of what either costs is to fetch the tensor from memory
        facts = list(
            itertools.chain.from_iterable(
                zip(map(_VERSION, tensors), map(torch.Tensor.data_ptr, tensors), strict=True)
            )
        )
    except RuntimeError:  # one of them is an inference tensor
        facts = [fact for each in tensors for fact in (version_of(each), each.data_ptr())]
    seen = Seen(tensors, facts[::2], facts[1::2])
    # A write in place makes a tensor part of a graph, and counts in its version. Asked before
    # gradients: torch warns when one reads the gradient of a tensor inside a graph.
    has_come = before is not None and (
        (seen.versions != before and not _are_leaves(tensors)) or _has_gradient(tensors)
    )
    return None if has_come else seen


def _are_leaves(tensors: Sequence[torch.Tensor]) -> bool:
    try:
        return all(map(operator.attrgetter("is_leaf"), tensors))
    except RuntimeError:  # see `plain.is_leaf`
        return False


def _has_gradient(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether any of these leaves has a gradient."""
    return any(
        map(operator.is_not, map(operator.attrgetter("grad"), tensors), itertools.repeat(None))
    )
