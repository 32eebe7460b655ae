"""A policy by which all handles take turns on one device, and questions about a view that several
policies ask."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Literal, get_args

from placement import HandleView, Plan, PolicyError, State, View

OptimizerIn = Literal["train", "optimizer_step", "streamed"]
_READING = {
    "log_prob": ("actor", "ref"),
    "ref_log_prob": ("ref",),
    "values": ("critic",),
    "reward": ("reward",),
}


class Colocated:
    """Outside every phase everything is CPU_OFFLOADED. In a phase only the handles that it needs
    are on the device.

    | phase | on the device |
    |---|---|
    | `rollout`, `eval` | the rollout engine, or the actor where none is registered |
    | `weight_sync` | the actor, SYNCING, and the engine; its weights alone, if it has tags |
    | `log_prob` | actor and ref |
    | `ref_log_prob` | the ref alone, for a step that computes the two one after the other |
    | `values`, `reward` | critic; reward |
    | `train`, `optimizer_step`, `restore` | stepped modules and their optimizers, all TRAINING |
    | `checkpoint` | nothing moves; FSDP1, which gathers on the device, is loaded |
    | a phase of `Settings.phases` | its roles' modules and engines, in the state that it names |

    A needed handle is GPU_RESIDENT unless the table says more. In `weight_sync` the engine is
    GPU_RESIDENT although its values change: TRAINING means writes by an optimizer, while an engine
    receives weights in that phase, so the manager allows its writes there. For an external handle
    the states say only whether it is in use.

    Args:
        optimizer_in: "train": the optimizer is on the device for the whole training phase.
            "optimizer_step": only in that phase (and in `restore`), which leaves its bytes to
            activations during forward and backward. "streamed": only in `restore`; each `step()`
            brings its state to the device and back in buckets of 512 MiB. An external optimizer
            stays where its framework has it; one whose step cannot be made in parts is refused.
        stream_sync: whether to publish the actor's weights straight from the host copy through a
            small device window, instead of loading the actor beside the engine. placement has no
            host copy of an external actor, so that is published where it lies.
        drop_gradients: whether gradients are set to None, not copied to the host, when their module
            leaves TRAINING (they are dead after `step()`). A phase inside the training phase (a
            checkpoint, an evaluation between two backward passes) drops none. By default gradients
            move like everything else.

    Example:
        ::

            manager = placement.Manager(policy="colocated")
            manager = placement.Manager(policy="colocated(stream_sync=True)")
    """

    name = "colocated"

    def __init__(
        self,
        optimizer_in: OptimizerIn = "train",
        *,
        stream_sync: bool = False,
        drop_gradients: bool = False,
    ) -> None:
        if optimizer_in not in get_args(OptimizerIn):
            raise ValueError(
                f"optimizer_in must be one of {', '.join(get_args(OptimizerIn))}, not "
                f"{optimizer_in!r}"
            )
        for name, value in (("stream_sync", stream_sync), ("drop_gradients", drop_gradients)):
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, not {value!r}")  # noqa: TRY004
        self.optimizer_in = optimizer_in
        self.stream_sync = stream_sync
        self.drop_gradients = drop_gradients

    def plan(self, view: View) -> Plan:
        """The handles that the phase needs, and nothing else."""
        if view.phase == "checkpoint":
            return _readable(view)
        needs = self.needs(view)
        dropped = []
        if self.drop_gradients and view.enclosing is None:
            for handle in _stepped(view):
                if handle.kind != "optimizer" and needs.get(handle.name) is not State.TRAINING:
                    dropped.append(handle.name)
        parts = {}
        if view.phase == "weight_sync":
            for handle in rollout_models(view):
                if "weights" in handle.tags:
                    parts[handle.name] = frozenset({"weights"})
        return view.total_plan(needs, self._streamed(view, needs), dropped, parts)

    def _streamed(self, view: View, needs: dict[str, State]) -> list[str]:
        """The handles that are published or stepped from their host copy."""
        streamed = []
        # a state dict is loaded into tensors on the device
        streams_steps = self.optimizer_in == "streamed" and view.phase != "restore"
        for name, state in needs.items():
            handle = view.handles[name]
            if handle.external:
                continue
            is_published = state is State.SYNCING and self.stream_sync
            is_stepped = state is State.TRAINING and handle.kind == "optimizer"
            if is_published or (is_stepped and streams_steps):
                streamed.append(name)
        return streamed

    def needs(self, view: View) -> dict[str, State]:
        """The state of every handle that the phase uses. `checkpoint` uses none on the device."""
        match view.phase:
            case "idle" | "checkpoint":
                return {}
            case "rollout" | "eval":
                return _targets(rollout_models(view) or _models(view, "actor"), State.GPU_RESIDENT)
            case "weight_sync":
                resident = _targets(rollout_models(view), State.GPU_RESIDENT)
                return resident | _targets(_models(view, "actor"), State.SYNCING)
            case phase if phase in _READING:
                return _targets(_models(view, *_READING[phase]), State.GPU_RESIDENT)
            case "train" if self.optimizer_in == "optimizer_step":
                return _targets(_stepped(view), State.TRAINING)
            case "train" | "optimizer_step" | "restore":
                return _targets([*_stepped(view), *optimizers(view)], State.TRAINING)
            case phase if phase in view.phases:
                wanted = {}
                for role, state in view.wanted_states(phase).items():
                    wanted.update({handle.name: state for handle in _models(view, role)})
                return wanted
        nearest = difflib.get_close_matches(view.phase, view.known_phases, n=1)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise PolicyError(
            f"unknown phase {view.phase!r}.{hint} Known phases: {', '.join(view.known_phases)}. "
            "Declare a phase of your own in Settings.phases, with the roles that it needs."
        )


def _models(view: View, *roles: str) -> list[HandleView]:
    """Modules and engines with these roles, in registration order. Optimizers have their owner's
    role, and are left out."""
    return [handle for handle in view.with_role(*roles) if handle.kind != "optimizer"]


def rollout_models(view: View) -> list[HandleView]:
    """The models that generate: every model with the role `rollout`, and every engine without a
    role."""
    models = []
    for handle in view.handles.values():
        is_engine = handle.kind == "engine" and handle.role is None
        if is_engine or (handle.kind != "optimizer" and handle.role == "rollout"):
            models.append(handle)
    return models


def optimizers(view: View) -> list[HandleView]:
    return [handle for handle in view.handles.values() if handle.kind == "optimizer"]


def _stepped(view: View) -> list[HandleView]:
    """The modules whose parameters an optimizer steps. Owners that are not in the view are left
    out."""
    owners: dict[str, None] = {}
    for optimizer in optimizers(view):
        owners.update(dict.fromkeys(optimizer.owners))
    return [view.handles[name] for name in owners if name in view.handles]


def _targets(handles: Iterable[HandleView], state: State) -> dict[str, State]:
    """The same target for several handles. A readonly handle cannot be TRAINING, so it gets
    GPU_RESIDENT instead."""
    readonly_state = State.GPU_RESIDENT if state is State.TRAINING else state
    return {handle.name: readonly_state if handle.readonly else state for handle in handles}


def _present(view: View) -> Plan:
    """The plan that changes nothing."""
    handles = view.handles.values()
    # A plan without `streamed` would load handles that are used from their host copy.
    streamed = [handle.name for handle in handles if handle.streaming]
    states = {handle.name: handle.state for handle in handles}
    return view.total_plan(states, streamed, parts=parts_of(handles))


def parts_of(handles: Iterable[HandleView]) -> dict[str, frozenset[str]]:
    """The tags of engines that are on the device in part."""
    parts = {}
    for handle in handles:
        if handle.resident_tags and handle.resident_tags != handle.tags.keys():
            parts[handle.name] = handle.resident_tags
    return parts


def _readable(view: View) -> Plan:
    """The plan for reading every value. It moves only handles whose values can be read on the
    device alone."""
    plan = _present(view)
    for handle in view.handles.values():
        if handle.gathers and handle.built:
            plan = plan.also(handle, State.GPU_RESIDENT)
    return plan
