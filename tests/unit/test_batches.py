"""Whether a batch repeats is told by what is in it, not by where it lies."""

from __future__ import annotations

import pyarrow as pa
import pytest
import torch

from halfscale.batches import BatchComparer
from halfscale.probe import record_probe
from halfscale.records import PROBE_SCHEMA
from halfscale.replay import Probe

from .crafted import make_plan


def repeats(*steps: object) -> list[bool]:
    """What is said of each step; a list holds the batches of one step."""
    comparer, said = BatchComparer(), []
    for step in steps:
        for batch in step if isinstance(step, list) else [step]:
            comparer.add(batch)
        said.append(comparer.take())
    return said


def test_equal_batches_repeat_wherever_they_lie() -> None:
    one = torch.arange(12.0).reshape(3, 4)
    assert repeats(one, one, one.clone(), one.t().contiguous().t()) == [False, True, True, True]
    nested = {"inputs": (one, one[0]), "weight": 0.5, "name": "a", "none": None}
    assert repeats(nested, {**nested, "inputs": (one.clone(), one[0])}) == [False, True]


def test_a_buffer_that_is_filled_anew_does_not_repeat() -> None:
    comparer, buffer = BatchComparer(), torch.zeros(4)
    said = []
    for step in range(3):
        buffer[0] = step // 2
        comparer.add(buffer)
        said.append(comparer.take())
    assert said == [False, True, False]


def test_what_differs_in_anything_does_not_repeat() -> None:
    one = torch.arange(12.0)
    for other in (
        one.flip(0),
        one.reshape(3, 4),
        one.double(),
        one.int(),
        (one,),
        (one, one),
        {"x": one},
        (one, 1),
        (one, "1"),
        [one, one],
    ):
        assert repeats(one, other) == [False, False]
    assert repeats({"a": one}, {"b": one}) == [False, False]


def test_several_batches_of_a_step_count_together() -> None:
    one, two = torch.zeros(2), torch.ones(2)
    assert repeats([one, two], [one, two], [two, one], [two]) == [False, True, False, False]


def test_what_cannot_be_told_is_taken_to_differ() -> None:
    one = torch.eye(3)
    assert repeats(one.to_sparse(), one.to_sparse()) == [False, False]
    assert repeats((one, object), (one, object)) == [False, False]
    assert repeats((one, object), one, one) == [False, False, True]


def test_any_kind_of_tensor_can_be_told() -> None:
    for tensor in (
        torch.ones(2, 3, dtype=torch.bfloat16),
        torch.tensor(3),
        torch.zeros(0, 4),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([True, False]),
        torch.ones(2, requires_grad=True),
    ):
        assert repeats(tensor, tensor.detach().clone()) == [False, True]


@pytest.mark.usefixtures("torch_settings")
@pytest.mark.parametrize(("workload", "same"), [("binary", True), ("digits", False)])
def test_a_probe_knows_whether_its_workload_repeats_its_batch(workload: str, same: bool) -> None:
    plan = make_plan(workloads={workload: {"steps": 3}})
    columns, _ = record_probe(plan.probe(workload, 0), lambda line: None)
    assert columns["batch_repeats"] == [False, same, same]
    assert Probe.of(pa.table(columns, schema=PROBE_SCHEMA)).same_batch == same
