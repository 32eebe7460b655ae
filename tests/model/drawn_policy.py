"""A policy whose answers Hypothesis draws: any total plan of legal states."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from placement import Plan, State, View

PHASES_USED = ("rollout", "weight_sync", "log_prob", "train", "restore", "checkpoint")
_SLOTS = 5


@dataclass(frozen=True)
class Drawn:
    """Handle `x7` belongs to slot 7 % 5; the table has a state for every phase and slot. Some phases want some slots early."""

    table: dict[str, tuple[tuple[State, bool], ...]]
    early: dict[str, tuple[int, ...]]
    """For every phase and slot the bytes that are wanted early."""
    name: str = "drawn"

    def plan(self, view: View) -> Plan:
        targets: dict[str, State] = {}
        streamed, prefetch = [], {}
        for handle in view.handles.values():
            state, streams = self.table[view.phase][int(handle.name[1:]) % _SLOTS]
            if handle.readonly and state is State.TRAINING:
                state = State.GPU_RESIDENT
            targets[handle.name] = state
            may_be_stepped = handle.kind == "optimizer" and not handle.external and handle.unstreamable is None
            if streams and (state is State.SYNCING or (state is State.TRAINING and may_be_stepped)):
                streamed.append(handle.name)
            if handle.can_prefetch and state is State.CPU_OFFLOADED and view.budget_bytes:
                prefetch[handle.name] = self.early[view.phase][int(handle.name[1:]) % _SLOTS]
        return Plan(targets, frozenset(streamed), prefetch=prefetch)


def drawn_policies() -> st.SearchStrategy[Drawn]:
    """Policies over the phases in use; TRAINING often, because only then may values change."""
    slot = st.tuples(st.sampled_from([*State, State.TRAINING]), st.booleans())
    slots = st.tuples(*[slot] * _SLOTS)
    early = st.tuples(*[st.sampled_from([1 << 30, 8192, 0])] * _SLOTS)
    nothing = st.just((0,) * _SLOTS)  # outside every phase nothing is left, which is checked
    wanted = st.fixed_dictionaries(dict.fromkeys(PHASES_USED, early) | {"idle": nothing})
    return st.builds(Drawn, st.fixed_dictionaries(dict.fromkeys((*PHASES_USED, "idle"), slots)), wanted)
