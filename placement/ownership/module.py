"""The tensors of a `torch.nn.Module`, whether plain, wrapped or sharded by frameworks; and those of
several modules registered as one."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from placement.core.errors import RegistrationError
from placement.core.weak import WeakIdSet, reference
from placement.frameworks.base import Advised, answering, frameworks_of
from placement.ownership.adapter import (
    MODULE_FIELDS,
    TRACK,
    Adapter,
    Noted,
    Steady,
    identity_of,
    refusal,
)
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


@dataclass(slots=True)
class _Scan:
    """The results of one scan of a module tree."""

    modules: list[torch.nn.Module] = field(default_factory=list)
    owned: list[Owned] = field(default_factory=list)
    # the name of each tensor object, by identity
    names: dict[int, str] = field(default_factory=dict)
    # name and value of each container and object that may hold tensors, by identity
    held: dict[int, tuple[str, Any]] = field(default_factory=dict)


class ModuleAdapter(Adapter):
    """Parameters, gradients, buffers and plain tensor attributes of a module and its submodules.
    Tensors in objects that they hold, or in attributes of parameters and buffers, belong to them,
    too.

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
        inner = _uncompiled(module)
        self._name = name
        self.compute_device = with_index(compute_device)
        # `inner` is a key too: registering a module and its compiled wrapper would claim the same
        # bytes twice.
        self._keys: list[Callable[[], Any]] = [reference(module)]
        if inner is not module:
            self._keys.append(reference(inner))
        # None once the module is gone
        self.root: Callable[[], torch.nn.Module | None] = reference(inner)
        self._own_tensors: dict[int, torch.Tensor] = {}  # see `own_tensors`; of the last scan
        self._kinds: dict[type, int] = {}
        self._sparse: WeakIdSet[torch.Tensor] = WeakIdSet()
        self._immovable: list[Noted] = []
        self._empty: list[Noted] = []
        self._left: list[Noted] = []
        self._other_names: dict[str, str] = {}
        self._containers: set[int] = set()
        """Identities of the containers and the objects in modules' attributes, which may come to
        hold tensors. From the last scan."""
        self._nests = False  # whether the last scan found a tensor in one of these
        self._cpu_stays = False
        self._on_device: set[str] = set()
        """If CPU tensors stay on the CPU: names of tensors seen on the accelerator. Under such a
        name, a tensor on the CPU must move."""
        self.frameworks = frameworks_of(inner)
        self._scans_parameters = not any(framework.hangs_tensors for framework in self.frameworks)
        self.external = "the caller says so (external=True)" if external else None
        for framework in self.frameworks:
            self.external = self.external or framework.external
        if self.external is None:
            self._refuse(inner)
            self.ready()
            self._cpu_stays = self._is_mixed(inner)

    def _refuse(self, module: torch.nn.Module) -> None:
        _refuse_parts(self._name, module)
        for framework in self.frameworks:
            reason = framework.refusal(self.compute_device)
            if reason is not None:
                raise RegistrationError(f"{self._name!r}: {reason}.")

    def _is_mixed(self, module: torch.nn.Module) -> bool:
        """Whether CPU tensors stay on the CPU on purpose, because weights are on the accelerator
        already. Decided before adoption."""
        if self.compute_device.type == "cpu":
            return False
        weights = [*module.parameters()] or module.buffers()
        return any(weight.device == self.compute_device for weight in weights)

    def owned(self) -> Iterator[Owned]:
        """See `Adapter.owned`. A tensor that wraps others (a DTensor) is replaced by those that it
        wraps. Gradients and tensors of a live autograd graph are transient. Raises
        RegistrationError: a tensor was added that cannot be moved as bytes."""
        self.steady = None
        module = self.root()
        if module is None:
            return iter(())
        scan = self._scan(module)
        # `Steady` sees only modules' attributes, so not tensors that frameworks keep elsewhere, or
        # that are inside wrappers or containers. A scan for handing back refuses nothing, so the
        # next one has to be complete.
        is_loose = any(owned.transient or owned.wrapper is not None for owned in scan.owned)
        if not (is_loose or self.frameworks or self._nests or self._immovable or self.hands_back):
            tensors = [owned.tensor for owned in scan.owned]
            with suppress(KeyError):
                self.steady = Steady(scan.modules, tensors, frozenset(self._containers))
        return iter(scan.owned)

    def other_names(self) -> Mapping[str, str]:
        return self._other_names

    def key_objects(self) -> Sequence[Any]:
        """The module and, if it is compiled, the module inside; without those that were
        garbage-collected."""
        return [key for key in (alive() for alive in self._keys) if key is not None]

    def parameters(self) -> list[torch.Tensor]:
        """The distinct parameters as an optimizer has them: sharded ones as wrappers."""
        return [parameter for _, parameter in self.named_parameters()]

    def with_gradients(self) -> Iterator[torch.Tensor]:
        """The tensors of the module that have a gradient now, including those that stay on the
        CPU."""
        tensors = [parameter for parameter in self.parameters() if parameter.grad is not None]
        tensors += super().with_gradients()
        return iter({id(tensor): tensor for tensor in tensors}.values())

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters as an optimizer has them, each once, under the module's own names."""
        module = self.root()
        if module is None:
            return
        own_tensors = self.own_tensors()
        seen = set()
        for name, parameter in module.named_parameters():
            own = own_tensors.get(id(parameter), parameter)
            if id(own) not in seen:
                seen.add(id(own))
                yield name, own

    def own_tensors(self) -> dict[int, torch.Tensor]:
        """See `Framework.own_tensors`: the keys are those of tensors that the module has only for
        now, gathered for computing."""
        own_tensors: dict[int, torch.Tensor] = {}
        for framework in self.frameworks:
            own_tensors.update(framework.own_tensors())
        return own_tensors

    def _scan(self, root: torch.nn.Module) -> _Scan:
        """The tensors and modules of a module tree."""
        self._nests = False
        self._immovable = []
        self._empty = []
        self._left = []
        self._sparse.clear()
        self._other_names = {}
        self._own_tensors = self.own_tensors()
        scan = _Scan()
        for framework in self.frameworks:
            scan.names.update({id(cache): "" for cache in framework.caches()})
        visited = set()
        stack: list[tuple[str, torch.nn.Module]] = [("", root)]
        while stack:
            prefix, module = stack.pop()
            if id(module) in visited:
                continue
            visited.add(id(module))
            scan.modules.append(module)
            fields = module.__dict__
            for registry in (fields["_parameters"], fields["_buffers"]):
                for name, tensor in registry.items():
                    if tensor is not None:
                        self._add(scan, prefix + name, tensor)
                        self._note_attributes(scan, prefix + name, tensor)
            self._add_attributes(scan, prefix, fields)
            for name, child in reversed(fields["_modules"].items()):
                if child is not None:
                    stack.append((f"{prefix}{name}.", child))
        for framework in self.frameworks:
            for owned in framework.tensors():
                self._add(scan, owned.name, owned.tensor, owned.transient)
        self._containers = {*scan.held}
        if self.external is None:
            self._add_held(scan)
        return scan

    def _add_held(self, scan: _Scan) -> None:
        """Add the tensors in objects that modules hold (a cache, a mask), or in attributes of
        parameters (`main_grad`). Only those are added that are on the device, or share a storage of
        the module. The objects may be another owner's, too, so tensors that cannot be moved are
        left and named."""
        held = []
        for path, value in scan.held.values():
            for name, tensor in nested_tensors(value, path, OBJECT_LEVELS):
                if id(tensor) not in scan.names:
                    held.append((name, tensor))
        if not held:
            return
        self._nests = True
        # whether the first tensor in each storage is transient
        storages = {
            owned.tensor.untyped_storage()._cdata: owned.transient for owned in reversed(scan.owned)
        }
        for name, tensor in held:
            parts = [part for _, part in parts_of(tensor, name)]
            keys = [part.untyped_storage()._cdata if has_bytes(part) else None for part in parts]
            if all(key in storages for key in keys) or all(map(self._is_free, parts)):
                is_transient = any(key is not None and storages.get(key, False) for key in keys)
                first = len(scan.owned)
                self._add(scan, name, tensor, is_transient)
                added = scan.owned[first:]
                scan.owned[first:] = [owned._replace(held=True) for owned in added]
            elif any(part.device == self.compute_device and nbytes_of(part) for part in parts):
                self._left.append((name, weakref.ref(tensor)))

    def _add_attributes(self, scan: _Scan, prefix: str, fields: dict[str, Any]) -> None:
        # torch.nn.Module's constructor sets its fields in one go, so usually they come first and
        # can be skipped without reading them.
        attributes = itertools.islice(fields.items(), len(MODULE_FIELDS) - 1, None)
        if next(attributes, ("", None))[0] != MODULE_FIELDS[-1]:
            attributes = itertools.islice(fields.items(), None)
        for name, value in attributes:
            kind = self._kind(value)
            if kind == _NO_TENSOR or name in MODULE_FIELDS:
                continue
            if kind == _TENSOR:
                self._add(scan, prefix + name, value)
                continue
            scan.held.setdefault(identity_of(value), (prefix + name, value))
            if kind == _CONTAINER:
                for path, tensor in nested_tensors(value, prefix + name):
                    self._nests = True
                    self._add(scan, path, tensor)

    def _note_attributes(self, scan: _Scan, name: str, tensor: torch.Tensor) -> None:
        """Note attributes of a parameter or buffer that may have tensors."""
        if not self._scans_parameters or not is_plain_type(type(tensor)):
            return
        for attribute, value in vars(tensor).items():
            if self._kind(value) != _NO_TENSOR:
                scan.held.setdefault(identity_of(value), (f"{name}.{attribute}", value))

    def _kind(self, value: Any) -> int:
        kind = self._kinds.get(type(value))
        if kind is None:
            kind = self._kinds[type(value)] = _kind_of(type(value))
        return kind

    def _add(
        self,
        scan: _Scan,
        name: str,
        tensor: torch.Tensor,
        transient: bool = False,
    ) -> None:
        tensor = self._own_tensors.get(id(tensor), tensor)
        first_name = scan.names.setdefault(id(tensor), name)
        if first_name is not name:
            self._other_names[name] = first_name
            return
        # A tensor inside a live graph (a cached activation, an auxiliary loss) is replaced at the
        # next forward.
        leaf = is_leaf(tensor)
        transient = transient or not leaf
        for path, part in parts_of(tensor, name):
            if self._moves(path, part, transient=transient):
                wrapper = None if part is tensor else tensor
                scan.owned.append(Owned(path, part, transient, wrapper))
            elif not part.numel():
                self._empty.append((path, weakref.ref(part)))
        gradient = tensor.grad if leaf else None
        if gradient is not None:
            self._add_gradient(scan, f"{name}.grad", gradient)

    def _moves(self, path: str, part: torch.Tensor, *, transient: bool) -> bool:
        """Whether a tensor moves with the module. Of an external one, whether it has bytes. Raises
        RegistrationError: it has to move, and cannot be moved."""
        if self.external is not None:
            return has_bytes(part)
        if self._stays(path, part):
            return False
        if not is_plain(part, self.compute_device):
            if self.hands_back:
                return False
            raise RegistrationError(
                f"{self._name!r}: {path!r} {problem_of(part, self.compute_device)}."
            )
        # a gradient moves with its range, and is in no state dict
        if not transient and not self.hands_back and is_lazy_view(part):
            raise RegistrationError(f"{self._name!r}: {path!r} {LAZY_VIEW}.")
        # an empty shard may be a view of padding, which has to move
        return bool(part.numel() or part.untyped_storage().nbytes())

    def _stays(self, path: str, part: torch.Tensor) -> bool:
        """Whether a tensor stays on the CPU on purpose (see `_is_mixed`)."""
        if self._cpu_stays and not part.is_cpu:
            self._on_device.add(path)
        return self._cpu_stays and path not in self._on_device

    def _add_gradient(self, scan: _Scan, name: str, gradient: torch.Tensor) -> None:
        """Add a gradient, which may have any layout. One that cannot be moved is noted, so that the
        object still moves without it."""
        if is_sparse(gradient):
            self._add_sparse(scan, name, gradient)
        elif self.external is None and not self._can_go(gradient):
            self._immovable.append((name, weakref.ref(gradient)))
        else:
            self._add(scan, name, gradient, transient=True)

    def _add_sparse(self, scan: _Scan, name: str, gradient: torch.Tensor) -> None:
        first_name = scan.names.setdefault(id(gradient), name)
        if first_name is not name:
            self._other_names[name] = first_name
            return
        parts = [*sparse_parts(gradient, name)]
        if self.external is None:
            if self._cpu_stays and gradient.is_cpu:
                return
            if any(problem_of_sparse(part, self.compute_device) for _, part in parts):
                self._immovable.append((name, weakref.ref(gradient)))
                return
            self._sparse.add(gradient)
        scan.owned += [Owned(path, part, True, gradient) for path, part in parts]

    def _is_free(self, part: torch.Tensor) -> bool:
        """Whether a part of a tensor that an object holds is on the device and can be moved from
        there."""
        is_here = part.device == self.compute_device and not is_lazy_view(part)
        return is_here and (part.is_inference() or problem_of(part, self.compute_device) is None)

    def _can_go(self, gradient: torch.Tensor) -> bool:
        for _, part in parts_of(gradient, ""):
            is_movable = is_plain(part, self.compute_device) and not part.is_inference()
            if not is_movable and not (self._cpu_stays and part.is_cpu):
                return False
        return True


def _uncompiled(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside the wrappers of `torch.compile`."""
    while type(module).__name__ == "OptimizedModule":
        inner = module._modules.get("_orig_mod")
        if inner is None:
            break
        module = inner
    return module


def _kind_of(cls: Any) -> int:
    if issubclass(cls, torch.Tensor):
        return _TENSOR
    if issubclass(cls, (list, tuple, deque, Mapping)):
        return _CONTAINER
    package = cls.__module__.partition(".")[0]
    return _OBJECT if has_fields(cls) and package not in _OF_FRAMEWORKS else _NO_TENSOR


def _refuse_parts(name: str, module: torch.nn.Module) -> None:
    """Refuse a module of which a part is sharded, wrapped or moved by a framework in a way that
    placement does not support."""
    refused: list[Advised] = []
    for framework in answering("refused_modules"):
        refused += framework.refused_modules
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
        for framework in asked:
            reason = framework.refuse_part(part)
            if reason is not None:
                problem, advice = reason
                raise refusal(f"{name!r}{where}: {problem}", _SUPPORTED, f"{advice}, {TRACK}")
