"""One probe: train in bf16 and count, in each step, the magnitudes of all gradients.

Under autocast the same tensors are in half precision in bf16 as in fp16, but bf16 has the range of
fp32: nothing overflows and nothing vanishes. What fp16 would do to them at any scale follows from
the counts (`halfscale.magnitudes`), but for one thing: what an element that vanishes would have
given to others is missing there too. So the shares lost are lower bounds, close ones for
activations; weights lose more where activations lose most. Tensors that autocast leaves in fp32
are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from halfscale.batches import BatchComparer
from halfscale.magnitudes import BINS, LOWEST_EXPONENT
from halfscale.plan import ProbeSpec
from halfscale.records import PROBE_SCHEMA, ProbeRecord, write_probe
from halfscale.train import Result, run_training

# Of bf16's exponent field: 1 stands for 2^-126, 255 for Inf and NaN.
_FIELDS = 256
_FIRST_NORMAL = -126
# Where zeros are counted, behind the exponents.
_ZEROS = BINS
# Elements that are kept to be counted together: 8 MiB.
_MOST_WAITING = 1 << 22


def probe(spec: ProbeSpec, folder: Path, progress: Callable[[str], None] = print) -> ProbeRecord:
    """Train one reference run and write ``probe.parquet`` and ``probe.json``.

    Training that ends early is a result with that outcome, as in `halfscale.train.train`.

    Args:
        spec: What to run.
        folder: Where the two files go.
        progress: Is given one line at about every tenth of the steps.

    Raises:
        OSError: If the files cannot be written.
    """
    columns, ended = record_probe(spec, progress)
    return write_probe(
        folder,
        columns,
        spec=spec,
        outcome=ended.outcome,
        error=ended.error,
        environment=ended.environment,
        gpu=ended.gpu,
    )


def record_probe(
    spec: ProbeSpec, progress: Callable[[str], None]
) -> tuple[dict[str, list[Any]], Result]:
    """Train one reference run; the columns of `PROBE_SCHEMA`, and how it ended.

    Args:
        spec: What to run.
        progress: Is given one line at about every tenth of the steps.

    Raises:
        RuntimeError: If a user's own workload was edited after the run was planned.
    """
    columns: dict[str, list[Any]] = {name: [] for name in PROBE_SCHEMA.names}
    recorder, batches = MagnitudeRecorder(), BatchComparer()

    def observe(loss: Tensor, batch: object) -> AbstractContextManager[None]:
        batches.add(batch)
        return recorder.watch(loss)

    def record(row: Mapping[str, Any]) -> None:
        figures = {**row, **recorder.take(), "batch_repeats": batches.take()}
        for name, column in columns.items():
            column.append(figures[name])

    return columns, run_training(spec, record, progress, observe=observe)


class MagnitudeRecorder:
    """Count the magnitudes of the bf16 gradients that backward passes make.

    Every tensor that an operation makes of a gradient counts once, views of it do not; nor does
    what a backward pass makes of activations alone, such as a checkpointed forward pass, since no
    scale reaches it. The gradients of weights (what autocast's copy of a parameter receives) are
    told apart from those of activations. Works on every device.
    """

    def __init__(self) -> None:
        self._everything = _Counter()
        self._weights = _Counter()

    @contextmanager
    def watch(self, loss: Tensor) -> Iterator[None]:
        """Record the backward pass of a loss, which is run inside; several add up."""

        def count_weights(gradients: tuple[Tensor | None, ...]) -> None:
            for gradient in gradients:
                if gradient is not None:
                    self._weights.add(gradient)

        watch = _Watch(self._everything.add)
        hooks = [node.register_prehook(count_weights) for node in _weight_copies(loss)]
        if loss.grad_fn is not None:
            hooks.append(loss.grad_fn.register_prehook(watch.start))
        try:
            with watch:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def take(self) -> dict[str, Any]:
        """The figures since the last call, and forget them: columns of `PROBE_SCHEMA`."""
        counts, largest = self._everything.take()
        weights, _ = self._weights.take()
        # A gradient that is broadcast to a weight, or to two, is more than was made.
        activations = (counts - weights).clamp(min=0)
        return {
            "largest": largest if math.isfinite(largest) else math.inf,
            "activation_counts": activations[:BINS].tolist(),
            "weight_counts": weights[:BINS].tolist(),
            "activation_zeros": int(activations[_ZEROS]),
            "weight_zeros": int(weights[_ZEROS]),
        }


class _Counter:
    """Counts by exponent, of many tensors at a time: most of them are too small to count alone."""

    def __init__(self) -> None:
        self._waiting: list[Tensor] = []
        self._elements = 0
        self._counts = torch.zeros(BINS + 1, dtype=torch.int64)
        self._largest = 0.0

    def add(self, tensor: Tensor) -> None:
        if tensor.dtype is torch.bfloat16 and tensor.numel():
            # A copy, and none in bf16 that would be seen itself; backward passes write in place.
            magnitudes = tensor.detach().view(torch.int16) & 0x7FFF
            self._waiting.append(magnitudes.flatten())
            self._elements += tensor.numel()
            if self._elements > _MOST_WAITING:
                self._count()

    def take(self) -> tuple[Tensor, float]:
        self._count()
        taken = self._counts, self._largest
        self._counts, self._largest = torch.zeros_like(self._counts), 0.0
        return taken

    def _count(self) -> None:
        if not self._waiting:
            return
        counts, largest = count_exponents(torch.cat(self._waiting))
        self._counts += counts.cpu()
        # NaN, once there, stays.
        self._largest = float(np.maximum(self._largest, float(largest)))
        self._waiting, self._elements = [], 0


class _Watch(TorchDispatchMode):
    """Show every new tensor that an operation makes of a gradient, also in autograd's own threads.

    Gradients are known by their memory, which views share.
    """

    def __init__(self, show: Callable[[Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._show = show
        self._gradients: set[StorageWeakRef] = set()

    def start(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Take these for gradients: what the backward pass starts from."""
        for gradient in _tensors(gradients):
            self._gradients.add(_memory(gradient))
            self._show(gradient)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = {_memory(tensor) for tensor in _tensors((*args, *kwargs.values()))}
        result = func(*args, **kwargs)
        if not given.isdisjoint(self._gradients) and not _takes_only_the_shape(func):
            for made in _tensors((result,)):
                memory = _memory(made)
                if memory not in given or func._schema.is_mutable:
                    self._gradients.add(memory)
                    self._show(made)
        return result


def _takes_only_the_shape(func: Any) -> bool:
    """Of its argument: ``zeros_like``, ``new_empty`` and the like."""
    name: str = func._schema.name
    return name.endswith("_like") or name.startswith("aten::new_")


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The dense tensors among values and in the lists among them."""
    for value in values:
        if isinstance(value, Tensor):
            if value.layout is torch.strided:
                yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


def _memory(tensor: Tensor) -> StorageWeakRef:
    """Equal for views; while it is held no other memory equals it, though this one be freed."""
    return StorageWeakRef(tensor.untyped_storage())


def _weight_copies(loss: Tensor) -> list[Node]:
    """The nodes of the graph that cast a parameter.

    Others that lead to a parameter, such as a layer norm's, receive the gradient of an activation.
    """
    found, seen, ahead = [], set(), [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        below = [next_node for next_node, _ in node.next_functions]
        is_copy = type(node).__name__ == "ToCopyBackward0"
        if is_copy and type(below[0]).__name__ == "AccumulateGrad":
            found.append(node)
        ahead.extend(below)
    return found


def count_exponents(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Count bf16 numbers by exponent.

    Args:
        bits: The numbers' bits without the sign, int16 of shape (elements,), at least one.

    Returns:
        Counts, int64 of shape (BINS + 1,): bin b holds the elements with floor(log2 |x|) =
        b + LOWEST_EXPONENT, the last one those of zero; Inf and NaN are in neither. And the
        largest magnitude, fp32 of no dimension; Inf or NaN if there is one.
    """
    fields = torch.bincount(bits >> 7, minlength=_FIELDS)
    counts = fields.new_zeros(BINS + 1)
    counts[_FIRST_NORMAL - LOWEST_EXPONENT : BINS] = fields[1:-1]
    counts[_ZEROS] = zeros = (bits == 0).sum()
    if fields[0] > zeros:
        # Below 2^-126 the field says nothing; 2^64 times as large they are normal numbers.
        small = _value(bits[(bits < 1 << 7) & (bits > 0)]).double() * 2.0**64
        exponents = torch.log2(small).floor().long() - 64 - LOWEST_EXPONENT
        counts[:BINS] += torch.bincount(exponents, minlength=BINS)
    # Without the sign the bits of floating-point numbers are in the order of their magnitudes.
    return counts, _value(bits.max())


def _value(bits: Tensor) -> Tensor:
    """What bf16 bits without the sign stand for, in fp32: its upper half."""
    return (bits.int() << 16).view(torch.float32)
