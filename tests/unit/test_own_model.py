"""A user's own model: what it may return, and how each mistake ends with what to change."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from halfscale import train as training
from halfscale.entry import EntryError
from halfscale.plan import RunSpec
from halfscale.planner import build_plan
from halfscale.records import RunRecord, read_run
from halfscale.tables import collect_runs, summarise

pytestmark = pytest.mark.usefixtures("torch_settings")

FILE = """\
import torch
from torch import nn


def build(seed, device, *, size=3):
    model = {model}
    optimizer = {optimizer}
    batches = {batches}

    def loss(model, batch):
        {loss}

    def evaluate(model):
        {evaluate}

    return {returned}
"""
PARTS = {
    "model": "nn.Linear(size, 1)",
    "optimizer": "torch.optim.SGD(model.parameters(), lr=0.1)",
    "batches": "[torch.randn(4, size) for _ in range(3)]",
    "loss": "return model(batch).float().pow(2).mean()",
    "evaluate": "return 1.0",
    "returned": "dict(model=model, optimizer=optimizer, batches=batches, loss=loss)",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory; what a training puts on ``sys.path`` is taken off again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def write(**parts: str) -> None:
    Path("mine.py").write_text(FILE.format(**PARTS | parts), encoding="utf-8")


def spec_of(arm: str = "a", steps: int = 6, **parameters: object) -> RunSpec:
    block = {"entry": "mine.py:build", "steps": steps, **parameters}
    config = {"configurations": {"a": {"init_scale": 256}}, "workloads": {"mine": block}}
    return build_plan(config | {"seeds": [0], "device": "cpu"}).run("mine", arm, 0)


def run(spec: RunSpec | None = None, **parts: str) -> tuple[RunRecord, pa.Table]:
    if parts or not Path("mine.py").exists():
        write(**parts)
    spec = spec or spec_of()
    training.train(spec, Path("results") / spec.folder, lambda line: None)
    return read_run(Path("results"), spec)


def failure(outcome: str = "failed", **parts: str) -> str:
    """The text of a run that must end with an outcome."""
    record, _ = run(**parts)
    assert record.outcome == outcome, record
    assert record.error
    return record.error


def line_of(text: str) -> int:
    lines = Path("mine.py").read_text().splitlines()
    (number,) = [index for index, line in enumerate(lines, 1) if text in line]
    return number


# What build may return.

RETURNED = {
    "a dict": PARTS["returned"],
    "a tuple": "model, optimizer, batches, loss",
    "a named tuple": "Made(model, optimizer, batches, loss)",
    "a workload": "halfscale.workloads.Workload(model, optimizer, iter(batches * 9), loss)",
    "a workload with a list": "halfscale.workloads.Workload(model, optimizer, batches, loss)",
}


@pytest.mark.parametrize("kind", RETURNED)
def test_what_build_returns_trains(kind: str) -> None:
    write(returned=RETURNED[kind])
    head = "import collections\nimport halfscale.workloads\nMade = collections.namedtuple("
    head += "'Made', 'model optimizer batches loss')\n"
    Path("mine.py").write_text(head + Path("mine.py").read_text())
    record, trace = run()
    assert (record.outcome, record.error) == ("ok", None)
    # Three batches, gone through twice.
    assert len(trace) == 6
    assert trace["loss"][3].as_py() < trace["loss"][0].as_py()
    assert record.evaluation is None


BATCHES = {
    "a list": "[torch.ones(4, size)]",
    "a tensor": "torch.ones(2, 4, size)",
    "a data loader": "torch.utils.data.DataLoader(torch.ones(8, size), 4, shuffle=True)",
    "an endless generator": "__import__('itertools').repeat(torch.ones(4, size))",
}


@pytest.mark.parametrize("kind", BATCHES)
def test_batches_may_be_anything_that_goes_on(kind: str) -> None:
    assert run(batches=BATCHES[kind])[0].outcome == "ok"


def test_batches_that_cannot_start_again_end_the_run() -> None:
    record, trace = run(batches="(torch.ones(4, size) for _ in range(4))")
    assert (record.outcome, len(trace)) == ("failed", 4)
    assert record.error == (
        "batches ended after 4 of 6 steps; return a list or a DataLoader, which can start again, "
        "or a generator that never ends (while True:)"
    )


def test_no_batches_at_all_end_the_run() -> None:
    assert failure(batches="[]").startswith("batches ended after 0 of 6 steps; ")


def test_options_are_used() -> None:
    schedule = "scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)"
    returned = PARTS["returned"][:-1] + f", clip_norm=1e-6, accumulate=3, {schedule})"
    record, trace = run(returned=returned, batches="[torch.ones(4, size)]")
    assert record.outcome == "ok"
    losses = trace["loss"].to_pylist()
    assert losses[-1] == pytest.approx(losses[0], rel=1e-4), "clipped, it does not move"


def test_parameters_and_relative_siblings_reach_build() -> None:
    Path("helper_absolute.py").write_text("def width(size):\n    return size\n")
    Path("helper_relative.py").write_text("import helper_absolute\n")
    model = "nn.Linear(helper_relative.helper_absolute.width(size), 1)"
    write(model=model)
    Path("mine.py").write_text("from . import helper_relative\n" + Path("mine.py").read_text())
    assert run(spec_of(size=5))[0].outcome == "ok"


def test_the_seed_decides_what_any_generator_draws() -> None:
    batches = "[torch.tensor(np.random.rand(4, size), dtype=torch.float) * random.random()]"
    write(batches=batches)
    Path("mine.py").write_text("import random, numpy as np\n" + Path("mine.py").read_text())
    losses = []
    for folder in ("one", "other"):
        training.train(spec_of(), Path(folder) / spec_of().folder, lambda line: None)
        torch.rand(3)
        losses.append(read_run(Path(folder), spec_of())[1]["loss"].to_pylist())
    assert losses[0] == losses[1]


def test_what_the_file_sets_does_not_stay() -> None:
    write()
    Path("mine.py").write_text(
        "import torch\ntorch.set_num_threads(2)\n" + Path("mine.py").read_text()
    )
    assert run()[0].outcome == "ok"
    assert torch.get_num_threads() == 1


# Evaluation.

EVALUATED = PARTS["returned"][:-1] + ", evaluate=evaluate)"


def evaluated(body: str, arm: str = "a") -> RunRecord:
    write(
        evaluate=body, returned=EVALUATED, model="nn.Sequential(nn.Linear(size, 1), nn.Dropout())"
    )
    return run(spec_of(arm))[0]


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ("return 0.25", 0.25),
        ("return torch.tensor([0.5])", 0.5),
        ("return 3", 3.0),
        ("return float('nan')", None),
        ("return torch.tensor(float('inf'))", None),
        ("return float(not model.training and not model[1].training)", 1.0),
        ("return float(not torch.is_grad_enabled())", 1.0),
        ("return float(model(torch.ones(1, size)).dtype == torch.float16)", 1.0),
    ],
)
def test_a_model_is_evaluated_once_after_training(body: str, value: float | None) -> None:
    record = evaluated(body)
    assert (record.outcome, record.evaluation) == ("ok", value)


def test_each_arm_is_evaluated_in_its_own_arithmetic() -> None:
    body = "return float(str(model(torch.ones(1, size)).dtype)[-2:])"
    assert [evaluated(body, arm).evaluation for arm in ("a", "fp32", "bf16")] == [16.0, 32.0, 16.0]


def test_the_training_mode_is_put_back() -> None:
    body = "model[1].register_module('seen', nn.Identity()); return 1.0"
    write(
        evaluate=body, returned=EVALUATED, model="nn.Sequential(nn.Linear(size, 1), nn.Dropout())"
    )
    spec = spec_of()
    with training.arithmetic("fp16", "cpu") as used:
        started = training.start_training(spec, training.make_scaler(spec), used)
        started.workload.model[1].eval()
        training.evaluate_model(started)
    model = started.workload.model
    assert [model.training, model[0].training, model[1].training] == [True, True, False]


def test_an_evaluation_that_fails_is_an_outcome() -> None:
    record = evaluated("raise ValueError('bad')")
    assert record.error == f"evaluate: ValueError: bad (mine.py, line {line_of('bad')})"
    record = evaluated("return 'good'")
    assert record.error == "evaluate returned a str; return one number"
    record = evaluated("return torch.ones(2)")
    assert (record.outcome, record.error) == (
        "failed",
        "evaluate returned a Tensor; return one number",
    )


def test_the_evaluation_is_a_column_and_its_median_another() -> None:
    write(evaluate="return seed / 4", returned=EVALUATED)
    block = {"entry": "mine.py:build", "steps": 3}
    config = {"configurations": {"a": {}}, "workloads": {"mine": block, "binary": {"steps": 3}}}
    plan = build_plan(config | {"seeds": [0, 1, 3], "device": "cpu"})
    for spec in plan.runs():
        training.train(spec, Path("results") / spec.folder, lambda line: None)
    runs, _ = collect_runs(plan, Path("results"))
    own = runs[(runs["workload"] == "mine") & (runs["configuration"] == "a")]
    assert own["evaluation"].tolist() == [0.0, 0.25, 0.75]
    medians = summarise(runs).set_index(["workload", "configuration"])["evaluation"]
    assert medians["mine", "a"] == 0.25
    assert math.isnan(medians["binary", "a"])


# Mistakes in what build returns.

WRONG = {
    "None": "build returned nothing; return {",
    "model": "build returned a Linear; return {",
    "model, optimizer": "build returned a tuple of 2 (Linear, SGD); return {",
    "dict(model=model, optimizer=optimizer, batches=batches)": "build returned no loss; return {",
    "dict(model=model, loss=loss)": "build returned no optimizer and no batches; return {",
    PARTS["returned"][:-1] + ", clipnorm=1)": "build returned an unknown field 'clipnorm'; did you "
    "mean 'clip_norm'?",
    PARTS["returned"][:-1] + ", zzz=1)": "build returned an unknown field 'zzz'; return {",
    "optimizer, model, batches, loss": "model is a SGD; return a torch.nn.Module",
    "model, 0.1, batches, loss": "optimizer is a float; return a torch.optim.Optimizer",
    "model, optimizer, 5, loss": "batches is an int; return a list, a DataLoader or a generator",
    "model, optimizer, {}, loss": "batches is a dict; return a list, a DataLoader or a generator",
    "model, optimizer, batches, 1.0": "loss is a float; return a function loss(model, batch)",
    PARTS["returned"][:-1] + ", clip_norm='1')": "clip_norm is a str; return a number above 0",
    PARTS["returned"][:-1] + ", clip_norm=0)": "clip_norm is an int; return a number above 0",
    PARTS["returned"][:-1] + ", accumulate=0.5)": "accumulate is a float; return a whole number",
    PARTS["returned"][:-1] + ", scheduler=1)": "scheduler is an int; return a torch.optim.lr_",
    PARTS["returned"][:-1]
    + ", evaluate=1)": "evaluate is an int; return a function evaluate(model)",
}


@pytest.mark.parametrize("returned", WRONG)
def test_a_wrong_return_says_what_came_and_what_to_return(returned: str) -> None:
    text = failure(returned=returned)
    assert text.startswith(f"building the workload: {WRONG[returned]}"), text
    if text.endswith("as you need"):
        assert '{"model": model, "optimizer": optimizer, "batches": batches, "loss": loss}' in text


def test_a_model_without_parameters() -> None:
    optimizer = "torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)"
    assert failure(model="nn.ReLU()", optimizer=optimizer) == (
        "building the workload: the model has no parameters; return a model that has something to "
        "train"
    )


def test_a_model_whose_parameters_are_all_frozen() -> None:
    assert failure(model="nn.Linear(size, 1).requires_grad_(False)") == (
        "building the workload: no parameter of the model requires a gradient; unfreeze some"
    )


def test_a_model_on_another_device() -> None:
    assert failure(model="nn.Linear(size, 1, device='meta')") == (
        "building the workload: the parameter weight is on meta, but the run is on cpu; use the "
        "device that build is given: model.to(device)"
    )


def test_an_optimizer_of_another_model() -> None:
    assert failure(optimizer="torch.optim.SGD(nn.Linear(size, 1).parameters(), lr=0.1)") == (
        "building the workload: the optimizer holds none of the model's parameters; build it from "
        "the model that is returned: optimizer(model.parameters(), ...)"
    )


@pytest.mark.parametrize("kind", ["half", "bfloat16"])
def test_parameters_in_half_precision(kind: str) -> None:
    text = failure(model=f"nn.Sequential(nn.Linear(size, 4), nn.Linear(4, 1).{kind}())")
    dtype = {"half": "torch.float16", "bfloat16": "torch.bfloat16"}[kind]
    assert text == (
        f"building the workload: the parameter 1.weight is in half precision ({dtype}); keep the "
        "parameters in float32, without .half(): autocast lowers what can be lowered"
    )


def test_frozen_parameters_may_be_in_half_precision() -> None:
    model = "nn.Sequential(nn.Linear(size, 4).half().requires_grad_(False), nn.Linear(4, 1))"
    assert run(model=model)[0].outcome == "ok"


# Mistakes in its code.


def test_an_error_while_building_names_the_line() -> None:
    text = failure(model="nn.Linear(size, one)")
    assert text == (
        "building the workload: NameError: name 'one' is not defined "
        f"(mine.py, line {line_of('one')})"
    )


def test_an_error_while_the_file_is_run_names_the_line() -> None:
    write()
    Path("mine.py").write_text("import no_such_module_here\n" + Path("mine.py").read_text())
    assert run()[0].error == (
        "building the workload: ModuleNotFoundError: No module named 'no_such_module_here' "
        "(mine.py, line 1)"
    )


def test_an_error_in_a_sibling_names_the_sibling() -> None:
    Path("helper_broken.py").write_text("\n\nx = 1 / 0\n")
    write(model="__import__('helper_broken')")
    assert str(run()[0].error).endswith(
        "ZeroDivisionError: division by zero (helper_broken.py, line 3)"
    )


def test_a_sibling_that_is_not_python_is_named_once() -> None:
    Path("helper_syntax.py").write_text("def (\n")
    write(model="__import__('helper_syntax')")
    text = str(run()[0].error)
    assert re.fullmatch(
        r"building the workload: SyntaxError: .*\(helper_syntax\.py, line 1\)", text
    )
    assert text.count("line") == 1


def test_an_error_in_a_step_names_the_innermost_line_of_the_users_code() -> None:
    # Raised inside torch: the line is the user's, not torch's.
    record, _ = run(loss="return model(batch[:, :2]).mean()")
    assert record.outcome == "failed"
    assert re.match(r"step 0: RuntimeError: .*shapes", record.error or "")
    assert (record.error or "").endswith(f"(mine.py, line {line_of('batch[:, :2]')})")
    batches = "iter([torch.ones(4, size)] * 3 + [None])"
    text = failure(batches=batches, loss="return model(batch).mean() if len(batch) else 0")
    assert text == (
        "step 3: TypeError: object of type 'NoneType' has no len() "
        f"(mine.py, line {line_of('len(batch)')})"
    )


def test_a_script_that_exits_is_told_how_not_to() -> None:
    write()
    Path("mine.py").write_text("import sys\nsys.exit(2)\n" + Path("mine.py").read_text())
    assert failure() == (
        "building the workload: it called sys.exit(2) (mine.py, line 2); put what only a script "
        'does under: if __name__ == "__main__":'
    )


LOSSES = {
    "return model(batch).mean().item()": "a float; return the tensor itself, without .item()",
    "model(batch).mean()": "a NoneType; return the tensor itself, without .item()",
    "return model(batch)": "the shape [4, 1]; return one number, such as its .mean()",
    "return model(batch).mean().long()": "a tensor of torch.int64; return one of floating point",
    "return model(batch).mean().detach()": "a tensor without a gradient; compute it from what the "
    "model gives, without .detach() or torch.no_grad()",
}


@pytest.mark.parametrize("body", LOSSES)
def test_a_loss_that_no_backward_pass_can_begin_with(body: str) -> None:
    assert failure(loss=body) == f"step 0: loss returned {LOSSES[body]}"


def test_no_gradients_at_all() -> None:
    text = failure(loss="return torch.ones((), requires_grad=True) * 2")
    assert text == "no parameter that the optimizer trains received a gradient"


def test_memory_that_runs_out() -> None:
    text = failure("out-of-memory", loss="return model(torch.ones(2**50, size)).mean()")
    assert text.startswith("step 0: ")


# Data that is not finite.


@pytest.mark.parametrize(
    ("value", "kind"), [("float('nan')", "NaN"), ("float('inf')", "Inf"), ("-float('inf')", "Inf")]
)
@pytest.mark.parametrize("nested", ["bad", "{'x': [bad]}"])
def test_data_that_is_not_finite_is_no_divergence(value: str, kind: str, nested: str) -> None:
    good = nested.replace("bad", "torch.ones(4, size)")
    bad = nested.replace("bad", f"torch.full((4, size), {value})")
    inputs = "batch" if nested == "bad" else "batch['x'][0]"
    text = failure(
        batches=f"[{good}, {good}, {bad}]", loss=f"return model({inputs}).float().pow(2).mean()"
    )
    assert text == f"the batch of step 2 holds {kind}; clean the data"


def test_bad_data_in_the_first_batch() -> None:
    text = failure(batches="[torch.full((4, size), float('nan'))]")
    assert text == "the batch of step 0 holds NaN; clean the data"


def test_a_mask_of_infinities_is_not_blamed_for_a_divergence() -> None:
    record, _ = run(
        batches="[(torch.ones(4, size), torch.full((4, 1), -float('inf')))]",
        loss="return (model(batch[0]).float() - batch[1].exp()).pow(2).mean()",
        optimizer="torch.optim.SGD(model.parameters(), lr=1e8)",
    )
    assert record.outcome == "diverged"
    assert "the loss became" in (record.error or "")


# An edit while the workflow runs.


def test_a_run_is_not_recorded_under_code_that_did_not_compute_it() -> None:
    write()
    spec = spec_of()
    write(loss="return model(batch).float().abs().mean()")
    with pytest.raises(RuntimeError, match="was edited after this run was planned"):
        run(spec)
    Path("mine.py").unlink()
    with pytest.raises(EntryError, match="no such file"):
        training.train(spec, Path("results") / spec.folder, lambda line: None)
    assert not (Path("results") / spec.folder / "run.json").exists()
