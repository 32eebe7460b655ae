"""A decoder in the shape of Qwen2.5 that trains in little memory: it computes log-probabilities of
the tokens that it is given, with gradient checkpointing.

Attention is written out. Fused kernels add in an order of their own in each run, and then not even
two runs of plain torch have the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Shape:
    """The dimensions of a decoder with grouped attention. `tied`: the embedding is the head,
    too."""

    hidden: int
    feed_forward: int
    layers: int
    heads: int
    key_value_heads: int
    head_width: int
    vocabulary: int
    tied: bool


SHAPES = {
    "tiny": Shape(32, 64, 3, 4, 2, 8, 256, tied=True),
    "1.5B": Shape(1536, 8960, 28, 12, 2, 128, 151936, tied=True),  # Qwen2.5-1.5B
    "4B": Shape(2560, 9728, 36, 32, 8, 128, 151936, tied=True),  # the dimensions of Qwen3-4B
    "7.6B": Shape(3584, 18944, 28, 28, 4, 128, 152064, tied=False),  # Qwen2.5-7B
}


class Layer(nn.Module):
    """Attention and feed-forward. The backward pass computes what is between them again."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.head_width
        self.heads, self.width = shape.heads, width
        self.groups = shape.heads // shape.key_value_heads
        self.attention_norm = nn.RMSNorm(shape.hidden, eps=1e-6)
        self.query = nn.Linear(shape.hidden, shape.heads * width)
        self.key = nn.Linear(shape.hidden, shape.key_value_heads * width)
        self.value = nn.Linear(shape.hidden, shape.key_value_heads * width)
        self.output = nn.Linear(shape.heads * width, shape.hidden, bias=False)
        self.feed_forward_norm = nn.RMSNorm(shape.hidden, eps=1e-6)
        self.gate = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.up = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.down = nn.Linear(shape.feed_forward, shape.hidden, bias=False)

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """[sequences, length, hidden] to the same; cosine and sine are [length, head width]."""
        if torch.is_grad_enabled():
            return _again_in_backward(self._compute, hidden, cosine, sine)
        return self._compute(hidden, cosine, sine)

    def _compute(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        hidden = hidden + self._attention(self.attention_norm(hidden), cosine, sine)
        normed = self.feed_forward_norm(hidden)
        return hidden + self.down(functional.silu(self.gate(normed)) * self.up(normed))

    def _attention(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        sequences, length, _ = hidden.shape
        query, key, value = (
            project(hidden).view(sequences, length, -1, self.width).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        query, key = _rotated(query, cosine, sine), _rotated(key, cosine, sine)
        key, value = self._for_each_head(key), self._for_each_head(value)
        scores = query @ key.transpose(2, 3) * self.width**-0.5
        later = torch.ones(length, length, dtype=torch.bool, device=hidden.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
        weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
        return self.output((weights @ value).transpose(1, 2).reshape(sequences, length, -1))

    def _for_each_head(self, states: Tensor) -> Tensor:
        """[sequences, key-value heads, length, width] repeated for the heads that share them."""
        return states[:, :, None].expand(-1, -1, self.groups, -1, -1).flatten(1, 2)


class Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-6)
        self.head = None if shape.tied else nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """The log-probability of each next token: [sequences, length] to float32
        [sequences, length - 1]."""
        hidden = self.embedding(ids[:, :-1])
        cosine, sine = self._rotation(hidden)
        for layer in self.layers:
            hidden = layer(hidden, cosine, sine)
        head = self.embedding if self.head is None else self.head
        logits = functional.linear(self.norm(hidden), head.weight)
        # in float32 one sequence at a time: those of all are many gigabytes
        rows = []
        for of_sequence, tokens in zip(logits, ids[:, 1:], strict=True):
            if torch.is_grad_enabled():
                rows.append(_again_in_backward(_log_probs, of_sequence, tokens))
            else:
                rows.append(_log_probs(of_sequence, tokens))
        return torch.stack(rows)

    def _rotation(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        width, length = self.shape.head_width, hidden.shape[1]
        exponents = torch.arange(0, width, 2, device=hidden.device) / width
        positions = torch.arange(length, device=hidden.device)
        angles = positions[:, None] * 1e6**-exponents
        angles = torch.cat([angles, angles], dim=1)
        return angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)


def _rotated(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = states.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (states * cosine + turned * sine).to(states.dtype)


def _log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """[length, vocabulary] and [length] to float32 [length]."""
    return -functional.cross_entropy(logits.float(), tokens, reduction="none")


def _again_in_backward(compute: object, *inputs: Tensor) -> Tensor:
    result = checkpoint(compute, *inputs, use_reentrant=False, preserve_rng_state=False)
    assert isinstance(result, Tensor)
    return result


def empty_decoder(shape: Shape) -> Decoder:
    """A decoder whose weights have no memory yet."""
    with torch.device("meta"):
        return Decoder(shape)


@torch.no_grad()
def fill(model: Decoder, device: torch.device) -> None:
    """Give the weights their first values, the same ones in each process, made on this device."""
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        weight = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if parameter.ndim == 1:
            weight.fill_(1.0 if "norm" in name else 0.0)
        else:
            values = torch.empty(parameter.shape, device=device)
            weight.copy_(values.normal_(std=0.02, generator=generator))
