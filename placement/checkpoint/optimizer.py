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
from placement.frameworks.base import own_state
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
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def stepped(self) -> set[str]:
        return {self.names[id(p)] for p in self.parameters()}


class Optimizer(Part):
    """An optimizer handle for torch.distributed.checkpoint: `{"optimizer":
    placement.checkpoint.Optimizer(adam)}`.

    Loading into an optimizer without state needs `planner=placement.checkpoint.LoadPlanner()`,
    because only the checkpoint knows what has to be read.
    """

    kind = noun = "optimizer"

    def state_dict(self) -> Shown:
        optimizer = self._object()
        if self.handle.gathers is not None:
            return self._gathered(optimizer)
        state: dict[str, Any] = {}
        groups: list[dict[str, Any]] = []
        with without_modes(), torch.inference_mode(False), torch.no_grad():
            for optimizer, mine, _ in self._optimizers():
                own = own_state(optimizer)
                for owner, entry in (optimizer.state if own is None else own.exported()).items():
                    if is_wrapper(owner) and len([*nested_tensors(entry, "", levels=1)]) > len(
                        [*nested_tensors(entry, "")]
                    ):
                        raise CheckpointError(
                            f"{self.handle.name!r}: the state of {mine.get(id(owner))!r} is "
                            "sharded and has tensors in objects, which a checkpoint takes from one "
                            "rank alone: save handle.state_dict() on each rank, and leave it out "
                            "here with only="
                        )
                    # not the text of a tensor, which several can have
                    unnamed = "" if isinstance(owner, torch.Tensor) else str(owner)
                    name = mine.get(id(owner), unnamed)
                    if not name or name in state:
                        raise CheckpointError(
                            f"{self.handle.name!r} has state under a key that has no name of its "
                            f"own (a {type(owner).__name__} {name!r}): save handle.state_dict(), "
                            "and leave it out here with only="
                        )
                    state[name] = mapped(entry, self._shown)
                for group in optimizer.param_groups:
                    settings = group if own is None else own.settings(group)
                    groups.append(
                        {key: value for key, value in settings.items() if key != "params"}
                    )
                    groups[-1]["params"] = [mine[id(parameter)] for parameter in group["params"]]
        for name, entry in state.items():
            for value in entry.values() if isinstance(entry, Mapping) else ():
                refuse_own_cuts(self.handle, name, value)
        return Shown(self, {"state": state, "param_groups": groups})

    def template(self, path: Path, metadata: Metadata) -> Read:
        parameters = {
            each.names[id(p)]: (each.optimizer, p)
            for each in self._optimizers()
            for p in each.parameters()
        }
        found: dict[str, Any] = {"state": {}, "param_groups": []}
        for rest, saved in under(metadata, path):
            if rest[0] not in found:
                raise self._error(
                    ".".join(map(str, rest)),
                    "is in the checkpoint, but an optimizer has only 'state' and 'param_groups'",
                )
            if rest[0] == "state" and rest[1] in parameters:
                optimizer, parameter = parameters[str(rest[1])]
                value = self._read_into(rest, saved, parameter, optimizer.state.get(parameter, {}))
            elif rest[0] == "state" and len(rest) > 2 and isinstance(saved, TensorStorageMetadata):
                raise self._error(
                    f"state of {rest[1]!r}",
                    "is in the checkpoint, but the optimizer steps no parameter of that name",
                )
            else:
                value = fresh(saved)
            set_element(found, rest, value)
        if not found["param_groups"]:
            raise self._error(
                "'param_groups'", f"is not in the checkpoint below {'.'.join(map(str, path))!r}"
            )
        return Read(found)

    def _read_into(
        self, rest: Path, saved: Any, parameter: torch.Tensor, entry: Mapping[Any, Any]
    ) -> Any:
        """New host memory for one value of a parameter's state; None for a value that is not a
        tensor."""
        if not isinstance(saved, TensorStorageMetadata):
            return None
        live = entry.get(rest[2]) if len(rest) == 3 else None
        if isinstance(live, torch.Tensor):
            return self._saved_like(f"state of {rest[1]!r}: {rest[2]!r}", live, saved)
        # sharded like its parameter
        if (
            is_a(parameter, "torch.distributed.tensor", "DTensor")
            and saved.size == parameter.size()
        ):
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

    def prepare(self, given: Mapping[str, Any]) -> list[Change]:
        self.require_writable()
        self._require_resident()
        optimizers = self._optimizers()
        has_state = any(is_born(leaf.optimizer) for leaf in self._adapter().leaves())
        if isinstance(given, Shown) and given.part is self and not given["state"] and not has_state:
            raise self._error(
                "its state",
                "does not exist yet: load with planner=placement.checkpoint.LoadPlanner(), which "
                "takes it from the checkpoint",
            )
        groups = self._groups(given, optimizers)
        steps = {name for each in optimizers for name in each.stepped()}
        for name, entry in given["state"].items():
            if (
                isinstance(entry, Mapping)
                and name not in steps
                and any(isinstance(value, torch.Tensor) for value in entry.values())
            ):
                raise self._error(
                    f"state of {name!r}", "belongs to a parameter that the optimizer does not step"
                )
        changes: list[Change] = []
        for each in optimizers:
            optimizer, mine, is_hollow = each
            theirs = steps - each.stepped()
            state = {name: entry for name, entry in given["state"].items() if name not in theirs}
            saved = [
                groups[mine[id(group["params"][0])]] if group["params"] else {}
                for group in optimizer.param_groups
            ]
            if (own := own_state(optimizer)) is not None:
                entries = {p: state.get(mine[id(p)], {}) for p in each.parameters()}
                for parameter, problem in own.problems(entries):
                    raise self._error(f"state of {mine[id(parameter)]!r}", problem)
                changes.append(write(self.handle, (), partial(own.restore, entries, saved)))
            elif not is_hollow and _loads_itself(optimizer):
                changes.append(self._own_load(each, state, saved))
            else:
                changes.append(
                    self._state_change(each, state, saved, is_ours=isinstance(given, Read))
                )
        return changes

    def _own_load(
        self, named: _Named, given: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
    ) -> Change:
        """A change by the optimizer's own `load_state_dict`, which numbers parameters as torch
        does."""
        optimizer, names, _ = named
        numbers: dict[str, int] = {}
        packed = []
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            mine = [names[id(parameter)] for parameter in group["params"]]
            packed.append(
                settings_of(saved)
                | {"params": [numbers.setdefault(name, len(numbers)) for name in mine]}
            )

        def load() -> None:
            # the optimizer may keep these very tensors
            copied = mapped(given, lambda tensor: tensor.detach().clone())
            optimizer.load_state_dict(
                {
                    "state": {numbers.get(name, name): entry for name, entry in copied.items()},
                    "param_groups": packed,
                }
            )

        return load_by_itself(self.handle, load)

    def _state_change(
        self,
        named: _Named,
        given: Mapping[str, Any],
        groups: Sequence[Mapping[str, Any]],
        *,
        is_ours: bool,
    ) -> Change:
        optimizer, names, _ = named
        copies: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        entries: dict[Any, dict[Any, Any]] = {}
        for parameter in named.parameters():
            name = names[id(parameter)]
            live: Mapping[Any, Any] = optimizer.state.get(parameter, {})
            keys = {str(key): key for key in live}
            entry = {
                keys.get(str(key), key): value for key, value in (given.get(name) or {}).items()
            }
            for key, value in entry.items():
                if isinstance(value, torch.Tensor) and isinstance(live.get(key), torch.Tensor):
                    what = f"state of {name!r}: {key!r}"
                    self._check(what, live[key], value)
                    copies.append((what, self._shown(live[key]), value))
                    entry[key] = live[key]
            if entry:
                entries[parameter] = entry
        # entries that belong to no parameter
        known = {str(key): key for key in optimizer.state if id(key) not in names}
        others = {
            known.get(key, key): value
            for key, value in given.items()
            if key not in set(names.values())
        }
        self._require_one_value(copies)
        return replace_state(
            self.handle, copies, optimizer, entries | others, groups, is_ours=is_ours
        )

    def _groups(
        self, given: Mapping[str, Any], optimizers: Sequence[_Named]
    ) -> dict[str, Mapping[str, Any]]:
        if not {"state", "param_groups"} <= set(given):
            raise self._error(
                "a state dict of an optimizer",
                f"must have 'state' and 'param_groups', but this one has {some(given)}",
            )
        saved = {name: group for group in given["param_groups"] for name in group["params"]}
        for optimizer, named, _ in optimizers:
            for group in optimizer.param_groups:
                mine = [named[id(parameter)] for parameter in group["params"]]
                missing = [name for name in mine if name not in saved]
                if missing:
                    raise self._error(
                        f"parameter {missing[0]!r}",
                        f"was in no group of the saved optimizer ({len(missing)} are missing)",
                    )
                settings = {id(saved[name]): settings_of(saved[name]) for name in mine}
                if not all(same(*pair) for pair in itertools.pairwise(settings.values())):
                    raise self._error(
                        f"the group of {mine[0]!r}",
                        "was saved as several groups with different settings",
                    )
        extra = set(saved) - {name for each in optimizers for name in each.names.values()}
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
            what = (
                "several modules"
                if len(owners) > 1
                else "no module"
                if not owners
                else ("parameters whose state is not born yet")
            )
            raise CheckpointError(
                f"{self.handle.name!r} steps {what}, but {self.handle.gathers}: leave it out with "
                "only="
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
        return (
            tensor.detach()
            if (holding := self.handle.holding) is None
            else hand_out(holding, tensor)
        )

    def _names(self) -> dict[int, str]:
        """The names of all parameters of the stepped modules, by the parameter's id. With several
        owners a name begins with the owner's."""
        names: dict[int, str] = {}
        owners = self.handle.owners
        for owner in owners:
            if (adapter := owner.modules_adapter) is None or (module := adapter.root()) is None:
                continue
            prefix = f"{owner.name}." if len(owners) > 1 else ""
            for name, parameter in adapter.named_parameters():
                (found,) = _get_fqns(module, name)  # without the prefixes of wrappers
                names.setdefault(id(parameter), prefix + found)
        return names

    def _optimizers(self) -> list[_Named]:
        """The optimizers that have state of their own and step only named parameters. Several may
        step one parameter (a wrapper with slow weights): to all but the first it has a name that
        begins with theirs."""
        names = self._names()
        found: list[_Named] = []
        taken: set[str] = set()
        for leaf in self._adapter().leaves():
            stepped = parameters_of([leaf])
            unnamed = [each for each in stepped if id(each) not in names]
            if not unnamed:
                prefix = f"{leaf.path}{type(leaf.optimizer).__name__}."
                mine = {
                    id(each): f"{prefix * (names[id(each)] in taken)}{names[id(each)]}"
                    for each in stepped
                }
                found.append(_Named(leaf.optimizer, {**names, **mine}, leaf.is_hollow))
                taken.update(names[key] for key in mine)
            elif self.handle.external_reason is None and not leaf.is_hollow:
                raise CheckpointError(
                    f"{self.handle.name!r} steps {len(unnamed)} tensors that are not parameters of "
                    "its modules: save it with its framework's checkpoint or as "
                    "handle.state_dict(), and leave it out here with only="
                )
        if not found:
            raise CheckpointError(
                f"{self.handle.name!r} steps no parameter with a name; save it with its "
                "framework's checkpoint"
            )
        return found


def _loads_itself(optimizer: Any) -> bool:
    """Whether loading an optimizer is more than torch's own loading: it overrides the method, or
    has hooks that are not placement's."""
    if (
        getattr(type(optimizer), "load_state_dict", None)
        is not torch.optim.Optimizer.load_state_dict
    ):
        return True
    kinds = (
        getattr(optimizer, f"_optimizer_load_state_dict_{when}_hooks", {})
        for when in ("pre", "post")
    )
    return any(not isinstance(hook, Guard) for hooks in kinds for hook in hooks.values())
