"""What every `Device` does, simulated or real. Sizes are multiples of the device's own."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from placement.core.errors import DeviceMemoryError
from placement.devices.base import POISON_WORD, Device, poison_bytes
from placement.devices.memory import Copy
from placement.devices.simulated.device import PrivatePoison
from tests.contract.ranges import (
    full_and_tail,
    is_poison,
    loaded,
    poisoned,
    random_bytes,
    read,
    whole,
)
from tests.support.poison import poison, reads_poison
from tests.support.threads import in_threads


def test_addresses_are_aligned_and_rounded_up(device: Device) -> None:
    addresses = device.reserve(device.granularity + 1)
    assert addresses.nbytes == 2 * device.granularity
    assert addresses.base % device.granularity == 0
    assert device.chunk_bytes % device.granularity == 0


@pytest.mark.parametrize("offset", [0, 64, 4096 + 8])
def test_every_element_of_poison_reads_as_nan_in_floats_and_negative_in_integers(
    device: Device, offset: int
) -> None:
    addresses = poisoned(device, device.chunk_bytes + device.granularity)
    view = device.view(addresses, offset, addresses.nbytes - offset)
    assert view.device.type == device.torch_device.type
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        assert view.view(dtype).isnan().all(), dtype
    for dtype in (torch.complex128, torch.complex64):
        assert torch.view_as_real(view[: view.numel() // 16 * 16].view(dtype)).isnan().all(), dtype
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        assert (view.view(dtype).float().isnan().view(-1, 8).sum(1) == 7).all(), dtype
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8):
        assert (view.view(dtype) < 0).all(), dtype
    assert reads_poison(view, offset)


def test_the_nan_of_poison_is_a_signalling_one_in_float64_alone(device: Device) -> None:
    """The bit that makes a NaN a quiet one is the first of the fraction."""
    view = whole(device, poisoned(device, device.granularity))
    for signed, bit, is_quiet in (
        (torch.int64, 51, False),
        (torch.int32, 22, True),
        (torch.int16, 6, True),
        (torch.int16, 9, True),
    ):
        assert ((view.view(signed) >> bit & 1) == is_quiet).all(), (signed, bit)


@given(offset=st.integers(0, 1 << 40), nbytes=st.integers(0, 100))
def test_the_poison_of_an_offset_is_the_word_over_and_over(offset: int, nbytes: int) -> None:
    expected = [POISON_WORD[(offset + i) % 8] for i in range(nbytes)]
    assert list(poison_bytes(offset, nbytes)) == expected


def test_unmap_is_idempotent_and_covers_the_rounded_start(device: Device) -> None:
    nbytes, chunks = full_and_tail(device)
    addresses = poisoned(device, nbytes)
    device.unmap(addresses, nbytes)
    device.map(addresses, chunks)
    whole(device, addresses).zero_()
    device.sync()
    for _ in range(2):
        device.unmap(addresses, nbytes - 1)
        assert reads_poison(whole(device, addresses))
    assert not device.heal_poison()


def test_memory_is_wiped_where_it_is_and_nothing_beside_it(device: Device) -> None:
    nbytes, chunks = full_and_tail(device)
    addresses = poisoned(device, nbytes)
    device.map(addresses, chunks)
    whole(device, addresses).fill_(7)
    device.sync()
    device.wipe_mapped(addresses, device.chunk_bytes, device.chunk_bytes)
    first, second, tail = whole(device, addresses).split(device.chunk_bytes)
    assert (first == 7).all()
    assert (second == 0xFF).all()
    assert (tail == 7).all()


def test_more_than_there_is_is_refused_and_takes_nothing(device: Device) -> None:
    before = device.memory()
    # who holds memory outside can always be asked
    assert (list(device.communicators()), device.ipc_collected_bytes) == ([], 0)
    too_much = before.total_bytes // device.granularity * device.granularity + device.granularity
    with pytest.raises(DeviceMemoryError):
        device.create(too_much)
    assert device.memory().chunk_bytes == before.chunk_bytes


def test_the_ledger_follows_chunks_and_none_is_released_twice(device: Device) -> None:
    before, small = device.memory(), device.granularity
    _, chunks = full_and_tail(device)
    held = device.memory()
    assert held.chunk_bytes - before.chunk_bytes == 2 * device.chunk_bytes + small
    assert held.used_bytes + held.free_bytes == held.total_bytes
    assert held.poison_bytes > 0
    assert held.free_bytes < before.free_bytes

    def more_bytes() -> int:
        return device.memory().chunk_bytes - before.chunk_bytes

    device.release()
    device.release(chunks[2], chunks[2])
    assert more_bytes() == 2 * device.chunk_bytes
    device.release(*chunks)
    assert more_bytes() == 0
    # the driver may call them by the same numbers
    others = [device.create(small) for _ in range(4)]
    device.release(*chunks)
    assert more_bytes() == 4 * small
    chunks.clear()
    assert more_bytes() == 4 * small
    others.pop()
    assert more_bytes() == 3 * small
    device.release(others[1], others[0])
    assert more_bytes() == small
    addresses = poisoned(device, small)
    device.map(addresses, others[2:])
    whole(device, addresses).fill_(3)
    assert (whole(device, addresses) == 3).all(), "what was not released is there"


def test_a_view_has_a_storage_of_its_own_size_and_keeps_what_is_behind_it(device: Device) -> None:
    offloaded = device.view(poisoned(device, device.chunk_bytes), 3, 100)
    addresses = poisoned(device, device.chunk_bytes)
    device.map(addresses, [device.create(device.chunk_bytes)])
    loaded = device.view(addresses, 256, 1000)
    assert (loaded.dtype, loaded.untyped_storage().nbytes(), loaded.data_ptr()) == (
        torch.uint8,
        1000,
        addresses.base + 256,
    )
    loaded.fill_(7)
    del addresses
    others = [poisoned(device, device.chunk_bytes) for _ in range(20)]
    for other in others:
        device.map(other, [])
    assert reads_poison(offloaded, 3)
    assert (loaded == 7).all()


def test_a_write_into_poison_is_found_once_and_healed_everywhere(device: Device) -> None:
    # a damage is found by its bytes
    shares_poison = not isinstance(getattr(device, "_poison", None), PrivatePoison)
    first, second = poisoned(device, device.chunk_bytes), poisoned(device, device.chunk_bytes)
    assert not device.heal_poison()
    assert not device.written_poison()
    device.view(first, 64, 1).zero_()
    assert device.view(second, 64, 1).item() == (0 if shares_poison else POISON_WORD[0])
    assert device.heal_poison()
    assert [place.addresses for place in device.written_poison()] == (
        [] if shares_poison else [first]
    )
    assert not device.heal_poison()
    assert not device.written_poison()
    assert reads_poison(whole(device, first))
    assert reads_poison(whole(device, second))


@pytest.mark.parametrize("gets", ["a chunk", "poison"])
def test_a_write_is_found_after_something_else_came_behind_the_addresses(
    device: Device, gets: str
) -> None:
    addresses, chunk = poisoned(device, 2 * device.chunk_bytes), device.create(device.chunk_bytes)
    device.view(addresses, device.chunk_bytes + 8, 1).zero_()
    device.sync()
    if gets == "a chunk":
        device.map(addresses, [chunk], device.chunk_bytes)
        # of the chunk, and no damage
        device.view(addresses, device.chunk_bytes, device.chunk_bytes).zero_()
        device.sync()
    else:
        device.unmap(addresses, device.chunk_bytes, device.chunk_bytes)
    assert device.heal_poison()
    assert not device.heal_poison()
    device.unmap(addresses, addresses.nbytes)
    assert is_poison(device, addresses, 0, addresses.nbytes)
    assert not device.heal_poison()


@pytest.mark.parametrize("is_tail", [False, True])
def test_a_damage_is_reported_once_without_waiting(device: Device, is_tail: bool) -> None:
    addresses = poisoned(device, device.granularity if is_tail else device.chunk_bytes)
    for offset in (0, addresses.nbytes - 1):
        device.view(addresses, offset, 1).zero_()
        found = []
        for _ in range(4):
            found.append(device.heal_poison(wait=False))
            device.sync()
        assert sum(found) == 1
        assert is_poison(device, addresses, 0, addresses.nbytes)
        assert not device.heal_poison()


def test_waiting_reports_what_was_begun_without(device: Device) -> None:
    addresses = poisoned(device, device.chunk_bytes)
    for is_done in (False, True):
        device.view(addresses, 8, 1).zero_()
        found = [device.heal_poison(wait=False)]
        if is_done:
            device.sync()
        found += [device.heal_poison(), device.heal_poison(), device.heal_poison(wait=False)]
        assert sum(found) == 1
        assert sum(found[:2]) == 1
    assert not device.heal_poison()


def test_copies_are_bit_exact_at_any_offset_and_touch_nothing_beside(device: Device) -> None:
    nbytes, chunks = full_and_tail(device)
    addresses = poisoned(device, nbytes)
    device.map(addresses, chunks)
    there, back = device.host(nbytes), device.host(nbytes)
    content = random_bytes(nbytes)
    there.view(0, nbytes).copy_(content)
    whole(device, addresses).zero_()
    device.sync()
    rng = random.Random(1)
    expected = torch.zeros(nbytes, dtype=torch.uint8)
    runs = []
    for _ in range(20):
        size = rng.choice([0, 1, 7, 255, 4097, device.chunk_bytes + 13])
        start = rng.randrange(nbytes - size)
        runs.append(Copy(addresses.base + start, there.address + start, size))
        expected[start : start + size] = content[start : start + size]
    device.copy(runs, "to_device")
    device.order()
    assert torch.equal(whole(device, addresses).cpu(), expected)
    device.copy([Copy(addresses.base + 5, back.address + 3, nbytes - 11)], "to_host")
    device.sync()
    assert torch.equal(back.view(3, nbytes - 11), expected[5 : nbytes - 6])
    assert (back.view(0, 3) == 0).all()
    assert (back.view(nbytes - 8, 8) == 0).all()


def test_a_copy_to_the_host_follows_the_work_of_the_current_stream(device: Device) -> None:
    addresses = poisoned(device, device.chunk_bytes)
    device.map(addresses, [device.create(device.chunk_bytes)])
    slab = device.host(device.chunk_bytes)
    view = whole(device, addresses)
    for value in range(20):
        view.fill_(value)
        device.copy([Copy(addresses.base, slab.address, device.chunk_bytes)], "to_host")
        device.sync()
        assert (slab.view(0, slab.nbytes) == value).all()


def test_a_mark_waits_for_the_copies_before_it(device: Device) -> None:
    addresses, _, content = loaded(device)
    nbytes, size = addresses.nbytes, device.chunk_bytes
    there, back = device.host(nbytes), device.host(nbytes)
    device.wait(device.mark("to_host"))
    device.copy([Copy(addresses.base, there.address, size)], "to_host")
    first = device.mark("to_host")
    device.copy([Copy(addresses.base + size, there.address + size, nbytes - size)], "to_host")
    second = device.mark("to_host")
    device.wait(first)
    assert torch.equal(there.view(0, size), content[:size])
    device.wait(second)
    device.wait(first)
    assert torch.equal(there.view(0, nbytes), content)
    there.view(0, nbytes).fill_(7)
    device.copy([Copy(addresses.base, there.address, nbytes)], "to_device")
    device.wait(device.mark("to_device"))
    device.copy([Copy(addresses.base, back.address, nbytes)], "to_host")
    device.wait(device.mark("to_host"))
    assert (back.view(0, nbytes) == 7).all()


def test_an_answer_comes_beside_copies_to_the_host(device: Device) -> None:
    addresses, _, content = loaded(device)
    slab = device.host(4 * addresses.nbytes)
    words = whole(device, addresses).view(torch.int64)
    for turn in range(5):
        for place in range(4):
            device.copy(
                [Copy(addresses.base, slab.address + place * addresses.nbytes, addresses.nbytes)],
                "to_host",
            )
        before = words[:500] + turn
        read = device.ask(before)
        values = content.view(torch.int64)[:500] + turn
        assert read().equal(values)
        assert device.ask(words[700:701])().equal(content.view(torch.int64)[700:701])
        device.wait(device.mark("to_host"))
        assert all(
            slab.view(place * addresses.nbytes, addresses.nbytes).equal(content)
            for place in range(4)
        )


def test_slabs_are_zero_and_live_as_long_as_their_views(device: Device) -> None:
    slab = device.host(100_001)
    assert slab.nbytes == 100_001
    view = slab.view(1, 100_000)
    assert view.untyped_storage().nbytes() == 100_000
    assert (view == 0).all()
    view.fill_(5)
    del slab
    others = [device.host(100_001) for _ in range(20)]
    assert all((other.view(0, 100_001) == 0).all() for other in others)
    assert (view == 5).all()
    empty = device.host(0)
    assert (empty.nbytes, empty.view(0, 0).numel()) == (0, 0)


def test_cycles_leave_nothing_behind(device: Device, mappings: Callable[[], int]) -> None:
    def cycle() -> None:
        addresses = poisoned(device, nbytes)
        slab = device.host(nbytes)
        new = [device.create(chunk.nbytes) for chunk in chunks]
        device.map(addresses, new)
        device.copy([Copy(addresses.base, slab.address, nbytes)], "to_device")
        device.sync()
        device.unmap(addresses, nbytes)
        device.map(kept, chunks)
        device.unmap(kept, nbytes)
        for chunk in new:
            device.release(chunk)

    nbytes, chunks = full_and_tail(device)
    kept = poisoned(device, nbytes)
    cycle()
    before, ledger = mappings(), device.memory()
    for _ in range(300 if device.torch_device.type == "cpu" else 50):
        cycle()
    assert mappings() <= before + 5  # the interpreter's own memory may have grown
    assert device.memory().chunk_bytes == ledger.chunk_bytes


def test_close_is_idempotent_and_waits_for_the_last_addresses(device: Device) -> None:
    addresses = poisoned(device, device.chunk_bytes)
    view = whole(device, addresses)
    device.close()
    assert reads_poison(view)
    del view, addresses
    device.close()
    device.close()


# --- parts of a range get memory and give it up


def test_a_short_chunk_has_poison_after_it(device: Device) -> None:
    size, short = device.chunk_bytes, device.granularity
    addresses = poisoned(device, 2 * size + short)
    view = whole(device, addresses)
    for start in (0, size, 2 * size):
        device.map(addresses, [device.create(short)], start)
        device.view(addresses, start, short).zero_()
        device.sync()
    expected = poison(0, addresses.nbytes)
    for start in (0, size, 2 * size):
        expected[start : start + short] = 0
    assert torch.equal(view.cpu(), expected)
    device.unmap(addresses, short, size)
    expected[size : size + short] = poison(size, short)
    assert torch.equal(view.cpu(), expected)
    full = device.create(size)
    device.map(addresses, [full], size)
    device.view(addresses, size, size).fill_(1)
    device.sync()
    expected[size : 2 * size] = 1
    assert torch.equal(view.cpu(), expected)
    device.unmap(addresses, addresses.nbytes)
    assert reads_poison(view)
    assert not device.heal_poison()


def test_misplaced_parts_are_refused_and_change_nothing(device: Device) -> None:
    addresses, _, content = loaded(device)
    size, step = device.chunk_bytes, device.granularity
    elsewhere = poisoned(device, addresses.nbytes)
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: device.unmap(addresses, size, step), "not a multiple"),
        (lambda: device.unmap(addresses, size, -size), "not a multiple"),
        (lambda: device.unmap(addresses, size, 2 * size), "not within"),
        (lambda: device.unmap(addresses, step), "in two"),
        (lambda: device.unmap(addresses, size + step), "in two"),
        (lambda: device.map(addresses, [device.create(step)], size), "in two"),
        (
            lambda: device.map(addresses, [device.create(size)]),
            ("other memory is behind .* already: unmap it first"),
        ),
        (lambda: device.map(elsewhere, [device.create(size)], step), "not a multiple"),
        (lambda: device.map(elsewhere, [device.create(size)], 2 * size), "not within"),
        (
            lambda: device.map(elsewhere, [device.create(step), device.create(size)]),
            "each but the last",
        ),
        (lambda: device.map(elsewhere, [device.create(size + step)]), "and the last at most that"),
    ]
    for call, why in refused:
        with pytest.raises(ValueError, match=why):
            call()
    assert torch.equal(whole(device, addresses).cpu(), content)
    assert is_poison(device, elsewhere, 0, elsewhere.nbytes)


def test_random_parts_match_a_model(device: Device) -> None:
    rng = random.Random(2)
    size, step = device.chunk_bytes, device.granularity
    ranges = [poisoned(device, 3 * size + step), poisoned(device, 3 * size + step)]
    chunks = [*(device.create(size) for _ in range(4)), device.create(step)]
    contents = [random_bytes(chunk.nbytes) for chunk in chunks]
    for chunk, content in zip(chunks, contents, strict=True):
        device.map(ranges[0], [chunk], 0)
        device.view(ranges[0], 0, chunk.nbytes).copy_(content)
        device.sync()
        device.unmap(ranges[0], chunk.nbytes)
    free, places = set(range(len(chunks))), [dict[int, int](), dict[int, int]()]
    for _ in range(60):
        which, slot, count = rng.randrange(2), rng.randrange(4), rng.randrange(1, 4)
        if rng.random() < 0.5:
            last = min(slot + count, 4)
            nbytes = min(last * size, ranges[which].nbytes) - slot * size
            device.unmap(ranges[which], nbytes, slot * size)
            free |= {
                places[which].pop(index) for index in range(slot, last) if index in places[which]
            }
        else:
            room = [
                index for index in range(slot, min(slot + count, 3)) if index not in places[which]
            ]
            taken = (
                sorted(free - {4})[: len(room)] if room == [*range(slot, slot + len(room))] else []
            )
            if slot == 3 and 4 in free and slot not in places[which]:
                taken = [4]
            device.map(ranges[which], [chunks[index] for index in taken], slot * size)
            places[which].update({slot + i: index for i, index in enumerate(taken)})
            free -= set(taken)
        for addresses, held in zip(ranges, places, strict=True):
            expected = poison(0, addresses.nbytes)
            for index, chunk_index in held.items():
                content = contents[chunk_index]
                expected[index * size : index * size + len(content)] = content
            assert torch.equal(whole(device, addresses).cpu(), expected)
    assert not device.heal_poison()


# --- the order of copies and kernels in which a streamed step relies


def test_what_is_enqueued_after_a_mark_sees_work_from_before_the_order(device: Device) -> None:
    addresses = poisoned(device, device.chunk_bytes)
    device.map(addresses, [device.create(device.chunk_bytes)])
    slab = device.host(device.chunk_bytes)
    whole(device, addresses).fill_(5)
    device.order()
    with device.after(device.mark("to_device")):
        whole(device, addresses).mul_(2)
        device.copy([Copy(addresses.base, slab.address, device.chunk_bytes)], "to_host")
        mark = device.mark("to_host")
    device.wait(mark)
    assert (slab.view(0, slab.nbytes) == 10).all()
    device.order()


def test_two_threads_hand_chunks_from_range_to_range(device: Device) -> None:
    """Each between two ranges of its own, with the bytes in the chunk, as the thread of a prefetch
    does beside a streamed step."""
    nbytes, turns = device.chunk_bytes, 20
    contents = [random_bytes(nbytes) for _ in range(2)]
    chunks = [device.create(nbytes) for _ in range(2)]
    ranges = [[poisoned(device, 2 * nbytes) for _ in range(2)] for _ in range(2)]
    slabs = [device.host(nbytes) for _ in range(2)]

    def hand_on(mine: int) -> None:
        slabs[mine].view(0, nbytes).copy_(contents[mine])
        here, there = ranges[mine]
        device.map(here, [chunks[mine]])
        device.copy([Copy(here.base, slabs[mine].address, nbytes)], "to_device")
        device.wait(device.mark("to_device"))
        for turn in range(turns):
            device.unmap(here, nbytes, turn % 2 * nbytes)
            device.map(there, [chunks[mine]], (turn + 1) % 2 * nbytes)
            here, there = there, here

    assert in_threads(lambda: hand_on(0), lambda: hand_on(1)) == [None, None]
    for mine, (first, second) in enumerate(ranges):
        assert read(device, first, 0, nbytes).equal(contents[mine])
        assert is_poison(device, first, nbytes, nbytes)
        assert is_poison(device, second, 0, 2 * nbytes)
    assert not device.heal_poison()
