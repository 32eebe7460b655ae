"""What every `Device` does when parts of a range get memory and give it up. Sizes are multiples of the device's own."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from placement.devices.base import Device
from tests.contract.ranges import is_poison, loaded, poisoned, random_bytes, whole
from tests.support.poison import poison, reads_poison


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
        (lambda: device.map(addresses, [device.create(size)]), "other memory is behind .* already: unmap it first"),
        (lambda: device.map(elsewhere, [device.create(size)], step), "not a multiple"),
        (lambda: device.map(elsewhere, [device.create(size)], 2 * size), "not within"),
        (lambda: device.map(elsewhere, [device.create(step), device.create(size)]), "each but the last"),
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
            free |= {places[which].pop(index) for index in range(slot, last) if index in places[which]}
        else:
            room = [index for index in range(slot, min(slot + count, 3)) if index not in places[which]]
            taken = sorted(free - {4})[: len(room)] if room == [*range(slot, slot + len(room))] else []
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
