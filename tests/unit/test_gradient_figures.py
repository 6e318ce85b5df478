"""The figures of a step are those of torch's own norms, to the last bit, from one transfer."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from halfscale.scaling.gradients import figures, largest_magnitude

SHAPES = [(7, 5), (1,), (), (300, 41), (16, 3, 3, 3)]


def dense(seed: int = 0, *special: float, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator, dtype=dtype) * 1e-3 for shape in SHAPES]
    for position, value in enumerate(special):
        tensors[3 * position % len(tensors)].view(-1)[-1] = value
    return tensors


CASES = {
    "finite": dense(1),
    "the largest is negative": dense(2, -3.0),
    "zero": [torch.zeros(3), -torch.zeros(2, 2)],
    "inf": dense(3, math.inf),
    "-inf": dense(4, -math.inf),
    "nan": dense(5, math.nan),
    "nan and inf": dense(6, math.nan, -math.inf),
    "inf and nan": dense(7, math.inf, math.nan),
    "a norm that overflows": dense(8, 3e38, -3e38),
    "fp64": dense(9, 1e200, dtype=torch.float64),
    "fp32 and fp64": [*dense(10), *dense(11, dtype=torch.float64)],
    "strided": [torch.randn(8, 6, generator=torch.manual_seed(0)).t()[::2]],
}


def same(actual: float, expected: float) -> bool:
    return actual == expected or (math.isnan(actual) and math.isnan(expected))


@pytest.mark.parametrize("gradients", CASES.values(), ids=CASES)
def test_figures_are_torchs_own_norms(gradients: list[Tensor]) -> None:
    loss, norm, largest = figures([torch.tensor(0.1)], gradients)
    assert loss == torch.tensor(0.1).item()
    assert same(norm, torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))).item())
    expected = torch.stack(torch._foreach_norm(gradients, math.inf)).amax().item()
    assert same(largest, expected)
    one = largest_magnitude([*gradients, torch.zeros(0)])
    assert one.shape == (1,)
    as_fp32 = torch.tensor(expected).item()
    assert one.item() == (as_fp32 if math.isfinite(as_fp32) else math.inf)


def test_losses_of_micro_batches_are_summed() -> None:
    losses = [torch.tensor(value) for value in (0.1, 0.2, 0.3)]
    assert figures(losses, dense())[0] == torch.stack(losses).sum().item()


def test_duplicates_of_a_sparse_gradient_are_summed() -> None:
    index = torch.tensor([[2, 0, 2]])
    sparse = torch.sparse_coo_tensor(
        index, torch.tensor([[1.0, -2.0], [3.0, 0.5], [1.5, -2.5]]), (4, 2), check_invariants=True
    )
    other = dense(1)
    assert figures([torch.zeros(())], [sparse, *other])[1:] == pytest.approx(
        figures([torch.zeros(())], [sparse.to_dense(), *other])[1:]
    )
    assert largest_magnitude([sparse.coalesce().values()]).item() == 4.5
    empty = torch.sparse_coo_tensor(index[:, :0], torch.zeros(0, 2), (4, 2), check_invariants=True)
    assert figures([torch.zeros(())], [empty]) == (0.0, 0.0, 0.0)


def test_the_device_is_asked_once() -> None:
    asked: list[str] = []

    class Asked(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            name = getattr(func, "__name__", "")
            if name in {"item", "tolist", "cpu", "numpy", "__bool__", "__float__"}:
                asked.append(name)
            return func(*args, **(kwargs or {}))

    with Asked():
        figures([torch.ones(()), torch.ones(())], dense())
    assert asked == ["tolist"]
