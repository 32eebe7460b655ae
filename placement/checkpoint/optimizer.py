"""Optimizer handles in checkpoints: saved by parameter names, without a step.

torch's own `get_optimizer_state_dict` and `set_optimizer_state_dict` step an optimizer that has no
state yet, which changes its later results. An optimizer's `load_state_dict` casts state to its
parameter's dtype. Here state stays as it was saved, and an optimizer that was saved without state
has none after loading.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import _get_fqns, get_optimizer_state_dict

from placement.checkpoint.parts import (
    Change,
    Part,
    Path,
    Read,
    Shown,
    fresh,
    load_by_itself,
    mapped,
    refuse_own_cuts,
    replace_state,
    same,
    settings_of,
    some,
    under,
    write,
)
from placement.core.errors import CheckpointError
from placement.core.modes import without_modes
from placement.frameworks.base import OwnState, own_state
from placement.ownership.optimizer import OptimizerAdapter
from placement.ownership.optimizer_state import is_born, parameters_of
from placement.registration.guards import Guard
from placement.registration.state_dicts import hand_out
from placement.tensors.plain import is_a, is_wrapper, nested_tensors, rewrapped


class _Named(NamedTuple):
    """An optimizer inside a handle's object, with the names that the parameters of the stepped
    modules have in its part of a checkpoint."""

    optimizer: Any
    names: Mapping[int, str]
    is_hollow: bool

    def parameters(self) -> list[torch.Tensor]:
        parameters = []
        for group in self.optimizer.param_groups:
            parameters += group["params"]
        return parameters

    def names_in(self, group: Mapping[str, Any]) -> list[str]:
        return [self.names[id(parameter)] for parameter in group["params"]]

    def stepped(self) -> set[str]:
        """The names of the parameters that it steps."""
        return {self.names[id(parameter)] for parameter in self.parameters()}


class Optimizer(Part):
    """An optimizer handle for torch.distributed.checkpoint.

    Loading into an optimizer without state needs `planner=placement.checkpoint.LoadPlanner()`,
    because only the checkpoint knows the entries to read.

    Example:
        ::

            state = {"optimizer": placement.checkpoint.Optimizer(adam)}
            planner = placement.checkpoint.LoadPlanner()
            torch.distributed.checkpoint.load(state, checkpoint_id=path, planner=planner)
    """

    kind = noun = "optimizer"

    def state_dict(self) -> Shown:
        optimizer = self._object()
        if self.handle.gathers is not None:
            return self._gathered(optimizer)
        state: dict[str, Any] = {}
        groups = []
        with without_modes(), torch.inference_mode(False), torch.no_grad():
            for named in self._optimizers():
                own = own_state(named.optimizer)
                entries = named.optimizer.state if own is None else own.exported()
                for owner, entry in entries.items():
                    name = self._name_of_entry(named, owner, entry)
                    if not name or name in state:
                        raise CheckpointError(
                            f"{self.handle.name!r} has state under a key that has no name of its "
                            f"own (a {type(owner).__name__} {name!r}): save handle.state_dict(), "
                            "and leave it out here with only="
                        )
                    state[name] = mapped(entry, self._shown)
                for group in named.optimizer.param_groups:
                    settings = dict(group if own is None else own.settings(group))
                    settings.pop("params", None)
                    settings["params"] = named.names_in(group)
                    groups.append(settings)
        for name, entry in state.items():
            if isinstance(entry, Mapping):
                for value in entry.values():
                    refuse_own_cuts(self.handle, name, value)
        return Shown(self, {"state": state, "param_groups": groups})

    def _name_of_entry(self, named: _Named, owner: Any, entry: Any) -> str:
        """The name for an entry of the state; empty where it has none."""
        if is_wrapper(owner):
            num_tensors = len([*nested_tensors(entry, "")])
            if len([*nested_tensors(entry, "", levels=1)]) > num_tensors:
                raise CheckpointError(
                    f"{self.handle.name!r}: the state of {named.names.get(id(owner))!r} is sharded "
                    "and has tensors in objects, which a checkpoint takes from one rank alone: "
                    "save handle.state_dict() on each rank, and leave it out here with only="
                )
        # not the text of a tensor, which several can have
        unnamed = "" if isinstance(owner, torch.Tensor) else str(owner)
        return named.names.get(id(owner), unnamed)

    def template(self, path: Path, metadata: Metadata) -> Read:
        parameters = {}
        for named in self._optimizers():
            for parameter in named.parameters():
                parameters[named.names[id(parameter)]] = named.optimizer, parameter
        values: dict[str, Any] = {"state": {}, "param_groups": []}
        for keys, saved in under(metadata, path):
            if keys[0] not in values:
                raise self._error(
                    ".".join(map(str, keys)),
                    "is in the checkpoint, but an optimizer has only 'state' and 'param_groups'",
                )
            is_state = keys[0] == "state"
            is_tensor = isinstance(saved, TensorStorageMetadata)
            if is_state and keys[1] in parameters:
                value = self._read_into(keys, saved, *parameters[str(keys[1])])
            elif is_state and is_tensor and len(keys) > 2:
                raise self._error(
                    f"state of {keys[1]!r}",
                    "is in the checkpoint, but the optimizer steps no parameter of that name",
                )
            else:
                value = fresh(saved)
            set_element(values, keys, value)
        if not values["param_groups"]:
            raise self._error(
                "'param_groups'", f"is not in the checkpoint below {'.'.join(map(str, path))!r}"
            )
        return Read(values)

    def _read_into(
        self,
        keys: Path,
        saved: Any,
        optimizer: Any,
        parameter: torch.Tensor,
    ) -> Any:
        """New host memory for one value of a parameter's state; None for a value that is not a
        tensor."""
        if not isinstance(saved, TensorStorageMetadata):
            return None
        entry = optimizer.state.get(parameter, {})
        live = entry.get(keys[2]) if len(keys) == 3 else None
        if isinstance(live, torch.Tensor):
            return self._saved_like(f"state of {keys[1]!r}: {keys[2]!r}", live, saved)
        is_sharded = is_a(parameter, "torch.distributed.tensor", "DTensor")
        if is_sharded and saved.size == parameter.size():
            like = torch.empty_like(parameter, dtype=saved.properties.dtype, device="meta")
            return rewrapped(like, lambda part: torch.empty_like(part, device="cpu"))
        return fresh(saved)

    def needs_device(self) -> str | None:
        for optimizer, _, is_hollow in self._optimizers():
            if own_state(optimizer) is None:
                if not is_hollow and _loads_itself(optimizer):
                    return f"{type(optimizer).__name__} loads state in its own way"
                if not self._adapter().follows(optimizer):
                    return f"{type(optimizer).__name__} may keep some state on the CPU on purpose"
        return None

    def prepare(self, values: Mapping[str, Any]) -> list[Change]:
        self.require_writable()
        self._require_resident()
        optimizers = self._optimizers()
        is_own = isinstance(values, Shown) and values.part is self
        if is_own and not values["state"] and not self._has_state():
            raise self._error(
                "its state",
                "does not exist yet: load with planner=placement.checkpoint.LoadPlanner(), which "
                "takes it from the checkpoint",
            )
        saved_groups = self._groups(values, optimizers)
        all_stepped = set()
        for named in optimizers:
            all_stepped |= named.stepped()
        self._refuse_unstepped(values["state"], all_stepped)
        changes = []
        for named in optimizers:
            state = dict(values["state"])
            for name in all_stepped - named.stepped():
                state.pop(name, None)
            groups = []
            for group in named.optimizer.param_groups:
                names = named.names_in(group)
                groups.append(saved_groups[names[0]] if names else {})
            own = own_state(named.optimizer)
            if own is not None:
                changes.append(self._framework_load(named, own, state, groups))
            elif not named.is_hollow and _loads_itself(named.optimizer):
                changes.append(self._own_load(named, state, groups))
            else:
                is_ours = isinstance(values, Read)
                changes.append(self._state_change(named, state, groups, is_ours=is_ours))
        return changes

    def _has_state(self) -> bool:
        return any(is_born(optimizer) for optimizer in self._adapter().optimizers())

    def _refuse_unstepped(self, state: Mapping[str, Any], stepped: set[str]) -> None:
        """Raise for state with tensors under a name that is no stepped parameter's."""
        for name, entry in state.items():
            if name in stepped or not isinstance(entry, Mapping):
                continue
            if any(isinstance(value, torch.Tensor) for value in entry.values()):
                raise self._error(
                    f"state of {name!r}", "belongs to a parameter that the optimizer does not step"
                )

    def _framework_load(
        self,
        named: _Named,
        own: OwnState,
        state: Mapping[str, Any],
        groups: Sequence[Mapping[str, Any]],
    ) -> Change:
        """A change by a framework that keeps the state in a form of its own."""
        entries = {}
        for parameter in named.parameters():
            entries[parameter] = state.get(named.names[id(parameter)], {})
        for parameter, problem in own.problems(entries):
            raise self._error(f"state of {named.names[id(parameter)]!r}", problem)
        return write(self.handle, (), partial(own.restore, entries, groups))

    def _own_load(
        self,
        named: _Named,
        state: Mapping[str, Any],
        groups: Sequence[Mapping[str, Any]],
    ) -> Change:
        """A change by the optimizer's own `load_state_dict`, which numbers parameters as torch
        does."""
        optimizer = named.optimizer
        numbers: dict[str, int] = {}
        numbered_groups = []
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            settings = settings_of(saved)
            settings["params"] = [
                numbers.setdefault(name, len(numbers)) for name in named.names_in(group)
            ]
            numbered_groups.append(settings)

        def load() -> None:
            # the optimizer may keep these very tensors
            copied = mapped(state, lambda tensor: tensor.detach().clone())
            numbered = {numbers.get(name, name): entry for name, entry in copied.items()}
            optimizer.load_state_dict({"state": numbered, "param_groups": numbered_groups})

        return load_by_itself(self.handle, load)

    def _state_change(
        self,
        named: _Named,
        state: Mapping[str, Any],
        groups: Sequence[Mapping[str, Any]],
        *,
        is_ours: bool,
    ) -> Change:
        optimizer = named.optimizer
        copies = []
        entries: dict[Any, Any] = {}
        for parameter in named.parameters():
            name = named.names[id(parameter)]
            live: Mapping[Any, Any] = optimizer.state.get(parameter, {})
            keys = {str(key): key for key in live}
            entry = {}
            for saved_key, value in (state.get(name) or {}).items():
                key = keys.get(str(saved_key), saved_key)
                present = live.get(key)
                if isinstance(value, torch.Tensor) and isinstance(present, torch.Tensor):
                    label = f"state of {name!r}: {key!r}"
                    self._require_writable_by(label, present, value)
                    copies.append((label, self._shown(present), value))
                    entry[key] = present
                else:
                    entry[key] = value
            if entry:
                entries[parameter] = entry
        # entries that belong to no parameter
        nameless = [key for key in optimizer.state if id(key) not in named.names]
        own_keys = {str(key): key for key in nameless}
        names = set(named.names.values())
        for name, value in state.items():
            if name not in names:
                entries[own_keys.get(name, name)] = value
        self._require_one_value(copies)
        return replace_state(self.handle, copies, optimizer, entries, groups, is_ours=is_ours)

    def _groups(
        self, values: Mapping[str, Any], optimizers: Sequence[_Named]
    ) -> dict[str, Mapping[str, Any]]:
        """The saved group of each parameter, by its name. Raises unless they fit these
        optimizers."""
        if not {"state", "param_groups"} <= set(values):
            raise self._error(
                "a state dict of an optimizer",
                f"must have 'state' and 'param_groups', but this one has {some(values)}",
            )
        saved: dict[str, Mapping[str, Any]] = {}
        for saved_group in values["param_groups"]:
            saved.update(dict.fromkeys(saved_group["params"], saved_group))
        extra = set(saved)
        for named in optimizers:
            extra.difference_update(named.names.values())
            for group in named.optimizer.param_groups:
                names = named.names_in(group)
                missing = [name for name in names if name not in saved]
                if missing:
                    raise self._error(
                        f"parameter {missing[0]!r}",
                        f"was in no group of the saved optimizer ({len(missing)} are missing)",
                    )
                settings = {id(saved[name]): settings_of(saved[name]) for name in names}
                if not all(itertools.starmap(same, itertools.pairwise(settings.values()))):
                    raise self._error(
                        f"the group of {names[0]!r}",
                        "was saved as several groups with different settings",
                    )
        if extra:
            raise self._error(
                f"parameter {min(extra)!r}",
                f"of the saved optimizer is unknown here ({len(extra)} parameters are)",
            )
        return saved

    def _gathered(self, optimizer: Any) -> Shown:
        """The state dict that torch makes, for a framework that gathers flat parameters for it."""
        owners = [owner.object for owner in self.handle.owners]
        if len(owners) != 1 or not self._adapter().state_is_all_born():
            stepped = "parameters whose state is not born yet"
            if len(owners) != 1:
                stepped = "several modules" if owners else "no module"
            raise CheckpointError(
                f"{self.handle.name!r} steps {stepped}, but {self.handle.gathers}: leave it out "
                "with only="
            )
        try:
            return Shown(self, get_optimizer_state_dict(owners[0], optimizer))
        except (AssertionError, AttributeError, RuntimeError) as error:
            raise CheckpointError(
                f"torch cannot name the state of {self.handle.name!r} ({error}): leave it out with "
                "only="
            ) from error

    def _adapter(self) -> OptimizerAdapter:
        adapter = self.handle.adapter
        assert isinstance(adapter, OptimizerAdapter)
        return adapter

    def _shown(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = self.handle.holding
        return tensor.detach() if storage is None else hand_out(storage, tensor)

    def _names(self) -> dict[int, str]:
        """The names of all parameters of the stepped modules, by the parameter's id. With several
        owners a name begins with the owner's."""
        names: dict[int, str] = {}
        owners = self.handle.owners
        for owner in owners:
            adapter = owner.modules_adapter
            module = None if adapter is None else adapter.root()
            if adapter is None or module is None:
                continue
            prefix = f"{owner.name}." if len(owners) > 1 else ""
            for path, parameter in adapter.named_parameters():
                (name,) = _get_fqns(module, path)  # without the prefixes of wrappers
                names.setdefault(id(parameter), prefix + name)
        return names

    def _optimizers(self) -> list[_Named]:
        """The optimizers that have state of their own and step only named parameters. Several may
        step one parameter (a wrapper with slow weights): to all but the first it has a name that
        begins with theirs."""
        names = self._names()
        optimizers = []
        taken: set[str] = set()
        for leaf in self._adapter().leaves():
            stepped = [*map(id, parameters_of([leaf]))]
            unnamed = [identity for identity in stepped if identity not in names]
            if not unnamed:
                prefix = f"{leaf.path}{type(leaf.optimizer).__name__}."
                own_names = dict(names)
                for identity in stepped:
                    if names[identity] in taken:
                        own_names[identity] = prefix + names[identity]
                optimizers.append(_Named(leaf.optimizer, own_names, leaf.is_hollow))
                taken.update(names[identity] for identity in stepped)
            elif self.handle.external_reason is None and not leaf.is_hollow:
                raise CheckpointError(
                    f"{self.handle.name!r} steps {len(unnamed)} tensors that are not parameters of "
                    "its modules: save it with its framework's checkpoint or as "
                    "handle.state_dict(), and leave it out here with only="
                )
        if not optimizers:
            raise CheckpointError(
                f"{self.handle.name!r} steps no parameter with a name; save it with its "
                "framework's checkpoint"
            )
        return optimizers


def _loads_itself(optimizer: Any) -> bool:
    """Whether loading an optimizer is more than torch's own loading: it overrides the method, or
    has hooks that are not placement's."""
    load_state_dict = getattr(type(optimizer), "load_state_dict", None)
    if load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return True
    for name in ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"):
        hooks = getattr(optimizer, name, {})
        if not all(isinstance(hook, Guard) for hook in hooks.values()):
            return True
    return False
