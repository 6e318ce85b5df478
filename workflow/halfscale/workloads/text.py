"""Text: a transformer's first steps, in which overflow, clipping and warm-up meet.

The next character of the language reference that ships with Python (``pydoc_data.topics``; its
words depend on Python's version): a small causal transformer, AdamW, a linear warm-up, gradients
clipped by their norm. fp16 loses few of its gradients, but while the weights are fresh S = 2^20
overflows. A scale that starts above skips steps, which the warm-up must not count; and gradients
that are clipped before they are unscaled are clipped to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from halfscale.workloads import Workload

CHARACTERS = 128
"""ASCII; what is not in it is read as a question mark."""


class CharacterModel(nn.Module):
    """From characters (batch, length) to the logits of each next one (batch, length, 128)."""

    def __init__(self, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, width)
        self.positions = nn.Parameter(torch.randn(length, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, CHARACTERS))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, characters: Tensor) -> Tensor:
        hidden = self.characters(characters) + self.positions
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.mask, is_causal=True)
        logits: Tensor = self.head(hidden)
        return logits


def build(
    seed: int,
    device: str,
    *,
    learning_rate: float = 0.005,
    warmup: int = 20,
    clip_norm: float = 0.5,
    batch_size: int = 32,
    length: int = 32,
    width: int = 32,
    heads: int = 2,
    layers: int = 2,
) -> Workload:
    """Build the task: ``batch_size`` pieces of ``length`` characters, ``warmup`` steps."""
    text = torch.tensor(list(" ".join(topics.values()).encode("ascii", "replace")))
    model = CharacterModel(length, width, heads, layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warmup, total_iters=warmup)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            start = torch.randint(len(text) - length, (batch_size, 1), generator=generator)
            piece = text[start + torch.arange(length + 1)].to(device)
            yield piece[:, :-1], piece[:, 1:]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    return Workload(model, optimizer, batches(), loss, clip_norm=clip_norm, scheduler=schedule)
