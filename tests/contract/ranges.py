"""Ranges for the contract suite, with poison or random bytes behind them."""

from __future__ import annotations

import torch

from placement.devices.base import Device
from placement.devices.memory import Addresses, Chunk
from tests.support.poison import reads_poison


def poisoned(device: Device, nbytes: int) -> Addresses:
    addresses = device.reserve(nbytes)
    device.unmap(addresses, addresses.nbytes)
    return addresses


def whole(device: Device, addresses: Addresses) -> torch.Tensor:
    return device.view(addresses, 0, addresses.nbytes)


def random_bytes(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


def full_and_tail(device: Device) -> tuple[int, list[Chunk]]:
    chunks = [
        device.create(device.chunk_bytes),
        device.create(device.chunk_bytes),
        device.create(device.granularity),
    ]
    return sum(chunk.nbytes for chunk in chunks), chunks


def loaded(device: Device) -> tuple[Addresses, list[Chunk], torch.Tensor]:
    """A range of two full chunks and a tail, and the random bytes in it."""
    nbytes, chunks = full_and_tail(device)
    addresses = poisoned(device, nbytes)
    device.map(addresses, chunks)
    content = random_bytes(nbytes)
    whole(device, addresses).copy_(content)
    device.sync()
    return addresses, chunks, content


def read(device: Device, addresses: Addresses, start: int, nbytes: int) -> torch.Tensor:
    return device.view(addresses, start, nbytes).cpu()


def is_poison(device: Device, addresses: Addresses, start: int, nbytes: int) -> bool:
    return reads_poison(device.view(addresses, start, nbytes), start)
