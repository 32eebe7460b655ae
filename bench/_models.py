"""The tensors that are moved: shapes of published models, their optimizer state, and many small
tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from bench._rig import Rig

_DIGEST_STEP = 1 << 24


@dataclass(frozen=True)
class DecoderConfig:
    """The dimensions of a decoder with grouped attention, biased projections and untied
    embeddings."""

    hidden: int
    feed_forward: int
    key_value: int
    vocabulary: int
    layers: int


QWEN2_5_7B = DecoderConfig(
    hidden=3584, feed_forward=18944, key_value=512, vocabulary=152064, layers=28
)
_TINY = DecoderConfig(hidden=32, feed_forward=64, key_value=16, vocabulary=128, layers=2)


def decoder_config(rig: Rig) -> DecoderConfig:
    """Qwen2.5-7B (339 tensors, 15.23 GB in bf16); quick: 8 of its 28 layers (5.9 GB)."""
    layers = rig.pick(_TINY.layers, 8, QWEN2_5_7B.layers)
    big = QWEN2_5_7B
    return (
        _TINY
        if rig.size == "tiny"
        else DecoderConfig(big.hidden, big.feed_forward, big.key_value, big.vocabulary, layers)
    )


def decoder_shapes(config: DecoderConfig) -> Iterator[tuple[int, ...]]:
    """The shapes of every parameter in the order of the model."""
    yield (config.vocabulary, config.hidden)
    for _ in range(config.layers):
        yield from [(config.hidden, config.hidden), (config.hidden,)]
        yield from [(config.key_value, config.hidden), (config.key_value,)] * 2
        yield (config.hidden, config.hidden)
        yield from [(config.feed_forward, config.hidden)] * 2
        yield (config.hidden, config.feed_forward)
        yield from [(config.hidden,)] * 2
    yield (config.hidden,)
    yield (config.vocabulary, config.hidden)


class Weights(torch.nn.Module):
    """Parameters of given shapes with random values, on the rig's device."""

    def __init__(
        self, rig: Rig, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.bfloat16
    ) -> None:
        super().__init__()
        made = [
            torch.empty(shape, dtype=dtype, device=rig.torch_device).normal_() for shape in shapes
        ]
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(tensor, requires_grad=False) for tensor in made
        )


def decoder(rig: Rig) -> Weights:
    return Weights(rig, list(decoder_shapes(decoder_config(rig))))


def blob(rig: Rig, nbytes: int) -> Weights:
    """A model of `nbytes` in tensors of 64 MiB."""
    step = min(nbytes, 64 << 20)
    return Weights(rig, [(step // 2,)] * (nbytes // step))


def adam_over(rig: Rig, module: torch.nn.Module, *, shards: int) -> torch.optim.AdamW:
    """AdamW with the fp32 moments that one of `shards` ranks holds after some steps. The moments
    are made, not trained."""
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        numel = -(-parameter.numel() // shards)
        moments = {
            key: torch.empty(numel, dtype=torch.float32, device=rig.torch_device).normal_()
            for key in ("exp_avg", "exp_avg_sq")
        }
        optimizer.state[parameter] = {"step": torch.tensor(3.0), **moments}
    return optimizer


def module_tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    return list(module.parameters())


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The moments of every parameter, without the counters."""
    return [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]


def nbytes_of(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@torch.no_grad()
def change(tensors: Sequence[torch.Tensor]) -> None:
    """Write every element reversibly, so that no byte can be proved clean afterwards."""
    torch._foreach_neg_(list(tensors))


@torch.no_grad()
def digest(tensors: Sequence[torch.Tensor]) -> int:
    """64 bits computed from every byte and its place, where the tensors are. Equal before and after
    a move unless a byte changed."""
    device = tensors[0].device
    keys = torch.arange(1, 2 * _DIGEST_STEP, 2, device=device)
    total = torch.zeros((), dtype=torch.int64, device=device)
    for part in _parts(tensors):
        total = total * 1_000_003 + (part.to(torch.int64) * keys[: part.numel()]).sum()
    return int(total.item())


def _parts(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors' bytes in their order, as words: large tensors in pieces, small ones together,
    because each piece costs some kernels."""
    small: list[torch.Tensor] = []
    num_words = 0
    for tensor in tensors:
        for part in tensor.detach().reshape(-1).view(torch.int16).split(_DIGEST_STEP):
            if small and num_words + part.numel() > _DIGEST_STEP:
                yield torch.cat(small)
                small, num_words = [], 0
            small.append(part)
            num_words += part.numel()
    if small:
        yield torch.cat(small)


class Consumer:
    """The first kernel of a phase: small, on the current stream, reading the last tensor that was
    moved."""

    def __init__(self) -> None:
        self._out: torch.Tensor | None = None

    @torch.no_grad()
    def read(self, tensor: torch.Tensor) -> None:
        last = tensor.detach().reshape(-1)[-1:]
        if self._out is None:
            self._out = torch.empty_like(last)
        torch.neg(last, out=self._out)
