"""Trainings in emulated fp16 agree with torch's own fp16 on a CPU, on every workload.

How far apart may they be? Both round every product to fp16 once, from sums in fp32 that differ in
their order only; a result differs by a unit in the last place where the two sums lie on two sides
of a rounding boundary, and not at all elsewhere. With u = 2^-11, fp16's rounding unit, a product is
thus off by less than u in the mean. Roundings of different products are independent, so over a path
of D products they add up to √D u (Higham and Mary, "A New Approach to Probabilistic Rounding Error
Analysis", 2019).

- Forward, the loss L of a step is off by √D u L.
- Backward, the gradients are products over the path forth and back: off by √(2D) u, for which we
  take the upper bound 2 √D u. The weights are so too, relative to their way, and the loss has
  fallen by the gradient times that way: it is off by 2 √D u (L0 − L).

Therefore |L − L'| ≤ √D u (L + 2 (L0 − L)) at every step, to first order.

The weights' own yardstick is their distance to the fp32 training: two independent roundings of it
would be √2 times as far from each other as from it, two that are nearly always the same less than
once. That holds for all but the biases of attention's keys: softmax takes no notice of them, their
exact gradient is zero, and Adam makes full steps in the direction of what rounding leaves of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from itertools import islice

import pytest
import torch
from torch import Tensor

from halfscale.policies import make_policy
from halfscale.precision import arithmetic
from halfscale.scaling import LossScaler
from halfscale.workload_plan import workload_names
from halfscale.workloads import Workload, build_workload

UNIT = 2.0**-11
SEED = 1

# Steps, products from input to loss, and a scale that does not overflow. A layer of the transformer
# has six products: queries with keys and values in one, two of attention, its output and two more.
CASES = {
    "binary": (60, 2, 2.0**14),
    "bursts": (60, 3, 2.0**6),  # one burst
    "deep_tanh": (40, 25, 2.0**6),
    "digits": (50, 3, 2.0**14),
    "segmentation": (10, 4, 2.0**14),
    "small_signal": (80, 4, 2.0**14),
    "text": (20, 2 * 6 + 1, 2.0**14),
}
each_workload = pytest.mark.parametrize("name", CASES)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def trained(name: str, precision: str, native: bool) -> tuple[Workload, Tensor]:
    """A workload after its steps, and the losses in double precision."""
    steps, _, scale = CASES[name]
    workload = build_workload(name, SEED, "cpu", {})
    scaler = LossScaler(make_policy("torch", init_scale=scale, growth_interval=10**9))
    losses = []
    with arithmetic(precision, "cpu", native=native) as used:
        for batch in islice(workload.batches, steps):
            workload.optimizer.zero_grad()
            with used.autocast():
                loss = workload.loss(workload.model, batch)
            scaler.scale(loss).backward()
            scaler.unscale_(workload.optimizer)
            if workload.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(workload.model.parameters(), workload.clip_norm)
            assert scaler.step(workload.optimizer), "the example must not overflow"
            scaler.update()
            if workload.scheduler is not None:
                workload.scheduler.step()
            losses.append(loss.item())
    return workload, torch.tensor(losses, dtype=torch.float64)


def weights(name: str, precision: str, native: bool) -> Tensor:
    """All parameters but the biases of attention's keys, in one vector."""
    kept = []
    for parameter, values in trained(name, precision, native)[0].model.named_parameters():
        parts = values.detach().double().flatten().chunk(3)
        kept += [parts[0], parts[2]] if parameter.endswith("in_proj_bias") else parts
    return torch.cat(kept)


def test_every_workload_is_compared() -> None:
    assert sorted(CASES) == sorted(workload_names())


@each_workload
def test_the_losses_agree_to_fp16_rounding_at_every_step(name: str) -> None:
    _, products, _ = CASES[name]
    (_, emulated), (_, native) = (trained(name, "fp16", native) for native in (False, True))
    assert native[-1] < native[0], "the example must learn"
    fallen = (native[0] - native).clamp(min=0.0)
    bound = math.sqrt(products) * UNIT * (native + 2 * fallen)
    excess = (emulated - native).abs() / bound
    assert excess.max() <= 1.0, f"{excess.max():.2f} of the bound in step {int(excess.argmax())}"


@each_workload
def test_the_weights_are_no_farther_from_each_other_than_from_fp32(name: str) -> None:
    emulated, native = (weights(name, "fp16", native) for native in (False, True))
    rounding = float((native - weights(name, "fp32", False)).norm())
    assert rounding > 0
    assert float((emulated - native).norm()) < rounding


def test_the_biases_of_keys_have_no_gradient_but_rounding() -> None:
    """Why they are left out: what backward gives them is nothing beside the other biases."""
    workload, _ = trained("text", "fp32", False)
    for parameter, values in workload.model.named_parameters():
        if parameter.endswith("in_proj_bias"):
            assert values.grad is not None
            queries, keys, _ = (part.norm() for part in values.grad.chunk(3))
            assert keys < 1e-4 * queries
