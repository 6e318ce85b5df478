"""Emulated fp16 against float64 on the same operands, and the context that switches it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from halfscale.precision import Arithmetic, arithmetic, choice, choose, emulation, native_fp16

UNIT = 2.0**-24  # rounding unit of fp32
INF, NAN = float("inf"), float("nan")
LARGEST, SMALLEST = 65504.0, 2.0**-24  # of fp16

quick = settings(max_examples=300, deadline=None, derandomize=True, database=None)


def emulated() -> AbstractContextManager[Arithmetic]:
    """Emulated fp16 also on a CPU that has native fp16."""
    return arithmetic("fp16", "cpu", native=False)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    # One thread: other work on the machine must not decide how long the tests take.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def round16(x: Tensor) -> np.ndarray:
    """float64 -> fp16 in one rounding to nearest even; torch would round to fp32 in between."""
    with np.errstate(over="ignore", invalid="ignore"):
        return x.detach().numpy().astype(np.float16)


def assert_rounded(actual: Tensor, exact: Tensor, magnitude: Tensor, terms: int) -> None:
    """Check that `actual` is `exact`, rounded once to fp16, up to fp32 accumulation error.

    A product of two fp16 numbers has 22 significant bits and is exact in fp32. A sum of n fp32
    terms, in any order, with or without fused multiply-add, is wrong by at most γ Σ|term| with
    γ = n u / (1 - n u) and u = 2^-24 (Higham, *Accuracy and Stability of Numerical Algorithms*,
    section 4.2). The fp32 result therefore lies in exact ± γ Σ|term|, and as rounding is monotone
    the fp16 result lies between the rounded ends of that interval: usually one number, two if a
    rounding boundary is inside. This includes which results become Inf. float64's own error is
    2^-29 of the bound and is covered by one term more.

    actual: fp16. exact: float64, the same computation on the same operands. magnitude: float64,
    Σ|term|. terms: n, additions and scalings of one element. NaN and Inf in `exact` must be
    the same in `actual`.
    """
    assert actual.dtype is torch.float16
    assert actual.shape == exact.shape
    n = terms + 1
    error = n * UNIT / (1 - n * UNIT) * magnitude
    finite = torch.isfinite(exact)
    error = torch.where(finite, error, 0.0)
    low, high = round16(exact - error), round16(exact + error)
    result = actual.detach().numpy()
    nan = np.isnan(low)
    np.testing.assert_array_equal(np.isnan(result), nan)
    inside = (low <= result) & (result <= high)
    assert (inside | nan).all(), (
        f"{(~(inside | nan)).sum()} of {inside.size} outside, "
        f"first {result[~(inside | nan)][0]!r} not in "
        f"[{low[~(inside | nan)][0]!r}, {high[~(inside | nan)][0]!r}]"
    )


# --- operands -----------------------------------------------------------------------------------

EDGES = [0.0, -0.0, 1.0, -1.0, LARGEST, -LARGEST, 256.0, 255.875, SMALLEST, -SMALLEST]
EDGES += [2.0**-14, 2.0**-14 - SMALLEST, 3 * SMALLEST, 0.5, 1 + 2.0**-10, 32752.0, 15.9921875, 16.0]
VALUES: dict[str, Callable[[torch.Generator, int], Tensor]] = {
    "normal": lambda g, n: torch.randn(n, generator=g).half(),
    "edges": lambda g, n: torch.tensor(EDGES).half()[torch.randint(len(EDGES), (n,), generator=g)],
    "any finite": lambda g, n: _any_bits(g, n).nan_to_num(1.0, 2.0, 3.0),
    "any": lambda g, n: _any_bits(g, n),
    "few non-finite": lambda g, n: torch.where(
        torch.rand(n, generator=g) < 0.05,
        torch.tensor([INF, -INF, NAN]).half()[torch.randint(3, (n,), generator=g)],
        torch.randn(n, generator=g).half(),
    ),
}
LAYOUTS = ["contiguous", "transposed", "strided", "expanded", "offset"]


def _any_bits(generator: torch.Generator, n: int) -> Tensor:
    bits = torch.randint(-(2**15), 2**15, (n,), generator=generator, dtype=torch.int16)
    return bits.view(torch.float16)


def operand(seed: int, values: str, layout: str, *shape: int) -> Tensor:
    """An fp16 tensor of at least two dimensions in the given memory layout."""
    generator = torch.Generator().manual_seed(seed)
    fill = VALUES[values]

    def dense(*sizes: int) -> Tensor:
        return fill(generator, int(np.prod(sizes))).view(sizes)

    *batch, m, n = shape
    match layout:
        case "transposed":
            return dense(*batch, n, m).transpose(-1, -2)
        case "strided":
            return dense(*batch, 2 * m, 3 * n)[..., ::2, ::3]
        case "expanded":
            return dense(*batch, 1, n).expand(*shape)
        case "offset":
            return dense(*batch, m + 1, n + 1)[..., 1:, 1:]
    return dense(*shape)


SIZES = st.sampled_from([0, 1, 2, 3, 5, 8, 17, 33])
OPERAND = st.tuples(st.integers(0, 2**31), st.sampled_from(list(VALUES)), st.sampled_from(LAYOUTS))
SCALARS = st.sampled_from([1, 0, 0.5, -1.25, 3])


# --- products -----------------------------------------------------------------------------------


@quick
@given(SIZES, SIZES, SIZES, OPERAND, OPERAND)
def test_mm_rounds_once(m: int, k: int, n: int, left: Any, right: Any) -> None:
    a, b = operand(*left, m, k), operand(*right, k, n)
    with emulated():
        y = a @ b
    assert_rounded(y, a.double() @ b.double(), a.double().abs() @ b.double().abs(), k)


@quick
@given(SIZES, SIZES, SIZES, OPERAND, OPERAND, OPERAND, SCALARS, SCALARS)
def test_addmm_rounds_once(
    m: int, k: int, n: int, left: Any, right: Any, added: Any, beta: float, alpha: float
) -> None:
    a, b, c = operand(*left, m, k), operand(*right, k, n), operand(*added, 1, n)
    with emulated():
        y = torch.addmm(c, a, b, beta=beta, alpha=alpha)
    # As in BLAS, a beta of zero discards the addend, whatever it is.
    addend = beta * c.double() if beta else torch.zeros(1, n).double()
    exact = alpha * (a.double() @ b.double()) + addend
    size = abs(alpha) * (a.double().abs() @ b.double().abs()) + addend.abs()
    if k == 0 or alpha == 0:
        # BLAS may skip the product; 0 · Inf is then 0 instead of NaN.
        keep = torch.isfinite(exact)
        y, exact, size = y[keep], exact[keep], size[keep]
    assert_rounded(y, exact, size, k + 3)


@quick
@given(st.integers(0, 3), SIZES, SIZES, SIZES, OPERAND, OPERAND, OPERAND, st.booleans())
def test_batched_products_round_once(
    batch: int, m: int, k: int, n: int, left: Any, right: Any, added: Any, add: bool
) -> None:
    a, b = operand(*left, batch, m, k), operand(*right, batch, k, n)
    c = operand(*added, batch, m, n)
    with emulated():
        y = torch.baddbmm(c, a, b, beta=0.5) if add else torch.bmm(a, b)
    addend = 0.5 * c.double() if add else torch.zeros(()).double()
    exact = a.double() @ b.double() + addend
    assert_rounded(y, exact, a.double().abs() @ b.double().abs() + addend.abs(), k + 2)


@pytest.mark.parametrize("k", [64, 1000, 20000])
def test_long_sums_accumulate_in_fp32(k: int) -> None:
    # Without cancellation: accumulated in fp16 the sums would stop growing near 2048 · 2^-4.
    a, b = (torch.rand(s, generator=torch.manual_seed(k)).half() for s in ((4, k), (k, 3)))
    with emulated():
        products = {"mm": a @ b, "mv": (a @ b[:, 0])[:, None], "dot": a[0].dot(b[:, 0])[None, None]}
    exact = a.double() @ b.double()
    for y in products.values():
        rows, columns = y.shape
        assert_rounded(y, exact[:rows, :columns], exact[:rows, :columns], k)


# sums of products that fp32 holds exactly, and their IEEE rounding to fp16
EXACT = [
    ([LARGEST, 15.9921875], LARGEST),  # 65519.99…, below the boundary
    ([LARGEST, 16.0], INF),  # 65520, the boundary: ties to even, which is Inf
    ([-LARGEST, -15.9921875], -LARGEST),
    ([-LARGEST, -16.0], -INF),
    ([LARGEST, LARGEST, -LARGEST], LARGEST),  # too large on the way only
    ([32752.0, 32752.0], LARGEST),
    ([2048.0, 1.0], 2048.0),  # tie to even, down
    ([2050.0, 1.0], 2052.0),  # tie to even, up
    ([2048.0, 1.0, 2.0**-12], 2050.0),  # just above a tie
    ([INF, 1.0], INF),
    ([INF, -INF], NAN),
    ([NAN, 1.0], NAN),
]


def _products_of(terms: list[float], factor: float) -> dict[str, Tensor]:
    """The sum of terms · factor by every product operator: 64 fp16 numbers and more for each."""
    a = torch.tensor([terms] * 8).half()
    b = torch.full((len(terms), 8), factor).half()
    zero = torch.zeros(8).half()
    kernel = torch.full((4, len(terms), 1, 1), factor).half()
    image = a.T[None, :, :, None].expand(2, -1, -1, 8)
    return {
        "mm": a @ b,
        "linear": F.linear(a, b.T, zero),
        "addmm": torch.addmm(a[:, :1], a[:, 1:], b[1:]) if factor == 1 else a @ b,
        "bmm": a[None] @ b[None],
        "baddbmm": torch.baddbmm(zero, a[None], b[None]),
        "conv": F.conv2d(image, kernel),
        "conv transposed": F.conv_transpose2d(image, kernel.transpose(0, 1)),
    }


@pytest.mark.parametrize(("terms", "rounded"), EXACT)
def test_exact_sums_round_as_ieee(terms: list[float], rounded: float) -> None:
    with emulated():
        results = _products_of(terms, 1.0)
    for name, y in results.items():
        expected = torch.full_like(y, rounded)
        assert torch.equal(y.nan_to_num(7.0, INF, -INF), expected.nan_to_num(7.0, INF, -INF)), name


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 1023, 1024, 2047])
@pytest.mark.parametrize("factor", [0.25, 0.5, 0.75, 1.0, 1.5])
def test_subnormals_round_as_ieee(count: int, factor: float) -> None:
    with emulated():
        results = _products_of([count * SMALLEST], factor)
    # Python's round() ties to even, and these results are multiples of SMALLEST or lie between.
    quantum = SMALLEST if count * factor < 2048 else 2 * SMALLEST
    expected = round(count * SMALLEST * factor / quantum) * quantum
    for name, y in results.items():
        assert torch.equal(y, torch.full_like(y, expected)), name


def test_every_fp16_number_passes_through_a_product() -> None:
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    numbers = numbers[~numbers.isnan()]
    with emulated():
        y = numbers[:, None] @ torch.ones(1, 1).half()
    assert torch.equal(y[:, 0], numbers)


# --- convolutions, forward and backward ---------------------------------------------------------

CONVOLUTIONS = st.fixed_dictionaries(
    {
        "dims": st.sampled_from([1, 2, 2, 2, 3]),
        "batch": st.sampled_from([0, 1, 2, 16]),
        "channels": st.sampled_from([(1, 1), (2, 4), (4, 2), (6, 8)]),
        "kernel": st.sampled_from([1, 2, 3]),
        "stride": st.sampled_from([1, 2]),
        "padding": st.sampled_from([0, 1]),
        "dilation": st.sampled_from([1, 2]),
        "grouped": st.booleans(),
        "transposed": st.booleans(),
        "bias": st.booleans(),
        "channels_last": st.booleans(),
        "values": st.sampled_from(["normal", "edges", "any finite", "few non-finite"]),
        "seed": st.integers(0, 2**31),
    }
)


def _convolution(case: dict[str, Any]) -> tuple[Callable[..., Tensor], list[Tensor], int]:
    """The function, its fp16 operands (input, weight, perhaps bias) and the number of groups."""
    inputs, outputs = case["channels"]
    groups = 2 if case["grouped"] and inputs % 2 == outputs % 2 == 0 else 1
    spatial, kernel = [6] * case["dims"], [case["kernel"]] * case["dims"]
    lead = [inputs, outputs // groups] if case["transposed"] else [outputs, inputs // groups]
    shapes = [[case["batch"], inputs, *spatial], [*lead, *kernel]]
    shapes += [[outputs]] * case["bias"]
    generator = torch.Generator().manual_seed(case["seed"])
    operands = [
        VALUES[case["values"]](generator, int(np.prod(shape))).view(shape) for shape in shapes
    ]
    if case["channels_last"] and case["dims"] == 2:
        operands[0] = operands[0].contiguous(memory_format=torch.channels_last)
    convolve = getattr(F, f"conv{'_transpose' * case['transposed']}{case['dims']}d")
    options = {name: case[name] for name in ("stride", "padding", "dilation")}

    def apply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y: Tensor = convolve(x, weight, bias, groups=groups, **options)
        return y

    return apply, operands, groups


def _gradients(apply: Callable[..., Tensor], operands: list[Tensor], seed: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in operands]
    return list(torch.autograd.grad(apply(*leaves), leaves, seed))


@quick
@given(CONVOLUTIONS)
def test_convolution_and_its_gradients_round_once(case: dict[str, Any]) -> None:
    apply, operands, groups = _convolution(case)
    wide = [x.double() for x in operands]
    exact = apply(*wide)
    grad = VALUES[case["values"]](torch.Generator().manual_seed(1), exact.numel())
    grad = grad.view(exact.shape)
    with emulated():
        y = apply(*operands)
        grads = _gradients(apply, operands, grad)
    sizes = [x.abs() for x in wide]
    exact_grads = _gradients(apply, wide, grad.double())
    if all(x.isfinite().all() for x in (*operands, grad)):
        inputs, outputs = case["channels"]
        taps = case["kernel"] ** case["dims"] / groups
        met = case["batch"] * int(np.prod((operands[0] if case["transposed"] else y).shape[2:]))
        terms = [inputs * taps + 1, outputs * taps, met, y[:, 0].numel()]
        wants = [exact, *exact_grads]
        magnitudes = [apply(*sizes), *_gradients(apply, sizes, grad.double().abs())]
        for got, want, size, n in zip((y, *grads), wants, magnitudes, terms, strict=False):
            assert_rounded(got, want, size, int(n))
        return
    if case["padding"] == 0 and case["stride"] == 1:
        # Otherwise an Inf may or may not meet a zero of the padding, or one between the strides
        # of a transposed convolution, and be NaN: algorithms differ, on every device.
        for got, want in zip((y, *grads), (exact, *exact_grads), strict=True):
            assert torch.equal(got.isfinite(), torch.from_numpy(np.isfinite(round16(want))))


@pytest.mark.parametrize("batch", [1, 32])
def test_large_convolution_keeps_the_bound(batch: int) -> None:
    # Large enough for algorithms with other error bounds (Winograd), were they ever chosen, and
    # for operands in scratch memory.
    generator = torch.manual_seed(0)
    operands = [
        torch.randn(shape, generator=generator).half()
        for shape in ((batch, 32, 24, 24), (16, 32, 3, 3), (16,))
    ]

    def apply(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.conv2d(x, weight, bias, padding=1)

    grad = torch.randn((batch, 16, 24, 24), generator=generator).half()
    with emulated():
        results = [apply(*operands), *_gradients(apply, operands, grad)]
    wide, sizes = ([f(x.double()) for x in (*operands, grad)] for f in (Tensor.double, Tensor.abs))
    exact = [apply(*wide[:3]), *_gradients(apply, wide[:3], wide[3])]
    size = [apply(*sizes[:3]), *_gradients(apply, sizes[:3], sizes[3])]
    terms = [289, 145, batch * 576, batch * 576]
    for got, want, magnitude, n in zip(results, exact, size, terms, strict=True):
        assert_rounded(got, want, magnitude, n)


# --- other gradients ----------------------------------------------------------------------------


@quick
@given(SIZES, SIZES, SIZES, st.sampled_from(["normal", "edges", "any finite"]), st.integers(0, 99))
def test_gradients_of_linear_round_once(m: int, k: int, n: int, values: str, seed: int) -> None:
    x, weight, grad = (
        operand(seed + i, values, "contiguous", *shape)
        for i, shape in enumerate([(m, k), (n, k), (m, n)])
    )
    with emulated():
        dx, dweight, dbias = _gradients(F.linear, [x, weight, torch.zeros(n).half()], grad)
    g, w, a = grad.double(), weight.double(), x.double()
    assert_rounded(dx, g @ w, g.abs() @ w.abs(), n)
    assert_rounded(dweight, g.T @ a, g.T.abs() @ a.abs(), m)
    assert_rounded(dbias, g.sum(0), g.abs().sum(0), m)


@quick
@given(st.sampled_from([1, 2, 7, 64, 300]), st.integers(-1, 1), st.integers(0, 99))
def test_softmax_and_its_gradient_round_once(n: int, dim: int, seed: int) -> None:
    x = operand(seed, "normal", "contiguous", 5, n) * 4
    grad = operand(seed + 1, "normal", "contiguous", 5, n)
    x.requires_grad_()
    with emulated():
        y = torch.softmax(x, dim)
        (dx,) = torch.autograd.grad(y, x, grad)
    wide, g, p = x.detach().double(), grad.double(), y.detach().double()
    exact = torch.softmax(wide, dim)
    # exp(x - max): the subtraction's error is that of the exponent; exp itself errs by 2 u.
    spread = wide.amax(dim, keepdim=True) - wide
    assert_rounded(y, exact, exact * (1 + spread / 8), n + 16)
    size = p * g.abs() + p * (p * g).abs().sum(dim, keepdim=True)
    assert_rounded(dx, p * (g - (p * g).sum(dim, keepdim=True)), size, n + 16)


@quick
@given(st.sampled_from(["none", "tanh"]), st.sampled_from([0, 1, 5, 300]), st.integers(0, 99))
def test_gelu_and_its_gradient_round_once(approximate: str, n: int, seed: int) -> None:
    x = operand(seed, "normal", "contiguous", 3, n) * 3
    grad = operand(seed + 1, "normal", "contiguous", 3, n)

    def gelu(x: Tensor) -> Tensor:
        return F.gelu(x, approximate=approximate)

    with emulated():
        y, (dx,) = gelu(x), _gradients(gelu, [x], grad)
    wide, g = x.double(), grad.double()
    # 1 + erf cancels on the left, so the error is that of numbers of the size of x and g.
    assert_rounded(y, gelu(wide), wide.abs(), 8)
    (exact,) = _gradients(gelu, [wide], g)
    assert_rounded(dx, exact, g.abs() * (1 + wide.abs() + wide.abs() ** 3), 8)


@quick
@given(
    st.sampled_from([1, 3, 16, 300]),
    st.sampled_from([None, torch.float16, torch.float32]),
    st.floats(-2, 2, width=16),
    st.integers(0, 99),
)
def test_layer_norm_and_its_gradients_round_once(
    n: int, affine: torch.dtype | None, shift: float, seed: int
) -> None:
    x = operand(seed, "normal", "contiguous", 6, n) + shift
    grad = operand(seed + 1, "normal", "contiguous", 6, n)
    parameters = [] if affine is None else [torch.linspace(-2, 2, n).to(affine) for _ in range(2)]

    def norm(x: Tensor, *parameters: Any) -> Tensor:
        return F.layer_norm(x, (n,), *parameters)

    with emulated():
        y, grads = norm(x, *parameters), _gradients(norm, [x, *parameters], grad)
    wide, g, p = x.double(), grad.double(), [t.double() for t in parameters]
    # Every term has been divided by the deviation; its relative error is that of a sum of n
    # squares, and the mean's error counts by the size of what was summed.
    rstd = (wide.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt()
    size = (wide.abs() + wide.abs().mean(-1, keepdim=True)) * rstd
    weight, bias = (p[0].abs(), p[1].abs()) if p else (torch.ones(n).double(), torch.zeros(n))
    terms = 2 * n + 32
    assert_rounded(y, norm(wide, *p), (size + size**2) * weight + bias, terms)
    exact = _gradients(norm, [wide, *p], g)
    gw = g.abs() * weight
    spread = 1 + size + size**2
    dx_size = rstd * spread * (gw + gw.mean(-1, keepdim=True) + (gw * size).mean(-1, keepdim=True))
    assert_rounded(grads[0], exact[0], dx_size * spread, terms)
    for got, want, factor in zip(grads[1:], exact[1:], (spread, torch.ones(())), strict=False):
        assert got.dtype is affine
        bound = (g.abs() * factor).sum(0)
        if affine is torch.float16:
            assert_rounded(got, want, bound, terms + 6)
        else:
            assert ((got.double() - want).abs() <= (terms + 6) * UNIT * bound).all()


@quick
@given(
    st.sampled_from([(1, 1, 1), (3, 5, 8), (17, 17, 16), (40, 33, 32)]),
    st.sampled_from(["none", "causal", "additive", "boolean"]),
    st.integers(0, 99),
)
def test_attention_and_its_gradients_round_once(
    sizes: tuple[int, int, int], masked: str, seed: int
) -> None:
    length, keys, width = sizes
    shapes = [(2, 2, length, width), (2, 2, keys, width), (2, 2, keys, width)]
    q, k, v = (operand(seed + i, "normal", "contiguous", *s) for i, s in enumerate(shapes))
    grad = operand(seed + 3, "normal", "contiguous", *shapes[0])
    visible = torch.ones(length, keys, dtype=torch.bool).tril()
    bias = torch.zeros(length, keys).half()
    options: dict[str, Any] = {}
    if masked == "causal":
        options["is_causal"] = True
    elif masked == "boolean":
        options["attn_mask"] = visible
    elif masked == "additive":
        bias = operand(seed + 4, "normal", "contiguous", length, keys)
        options["attn_mask"] = bias
    hidden = ~visible if masked in ("causal", "boolean") else torch.zeros_like(visible)
    leaves: list[Any] = [x.requires_grad_() for x in (q, k, v)]
    with emulated():
        y = F.scaled_dot_product_attention(*leaves, **options)
        dq, dk, dv = torch.autograd.grad(y, leaves, grad)

    scale = width**-0.5
    q64, k64, v64, g, out = (x.detach().double() for x in (q, k, v, grad, y))
    scores = (scale * (q64 @ k64.mT) + bias.double()).masked_fill(hidden, -INF)
    p = scores.softmax(-1)
    assert_rounded(y, p @ v64, p @ v64.abs() * (1 + _spread(q64, k64, scores)), 2 * keys + width)
    # Backward recomputes p, and takes the output as it was rounded.
    inner = (g * out).sum(-1, keepdim=True)
    ds = p * (g @ v64.mT - inner) * scale
    spread = 1 + _spread(q64, k64, scores)
    ds_size = p * (g.abs() @ v64.abs().mT + (g * out).abs().sum(-1, keepdim=True)) * scale * spread
    terms = 2 * (keys + length + width) + 16
    assert_rounded(dv, p.mT @ g, (p * spread).mT @ g.abs(), terms)
    assert_rounded(dq, ds @ k64, ds_size @ k64.abs(), terms)
    assert_rounded(dk, ds.mT @ q64, ds_size.mT @ q64.abs(), terms)


def _spread(q: Tensor, k: Tensor, scores: Tensor) -> Tensor:
    """How much larger than p's own the error of p = exp(score - max) is: by the scores' sizes."""
    size = q.shape[-1] ** -0.5 * (q.abs() @ k.abs().mT)
    finite = scores.masked_fill(scores.isinf(), 0.0)
    largest: Tensor = (size + finite.abs()).amax(-1, keepdim=True)
    return largest


# --- training -----------------------------------------------------------------------------------


def _model(kind: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(3)
    if kind == "mlp":
        x = torch.randn(256, 16)
        model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
        return model, x, (x[:, 0] * x[:, 1] > 0).long()
    x = torch.randn(32, 1, 8, 8)
    labels = (x.mean((1, 2, 3)) > 0).long()
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(128, 2)), x, labels


def _losses(kind: str, used: Arithmetic, steps: int = 30) -> Tensor:
    model, x, y = _model(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with used.autocast():
            loss = F.cross_entropy(model(x), y)
        (1024 * loss).backward()  # type: ignore[no-untyped-call]
        for p in model.parameters():
            assert p.grad is not None
            p.grad /= 1024
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_loss_curve_agrees_with_native_fp16(kind: str) -> None:
    with emulated() as used:
        curve = _losses(kind, used)
    with arithmetic("fp16", native=True) as used:
        native = _losses(kind, used)
    assert curve[-1] < 0.7 * curve[0]
    # 2^-11 is the rounding unit of fp16.
    assert ((curve - native).abs() <= 2.0**-11 * curve[0]).all()


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_same_bytes_every_time(kind: str) -> None:
    curves = []
    for _ in range(3):
        with emulated() as used:
            curves.append(_losses(kind, used, steps=8).numpy().tobytes())
    assert len(set(curves)) == 1


# --- what is emulated, and where ----------------------------------------------------------------


OPERATORS = ["mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward"]
OPERATORS += ["_softmax", "_softmax_backward_data", "gelu", "gelu_backward"]
OPERATORS += ["native_layer_norm", "native_layer_norm_backward"]
OPERATORS += [f"_scaled_dot_product_flash_attention_for_cpu{end}" for end in ("", "_backward")]


def _everything(dtype: torch.dtype) -> Tensor:
    """A forward and backward pass over every emulated operator, in `dtype`."""
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    x = leaf(2, 4, 8, 8)
    h = F.conv2d(x, leaf(8, 4, 3, 3), padding=1).flatten(2)  # (2, 8, 64)
    h = F.gelu(F.layer_norm(h, (64,)))
    h = F.linear(h, leaf(64, 64), leaf(64)) @ leaf(64, 64)
    h = torch.baddbmm(h, h.softmax(-1), leaf(2, 64, 64))
    q = h.view(2, 8, 4, 16).transpose(1, 2)
    h = F.scaled_dot_product_attention(q, q, q)
    h.float().square().sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return torch.cat([h.detach().flatten(), x.grad.flatten()])


def test_every_operator_computes_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.library.get_kernel
    calls: dict[str, set[torch.dtype]] = {}

    def recording(op: str, key: str) -> Any:
        kernel = real(op, key)

        class Recorded:
            @staticmethod
            def call_boxed(keys: Any, *args: Any, **kwargs: Any) -> Any:
                tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
                dtypes = calls.setdefault(op.removeprefix("aten::"), set())
                dtypes |= {x.dtype for x in tensors if x.is_floating_point()}
                return kernel.call_boxed(keys, *args, **kwargs)

        return Recorded

    monkeypatch.setattr(torch.library, "get_kernel", recording)
    emulation._kernels.cache_clear()
    try:
        with emulated():
            _everything(torch.float16)
    finally:
        emulation._kernels.cache_clear()
    assert calls.keys() == set(OPERATORS)
    assert set().union(*calls.values()) == {torch.float32}


def test_fp16_operands_give_the_rounded_fp32_result() -> None:
    a, b = (torch.randn(512, 768, generator=torch.manual_seed(i)).half() for i in (1, 2))
    x = torch.randn(16, 32, 24, 24, generator=torch.manual_seed(3)).half()
    functions: list[Callable[..., Tensor]] = [
        lambda a, b, x: a @ b.T,
        lambda a, b, x: a.T @ b,
        lambda a, b, x: F.linear(a, b, b[:, 0]),
        lambda a, b, x: F.conv2d(x, a[:8, :288].reshape(8, 32, 3, 3)),
        lambda a, b, x: F.conv2d(x.contiguous(memory_format=torch.channels_last), x[:4, :, 0:1]),
        lambda a, b, x: F.gelu(x),
        lambda a, b, x: F.layer_norm(x, (24,)),
        lambda a, b, x: torch.softmax(x, 1),
        lambda a, b, x: F.scaled_dot_product_attention(x, x, x),
    ]
    for i, function in enumerate(functions):
        want = function(a.float(), b.float(), x.float()).half()
        with emulated():
            got = [function(a, b, x) for _ in range(2)]
        assert torch.equal(got[0], want) and torch.equal(got[1], want), i
        assert got[0].stride() == want.stride()


def test_large_operands_do_not_mix() -> None:
    # All go through scratch memory if their layout allows, in sizes that grow and shrink; the
    # memory may be allocated under inference mode and must be usable after it.
    generator = torch.manual_seed(0)
    with emulated():
        for rows, inference in ((600, True), (900, False), (500, True), (1200, False)):
            with torch.inference_mode(inference):
                a, b = (torch.randn(rows, 1200, generator=generator).half() for _ in range(2))
                pairs = [(a, b.T), (a.T, b), (a, a.T)]
                pairs += [(a[:, ::2], b[:, 1::2].T), (a[:1].expand(rows, 1200), b.T)]
                pairs += [(a.view(-1).unfold(0, 1200, 600), b.T)]
                results = [x @ y for x, y in pairs]
            results += [x @ y for x, y in pairs]
            wants = [(x.float() @ y.float()).half() for x, y in pairs]
            for got, want in zip(results, wants * 2, strict=True):
                assert torch.equal(got, want)
        assert emulation._thread.scratch
    assert not emulation._thread.scratch


def _registrations() -> list[str]:
    return [torch._C._dispatch_dump(f"aten::{name}") for name in OPERATORS]


def test_outside_the_context_nothing_has_changed() -> None:
    registrations, before = _registrations(), _everything(torch.float16)
    with emulated():
        inside = _everything(torch.float16)
        assert _registrations() != registrations
        with emulated():
            assert torch.equal(_everything(torch.float16), inside)
        assert torch.equal(_everything(torch.float16), inside)
    assert _registrations() == registrations
    assert torch.equal(_everything(torch.float16), before)
    with pytest.raises(ZeroDivisionError), emulated(), emulated():
        raise ZeroDivisionError
    assert _registrations() == registrations
    assert not emulation._thread.emulating
    with emulated():
        assert torch.equal(_everything(torch.float16), inside)


def test_failed_registration_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    registrations = _registrations()
    real = torch.library.Library.impl

    def failing(library: Any, name: str, *args: Any, **options: Any) -> None:
        if name == "convolution":
            raise RuntimeError("out of luck")
        real(library, name, *args, **options)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(torch.library.Library, "impl", failing)
    with pytest.raises(RuntimeError, match="out of luck") as caught, emulated():
        pass
    assert caught.traceback  # which keeps the half-made registration's frame
    assert _registrations() == registrations
    assert not emulation._thread.emulating
    monkeypatch.undo()
    with emulated():
        assert emulation._thread.emulating
    assert _registrations() == registrations


@pytest.mark.parametrize("inner", ["fp32", "bf16", "native fp16"])
def test_the_innermost_context_decides(inner: str) -> None:
    precision, native = ("fp16", True) if inner == "native fp16" else (inner, None)
    a = torch.randn(256, 256, generator=torch.manual_seed(0)).half()
    plain = a @ a
    with emulated():
        rounded = a @ a
        with arithmetic(precision, "cpu", native=native):
            assert not emulation._thread.emulating
            assert torch.equal(a @ a, plain)
        assert torch.equal(a @ a, rounded)


def test_other_threads_are_left_alone() -> None:
    plain, seen = _everything(torch.float16), []
    with emulated():
        thread = threading.Thread(target=lambda: seen.append(_everything(torch.float16)))
        thread.start()
        thread.join()
    assert torch.equal(seen[0], plain)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fp32_and_bf16_are_not_emulated(precision: str) -> None:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    registrations, before = _registrations(), _everything(dtype)
    with emulated():
        # Nor do fp32 and bf16 operands change under emulation.
        assert torch.equal(_everything(dtype), before)
    with arithmetic(precision, "cpu") as used:
        assert _registrations() == registrations
        assert torch.equal(_everything(dtype), before)
        with used.autocast():
            assert torch.is_autocast_enabled("cpu") is (precision == "bf16")
            assert F.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype is dtype
    assert not used.emulated


def test_autocast_ends_before_backward() -> None:
    weight = torch.ones(3, 3, requires_grad=True)
    with emulated() as used:
        with used.autocast():
            y = F.linear(torch.ones(2, 3), weight)
        assert not torch.is_autocast_enabled("cpu")
        y.sum().backward()  # type: ignore[no-untyped-call]
    assert y.dtype is torch.float16
    assert weight.grad is not None and weight.grad.dtype is torch.float32


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.ones(2, 3).half() @ torch.ones(2, 3).half(),
        lambda: torch.ones(2, 3).half() @ torch.ones(3, 2),
        lambda: torch.addmm(torch.ones(2), torch.ones(2, 3).half(), torch.ones(3, 2).half()),
        lambda: F.conv2d(torch.ones(1, 2, 4, 4).half(), torch.ones(1, 3, 3, 3).half()),
        lambda: F.conv2d(torch.ones(1, 2, 4, 4).half(), torch.ones(1, 2, 3, 3)),
        lambda: torch.bmm(torch.ones(2, 3, 3).half(), torch.ones(3, 3, 3).half()),
    ],
)
def test_errors_stay_torchs_own(call: Callable[[], Tensor]) -> None:
    with pytest.raises(RuntimeError) as plain:
        call()
    with emulated(), pytest.raises(RuntimeError) as error:
        call()
    assert str(error.value) == str(plain.value)


@pytest.mark.parametrize(
    ("precision", "device", "native", "text"),
    [
        ("fp32", "cpu", None, "fp32"),
        ("fp32", "cuda", None, "fp32"),
        ("bf16", "cpu", None, "bf16 autocast, native"),
        ("bf16", "cuda:1", None, "bf16 autocast, native"),
        ("fp16", "cuda", None, "fp16 autocast, native"),
        ("fp16", torch.device("cuda", 0), False, "fp16 autocast, native"),
        ("fp16", "cpu", True, "fp16 autocast, native"),
        ("fp16", "cpu", False, "fp16 autocast, fp32 products rounded to fp16"),
    ],
)
def test_choice_and_its_text(
    precision: str, device: str | torch.device, native: bool | None, text: str
) -> None:
    used = choose(precision, device, native=native)
    assert str(used) == text
    assert used.emulated is ("rounded" in text)
    assert used.device_type == torch.device(device).type


@pytest.mark.parametrize("native", [True, False])
def test_the_processor_decides_for_fp16_on_a_cpu(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "native_fp16", lambda device: native)
    with arithmetic("fp16", "cpu") as used:
        assert used.emulated is not native


def test_native_fp16_agrees_with_the_processor() -> None:
    capabilities = torch.cpu.get_capabilities()
    assert native_fp16("cuda")
    if capabilities.get("architecture") == "x86_64":
        has_units = capabilities["avx512_fp16"] or capabilities["amx_fp16"]
        assert native_fp16("cpu") is has_units


def test_unknown_precision_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'fp8': expected one of fp32, bf16, fp16"):
        choose("fp8")
