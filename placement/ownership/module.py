"""The tensors of a `torch.nn.Module`, whether plain, wrapped or sharded by frameworks; and those of
several modules registered as one."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from placement.core.errors import RegistrationError
from placement.core.weak import WeakIdSet, reference
from placement.frameworks.base import Advised, answering, frameworks_of
from placement.ownership.adapter import MODULE_FIELDS, TRACK, Adapter, Noted, Steady, refusal
from placement.tensors.plain import (
    LAZY_VIEW,
    OBJECT_LEVELS,
    Owned,
    has_bytes,
    has_fields,
    is_lazy_view,
    is_leaf,
    is_plain,
    is_plain_type,
    is_sparse,
    nbytes_of,
    nested_tensors,
    parts_of,
    problem_of,
    problem_of_sparse,
    sparse_parts,
    with_index,
)

_NO_TENSOR, _TENSOR, _CONTAINER, _OBJECT = range(4)
_OF_FRAMEWORKS = frozenset(
    {
        "accelerate",
        "bitsandbytes",
        "deepspeed",
        "megatron",
        "torchao",
        "transformer_engine",
        "veomni",
    }
)
"""The packages whose objects are left to the file in `frameworks`."""
_SUPPORTED = (
    "torch.nn.Module objects, also compiled, quantised, with adapters, under DDP, FSDP1, FSDP2, "
    "tensor parallel, DeepSpeed"
)


class ModuleAdapter(Adapter):
    """Parameters, gradients, buffers and plain tensor attributes of a module and its submodules,
    and tensors in objects that they hold, or in attributes of parameters and buffers.

    The module is held weakly: an adapter keeps nothing alive, and once the module is gone it owns
    nothing. `external`: whether the caller said that a framework moves the bytes; then nothing is
    refused. Raises RegistrationError: a framework shards or moves the module, or a tensor of it
    cannot be moved as bytes.
    """

    kind = "module"
    steady: Steady | None = None

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        name: str,
        compute_device: torch.device,
        external: bool = False,
    ) -> None:
        inner = module
        while (
            type(inner).__name__ == "OptimizedModule"
            and (wrapped := inner._modules.get("_orig_mod")) is not None
        ):
            inner = wrapped
        self._name = name
        self.compute_device = with_index(compute_device)
        # `inner` is a key too: registering a module and its compiled wrapper would claim the same
        # bytes twice.
        self._keys: list[Callable[[], Any]] = [
            reference(key) for key in ([module] if inner is module else [module, inner])
        ]
        # None once the module is gone
        self.root: Callable[[], torch.nn.Module | None] = reference(inner)
        self._shown: dict[int, torch.Tensor] = {}
        self._kinds: dict[type, int] = {}
        self._sparse: WeakIdSet[torch.Tensor] = WeakIdSet()
        self._immovable: list[Noted] = []
        self._left: list[Noted] = []
        self._other_names: dict[str, str] = {}
        self._containers: set[int] = set()
        """Identities of the containers and the objects in modules' attributes, which may come to
        hold tensors. From the last walk."""
        self._nests = False  # whether the last walk found a tensor in one of these
        self._cpu_stays = False
        self._on_device: set[str] = set()
        """If CPU tensors stay on the CPU: names of tensors seen on the accelerator. Under such a
        name, a tensor on the CPU must move."""
        self.frameworks = frameworks_of(inner)
        self._looks_at_parameters = not any(each.hangs_tensors for each in self.frameworks)
        by_framework = next(filter(None, (each.external for each in self.frameworks)), None)
        self.external = "the caller says so (external=True)" if external else by_framework
        if self.external is None:
            _refuse_parts(name, inner)
            for each in self.frameworks:
                if (reason := each.refusal(self.compute_device)) is not None:
                    raise RegistrationError(f"{name!r}: {reason}.")
            self.ready()
            self._cpu_stays = self._is_mixed(inner)

    def _is_mixed(self, module: torch.nn.Module) -> bool:
        """Whether CPU tensors stay on the CPU on purpose, because weights are on the accelerator
        already. Decided before adoption."""
        weights = (
            [*module.parameters()] or module.buffers() if self.compute_device.type != "cpu" else ()
        )
        return any(weight.device == self.compute_device for weight in weights)

    def owned(self) -> Iterator[Owned]:
        """See `Adapter.owned`. A tensor that wraps others (a DTensor) is replaced by those that it
        wraps. Gradients and tensors of a live autograd graph are transient. Raises
        RegistrationError: a tensor was added that cannot be moved as bytes."""
        module, self.steady = self.root(), None
        if module is None:
            return iter(())
        modules: list[torch.nn.Module] = []
        found = self._collect(module, modules)
        # `Steady` sees only modules' attributes, so not tensors that frameworks keep elsewhere, or
        # that are inside wrappers or containers. A walk for handing back refuses nothing, so the
        # next one has to look at everything.
        is_loose = any(each.transient or each.wrapper is not None for each in found)
        if not (is_loose or self.frameworks or self._nests or self._immovable or self.hands_back):
            with suppress(KeyError):
                self.steady = Steady(
                    modules, [owned.tensor for owned in found], frozenset(self._containers)
                )
        return iter(found)

    def other_names(self) -> Mapping[str, str]:
        return self._other_names

    def key_objects(self) -> Sequence[Any]:
        """The module and, if it is compiled, the module inside; without those that were
        garbage-collected."""
        return [key for key in (alive() for alive in self._keys) if key is not None]

    def parameters(self) -> list[torch.Tensor]:
        """The distinct parameters as an optimizer has them: sharded ones as wrappers."""
        return [each for _, each in self.named_parameters()]

    def with_gradients(self) -> Iterator[torch.Tensor]:
        """The tensors of the module that have a gradient now, including those that stay on the
        CPU."""
        parameters = [each for each in self.parameters() if each.grad is not None]
        return iter(
            {
                id(each): each for each in itertools.chain(parameters, super().with_gradients())
            }.values()
        )

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters as an optimizer has them, each once, under the module's own names."""
        module = self.root()
        own_tensors = {} if module is None else self.own_tensors()
        seen: set[int] = set()
        for name, shown in () if module is None else module.named_parameters():
            own = own_tensors.get(id(shown), shown)
            if id(own) not in seen:
                seen.add(id(own))
                yield name, own

    def own_tensors(self) -> dict[int, torch.Tensor]:
        """See `Framework.own_tensors`: the keys are those of tensors that the module has only for
        now, gathered for computing."""
        return {shown: own for each in self.frameworks for shown, own in each.own_tensors().items()}

    def _collect(self, root: torch.nn.Module, modules: list[torch.nn.Module]) -> list[Owned]:
        """The tensors of a module tree. Its modules are added to `modules`."""
        self._nests, self._immovable, self._left = False, [], []
        self._sparse.clear()
        held: dict[int, tuple[str, Any]] = {}
        found: list[Owned] = []
        self._other_names = {}
        seen: dict[int, str] = {
            id(cache): "" for each in self.frameworks for cache in each.caches()
        }
        self._shown = self.own_tensors()
        visited: set[int] = set()
        stack: list[tuple[str, torch.nn.Module]] = [("", root)]
        while stack:
            prefix, module = stack.pop()
            if id(module) in visited:
                continue
            visited.add(id(module))
            modules.append(module)
            fields = module.__dict__
            for registry in (fields["_parameters"], fields["_buffers"]):
                for name, tensor in registry.items():
                    if tensor is not None:
                        self._add(prefix + name, tensor, found, seen)
                        self._note_hung(prefix + name, tensor, held)
            self._add_attributes(prefix, fields, found, seen, held)
            if children := fields["_modules"]:
                stack.extend(
                    [
                        (f"{prefix}{name}.", child)
                        for name, child in children.items()
                        if child is not None
                    ][::-1]
                )
        for each in self.frameworks:
            for owned in each.tensors():
                self._add(owned.name, owned.tensor, found, seen, owned.transient)
        self._containers = {*held}
        if held and self.external is None:
            self._add_held(held.values(), found, seen)
        return found

    def _add_held(
        self, values: Iterable[tuple[str, Any]], found: list[Owned], seen: dict[int, str]
    ) -> None:
        """Add the tensors in objects that modules hold (a cache, a mask), or in attributes of
        parameters (`main_grad`), which are on the device, or share a storage of the module. They
        may be another's, too, so what cannot be moved is left and named."""
        held = [
            each
            for path, value in values
            for each in nested_tensors(value, path, OBJECT_LEVELS)
            if id(each[1]) not in seen
        ]
        transient = (
            {owned.tensor.untyped_storage()._cdata: owned.transient for owned in reversed(found)}
            if held
            else {}
        )
        for path, tensor in held:
            keys = [
                part.untyped_storage()._cdata if has_bytes(part) else None
                for _, part in parts_of(tensor, path)
            ]
            first = len(found)
            if all(key in transient for key in keys) or all(
                self._is_free(part) for _, part in parts_of(tensor, path)
            ):
                self._add(
                    path,
                    tensor,
                    found,
                    seen,
                    any(transient.get(key, False) for key in keys if key is not None),
                )
                found[first:] = [owned._replace(held=True) for owned in found[first:]]
            elif any(
                part.device == self.compute_device and nbytes_of(part)
                for _, part in parts_of(tensor, "")
            ):
                self._left.append((path, weakref.ref(tensor)))
            self._nests = True

    def _add_attributes(
        self,
        prefix: str,
        fields: dict[str, Any],
        found: list[Owned],
        seen: dict[int, str],
        held: dict[int, tuple[str, Any]],
    ) -> None:
        # torch.nn.Module's constructor sets its fields in one go, so usually they come first and
        # can be skipped without a look at each.
        attributes = itertools.islice(fields.items(), len(MODULE_FIELDS) - 1, None)
        if next(attributes, ("", None))[0] != MODULE_FIELDS[-1]:
            attributes = itertools.islice(fields.items(), None)
        for name, value in attributes:
            kind = self._kind(value)
            if kind == _NO_TENSOR or name in MODULE_FIELDS:
                continue
            if kind == _TENSOR:
                self._add(prefix + name, value, found, seen)
                continue
            held.setdefault(id(value), (prefix + name, value))
            for path, tensor in nested_tensors(value, prefix + name) if kind == _CONTAINER else ():
                self._nests = True
                self._add(path, tensor, found, seen)

    def _note_hung(self, name: str, tensor: torch.Tensor, held: dict[int, tuple[str, Any]]) -> None:
        """Note attributes of a parameter or buffer that may have tensors."""
        fields = vars(tensor) if self._looks_at_parameters and is_plain_type(type(tensor)) else {}
        for attribute, value in fields.items():
            if self._kind(value) != _NO_TENSOR:
                held.setdefault(id(value), (f"{name}.{attribute}", value))

    def _kind(self, value: Any) -> int:
        if (kind := self._kinds.get(type(value))) is None:
            kind = self._kinds[type(value)] = _kind_of(type(value))
        return kind

    def _add(
        self,
        name: str,
        tensor: torch.Tensor,
        found: list[Owned],
        seen: dict[int, str],
        transient: bool = False,
    ) -> None:
        tensor = self._shown.get(id(tensor), tensor)
        if (first := seen.setdefault(id(tensor), name)) is not name:
            self._other_names[name] = first
            return
        # A tensor inside a live graph (a cached activation, an auxiliary loss) is replaced at the
        # next forward.
        leaf = is_leaf(tensor)
        transient = transient or not leaf
        for path, part in parts_of(tensor, name):
            wrapper = None if part is tensor else tensor
            if self.external is not None:
                if has_bytes(part):
                    found.append(Owned(path, part, transient, wrapper))
            elif not self._stays(path, part):
                if not is_plain(part, self.compute_device):
                    if self.hands_back:
                        continue
                    raise RegistrationError(
                        f"{self._name!r}: {path!r} {problem_of(part, self.compute_device)}."
                    )
                # a gradient moves with its range, and is in no state dict
                if not transient and not self.hands_back and is_lazy_view(part):
                    raise RegistrationError(f"{self._name!r}: {path!r} {LAZY_VIEW}.")
                # an empty shard may be a view of padding, which has to move
                if part.numel() or part.untyped_storage().nbytes():
                    found.append(Owned(path, part, transient, wrapper))
        if leaf and (gradient := tensor.grad) is not None:
            self._add_gradient(f"{name}.grad", gradient, found, seen)

    def _stays(self, path: str, part: torch.Tensor) -> bool:
        """Whether a tensor stays on the CPU on purpose (see `_is_mixed`)."""
        if self._cpu_stays and not part.is_cpu:
            self._on_device.add(path)
        return self._cpu_stays and path not in self._on_device

    def _add_gradient(
        self, name: str, gradient: torch.Tensor, found: list[Owned], seen: dict[int, str]
    ) -> None:
        """Add a gradient, which may have any layout. One that cannot be moved is noted, so that the
        rest of the object still moves."""
        if is_sparse(gradient):
            if (first := seen.setdefault(id(gradient), name)) is not name:
                self._other_names[name] = first
                return
            parts = [
                Owned(path, part, True, gradient) for path, part in sparse_parts(gradient, name)
            ]
            if self.external is not None:
                found += parts
            elif not (self._cpu_stays and gradient.is_cpu):
                if any(problem_of_sparse(each.tensor, self.compute_device) for each in parts):
                    self._immovable.append((name, weakref.ref(gradient)))
                else:
                    self._sparse.add(gradient)
                    found += parts
        elif self.external is None and any(
            not self._can_go(part) for _, part in parts_of(gradient, name)
        ):
            self._immovable.append((name, weakref.ref(gradient)))
        else:
            self._add(name, gradient, found, seen, transient=True)

    def _is_free(self, part: torch.Tensor) -> bool:
        """Whether a part of a tensor that an object holds is on the device and can be moved from
        there."""
        is_here = part.device == self.compute_device and not is_lazy_view(part)
        return is_here and (part.is_inference() or problem_of(part, self.compute_device) is None)

    def _can_go(self, part: torch.Tensor) -> bool:
        return (is_plain(part, self.compute_device) and not part.is_inference()) or (
            self._cpu_stays and part.is_cpu
        )


