"""How a slab is cut into parts."""

from __future__ import annotations

import pytest

from placement.devices.host.slab import Slab, cut


def test_parts_of_a_slab_are_apart_and_keep_it_alive() -> None:
    whole = Slab(1000)
    address = whole.address
    part, rest = cut(whole, 100)
    assert rest is not None
    assert (part.address, part.nbytes) == (address, 100)
    assert (rest.address, rest.nbytes) == (address + 128, 872)
    last, none = cut(rest, 872)
    assert none is None
    del whole, rest
    part.view(0, 100).fill_(1)
    last.view(0, 872).fill_(2)
    assert part.view(90, 10).tolist() == [1] * 10
    assert last.view(870, 2).tolist() == [2, 2]
    assert part.view(8, 8).untyped_storage().nbytes() == 8
    assert part.ready.is_set()
    assert (part.pinned_bytes, part.pageable_bytes, part.pageable_reason, part.held_bytes) == (0, 0, None, 100)
    with pytest.raises(ValueError, match="not within"):
        part.view(96, 8)
    with pytest.raises(ValueError, match="not within"):
        cut(last, 1000)


class _Pinned(Slab):
    """A slab of which the device has pinned some bytes and refused others."""

    pinned_bytes = 600
    pageable_bytes = 400
    pageable_reason = "refused"


def test_a_part_of_a_slab_that_is_pinned_in_part_has_its_share() -> None:
    part, _ = cut(_Pinned(1000), 100)
    assert (part.pinned_bytes, part.pageable_bytes, part.pageable_reason) == (60, 40, "refused")
    assert not part.pinned
