"""The settings for other tools: what they say, what the tools make of it, what is admitted."""

import argparse
import ast
import json
import math
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from halfscale.policies import POLICIES, FloorReached, Policy, make_policy
from halfscale.settings import TOOLS, Setting, express, write_settings

law = settings(deadline=None, max_examples=60)  # a busy machine is no failure
each_policy = pytest.mark.parametrize("policy", POLICIES)
GRAD_SCALER_TOOLS = ("pytorch", "lightning", "accelerate", "transformers")
GRAD_SCALER_DEFAULTS = {
    "init_scale": 65536.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
}
DEEPSPEED_DEFAULTS = {  # the documented keys of its fp16 block
    "enabled": False,
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "consecutive_hysteresis": False,
    "min_loss_scale": 1,
}
CHOICE = {"init_scale": 1024.0, "growth_factor": 1.5, "backoff_factor": 0.25, "growth_interval": 7}


# --- reading a setting back, as its tool would ------------------------------------------------


def python_values(text: str) -> dict[str, Any]:
    """The arguments that the snippet gives to its scaler."""
    calls = [
        node.value
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "scaler"
    ]
    assert len(calls) == 1 and isinstance(calls[0], ast.Call)
    found = {str(pair.arg): ast.literal_eval(pair.value) for pair in calls[0].keywords}
    assert found.pop("_growth_tracker", 0) == 0
    if "scale" in found:
        found["init_scale"] = found.pop("scale")
    return GRAD_SCALER_DEFAULTS | found


def flags(text: str) -> list[str]:
    inside = text.partition("LOSS_SCALE_ARGS=(")[2]
    assert inside.endswith(")\n")
    return shlex.split(inside.removesuffix(")\n"))


def megatron_values(text: str) -> argparse.Namespace:
    """By Megatron-LM's documented flags, types and defaults, and the bounds it asserts."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--loss-scale", type=float, default=None)
    parser.add_argument("--initial-loss-scale", type=float, default=2**32)
    parser.add_argument("--min-loss-scale", type=float, default=1.0)
    parser.add_argument("--loss-scale-window", type=float, default=1000)
    parser.add_argument("--hysteresis", type=int, default=2)
    values = parser.parse_args(flags(text))
    lowest, start = torch.tensor([values.min_loss_scale, values.initial_loss_scale])
    assert 0 < lowest <= start < math.inf
    assert values.fp16 and values.loss_scale_window > 0 and values.hysteresis > 0
    return values


def fairseq_values(text: str) -> argparse.Namespace:
    """By fairseq's documented flags, types and defaults."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--fp16-init-scale", type=int, default=2**7)
    parser.add_argument("--fp16-scale-window", type=int, default=None)
    parser.add_argument("--fp16-scale-tolerance", type=float, default=0.0)
    parser.add_argument("--min-loss-scale", type=float, default=1e-4)
    parser.add_argument("--threshold-loss-scale", type=float, default=None)
    values = parser.parse_args(flags(text))
    assert values.fp16 and values.fp16_init_scale > 0
    return values


def deepspeed_values(text: str) -> dict[str, Any]:
    block = json.loads(text)
    assert list(block) == ["fp16"]
    assert set(block["fp16"]) <= set(DEEPSPEED_DEFAULTS)
    values = DEEPSPEED_DEFAULTS | block["fp16"]
    assert values["enabled"] is True
    for whole in ("initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"):
        assert type(values[whole]) is int
    assert min(values["loss_scale_window"], values["hysteresis"], values["min_loss_scale"]) > 0
    return values