def _kind_of(cls: Any) -> int:
    if issubclass(cls, torch.Tensor):
        return _TENSOR
    if issubclass(cls, (list, tuple, deque, Mapping)):
        return _CONTAINER
    return (
        _OBJECT
        if has_fields(cls) and cls.__module__.partition(".")[0] not in _OF_FRAMEWORKS
        else _NO_TENSOR
    )


def _refuse_parts(name: str, module: torch.nn.Module) -> None:
    """Refuse a module of which a part is sharded, wrapped or moved by a framework in a way that
    placement does not support."""
    refused = [advised for each in answering("refused_modules") for advised in each.refused_modules]
    asked = answering("refuse_part")
    answers: dict[type, list[Advised]] = {}
    for path, part in module.named_modules():
        where = f" (submodule {path!r})" if path else ""
        cls = type(part)
        if cls not in answers:
            answers[cls] = [advised for advised in refused if advised.cls.is_of(part)]
        for advised in answers[cls]:
            if advised.is_about(part):
                raise refusal(
                    f"{name!r}{where}: {cls.__module__}.{cls.__qualname__}",
                    _SUPPORTED,
                    advised.advice,
                )
        for each in asked:
            if (reason := each.refuse_part(part)) is not None:
                raise refusal(f"{name!r}{where}: {reason[0]}", _SUPPORTED, f"{reason[1]}, {TRACK}")
