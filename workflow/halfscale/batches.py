"""Whether a step has the batch of the step before, told by what is in it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch


class BatchComparer:
    """Compare the batches of each step with those of the step before, by a digest of their content.

    A loader may fill the same buffer with other samples, or build equal tensors anew; objects and
    addresses therefore say nothing.
    """

    def __init__(self) -> None:
        self._before: bytes | None = None
        self._digest = _Digest()

    def add(self, batch: object) -> None:
        """Take note of a batch of the current step; there may be several."""
        self._digest.add(batch)

    def take(self) -> bool:
        """End a step: whether its batches were those of the step before; False for the first."""
        now, self._digest = self._digest.taken(), _Digest()
        same = now is not None and now == self._before
        self._before = now
        return same


class _Digest:
    """A digest of batches of any nesting; None if something in them cannot be digested."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._complete = True

    def add(self, part: object) -> None:
        if isinstance(part, torch.Tensor):
            self._add_tensor(part)
        elif isinstance(part, Mapping):
            self._add_all("mapping", [piece for item in part.items() for piece in item])
        elif isinstance(part, list | tuple):
            self._add_all("sequence", list(part))
        elif part is None or isinstance(part, bool | int | float | str):
            self._hash.update(repr(part).encode() + b"\0")
        else:
            self._complete = False

    def taken(self) -> bytes | None:
        return self._hash.digest() if self._complete else None

    def _add_all(self, kind: str, parts: list[object]) -> None:
        self._hash.update(f"{kind} {len(parts)}".encode() + b"\0")
        for part in parts:
            self.add(part)

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            self._complete = False
            return
        self._hash.update(f"{tensor.dtype} {list(tensor.shape)}".encode() + b"\0")
        content = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        self._hash.update(content.reshape(-1).view(torch.uint8).numpy().data)