def rule_of(setting: Setting) -> Policy:
    """The tool's own rule, with the values that the setting gives it."""
    if setting.tool in GRAD_SCALER_TOOLS:
        return make_policy("torch", **python_values(setting.text))
    if setting.tool == "deepspeed":
        values = deepspeed_values(setting.text)
        if values["loss_scale"]:
            return make_policy("static", init_scale=values["loss_scale"])
        return make_policy(
            "deepspeed",
            init_scale=2.0 ** values["initial_scale_power"],
            growth_interval=values["loss_scale_window"],
            hysteresis=values["hysteresis"],
            consecutive_hysteresis=values["consecutive_hysteresis"],
            min_scale=min(values["min_loss_scale"], 2.0 ** values["initial_scale_power"]),
            raise_at_floor=True,  # what ZeRO does
        )
    if setting.tool == "megatron":
        megatron = megatron_values(setting.text)
        if megatron.loss_scale:
            return make_policy("static", init_scale=megatron.loss_scale)
        return make_policy(
            "megatron",
            init_scale=megatron.initial_loss_scale,
            growth_interval=megatron.loss_scale_window,
            hysteresis=megatron.hysteresis,
            min_scale=megatron.min_loss_scale,
        )
    fairseq = fairseq_values(setting.text)
    rule = make_policy("fairseq", init_scale=fairseq.fp16_init_scale)
    # Set afterwards: fairseq checks nothing, the policy would refuse a tolerance above 1.
    for name, value in {
        "growth_interval": fairseq.fp16_scale_window,
        "tolerance": fairseq.fp16_scale_tolerance,
        "threshold": fairseq.threshold_loss_scale,
        "min_scale": fairseq.min_loss_scale,
    }.items():
        setattr(rule, name, value)
    return rule


def scales(policy: Policy, pattern: str) -> Iterator[float | str]:
    """The scale after each step of a pattern of F and X; where training stops, the last."""
    for letter in pattern:
        try:
            yield policy.update(letter == "X", largest_gradient=1.0)
        except FloorReached:
            yield "stopped"
            return


# --- strategies -------------------------------------------------------------------------------

runs = st.tuples(st.sampled_from("FX"), st.integers(1, 30) | st.integers(100, 200))
patterns = st.lists(runs, max_size=8).map(lambda parts: "".join(c * n for c, n in parts))
extremes = st.sampled_from([2.0**-140, 2.0**127, 1e38, 1e300, 1e-300])
init_scales = st.integers(-6, 34).map(lambda p: 2.0**p) | st.floats(0.1, 2.0**30) | extremes
below = st.integers(0, 12).map(lambda power: 2.0**-power)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "growth_factor": st.sampled_from([2.0, 1.5]) | st.floats(1.01, 16),
    "backoff_factor": st.sampled_from([0.5, 0.25]) | st.floats(0.01, 0.99),
    "factor": st.sampled_from([2.0, 4.0, 3.0, 1.1]),
    "growth_interval": st.integers(1, 9),
    "hysteresis": st.integers(1, 4),
    "consecutive_hysteresis": st.booleans(),
    "raise_at_floor": st.booleans(),
    "tolerance": st.sampled_from([0.0, 0.25, 1.0]),
    "floors": st.sampled_from([(), ((10, 2.0),), ((0, 4.0), (50, 8.0))]),
    "beta1": st.floats(0.1, 0.99),
    "beta2": st.floats(0.1, 0.99),
    "overflow_std_dev": st.floats(0, 5),
    "overflow_log2": st.floats(0, 20),
}


@st.composite
def choices(
    draw: st.DrawFn, policies: tuple[str, ...] = tuple(POLICIES)
) -> tuple[str, dict[str, Any]]:
    """A policy and parameters it accepts."""
    policy = draw(st.sampled_from(policies))
    init = draw(init_scales)
    parameters: dict[str, Any] = {"init_scale": init}
    for name, default in POLICIES[policy].parameters().items():
        if name in ("min_scale", "threshold"):
            value = draw(below.map(lambda share: init * share) | st.just(min(1.0, init)))
            parameters[name] = draw(st.sampled_from([value, default])) if default is None else value
        elif name == "max_scale":
            value = init * 2.0 ** draw(st.integers(0, 12))
            parameters[name] = draw(st.sampled_from([value, default])) if default is None else value
        elif name in VALUES:
            parameters[name] = draw(VALUES[name])
    return policy, accepted(policy, parameters)


