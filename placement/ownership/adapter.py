"""The contract of adapters: an adapter knows which tensors an object owns now.

An adapter never moves a byte and never changes its object. It answers anew each time, because
parameters are added, state is created at the first step, and gradients come and go. The frameworks
that know the object's modules are in `frameworks`; callers ask them.

`Steady` and `SteadyState` check that a module tree, or an optimizer's state, is unchanged since the
last scan. Their passes over flat lists run in C, because models of experts have tens of thousands
of tensors. Every phase transition that moves an object must know that no tensor of it was added,
replaced or given a gradient. The number of Python calls does not depend on how many tensors there
are.
"""

from __future__ import annotations

import abc
import itertools
import math
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
_TENSORLESS = frozenset({*MODULE_FIELDS, *dir(torch.nn.Module)})
"""Names under which a module has no tensor beside those in its registries. Under a method's name
lies its replacement (a guard)."""
identity_of = object.__hash__
"""As good as `id`. From Python 3.12 on, `id` asks the audit hooks: with that of filelock, which
many libraries import, it takes 0.5 us (20,000 tensors: 10 ms)."""
_FIELDS = operator.attrgetter("__dict__")
_VERSION = operator.attrgetter("_version")
_GRADIENT = operator.attrgetter("grad")
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
_WeakModule = weakref.ref[torch.nn.Module]


def refusal(description: str, supported: str, advice: str) -> RegistrationError:
    """The error for an object that is not supported."""
    return RegistrationError(
        f"{description} is not supported now. Supported: {supported}. What to do: {advice}."
    )


class Seen(NamedTuple):
    """The owned tensors in the order of the scan, with facts about each."""

    tensors: list[torch.Tensor]
    versions: list[int]
    addresses: list[int]
    """The `data_ptr()` of each tensor."""


