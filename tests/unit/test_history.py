"""Which phases are expected next, from those that have begun."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from placement.planning.host_tier import PhaseHistory


def after(*phases: str) -> PhaseHistory:
    history = PhaseHistory()
    for phase in phases:
        history.began(phase)
    return history


def test_what_followed_the_last_time_is_expected_again() -> None:
    assert after(*"RLT").upcoming("idle") == ()
    assert after(*"RLTSRL").upcoming("T") == ("S", "R", "L")
    assert after(*"RLTSRL").upcoming("idle") == tuple("TSRL")  # the cycle goes on after the last phase
    assert after(*"RLTSRLTS").upcoming("E") == tuple("RLTS")  # one that begins for the first time was put in


@given(st.lists(st.sampled_from("ABC"), max_size=60), st.sampled_from("ABCD"))
def test_it_is_what_a_search_of_the_whole_history_finds(phases: list[str], phase: str) -> None:
    seen = [*phases, phase] if phase in phases else phases
    best = (0, 0)
    for index in range(len(seen) - 1):
        length = 0
        while length <= index and seen[index - length] == seen[-1 - length]:
            length += 1
        best = max(best, (length, index))
    assert after(*phases).upcoming(phase) == (tuple(phases[best[1] + 1 :]) if best[0] else ())
