"""fp16 arithmetic on a CPU that has none: fp32 on the fp16 operands, the result rounded to fp16.

This is what tensor cores do (fp16 operands, exact products, fp32 accumulation, one rounding at the
end; NVIDIA, *Tesla V100 GPU Architecture*, 2017), at the speed of the CPU's fp32 kernels.
It covers matrix products and convolutions, and attention, softmax, layer norm and GELU, with their
backwards. Operations that torch computes well in fp16 (elementwise, reductions, ``mv``, ``dot``:
fp32 inside, one rounding) stay torch's own, and so do fp32, bf16 and other devices.

The kernels below replace torch's at the dispatcher's CPU key. A ``TorchDispatchMode`` gives the
same numbers, but calls Python for *every* operation of a step: a 16-64-2 MLP then takes 1.8 times
its fp32 step instead of 1.35 times. The registration is the process's, so each kernel also asks
whether its own thread is emulating; backward passes on a CPU run on the thread that calls
``backward()``.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

Kernel = Callable[..., Any]
"""A kernel: takes the dispatcher's key set, then the operator's arguments as in its schema."""

_HALF = torch.float16

_LARGE = 2**18
"""Elements from which a widened operand goes to memory that is kept: 1 MiB in fp32."""


class _Thread(threading.local):
    """Whether this thread emulates, and its memory for widened operands, by position."""

    def __init__(self) -> None:
        self.emulating = False
        self.scratch: dict[int, Tensor] = {}


_thread = _Thread()


def _wide(position: int, x: Tensor) -> Tensor:
    """An fp16 operand in fp32 (exact), with its strides if they are dense.

    The allocator gives freed blocks of megabytes back to the system, and then every page of every
    copy is faulted in anew, which takes longer than the conversion. A large operand is therefore
    copied to memory kept until emulation ends, one block for each position in the argument list;
    no kernel keeps or returns its operands, so the next call may overwrite them.
    """
    size = x.numel()
    if size < _LARGE or not torch.ops.aten.is_non_overlapping_and_dense(x):
        return x.float()
    block = _thread.scratch.get(position)
    if block is None or block.numel() < size:
        # An inference tensor could not be written to once inference mode has ended.
        with torch.inference_mode(False):
            block = _thread.scratch[position] = torch.empty(size, dtype=torch.float32)
    return block.as_strided(x.shape, x.stride()).copy_(x)


def _wide_if_half(position: int, x: Any) -> Any:
    return _wide(position, x) if isinstance(x, Tensor) and x.dtype is _HALF else x


def _rounded(x: Tensor | None, like: Tensor | None = None) -> Tensor | None:
    """`x` rounded to nearest even in fp16, or in the dtype of `like`; None stays None."""
    return x if x is None else x.to(_HALF if like is None else like.dtype)


def _emulates(*operands: Tensor | None) -> bool:
    # Operands of several dtypes go to torch's kernel, which reports them in its own words.
    return _thread.emulating and all(x is None or x.dtype is _HALF for x in operands)


def _of_tensors(native: Kernel) -> Kernel:
    """For ``op(*tensors, **scalars) -> tensor``: mm, addmm, bmm, baddbmm, GELU and its backward."""

    def kernel(keys: Any, *operands: Tensor, **scalars: Any) -> Any:
        # Not `_emulates`: this is the hot path of models that are mostly overhead.
        for x in operands:
            if x.dtype is not _HALF:
                return native(keys, *operands, **scalars)
        if not _thread.emulating:
            return native(keys, *operands, **scalars)
        return native(keys, *[_wide(i, x) for i, x in enumerate(operands)], **scalars).half()

    return kernel


def _convolution(native: Kernel) -> Kernel:
    def kernel(keys: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Any:
        if not _emulates(x, weight, bias):
            return native(keys, x, weight, bias, *rest)
        wide_bias = _wide_if_half(2, bias)
        return native(keys, _wide(0, x), _wide(1, weight), wide_bias, *rest).half()

    return kernel


def _convolution_backward(native: Kernel) -> Kernel:
    def kernel(keys: Any, grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Any:
        if not _emulates(grad, x, weight):
            return native(keys, grad, x, weight, *rest)
        grads = native(keys, _wide(0, grad), _wide(1, x), _wide(2, weight), *rest)
        return tuple(map(_rounded, grads))

    return kernel


def _softmax(native: Kernel) -> Kernel:
    def kernel(keys: Any, x: Tensor, dim: int, half_to_float: bool) -> Any:
        if half_to_float or not _emulates(x):
            return native(keys, x, dim, half_to_float)
        return native(keys, _wide(0, x), dim, False).half()

    return kernel


def _softmax_backward(native: Kernel) -> Kernel:
    def kernel(keys: Any, grad: Tensor, y: Tensor, dim: int, dtype: torch.dtype) -> Any:
        if not _emulates(grad, y):
            return native(keys, grad, y, dim, dtype)
        return native(keys, _wide(0, grad), _wide(1, y), dim, torch.float32).half()

    return kernel


def _layer_norm(native: Kernel) -> Kernel:
    """Mean and reciprocal deviation stay fp32, as on CUDA, so that backward need not lose bits."""

    def kernel(keys: Any, x: Tensor, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
        if not _emulates(x):
            return native(keys, x, shape, weight, bias, eps)
        affine = _wide_if_half(1, weight), _wide_if_half(2, bias)
        y, mean, rstd = native(keys, _wide(0, x), shape, *affine, eps)
        return y.half(), mean, rstd

    return kernel


def _layer_norm_backward(native: Kernel) -> Kernel:
    """Under autocast weight and bias are fp32, and so are their gradients."""

    def kernel(keys: Any, grad: Tensor, x: Tensor, shape: Any, *rest: Any) -> Any:
        if not _emulates(grad, x):
            return native(keys, grad, x, shape, *rest)
        *statistics_and_affine, mask = rest
        wide = [_wide_if_half(2 + i, t) for i, t in enumerate(statistics_and_affine)]
        dx, dweight, dbias = native(keys, _wide(0, grad), _wide(1, x), shape, *wide, mask)
        weight, bias = statistics_and_affine[2:]
        return _rounded(dx), _rounded(dweight, weight), _rounded(dbias, bias)

    return kernel


def _attention(native: Kernel) -> Kernel:
    """The log-sum-exp of the scores stays fp32, as in torch's fp16 kernel."""

    def kernel(keys: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Any:
        if not _emulates(q, k, v):
            return native(keys, q, k, v, *rest, **options)
        options = {name: _wide_if_half(3, option) for name, option in options.items()}
        wide = _wide(0, q), _wide(1, k), _wide(2, v)
        y, logsumexp = native(keys, *wide, *rest, **options)
        return y.half(), logsumexp

    return kernel


def _attention_backward(native: Kernel) -> Kernel:
    def kernel(keys: Any, *args: Any, **options: Any) -> Any:
        grad_q_k_v_out = args[:5]
        if not _emulates(*grad_q_k_v_out):
            return native(keys, *args, **options)
        options = {name: _wide_if_half(5, option) for name, option in options.items()}
        wide = [_wide(i, x) for i, x in enumerate(grad_q_k_v_out)]
        return tuple(map(_rounded, native(keys, *wide, *args[5:], **options)))

    return kernel


EMULATED: dict[str, Callable[[Kernel], Kernel]] = {
    "mm": _of_tensors,
    "addmm": _of_tensors,
    "bmm": _of_tensors,
    "baddbmm": _of_tensors,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_softmax": _softmax,
    "_softmax_backward_data": _softmax_backward,
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "gelu": _of_tensors,
    "gelu_backward": _of_tensors,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}
"""Operator of the ``aten`` namespace -> what makes its emulated kernel from torch's own."""


@cache
def _kernels() -> dict[str, Kernel]:
    """The emulated kernels, made on first use: before any of torch's is replaced."""
    return {
        name: emulated(torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed)
        for name, emulated in EMULATED.items()
    }


class _Registration:
    """The emulated kernels in the dispatcher, from the first `acquire` to the last `release`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._library: torch.library.Library | None = None

    def acquire(self) -> None:
        with self._lock:
            if self._users == 0:
                self._library = self._registered()
            self._users += 1

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._library is not None:
                self._library._destroy()
                self._library = None

    @staticmethod
    def _registered() -> torch.library.Library:
        library = torch.library.Library("aten", "IMPL", "CPU")
        try:
            with warnings.catch_warnings():
                # That a kernel is replaced is the purpose here; torch says so once a process.
                warnings.filterwarnings("ignore", "Warning only once for all operators")
                for name, kernel in _kernels().items():
                    library.impl(name, kernel, with_keyset=True)
        except BaseException:
            library._destroy()
            raise
        return library


_registration = _Registration()


@contextmanager
def emulation(on: bool) -> Iterator[None]:
    """Emulate, or do not, what this thread computes until the context ends; contexts nest.

    Inside, the operators in `EMULATED` take dense CPU tensors of the shapes torch takes. If all
    operands are fp16 the result is fp16, computed in fp32 and rounded to nearest even once;
    operands of any other dtype get torch's own kernel, and errors are torch's own.

    Args:
        on: False switches an outer emulation off until the context ends.

    Raises:
        RuntimeError: If torch refuses a kernel; nothing stays registered.
    """
    outer = _thread.emulating
    if on:
        _registration.acquire()
    _thread.emulating = on
    try:
        yield
    finally:
        _thread.emulating = outer
        if not outer:
            _thread.scratch.clear()
        if on:
            _registration.release()
