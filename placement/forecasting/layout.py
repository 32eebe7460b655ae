"""The parallel layout of a job: how many ranks there are, and which part of a parameter one of them holds."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How the trained models are divided among GPUs. One rank has one GPU.

    Raises:
        ValueError: a number is below 1, or the ranks do not fill their nodes.
    """

    data_parallel: int = 1
    """Replicas, each with all bytes. It changes no rank's bytes."""
    shards: int = 1
    """Ranks that share each parameter, as FSDP2 does: every one holds a part of its first dimension."""
    tensor_parallel: int = 1
    """Ranks that share each layer, as the model's own tensor-parallel plan says."""
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{each.name} must be a whole number from 1 on, not {value!r}")
        if self.ranks > self.gpus_per_node and self.ranks % self.gpus_per_node:
            raise ValueError(
                f"{self.ranks} ranks (data_parallel {self.data_parallel} x shards {self.shards} x tensor_parallel {self.tensor_parallel}) "
                f"do not fill nodes of {self.gpus_per_node} GPUs; change one of them"
            )

    @property
    def ranks(self) -> int:
        return self.data_parallel * self.shards * self.tensor_parallel

    @property
    def ranks_per_node(self) -> int:
        return min(self.ranks, self.gpus_per_node)

    def part_of(self, name: str, shape: tuple[int, ...], split_dimension: int | None) -> tuple[int, ...]:
        """The shape of the first rank's part of a parameter. No other rank's part is larger.

        Args:
            split_dimension: the dimension that tensor parallelism divides; None: it divides none.

        Raises:
            ValueError: tensor parallelism does not divide the dimension, or there is none to shard.
        """
        part = list(shape)
        if split_dimension is not None and self.tensor_parallel > 1:
            if part[split_dimension] % self.tensor_parallel:
                raise ValueError(
                    f"tensor_parallel {self.tensor_parallel} does not divide dimension {split_dimension} of {name!r}, of shape {shape}; "
                    "choose a divisor"
                )
            part[split_dimension] //= self.tensor_parallel
        if self.shards > 1:
            if not part:
                raise ValueError(f"{name!r} has no dimension, so it cannot be sharded; use shards=1")
            part[0] = -(-part[0] // self.shards)
        return tuple(part)


ALONE = Layout()
"""The layout of a model that every rank holds whole."""
