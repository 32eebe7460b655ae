"""Who leaves host memory and who comes back: pure decisions."""

from __future__ import annotations

from itertools import takewhile
from operator import eq

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from placement.core.errors import HostMemoryError
from placement.planning.host_tier import HostShare, UseHistory, check_fits_host
from placement.planning.planner import PhaseHistory
from placement.storage.disk import HostCopy, next_step

COPIES = st.lists(
    st.builds(HostCopy, st.integers(0, 100), st.booleans(), st.booleans(), st.just(value=False)),
    max_size=12,
)
SOME_IDLE = st.lists(
    st.builds(HostCopy, st.integers(0, 100), st.booleans(), st.booleans(), st.booleans()),
    max_size=12,
)


def done(copies: list[HostCopy], fixed_bytes: int, limit_bytes: int) -> list[HostCopy]:
    """Carry out every step."""
    for _ in range(4 * len(copies) + 1):
        position = next_step(copies, fixed_bytes, limit_bytes)
        if position is None:
            return copies
        copy = copies[position]
        assert copy.can_leave or not copy.is_here
        copies = [
            *copies[:position],
            copy._replace(is_here=not copy.is_here),
            *copies[position + 1 :],
        ]
    raise AssertionError(f"it never ends: {copies}")


def held(copies: list[HostCopy]) -> int:
    return sum(copy.nbytes for copy in copies if copy.is_here)


@given(COPIES, st.integers(0, 100), st.integers(1, 500))
def test_it_ends_full_within_the_limit_unless_what_cannot_leave_exceeds_it(
    copies: list[HostCopy], fixed: int, limit: int
) -> None:
    stuck = fixed + sum(copy.nbytes for copy in copies if copy.is_here and not copy.can_leave)
    after = done(copies, fixed, limit)
    assert fixed + held(after) <= max(limit, stuck)
    if fixed + held(after) <= limit:
        assert all(
            fixed + held(after) + copy.nbytes > limit
            for copy in after
            if not copy.is_here and copy.nbytes
        )


@given(COPIES, st.integers(0, 100), st.integers(1, 500))
def test_what_is_away_could_not_take_the_place_of_what_is_needed_later(
    copies: list[HostCopy], fixed: int, limit: int
) -> None:
    after = done(copies, fixed, limit)
    for position, copy in enumerate(after):
        later = sum(
            each.nbytes for each in after[position + 1 :] if each.is_here and each.can_leave
        )
        assert (
            copy.is_here
            or fixed + held(after) <= limit < fixed + held(after) + copy.nbytes - later
            or fixed + held(after) > limit
        )


@given(COPIES, st.integers(0, 100), st.integers(1, 500))
def test_nothing_leaves_for_what_is_needed_later(
    copies: list[HostCopy], fixed: int, limit: int
) -> None:
    position = next_step(copies, fixed, limit)
    if position is not None and copies[position].is_here and fixed + held(copies) <= limit:
        assert any(not copy.is_here for copy in copies[:position])


@given(SOME_IDLE, st.integers(0, 100), st.integers(1, 500))
def test_what_is_idle_leaves_and_does_not_come_back(
    copies: list[HostCopy], fixed: int, limit: int
) -> None:
    for before, copy in zip(copies, done(copies, fixed, limit), strict=True):
        if copy.is_idle and copy.nbytes:
            assert copy.is_here is (before.is_here and not copy.can_leave)


def test_a_host_copy_is_idle_once_a_whole_cycle_has_left_it_alone() -> None:
    history = UseHistory()
    assert not history.is_idle("critic")
    idle = []
    for step in range(4):
        for phase in ("log_prob", "train"):
            history.note(
                phase,
                frozenset({"actor"} if phase == "train" else ())
                | frozenset({"critic"} if step == 0 else ()),
            )
            idle.append((history.is_idle("critic"), history.is_idle("actor")))
    assert idle[:2] == [(False, False)] * 2
    assert idle[-3:] == [(True, False)] * 3


# --- who is needed when


def test_the_cycle_tells_who_is_needed_next() -> None:
    history = UseHistory()
    for _ in range(2):
        for phase, used in (
            ("rollout", "actor engine"),
            ("log_prob", "actor ref"),
            ("train", "actor adam ref"),
            ("idle", "actor adam"),
        ):
            history.note(phase, frozenset(used.split()))
    history.note("rollout", frozenset({"actor", "engine"}))
    assert history.order(["engine", "adam", "ref", "actor"]) == ["actor", "ref", "adam", "engine"]


def test_without_a_cycle_the_least_recently_used_goes_first() -> None:
    history = UseHistory()
    for number, name in enumerate("abca"):
        history.note(f"phase {number}", frozenset({name}))
    assert history.order(["never", "a", "b", "c"]) == ["a", "c", "b", "never"]


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


# --- what can never fit


def test_what_cannot_leave_counts() -> None:
    shares = {"shared": HostShare(50, 50, 50)}
    check_fits_host("a", 50, [], shares, 100)
    with pytest.raises(HostMemoryError, match="beside what cannot leave it"):
        check_fits_host("a", 51, [], shares, 100)
