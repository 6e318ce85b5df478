"""Plans and run specifications: canonical text, digests, names of arms and folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from halfscale import planner as plans
from halfscale.plan import CONTROLS, Plan, PolicyChoice, RunSpec, WorkloadPlan, canonical_json
from halfscale.planner import build_plan
from halfscale.policies import POLICIES
from halfscale.sources import PACKAGE
from halfscale.workload_plan import workload_defaults, workload_names

from .crafted import make_plan

scalers = st.builds(
    PolicyChoice.of,
    init_scale=st.floats(1e-30, 1e30),
    growth_factor=st.floats(1, 1e6, exclude_min=True),
    backoff_factor=st.floats(0, 1, exclude_min=True, exclude_max=True).filter(lambda x: x > 0),
    growth_interval=st.integers(1, 10**6),
)
numbers = st.floats(allow_nan=False, allow_infinity=False)
parameters = st.dictionaries(
    st.text(min_size=1, max_size=8),
    st.one_of(numbers, st.integers(-(2**62), 2**62), st.booleans(), st.text(max_size=8)),
    max_size=3,
)
names = st.from_regex(r"[a-z][a-z0-9-]{0,6}[a-z0-9]", fullmatch=True)
specs = st.builds(
    RunSpec,
    workload=names,
    parameters=parameters,
    steps=st.integers(2, 10**6),
    arm=names,
    precision=st.sampled_from(["fp32", "bf16", "fp16"]),
    policy=st.none() | scalers,
    seed=st.integers(0, 2**62),
    device=st.sampled_from(["cpu", "cuda"]),
    threads=st.integers(1, 64),
    source=st.text("0123456789abcdef", min_size=16, max_size=16),
)
built_plans = st.builds(
    Plan,
    device=st.sampled_from(["cpu", "cuda"]),
    threads=st.integers(1, 64),
    seeds=st.lists(st.integers(0, 2**62), min_size=1, max_size=4, unique=True).map(tuple),
    workloads=st.dictionaries(
        names,
        st.builds(WorkloadPlan, steps=st.integers(2, 999), parameters=parameters, source=names),
        min_size=1,
        max_size=2,
    ),
    configurations=st.dictionaries(names, scalers, min_size=1, max_size=3),
)


@given(spec=specs)
def test_a_specification_survives_its_canonical_text(spec: RunSpec) -> None:
    text = spec.canonical_json()
    again = RunSpec.model_validate_json(text)
    assert again == spec
    assert again.canonical_json() == text
    assert again.digest == spec.digest
    for name, value in spec.parameters.items():
        assert type(again.parameters[name]) is type(value)


@given(plan=built_plans)
def test_a_plan_survives_its_canonical_text(plan: Plan) -> None:
    again = Plan.model_validate_json(plan.canonical_json())
    assert again == plan
    assert again.canonical_json() == plan.canonical_json()
    assert [spec.digest for spec in again.runs()] == [spec.digest for spec in plan.runs()]


@given(spec=specs)
def test_canonical_text_is_one_line_of_strict_sorted_json(spec: RunSpec) -> None:
    text = spec.canonical_json()
    assert len(text.splitlines()) == 1
    assert json.dumps(json.loads(text), sort_keys=True, separators=(",", ":")) == text


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_canonical_text_has_no_nan_and_no_infinity(number: float) -> None:
    with pytest.raises(ValueError):
        canonical_json({"a": {"b": [number]}})


@given(one=specs, other=specs, field=st.sampled_from(sorted(RunSpec.model_fields)))
def test_any_field_that_differs_changes_the_digest(
    one: RunSpec, other: RunSpec, field: str
) -> None:
    assume(getattr(one, field) != getattr(other, field))
    assert one.model_copy(update={field: getattr(other, field)}).digest != one.digest


@given(one=scalers, other=scalers, field=st.sampled_from(sorted(POLICIES["torch"].parameters())))
@example(PolicyChoice.of(), PolicyChoice.of(growth_factor=2.0000000000000004), "growth_factor")
def test_any_scaler_parameter_that_differs_changes_the_digest(
    one: PolicyChoice, other: PolicyChoice, field: str
) -> None:
    assume(one.parameters[field] != other.parameters[field])
    changed = PolicyChoice.of(**{**one.parameters, field: other.parameters[field]})
    plan = make_plan()
    digests = {
        plan.model_copy(update={"configurations": {"a": block}}).run("binary", "a", 0).digest
        for block in (one, changed)
    }
    assert len(digests) == 2


def test_swapped_values_change_the_digest() -> None:
    plan = make_plan(
        {
            "a": {"init_scale": 4, "growth_factor": 2},
            "b": {"init_scale": 2, "growth_factor": 4},
        }
    )
    one, other = plan.run("binary", "a", 0), plan.run("binary", "b", 0)
    assert one.digest != other.digest
    assert one.model_copy(update={"arm": "b"}).digest != other.digest


def test_two_names_for_one_configuration_differ_in_name_only() -> None:
    plan = make_plan({"a": {"init_scale": 4}, "b": {"init_scale": 4.0}})
    one, other = plan.run("binary", "a", 3), plan.run("binary", "b", 3)
    assert one.digest != other.digest
    assert one.model_copy(update={"arm": "b"}) == other


def test_a_plan_runs_every_arm_of_every_workload_on_every_seed_once() -> None:
    plan = make_plan({"b": {}, "a": {}}, seeds=[4, 2], workloads={"digits": {}, "binary": {}})
    runs = list(plan.runs())
    assert plan.arms == ["a", "b", *CONTROLS]
    assert len(runs) == 2 * 5 * 2
    assert {(run.workload, run.arm, run.seed) for run in runs} == {
        (workload, arm, seed)
        for workload in ("binary", "digits")
        for arm in ("a", "b", *CONTROLS)
        for seed in (2, 4)
    }
    assert len({run.folder for run in runs}) == len({run.digest for run in runs}) == len(runs)
    assert all(run == plan.run(run.workload, run.arm, run.seed) for run in runs)
    assert runs[0].folder == Path("runs/binary/a/seed2")
    assert str(runs[0]) == "workload=binary configuration=a seed=2"


def test_controls_have_their_precision_and_no_scaler() -> None:
    plan = make_plan()
    arms = {arm: plan.run("binary", arm, 0) for arm in plan.arms}
    assert {arm: run.precision for arm, run in arms.items()} == {
        "default": "fp16",
        "fp32": "fp32",
        "bf16": "bf16",
        "fp16-unscaled": "fp16",
    }
    assert [arm for arm, run in arms.items() if run.is_control] == list(CONTROLS)
    assert [arm for arm, run in arms.items() if run.policy is None] == list(CONTROLS)


def test_a_run_that_the_plan_does_not_have_is_a_key_error() -> None:
    for workload, arm in (("digits", "default"), ("binary", "other")):
        with pytest.raises(KeyError):
            make_plan().run(workload, arm, 0)


def test_workload_parameters_are_laid_over_the_defaults_of_its_code() -> None:
    plan = make_plan(workloads={"binary": {"steps": 7, "hidden": 3.0, "learning_rate": 1}})
    block = plan.workloads["binary"]
    assert block.steps == 7
    assert block.parameters == {"learning_rate": 1.0, "samples": 2048, "hidden": 3}
    assert {name: type(value) for name, value in block.parameters.items()} == {
        "learning_rate": float,
        "samples": int,
        "hidden": int,
    }


def test_parameters_read_without_torch_are_those_that_the_code_has() -> None:
    import inspect
    from importlib import import_module

    assert workload_names() == [
        *("binary", "bursts", "deep_tanh", "digits", "segmentation", "small_signal", "text")
    ]
    for name in workload_names():
        build = import_module(f"halfscale.workloads.{name}").build
        keywords = {
            parameter.name: parameter.default
            for parameter in inspect.signature(build).parameters.values()
            if parameter.kind is parameter.KEYWORD_ONLY
        }
        assert workload_defaults(PACKAGE / "workloads" / f"{name}.py") == keywords


@pytest.mark.parametrize(
    ("wanted", "gpus", "device"),
    [("auto", 0, "cpu"), ("auto", 2, "cuda"), ("cpu", 2, "cpu"), ("cuda", 1, "cuda")],
)
def test_the_device_is_resolved_in_the_plan(
    monkeypatch: pytest.MonkeyPatch, wanted: str, gpus: int, device: str
) -> None:
    monkeypatch.setattr(plans, "count_gpus", lambda: gpus)
    config: dict[str, Any] = {"configurations": {"a": None}, "device": wanted}
    assert build_plan(config).device == device


@given(parameters=scalers, device=st.sampled_from(["cpu", "cuda"]))
@example(PolicyChoice.of(), "cpu")
@example(PolicyChoice.of(init_scale=2.0**24, growth_factor=1.5, backoff_factor=0.25), "cuda")
def test_the_line_to_paste_builds_a_scaler_with_these_parameters(
    parameters: PolicyChoice, device: str
) -> None:
    built: dict[str, object] = {}

    class Torch:
        class amp:
            @staticmethod
            def GradScaler(device: str, **keywords: object) -> None:
                built.update(keywords, device=device)

    exec(parameters.constructor(device), {"torch": Torch})
    assert built == {**parameters.parameters, "device": device}


def test_the_line_to_paste_shows_powers_of_two_as_such() -> None:
    text = PolicyChoice.of(init_scale=2**24).constructor("cuda")
    assert "init_scale=2.0**24," in text
    assert '"cuda"' in text


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "torch"])
def test_the_lines_to_paste_build_any_other_policy(policy: str) -> None:
    choice = PolicyChoice.of(policy)
    built: dict[str, object] = {}
    exec(choice.constructor("cpu"), built)
    assert built["scaler"].policy == choice.make()  # type: ignore[attr-defined]


def test_another_rule_is_farther_from_the_default_than_any_parameter() -> None:
    far = PolicyChoice.of(init_scale=1.0, growth_factor=64.0, growth_interval=1)
    assert PolicyChoice.of().distance < far.distance
    assert far.distance < PolicyChoice.of("megatron").distance
    # logmax has one of PyTorch's parameters, continuous three.
    assert PolicyChoice.of("continuous").distance < PolicyChoice.of("openseq2seq-logmax").distance