def accepted(policy: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters as the policy keeps them; the example is dropped where it refuses them."""
    try:
        machine = make_policy(policy, **parameters)
    except ValueError:
        assume(False)
    return {name: getattr(machine, name) for name in machine.parameters()}


devices = st.sampled_from(["cpu", "cuda"])


# --- exactness --------------------------------------------------------------------------------


@law
@given(choices(), devices, patterns)
def test_an_exact_setting_moves_the_scale_as_the_policy_does(
    choice: tuple[str, dict[str, Any]], device: str, pattern: str
) -> None:
    policy, parameters = choice
    for setting in express(policy, parameters, device).values():
        if setting.exact:
            expected = list(scales(make_policy(policy, **parameters), pattern))
            assert list(scales(rule_of(setting), pattern)) == expected, setting


@law
@given(
    choices(("torch", "apex-hysteresis", "continuous", "megatron", "fairseq", "static")), devices
)
def test_an_exact_setting_reads_back_as_the_same_numbers(
    choice: tuple[str, dict[str, Any]], device: str
) -> None:
    policy, parameters = choice
    for setting in express(policy, parameters, device).values():
        if setting.exact:
            rule = rule_of(setting)
            shared = set(parameters) & set(rule.parameters())
            assert "init_scale" in shared
            assert {name: getattr(rule, name) for name in shared} == {
                name: parameters[name] for name in shared
            }


@law
@given(choices(), devices)
def test_a_setting_is_exact_where_there_is_nothing_to_note(
    choice: tuple[str, dict[str, Any]], device: str
) -> None:
    for setting in express(*choice, device).values():
        assert setting.exact == (not setting.notes)
        assert all(note.endswith(".") and "\n" not in note for note in setting.notes)


@pytest.mark.parametrize(
    ("policy", "parameters", "tools"),
    [
        ("torch", {}, GRAD_SCALER_TOOLS),
        ("torch", CHOICE, GRAD_SCALER_TOOLS),
        ("apex-hysteresis", {"hysteresis": 1}, GRAD_SCALER_TOOLS),
        ("continuous", {}, GRAD_SCALER_TOOLS),
        ("rising-floor", {"floors": ()}, GRAD_SCALER_TOOLS),
        ("static", {"init_scale": 128.0}, tuple(TOOLS)),
        ("static", {"init_scale": 0.5}, tuple(tool for tool in TOOLS if tool != "fairseq")),
        ("megatron", {}, ("megatron",)),
        ("megatron", {"hysteresis": 1, "init_scale": 1000.0, "min_scale": 0.25}, ("megatron",)),
        ("fairseq", {}, ("fairseq",)),
        ("fairseq", {"tolerance": 0.25, "threshold": 4.5, "init_scale": 100.0}, ("fairseq",)),
        ("deepspeed", {}, ()),
        ("keras", {}, ()),
        ("apex", {}, ()),
        ("jmp", {}, ()),
        ("flax", {}, ()),
        ("metaseq", {}, ()),
        ("openseq2seq-logmax", {}, ()),
    ],
)
def test_these_tools_run_the_policy_exactly(
    policy: str, parameters: dict[str, Any], tools: tuple[str, ...]
) -> None:
    written = express(policy, parameters, "cuda")
    assert tuple(tool for tool in TOOLS if written[tool].exact) == tools


def test_tools_without_a_scaler_on_the_cpu_are_not_exact_there() -> None:
    on_cpu, on_cuda = (express("torch", {}, device) for device in ("cpu", "cuda"))
    assert [tool for tool in GRAD_SCALER_TOOLS if on_cpu[tool].exact] == ["pytorch", "lightning"]
    for tool in ("accelerate", "transformers"):
        assert "CPU" in on_cpu[tool].notes[0]
        assert on_cpu[tool].text == on_cuda[tool].text


# --- what cannot be expressed -----------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(choices(), devices, st.data())
def test_a_value_that_does_not_reach_the_block_is_named_in_a_note(
    choice: tuple[str, dict[str, Any]], device: str, data: st.DataObject
) -> None:
    policy, parameters = choice
    name = data.draw(st.sampled_from(sorted(parameters)))
    _, others = data.draw(choices((policy,)))
    changed = accepted(policy, parameters | {name: others[name]})
    assume(changed[name] != parameters[name])
    # A kind of hysteresis is nothing without a hysteresis.
    assume(name != "consecutive_hysteresis" or parameters["hysteresis"] > 1)
    # A floor down there is the one that Megatron-LM is given for none.
    assume(min(parameters["init_scale"], changed["init_scale"]) >= 2.0**-126)
    # Two floors at one height are one.
    heights = (parameters[name], changed[name])
    assume(name != "threshold" or parameters["min_scale"] not in heights)
    before, after = express(policy, parameters, device), express(policy, changed, device)
    for tool in TOOLS:
        if before[tool].text == after[tool].text:
            notes = " ".join(before[tool].notes + after[tool].notes)
            assert name in notes, (tool, name, notes)


@pytest.mark.parametrize(
    ("policy", "parameters", "tool", "words"),
    [
        (
            "torch",
            {"growth_factor": 1.5},
            "deepspeed",
            "growth factor is fixed at 2; growth_factor 1.5",
        ),
        ("torch", {"backoff_factor": 0.25}, "megatron", "fixed at 0.5; backoff_factor 0.25"),
        (
            "torch",
            {"init_scale": 1000.0},
            "deepspeed",
            "takes a power of two for initial_scale_power",
        ),
        ("torch", {"init_scale": 0.5}, "fairseq", "takes a whole number for fp16-init-scale"),
        ("torch", {"init_scale": 0.5}, "deepspeed", "to which an overflow raises the scale"),
        ("torch", {}, "deepspeed", "grows a step later"),
        ("torch", {}, "megatron", "always has a floor"),
        ("deepspeed", {}, "pytorch", "hysteresis is fixed at 1; hysteresis 2"),
        ("deepspeed", {}, "deepspeed", "raise_at_floor"),
        ("deepspeed", {}, "deepspeed", "Without ZeRO"),
        ("deepspeed", {"min_scale": 0.25}, "deepspeed", "min_scale 0.25 is left out"),
        ("deepspeed", {"consecutive_hysteresis": True}, "megatron", "consecutive_hysteresis true"),
        ("apex-hysteresis", {}, "megatron", "consecutive"),
        ("apex", {}, "pytorch", "max_scale 16777216"),
        ("jmp", {"factor": 3.0}, "deepspeed", "growth factor is fixed at 2; factor 3"),
        ("jmp", {"factor": 3.0}, "pytorch", "1/factor"),
        ("keras", {}, "pytorch", "policy keras makes it infinite"),
        ("fairseq", {}, "pytorch", "stop at min_scale 0.0001"),
        ("fairseq", {"tolerance": 0.25}, "deepspeed", "tolerance 0.25"),
        ("fairseq", {"init_scale": 0.1}, "pytorch", "takes a float32 for init_scale"),
        ("metaseq", {}, "fairseq", "doubles it on a growth"),
        ("openseq2seq-logmax", {}, "deepspeed", "beta1 0.99"),
        ("rising-floor", {}, "pytorch", "floors 8192 from step 40000, 32768 from step 150000"),
    ],
)
def test_a_note_says_what_a_tool_cannot_do(
    policy: str, parameters: dict[str, Any], tool: str, words: str
) -> None:
    assert words in " ".join(express(policy, parameters, "cuda")[tool].notes)


def test_a_value_in_the_wrong_form_leaves_its_key_out() -> None:
    written = express("torch", {"init_scale": 1000.5}, "cuda")
    assert "initial_scale_power" not in written["deepspeed"].text
    assert "init-scale" not in written["fairseq"].text
    assert "--initial-loss-scale 1000.5" in written["megatron"].text
    assert "init_scale=1000.5" in written["pytorch"].text


@pytest.mark.parametrize(
    ("tool", "init", "floor", "start", "key"),
    [
        ("deepspeed", 100_000.0, 70_000.0, "65536", "min_loss_scale"),
        ("megatron", 2.0**40 + 1, 2.0**39, "4294967296", "min-loss-scale"),
        ("fairseq", 200.5, 150.0, "128", "threshold-loss-scale"),
    ],
)
def test_a_floor_above_the_scale_a_tool_starts_from_is_left_out(
    tool: str, init: float, floor: float, start: str, key: str
) -> None:
    setting = express("deepspeed", {"init_scale": init, "min_scale": floor}, "cuda")[tool]
    left_out = f"takes at most {start} for {key}; min_scale {int(floor)} is left out."
    assert any(note.endswith(left_out) for note in setting.notes)
    assert str(int(floor)) not in setting.text


def test_flax_is_given_the_interval_it_really_has() -> None:
    text = express("flax", {"growth_interval": 100}, "cuda")["pytorch"].text
    assert python_values(text)["growth_interval"] == 101


@pytest.mark.parametrize(
    ("policy", "parameters", "words"),
    [
        ("nope", {}, "unknown policy"),
        ("torch", {"hysteresis": 2}, "no parameter hysteresis"),
        ("torch", {"growth_factor": 1.0}, "growth_factor must be greater than 1"),
    ],
)
def test_what_is_no_configuration_is_refused(
    policy: str, parameters: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        express(policy, parameters, "cuda")


# --- valid output -----------------------------------------------------------------------------


@law
@given(choices(), devices)
def test_every_setting_is_valid_in_its_tool(
    choice: tuple[str, dict[str, Any]], device: str
) -> None:
    written = express(*choice, device)
    assert list(written) == list(TOOLS) == [setting.tool for setting in written.values()]
    for tool in GRAD_SCALER_TOOLS:
        torch.amp.GradScaler("cpu", **python_values(written[tool].text))
    deepspeed_values(written["deepspeed"].text)
    megatron_values(written["megatron"].text)
    fairseq_values(written["fairseq"].text)


@each_policy
def test_parameters_may_come_from_json(policy: str) -> None:
    defaults = POLICIES[policy].parameters()
    from_json = json.loads(json.dumps(defaults))
    assert express(policy, from_json, "cpu") == express(policy, {}, "cpu")


@each_policy
def test_no_file_hides_a_module_that_it_imports(policy: str) -> None:
    for setting in express(policy, {}, "cuda").values():
        if setting.file.endswith(".py"):
            imports = {
                name.partition(".")[0]
                for node in ast.walk(ast.parse(setting.text))
                for name in (
                    [alias.name for alias in node.names]
                    if isinstance(node, ast.Import)
                    else [str(node.module)]
                    if isinstance(node, ast.ImportFrom)
                    else []
                )
            }
            assert Path(setting.file).stem not in imports


@pytest.mark.skipif(not shutil.which("bash"), reason="no bash")
@pytest.mark.parametrize("tool", ["megatron", "fairseq"])
def test_bash_expands_the_flags_to_those_that_were_meant(tool: str, tmp_path: Path) -> None:
    write_settings(express("megatron", {}, "cuda"), tmp_path)
    show = f'set -eu; source {tool}.sh; printf "%s\\n" "${{LOSS_SCALE_ARGS[@]}}"'
    run = subprocess.run(
        ["bash", "-c", show], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert run.stdout.splitlines() == flags((tmp_path / f"{tool}.sh").read_text())


def test_each_tool_gets_a_file_and_the_notes_get_one(tmp_path: Path) -> None:
    written = express("megatron", {}, "cuda")
    write_settings(written, tmp_path / "settings")
    files = {path.name: path.read_text() for path in (tmp_path / "settings").iterdir()}
    notes = files.pop("settings.md")
    assert files == {setting.file: setting.text for setting in written.values()}
    assert "| Megatron-LM | `megatron.sh` | yes |" in notes
    assert "| DeepSpeed | `deepspeed.json` | no |" in notes
    assert "## Megatron-LM" not in notes
    for setting in written.values():
        assert all(f"- {note}\n" in notes for note in setting.notes)


def test_writing_settings_needs_no_torch() -> None:
    code = "import sys, halfscale.settings; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- the snippets, run by the tools themselves ------------------------------------------------


def run(text: str) -> dict[str, Any]:
    """What a snippet defines."""
    defined: dict[str, Any] = {"__name__": "snippet"}
    exec(compile(text, "snippet", "exec"), defined)
    return defined


def assert_has(scaler: torch.amp.GradScaler, expected: dict[str, float]) -> None:
    assert scaler.is_enabled()
    assert scaler.get_scale() == expected["init_scale"]
    assert scaler.get_growth_factor() == expected["growth_factor"]
    assert scaler.get_backoff_factor() == expected["backoff_factor"]
    assert scaler.get_growth_interval() == expected["growth_interval"]


def drive(scaler: torch.amp.GradScaler, pattern: str) -> list[float]:
    """The scale of a real scaler after each step of a pattern."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    trace = []
    for letter in pattern:
        optimizer.zero_grad()
        scaler.scale((weight * (math.inf if letter == "X" else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        trace.append(scaler.get_scale())
    return trace


def test_pytorch_builds_the_recommended_scaler() -> None:
    scaler = run(express("torch", CHOICE, "cpu")["pytorch"].text)["scaler"]
    assert_has(scaler, CHOICE)
    assert scaler._device == "cpu"


@pytest.mark.parametrize(
    ("policy", "parameters"),
    [
        ("torch", CHOICE),
        ("apex-hysteresis", {"hysteresis": 1, "growth_interval": 3}),
        ("continuous", {"init_scale": 1.0}),
        ("rising-floor", {"floors": (), "growth_interval": 2}),
        ("static", {"init_scale": 3.4028234663852886e38}),  # the largest float32
        ("static", {"init_scale": 1000.0}),
        ("static", {"init_scale": 2.0**-126}),
    ],
)
def test_pytorch_moves_the_scale_as_an_exact_setting_promises(
    policy: str, parameters: dict[str, Any]
) -> None:
    setting = express(policy, parameters, "cpu")["pytorch"]
    assert setting.exact
    pattern = "FFXFFFFFFFXXF" * 4
    expected = list(scales(make_policy(policy, **parameters), pattern))
    assert drive(run(setting.text)["scaler"], pattern) == expected


def test_a_static_scale_survives_two_thousand_steps() -> None:
    setting = express("static", {"init_scale": 1000.0}, "cpu")["pytorch"]
    assert set(drive(run(setting.text)["scaler"], "F" * 2001 + "X")) == {1000.0}


@pytest.mark.filterwarnings("ignore")
def test_lightning_trains_with_the_recommended_scaler(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    text = express("torch", CHOICE | {"growth_interval": 2}, "cpu")["lightning"].text
    quiet = "max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False"
    where = f"default_root_dir={str(tmp_path)!r}"
    parts = run(text.replace("plugins=", f"{quiet}, enable_model_summary=False, {where}, plugins="))
    trainer, scaler = parts["trainer"], parts["scaler"]
    assert trainer.precision_plugin.scaler is scaler
    assert_has(scaler, CHOICE | {"growth_interval": 2})
    seen = []

    class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            output = self.layer(batch)
            seen.append((output.dtype, scaler.get_scale()))
            return output.float().square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(3, 4), batch_size=1))
    assert seen == [(torch.float16, 1024.0), (torch.float16, 1024.0), (torch.float16, 1536.0)]


@pytest.mark.parametrize(
    ("policy", "parameters", "expected"),
    [
        ("torch", CHOICE, CHOICE),
        ("torch", {}, GRAD_SCALER_DEFAULTS),
        (
            "continuous",
            {},
            {
                **GRAD_SCALER_DEFAULTS,
                "init_scale": 1.0,
                "growth_factor": 1.001,
                "growth_interval": 1,
            },
        ),
    ],
)
def test_accelerate_builds_the_recommended_scaler(
    policy: str,
    parameters: dict[str, Any],
    expected: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState
    from accelerate.utils import get_grad_scaler

    AcceleratorState._reset_state(True)
    accelerator = run(express(policy, parameters, "cuda")["accelerate"].text)["accelerator"]
    assert accelerator.mixed_precision == "fp16"
    if accelerator.scaler is None:  # no GPU here: build what Accelerate builds on one
        monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
        handler = accelerator.scaler_handler
        accelerator.scaler = get_grad_scaler(accelerator.distributed_type, **handler.to_kwargs())
    assert_has(accelerator.scaler, expected)
    AcceleratorState._reset_state(True)


def test_accelerate_does_not_scale_on_a_cpu() -> None:
    pytest.importorskip("accelerate")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    assert Accelerator(mixed_precision="fp16", cpu=True).scaler is None
    AcceleratorState._reset_state(True)


def test_transformers_trainer_gets_the_recommended_scaler(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Accelerator:
        scaler = torch.amp.GradScaler("cpu")

    def create(trainer: Any) -> None:
        trainer.accelerator = Accelerator()

    # Without a GPU the Trainer makes an accelerator that has no scaler.
    monkeypatch.setattr(transformers.Trainer, "create_accelerator_and_postprocess", create)
    cls = run(express("torch", CHOICE, "cuda")["transformers"].text)["ScaledTrainer"]
    assert issubclass(cls, transformers.Trainer)
    trainer = cls.__new__(cls)
    trainer.create_accelerator_and_postprocess()
    assert_has(trainer.accelerator.scaler, CHOICE)


# --- DeepSpeed's own classes ------------------------------------------------------------------


@each_policy
def test_deepspeed_accepts_the_block(policy: str) -> None:
    module = pytest.importorskip("deepspeed.runtime.precision_config")
    for parameters in ({}, {"init_scale": 100.0}, {"init_scale": 2.0**13}):
        text = express(policy, parameters, "cuda")["deepspeed"].text
        config = module.get_float16_config(json.loads(text))
        for key, value in deepspeed_values(text).items():
            assert getattr(config, key) == value


@pytest.mark.parametrize("refill", [False, True])
def test_deepspeed_with_zero_moves_the_scale_by_the_policy_that_stops_at_the_floor(
    refill: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = pytest.importorskip("deepspeed.runtime.precision_config")
    scalers = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler")
    monkeypatch.setattr(scalers.dist, "get_rank", lambda: 0)
    parameters = {
        "init_scale": 64.0,
        "growth_interval": 3,
        "hysteresis": 2,
        "consecutive_hysteresis": refill,
        "min_scale": 4.0,
        "raise_at_floor": True,
    }
    setting = express("deepspeed", parameters, "cuda")["deepspeed"]
    config = configs.get_float16_config(json.loads(setting.text))
    scaler = scalers.CreateLossScaler(
        torch.half, config.loss_scale, config.loss_scale == 0, config.dynamic_loss_scale_args()
    )
    pattern = "FFFFXFXFFXXFFFFFFFXFXXXXXXXXXX"
    trace: list[float | str] = []
    for letter in pattern:
        try:
            scaler.update_scale(letter == "X")
        except Exception:
            trace.append("stopped")
            break
        trace.append(float(scaler.cur_scale))
    assert trace[-1] == "stopped"
    assert trace == list(scales(make_policy("deepspeed", **parameters), pattern))
    assert trace == list(scales(rule_of(setting), pattern))


def test_deepspeed_has_a_constant_scale() -> None:
    configs = pytest.importorskip("deepspeed.runtime.precision_config")
    scalers = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler")
    text = express("static", {"init_scale": 1000.5}, "cuda")["deepspeed"].text
    config = configs.get_float16_config(json.loads(text))
    scaler = scalers.CreateLossScaler(torch.half, config.loss_scale, config.loss_scale == 0, None)
    for overflow in (True, False, True):
        scaler.update_scale(overflow)
        assert scaler.cur_scale == 1000.5


def test_deepspeed_without_zero_ignores_the_hysteresis_and_the_floor_stops_nothing() -> None:
    configs = pytest.importorskip("deepspeed.runtime.precision_config")
    scalers = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler")
    optimizers = pytest.importorskip("deepspeed.runtime.fp16.fused_optimizer")
    if not hasattr(scalers, "LossScaleConfig"):
        pytest.skip("another DeepSpeed keeps its scale elsewhere")
    parameters = {"init_scale": 16.0, "growth_interval": 3, "hysteresis": 3, "min_scale": 4.0}
    setting = express("deepspeed", parameters, "cuda")["deepspeed"]
    config = configs.get_float16_config(json.loads(setting.text))
    state = scalers.LossScaleConfig(torch.half, True, 0, config.dynamic_loss_scale_args())
    optimizer = SimpleNamespace(loss_scale_config=state, verbose=False)
    pattern, trace = "FFFFXFXFFXXFFFFFFFXFXXXXXX", []
    for letter in pattern:
        optimizers.FP16_Optimizer._update_scale(optimizer, letter == "X")
        trace.append(float(state.cur_scale))
    assert trace == list(
        scales(make_policy("deepspeed", **{**parameters, "hysteresis": 1}), pattern)
    )
