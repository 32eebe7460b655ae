"""The weak set that may change while it is walked."""

from __future__ import annotations

from placement.weak import WeakIdSet


class Thing:
    """Equal to every other."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def test_a_walk_sees_who_was_there_when_it_began() -> None:
    things, added = [Thing(), Thing()], []
    found: WeakIdSet[Thing] = WeakIdSet()
    for thing in things:
        found.add(thing)
    for thing in found:
        found.discard(thing)
        added.append(Thing())
        found.add(added[-1])
    assert {id(thing) for thing in found} == {id(thing) for thing in added}


def test_it_holds_nothing_and_knows_its_things_by_identity() -> None:
    found: WeakIdSet[Thing] = WeakIdSet()
    thing = Thing()
    found.add(thing)
    found.add(thing)
    assert list(found) == [thing]
    assert thing in found
    assert Thing() not in found
    del thing
    assert not list(found)
    assert not found._references
