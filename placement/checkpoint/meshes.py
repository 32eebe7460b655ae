"""Refuse tensors that have one name, but different values on different device meshes.

Ranks of different meshes may hold the same values (replicas: FSDP2 over one dimension of a two-dimensional mesh, without tensor
parallelism along the other) or different ones (experts that expert parallelism splits by name). torch.distributed.checkpoint treats
both alike: it writes one mesh's values, and would lose experts. Only the values tell the cases apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from placement.core.errors import CheckpointError
from placement.tensors.plain import parts_of

Meshes = dict[str, tuple[int, ...]]
"""For each sharded tensor that is not sharded over all ranks, by its path in the checkpoint: the ranks of its mesh."""


class Shard(NamedTuple):
    """Facts about a rank's shard, to compare with the shards of another mesh."""

    ranks: tuple[int, ...]
    place: str
    """The rank's coordinates in the mesh, the shapes, and how the tensor is split."""
    digest: bytes


def own_meshes(found: Mapping[str, Any]) -> Meshes:
    return {key: tuple(value.device_mesh.mesh.flatten().tolist()) for key, value in _on_own_meshes(found)}


def on_several(facts: Sequence[Meshes]) -> set[str]:
    """Names of tensors whose mesh differs between ranks."""
    seen: dict[str, set[tuple[int, ...]]] = {}
    for meshes in facts:
        for key, ranks in meshes.items():
            seen.setdefault(key, set()).add(ranks)
    return {key for key, ranks in seen.items() if len(ranks) > 1}


def shards(found: Mapping[str, Any], names: Collection[str]) -> dict[str, Shard]:
    """This rank's shards of the tensors with these names."""
    return {key: _shard(value) for key, value in _on_own_meshes(found) if key in names}


def refuse_experts(facts: Sequence[Mapping[str, Shard]]) -> None:
    """Raise unless every mesh of a tensor has the same bytes at the same places. Gives the same result on every rank.

    Raises:
        CheckpointError: the meshes of a tensor have different bytes.
    """
    found: dict[str, dict[tuple[int, ...], dict[str, bytes]]] = {}
    for each in facts:
        for key, shard in each.items():
            found.setdefault(key, {}).setdefault(shard.ranks, {})[shard.place] = shard.digest
    for key, by_mesh in found.items():
        (first, wanted), *others = by_mesh.items()
        for ranks, shards_there in others:
            if shards_there != wanted:
                raise CheckpointError(
                    f"{key} is sharded over ranks {first} and over {ranks}, with other values: torch.distributed.checkpoint would "
                    "write only one of them (experts split by expert parallelism). Save it with its framework's checkpoint, and "
                    "leave it out here with only=. Nothing was written."
                )


def _shard(tensor: Any) -> Shard:
    mesh = tensor.device_mesh
    digest = hashlib.blake2b(digest_size=16)
    for _, part in parts_of(tensor._local_tensor, ""):
        digest.update(f"{tuple(part.shape)} {part.dtype}".encode())
        digest.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    place = f"{mesh.get_coordinate()} {tuple(mesh.shape)} {tensor.placements} {tuple(tensor.shape)}"
    return Shard(tuple(mesh.mesh.flatten().tolist()), place, digest.digest())


def _on_own_meshes(found: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in found.items():
        if isinstance(value, Mapping):
            yield from _on_own_meshes(value, f"{prefix}{key}.")
        elif (mesh := getattr(value, "device_mesh", None)) is not None and mesh.size() < dist.get_world_size():
            yield f"{prefix}{key}", value
