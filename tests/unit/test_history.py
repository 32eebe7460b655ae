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


def test_nothing_is_expected_before_a_phase_comes_again() -> None:
    assert after().upcoming("idle") == ()
    assert after(*"RLT").upcoming("idle") == ()
    assert after(*"RLT").upcoming("S") == ()


def test_what_followed_the_last_time_is_expected_again() -> None:
    assert after(*"RLTS").upcoming("R") == ("L", "T", "S")
    assert after(*"RLTSRL").upcoming("T") == ("S", "R", "L")


def test_outside_every_phase_the_cycle_goes_on_after_the_last_phase() -> None:
    assert after(*"RLTSRLTS").upcoming("idle") == tuple("RLTS")
    assert after(*"RLTSRL").upcoming("idle") == tuple("TSRL")


def test_a_phase_that_begins_for_the_first_time_was_put_in() -> None:
    assert after(*"RLTSRLTS").upcoming("E") == tuple("RLTS")


def test_a_phase_with_two_places_in_the_cycle_is_told_by_what_was_before() -> None:
    assert after(*"RTOTOSRT").upcoming("O")[:2] == ("T", "O")
    assert after(*"RTOTOSRTOT").upcoming("O")[:2] == ("S", "R")


def test_a_phase_that_fell_out_is_missed_once() -> None:
    history = after(*"RLTS" * 5, *"RT")
    assert history.upcoming("S")[0] == "R"
    history = after(*"RLTS" * 5, *"RTS")
    assert history.upcoming("R") == ("T", "S")


def test_a_phase_in_every_third_cycle_is_expected_there() -> None:
    whole = [*"RLTSRLTSRLTSE"]
    history = after(*whole * 2)
    for index, phase in enumerate(whole * 2):
        assert history.upcoming(phase) == tuple((whole * 3)[index % 13 + 1 : index % 13 + 13])
        history.began(phase)


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