class Adapter(abc.ABC):
    """The contract of every adapter.

    `owned()` yields EVERY tensor object through which the object reaches a storage, because
    adoption by rebinding needs each of them. So aliases are included: tied weights, views of one
    buffer, plain tensor attributes. Its order follows the object's own registration, so two calls
    agree, and all ranks. The call creates nothing (no empty entries in an optimizer's state).
    """

    kind: str  # the kind: "module", "optimizer" or "engine"
    compute_device: torch.device
    _name: str
    _sparse: Iterable[torch.Tensor] = ()
    # gradients of the last scan that cannot be moved
    _immovable: Sequence[Noted] = ()
    _empty: Sequence[Noted] = ()
    # device tensors of the last scan, in objects that a module holds, that cannot be moved
    _left: Sequence[Noted] = ()
    # a record of the last `owned()`, where a quick check can tell whether it has changed since
    steady: Steady | SteadyState | None = None
    hands_back: bool = False
    """Whether the object is being handed back. Then `owned()` leaves out the tensors that cannot be
    moved, and refuses nothing."""
    external: str | None = None
    """Why the framework itself places the bytes, which placement then tracks but never moves; None
    when placement moves them."""
    # the frameworks that have a part in the object's modules
    frameworks: Sequence[Framework] = ()

    @abc.abstractmethod
    def owned(self) -> Iterator[Owned]:
        """Every tensor that moves with the object. Tensors that stay on the CPU on purpose are not
        included."""

    @abc.abstractmethod
    def key_objects(self) -> Sequence[Any]:
        """The objects whose identity identifies this registration: the module and the module
        inside, the leaf optimizers, the engine."""

    def check(self, owned: Iterable[Owned]) -> None:
        """Raise RegistrationError if one of these tensors, which the first `owned()` has yielded,
        has to be moved and cannot be."""
        if self.external is not None:
            return
        for name, tensor, *_ in owned:
            problem = problem_of_any(tensor, self.compute_device)
            if problem is None:
                continue
            # a cache moves; a weight of this kind could never be trained
            is_cache = type(tensor) is torch.Tensor and tensor.is_inference()
            if self.kind == "optimizer" or not is_cache:
                raise RegistrationError(f"{self._name!r}: {name!r} {problem}.")
        for name, problem in self.immovable():
            raise RegistrationError(f"{self._name!r}: {name!r} {problem}.")

    def unchanged(self) -> Seen | None:
        """The tensors of the last `owned()`, in order, if a quick check shows that they are the
        same, none loose or wrapped; else None."""
        return self.steady.unchanged() if isinstance(self.steady, Steady) else None

    def record_if_current(self) -> object | None:
        """A record of the last `owned()`, to be compared by `==` with that of another call: equal
        if there was no scan between. None where a gradient or an entry of optimizer state has come
        since, or it cannot be told. Only a few tensors are read."""
        if self.steady is None or not self.steady.seems_current():
            return None
        return self.steady

    def other_names(self) -> Mapping[str, str]:
        """Further names of tensors that the last `owned()` yielded once (tied weights), by the
        yielded name."""
        return {}

    def with_gradients(self) -> Iterator[torch.Tensor]:
        """The tensors of the object that have a gradient now."""
        for owned in self.owned():
            if is_leaf(owned.tensor) and owned.tensor.grad is not None:
                yield owned.tensor

    def borrowed(self) -> Iterator[torch.Tensor]:
        """Tensors of the object in storages of other objects (a shard of a model's buffer). They
        are known here, but never move with it."""
        return iter(())

    def lent_gradients(self) -> set[int]:
        """Storages (`_cdata`) of modules' gradients that are also an optimizer's state, as of the
        last scan. State outlives gradients."""
        return set()

    def lasting_gradients(self) -> set[int]:
        """The storages (`_cdata`) of gradients that frameworks go on using when the gradients are
        dropped."""
        storages = set()
        for framework in self.frameworks:
            for buffer in framework.gradient_buffers():
                storages.add(buffer.untyped_storage()._cdata)
        return storages

    def stepped(self) -> Iterator[torch.Tensor]:
        """The plain parts of the parameters that an optimizer steps: it holds them even when their
        module is gone."""
        return iter(())

    def sparse(self) -> Iterator[torch.Tensor]:
        """The sparse tensors of the last scan, which may use storages of other objects: see
        `own_storages`."""
        return iter(self._sparse)

    def empty(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor of those that the last scan left out, because they have no bytes."""
        return _living(self._empty)

    def immovable(self) -> Iterator[tuple[str, str]]:
        """Name and problem of gradients that cannot be moved as bytes, as of the last scan. They
        stay where they are."""
        for name, tensor in _living(self._immovable):
            problem = problem_of_any(tensor, self.compute_device)
            if problem is not None:
                yield name, problem

    @property
    def gathers(self) -> str | None:
        """Why the object's own `state_dict()` gathers its values on the device; None where the host
        copy can stand in for them."""
        return next(filter(None, (framework.gathers for framework in self.frameworks)), None)

    def away(self) -> str | None:
        """Why an external object cannot be used now (its framework has offloaded it), with advice;
        None while it can be used."""
        return next(filter(None, (framework.away() for framework in self.frameworks)), None)

    def kept_by_framework(self) -> Iterator[tuple[str, int]]:
        """Name and bytes of device memory that is kept for the object and cannot be moved: by a
        framework, or as a tensor."""
        for framework in self.frameworks:
            yield from framework.kept_by_framework()
        for name, tensor in _living((*self._immovable, *self._left)):
            yield f"{name} ({_layout_of(tensor)})", nbytes_of(tensor)

    def ready(self) -> None:
        """Release the tensors that frameworks gathered for computing. Called before an offload,
        with the device synchronised. Idempotent."""
        for framework in self.frameworks:
            framework.ready()

    def drop_caches(self) -> None:
        """Drop caches that frameworks rebuild on demand. Called once the object is on the host."""
        for framework in self.frameworks:
            framework.drop_caches()

    def unmoved(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor of the tensors that the object holds and `owned()` does not find. Scans
        everything, so it is for audits only."""
        return iter(())

    def expected_sizes(self) -> Sequence[int] | None:
        """Sizes in bytes of storages that will be created (optimizer state); None when they cannot
        be predicted. Asked once."""
        return ()

    def unborn_sizes(self) -> Sequence[int]:
        """The `expected_sizes` of storages that do not exist yet, as of the last
        `follow_param_groups`. May read every parameter."""
        return ()

    def follow_param_groups(self) -> bool:
        """Whether an optimizer steps other parameters than at the last call. From now on
        `unborn_sizes` is about these."""
        return False

    def num_entries(self) -> int:
        """A number that changes when some of these storages are created. Costs nothing."""
        return 0


def _living(noted: Iterable[Noted]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, alive in noted:
        tensor = alive()
        if tensor is not None:
            yield name, tensor


def _layout_of(tensor: torch.Tensor) -> str:
    if tensor.is_nested:
        return "nested"
    if tensor.layout is not torch.strided:
        return str(tensor.layout)
    return type(tensor).__qualname__


# --- whether anything has changed since the last scan


class _Alike(NamedTuple):
    """Modules with the same attributes."""

    read: Callable[[dict[str, Any]], tuple[Any, ...]]
    """Reads the registries, and all attributes but bookkeeping, of a module's `__dict__`."""
    num_read: int
    modules: list[_WeakModule]


class Steady:
    """A record of a module tree as of the last scan, which found `owned`, none of it loose or part
    of a wrapper. `containers`: identities of attributes that may come to contain tensors. It keeps
    no tensor and no module alive. Raises KeyError: one has a method's name."""

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        owned: Sequence[torch.Tensor],
        containers: frozenset[int],
    ) -> None:
        by_names: dict[tuple[str, ...], list[_WeakModule]] = {}
        for module in modules:
            by_names.setdefault(tuple(vars(module)), []).append(weakref.ref(module))
        self._alike: list[_Alike] = []
        for names, references in by_names.items():
            to_read = [*_REGISTRIES, *(name for name in names if name not in _TENSORLESS)]
            self._alike.append(_Alike(operator.itemgetter(*to_read), len(to_read), references))
        self._lengths, _, values = self._read()
        self._ids = list(map(identity_of, values))
        self._types = list(map(type, values))
        place = _places(self._ids)
        self._owned = list(map(place.__getitem__, map(identity_of, owned)))
        tensors = set(itertools.compress(itertools.count(), _are_tensors(self._types)))
        self._unowned = sorted(tensors.difference(self._owned))
        self._forms_of_unowned = _forms(map(values.__getitem__, self._unowned))
        self._containers = list(map(place.__getitem__, containers))
        # none of them has tensors, else they were containers
        self._attribute_types = _types_in_attributes(owned)
        self._versions: list[int] = []  # the versions of the owned tensors at the last check
        self._watched: tuple[list[_WeakModule], list[str]] | None = None
        """The modules and names of a few parameters that are trained, spread over the tree."""

    def unchanged(self) -> Seen | None:
        """The present tensors, if nothing changed and none of them has a gradient or a graph; else
        None."""
        try:
            lengths, forwards, values = self._read()
            if not forwards <= _FORWARDS:
                return None
            if lengths != self._lengths and not self._have_only_guards_come():
                return None
        # a module is gone; an attribute was deleted, and another one added
        except (AttributeError, KeyError):
            return None
        if list(map(identity_of, values)) != self._ids:
            return None
        if list(map(type, values)) != self._types:
            return None
        # one of them may have to move now
        if _forms(map(values.__getitem__, self._unowned)) != self._forms_of_unowned:
            return None
        seen = seen_now(list(map(values.__getitem__, self._owned)), self._versions)
        if seen is None or not _types_in_attributes(seen.tensors) <= self._attribute_types:
            return None
        for place in self._containers:
            if next(nested_tensors(values[place], "", OBJECT_LEVELS), None) is not None:
                return None
        self._lengths = lengths
        self._versions = seen.versions
        return seen

    def _have_only_guards_come(self) -> bool:
        """Whether the modules have no more attributes than at the last scan, but for callables in
        place of methods."""
        for alike in self._alike:
            for alive in alike.modules:
                fields = _FIELDS(_ALIVE(alive))
                names = fields.keys() - MODULE_FIELDS
                come = [fields[name] for name in names & _TENSORLESS]
                if not all(map(callable, come)):
                    return False
                if any(map(has_fields, map(type, come))):
                    return False
                if len(names - _TENSORLESS) != alike.num_read - len(_REGISTRIES):
                    return False
        return True

    def seems_current(self) -> bool:
        """Whether no parameter has a gradient, as far as a few tell: the scan has found none, and
        `zero_grad()` drops those of all."""
        try:
            if self._watched is None:
                self._watched = self._few_trained()
            modules, names = self._watched
            registries = map(operator.attrgetter("_parameters"), map(_ALIVE, modules))
            parameters: list[Any] = list(map(dict.get, registries, names))
        except AttributeError:  # a module is gone
            return False
        if any(map(operator.is_, parameters, itertools.repeat(None))):
            return False
        return _are_leaves(parameters) and not _has_gradient(parameters)

    def _few_trained(self) -> tuple[list[_WeakModule], list[str]]:
        """See `_watched`. A weak reference to each parameter would be quicker, but torch swaps no
        tensor that has one."""
        modules = []
        names = []
        for alike in self._alike:
            for alive in alike.modules:
                for name, parameter in _ALIVE(alive)._parameters.items():
                    if parameter is not None and parameter.requires_grad:
                        modules.append(alive)
                        names.append(name)
        stride = math.ceil(len(names) / _FEW) or 1
        return modules[::stride], names[::stride]

    def _read(self) -> tuple[list[int], set[type], list[Any]]:
        """How many attributes each module has beside `forward`, the types of the values under that
        name, and every value of every module. No pass makes a container for each module: that would
        start the garbage collector."""
        lengths: list[int] = []
        forwards: set[type] = set()
        values = []
        for alike in self._alike:
            fields = list(map(_FIELDS, map(_ALIVE, alike.modules)))
            attributes = list(itertools.chain.from_iterable(map(alike.read, fields)))
            values += attributes
            for index in range(len(_REGISTRIES)):
                registries = filter(None, attributes[index :: alike.num_read])  # most are empty
                values += itertools.chain.from_iterable(map(dict.values, registries))
            own_forwards = list(map(dict.get, fields, itertools.repeat("forward")))
            forwards.update(map(type, own_forwards))
            has_own = map(operator.is_not, own_forwards, itertools.repeat(None))
            lengths += map(operator.sub, map(len, fields), has_own)
        return lengths, forwards, values


class SteadyState:
    """A record of plain optimizers' state as of the last scan, which found `owned` to move. It
    holds no tensor."""

    def __init__(self, optimizers: Sequence[Any], owned: Sequence[torch.Tensor]) -> None:
        self._optimizers = list(map(reference, optimizers))
        self._counts = _counts(optimizers)
        self._holders, values = _state(optimizers)
        self._ids = list(map(identity_of, values))
        self._types = list(map(type, values))
        owned_ids = list(map(identity_of, owned))
        self._owned = list(map(_places(self._ids).__getitem__, owned_ids))
        are_owned = map(set(owned_ids).__contains__, self._ids)
        # which values are tensors that are not moved
        self._staying = list(map(operator.gt, _are_tensors(self._types), are_owned))
        self.leaves_numbers_alone = self._leaves_numbers_alone(values)

    def seems_current(self) -> bool:
        """Whether they have as many parameters and entries as at the last scan, and the same in the
        first entry: a load replaces all."""
        optimizers = [alive() for alive in self._optimizers]
        return None not in optimizers and _counts(optimizers) == self._counts

    def unchanged(self, optimizers: Sequence[Any]) -> Seen | None:
        """The present tensors, if nothing changed and every state tensor that stayed on the CPU is
        still a number there; else None."""
        holders, values = _state(optimizers)
        if holders != self._holders or list(map(identity_of, values)) != self._ids:
            return None
        if list(map(type, values)) != self._types or not self._leaves_numbers_alone(values):
            return None
        return seen_now(list(map(values.__getitem__, self._owned)))

    def _leaves_numbers_alone(self, values: list[Any]) -> bool:
        """Whether all tensors of the state that are not moved are numbers on the CPU. Any other may
        have to move."""
        staying = list(itertools.compress(values, self._staying))
        are_on_cpu = all(map(operator.attrgetter("is_cpu"), staying))
        return are_on_cpu and not any(map(torch.Tensor.dim, staying))

    @staticmethod
    def fits(optimizers: Sequence[Any]) -> bool:
        """Whether every entry of every state is a plain dictionary by text that holds nothing with
        further tensors."""
        entries = []
        for optimizer in optimizers:
            entries += optimizer.state.values()
        if not {*map(type, entries)} <= {dict}:
            return False
        names = itertools.chain.from_iterable(entries)
        if not {*map(type, names)} <= {str}:
            return False
        values = itertools.chain.from_iterable(map(dict.values, entries))
        return {*map(type, values)} <= _SIMPLE


_NUMBERS = (int, float, bool, str, type(None))
_SIMPLE = {torch.Tensor, torch.nn.Parameter, *_NUMBERS}
# options of a parameter group that decide on which device torch keeps its counters
_WHERE_COUNTERS_ARE = ("fused", "capturable")


def _places(identities: list[int]) -> dict[int, int]:
    """The first place of each identity in a list."""
    backwards = reversed(range(len(identities)))
    return dict(zip(reversed(identities), backwards, strict=True))


def _are_tensors(kinds: Sequence[type]) -> Iterator[bool]:
    """Whether each of these types is that of a tensor."""
    tensor_types = {kind for kind in {*kinds} if issubclass(kind, torch.Tensor)}
    return map(tensor_types.__contains__, kinds)


def _types_in_attributes(tensors: Iterable[torch.Tensor]) -> set[type]:
    """The types of the values of tensors' attributes."""
    fields = filter(None, map(_FIELDS, tensors))
    return {*map(type, itertools.chain.from_iterable(map(dict.values, fields)))}


def _forms(tensors: Iterable[torch.Tensor]) -> list[tuple[bool, int]]:
    """Whether each tensor is on the CPU, and how many elements it has."""
    return [(tensor.is_cpu, tensor.numel()) for tensor in tensors]


def _counts(optimizers: Sequence[Any]) -> list[int]:
    """The identity of each optimizer and of all in its first entry, how many entries it has, and
    parameters in each group."""
    counts: list[int] = []
    for optimizer in optimizers:
        counts += (identity_of(optimizer), len(optimizer.state))
        counts += [len(group["params"]) for group in optimizer.param_groups]
        first = next(iter(optimizer.state.values()), None)
        if isinstance(first, dict):
            counts += map(identity_of, first.values())
    return counts


def _state(
    optimizers: Sequence[Any],
) -> tuple[tuple[list[int], list[Any]], list[Any]]:
    """The identities of the objects that hold the state with the names in its entries, and all its
    values, in a fixed order."""
    holders = []
    names: list[Any] = []
    values: list[Any] = []
    for optimizer in optimizers:
        holders.append(optimizer)
        for group in optimizer.param_groups:
            holders.append(group)
            holders += map(bool, map(group.get, _WHERE_COUNTERS_ARE))
            holders += group["params"]
        state: Mapping[Any, dict[str, Any]] = optimizer.state
        entries = list(state.values())
        holders += (*state, *entries)
        # else an entry has come since, which shows in the holders
        if {*map(type, entries)} <= {dict}:
            names += itertools.chain.from_iterable(entries)
            values += itertools.chain.from_iterable(map(dict.values, entries))
    return (list(map(identity_of, holders)), names), values


def seen_now(
    tensors: list[torch.Tensor],
    before: list[int] | None = None,
) -> Seen | None:
    """The tensors with their versions and addresses. With `before` (versions at the last check),
    None if one has a gradient or a graph."""
    try:  # both in one pass: most of the time goes into fetching the tensor from memory
        addresses = map(torch.Tensor.data_ptr, tensors)
        pairs = zip(map(_VERSION, tensors), addresses, strict=True)
        facts = list(itertools.chain.from_iterable(pairs))
    except RuntimeError:  # one of them is an inference tensor
        facts = []
        for tensor in tensors:
            facts += (version_of(tensor), tensor.data_ptr())
    seen = Seen(tensors, facts[::2], facts[1::2])
    if before is None:
        return seen
    # A write in place makes a tensor part of a graph, and counts in its version. Asked before
    # gradients: torch warns when one reads the gradient of a tensor inside a graph.
    if seen.versions != before and not _are_leaves(tensors):
        return None
    return None if _has_gradient(tensors) else seen


def _are_leaves(tensors: Sequence[torch.Tensor]) -> bool:
    try:
        return all(map(operator.attrgetter("is_leaf"), tensors))
    except RuntimeError:  # see `plain.is_leaf`
        return False


def _has_gradient(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether any of these leaves has a gradient."""
    gradients = map(_GRADIENT, tensors)
    return any(map(operator.is_not, gradients, itertools.repeat(None)))
