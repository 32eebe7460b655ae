"""Which phases are expected next."""

from __future__ import annotations

from itertools import takewhile
from operator import eq

from hypothesis import example, given
from hypothesis import strategies as st

from placement.planning.planner import PhaseHistory


@given(
    st.text("ABC", max_size=60),
    st.integers(1, 30),
    st.text("ABC"),
    st.integers(0, 30),
    st.sampled_from("ABCD"),
)
@example("AB", 20, "C", 19, "A")  # half of the history tells the places of a long cycle apart
def test_what_followed_the_last_time_is_expected_again(
    inner: str, turns: int, outer: str, more: int, phase: str
) -> None:
    phases = [*(inner * turns + outer) * 2, *inner * more][-128:]
    seen = [*phases, phase] if phase in phases[-64:] else phases
    best = max(
        [
            (len([*takewhile(bool, map(eq, seen[i::-1], seen[::-1]))]), i)
            for i in range(len(seen) - 1)[-64:]
        ],
        default=(0, 0),
    )
    history = PhaseHistory()
    for each in phases:
        history.began(each)
    assert history.upcoming(phase) == (tuple(phases[best[1] + 1 :]) if best[0] else ())
