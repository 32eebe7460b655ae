"""The table of all ranges, while what is collected takes its own out."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field
from typing import Any

from placement.storage.layout import _Table


@dataclass(eq=False)
class Owner:
    name: str = "actor"
    me: list[Any] = field(default_factory=list)


def test_a_collection_in_the_middle_of_a_look_takes_ranges_out() -> None:
    table, owner = _Table(), Owner()
    for base in range(0, 20_000, 10):
        table.add(owner, base, 10)
    thresholds = gc.get_threshold()
    try:
        gc.set_threshold(100)  # that is, every 100 containers: in the middle of 2,000
        for base in range(0, 20_000, 100):
            dropped = Owner()
            dropped.me.append(dropped)
            weakref.finalize(dropped, table.remove, base)
            del dropped
            assert table.owner_of(19_995) is owner
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert table.owner_of(0) is None
    assert table.owner_of(10) is owner
