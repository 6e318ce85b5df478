"""The recommended configuration in the words of the tools people train with, ready to paste.

A tool runs its own rule. A setting is exact only if that rule, with the values of the block, moves
the scale as the recommended policy does: the same scale after every step, whatever steps overflow,
to the ends of the number format, on the device named, and training stopped where the policy stops
it. Any difference is a note, and a setting with a note is not exact. A value that a tool cannot
express is never rounded: the key is left out, or the tool's fixed value stands, and a note says so.

Exactness speaks of the rule alone: which steps overflow remains the tool's business.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfscale.policies import Policy, make_policy
from halfscale.policies.fp32 import FP32_SMALLEST_NORMAL, to_fp32
from halfscale.records import write_text

TOOLS = {
    "pytorch": "PyTorch",
    "lightning": "Lightning",
    "accelerate": "Accelerate",
    "transformers": "Transformers",
    "deepspeed": "DeepSpeed",
    "megatron": "Megatron-LM",
    "fairseq": "fairseq",
}

_GRAD_SCALER = 'scaler = torch.amp.GradScaler(\n    "<device>",\n<values>)\n'
_PYTHON = {
    "pytorch": f"import torch\n\n{_GRAD_SCALER}",
    "lightning": f"""import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import MixedPrecision

{_GRAD_SCALER}precision = MixedPrecision("16-mixed", "<device>", scaler=scaler)
trainer = Trainer(accelerator="<device>", plugins=[precision])
""",
    "accelerate": """from accelerate import Accelerator
from accelerate.utils import GradScalerKwargs

scaler = GradScalerKwargs(
<values>)
accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[scaler])
""",
    "transformers": '''from transformers import Trainer

scaler = dict(
<values>)


class ScaledTrainer(Trainer):
    """A Trainer with this scaler; needs fp16=True in its TrainingArguments."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler.load_state_dict(scaler)
''',
}
_SHELL = '# Pass "${LOSS_SCALE_ARGS[@]}".\nLOSS_SCALE_ARGS=(\n    --fp16\n<values>)\n'

# The rules in the terms of `_describe`: GradScaler's, DeepSpeed's, Megatron-LM's, fairseq's.
_COLUMN = dict.fromkeys(_PYTHON, 0) | {"deepspeed": 1, "megatron": 2, "fairseq": 3}
_KEYS = {
    "init_scale": ("init_scale", "initial_scale_power", "initial-loss-scale", "fp16-init-scale"),
    "growth_factor": ("growth_factor", "", "", ""),
    "backoff_factor": ("backoff_factor", "", "", ""),
    "interval": ("growth_interval", "loss_scale_window", "loss-scale-window", "fp16-scale-window"),
    "hysteresis": ("", "hysteresis", "hysteresis", ""),
    "consecutive_hysteresis": ("", "consecutive_hysteresis", "", ""),
    "tolerance": ("", "", "", "fp16-scale-tolerance"),
    "floor": ("", "min_loss_scale", "min-loss-scale", "threshold-loss-scale"),
    "stop": ("", "", "", "min-loss-scale"),
    "constant": ("", "loss_scale", "loss-scale", ""),
}
_USUAL = {  # of a policy without such a parameter, and of a tool without such a key
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "interval": 1,
    "hysteresis": 1,
    "consecutive_hysteresis": False,
    "tolerance": 0.0,
    "raise_at_floor": False,
}
_START = (2.0**16, 2.0**16, 2.0**32, 2.0**7)  # without init_scale
_POWER, _WHOLE, _FLOAT32 = "a power of two", "a whole number", "a float32"
_FORMS = {
    "init_scale": (_FLOAT32, _POWER, _FLOAT32, _WHOLE),
    "floor": ("", _WHOLE, _FLOAT32, ""),
    "constant": ("", "", _FLOAT32, ""),
}
# What holds the scale where no key does: factors that round to 1, a window that never passes.
_CONSTANT: dict[int, dict[str, float]] = {
    0: {"growth_factor": math.nextafter(1, 2), "backoff_factor": math.nextafter(1, 0)},
    3: {"interval": 2**62, "tolerance": 2, "stop": 0},
}
# What becomes of a growth that leaves the range of float32.
_DROPS, _INFINITE, _DOUBLE = "leaves it out", "makes it infinite", "goes on in double precision"
_PAST_FP32 = (_DROPS, _DOUBLE, _INFINITE, _DOUBLE)
_POLICY_PAST_FP32 = {
    **dict.fromkeys(("torch", "apex-hysteresis", "jmp", "continuous", "rising-floor"), _DROPS),
    **dict.fromkeys(("keras", "megatron"), _INFINITE),
    **dict.fromkeys(("deepspeed", "fairseq", "metaseq"), _DOUBLE),
    "flax": "stops at the largest float32",
}
_QUIRKS = {
    "metaseq": "halves growth_interval on a backoff and doubles it on a growth",
    "openseq2seq-logmax": "sets the scale from the magnitudes of the gradients",
}

Described = dict[str, tuple[str, Any]]  # by term: the policy's own name for it, and the value


@dataclass(frozen=True)
class Setting:
    """The recommended configuration for one tool.

    Attributes:
        tool: A key of `TOOLS`.
        file: The name of its file. No Python file has the name of a module that it imports.
        text: Its content: Python with its imports, a JSON block, or a bash array of flags.
        exact: Whether the tool moves the scale as the policy does, as strictly as the module says.
        notes: A sentence for every value not expressed and every difference between the rules.
    """

    tool: str
    file: str
    text: str
    exact: bool
    notes: list[str]


def express(policy: str, parameters: Mapping[str, Any], device: str) -> dict[str, Setting]:
    """Write a policy and its parameters in the words of every tool.

    Args:
        policy: A key of `halfscale.policies.POLICIES`.
        parameters: Its parameters; those left out have the policy's defaults.
        device: Where training runs: ``cpu`` or ``cuda``.

    Returns:
        A setting for each key of `TOOLS`, in that order.

    Raises:
        ValueError: If the policy is unknown, has no such parameter or refuses a value.
    """
    machine = make_policy(policy, **parameters)
    settings = {}
    for tool, title in TOOLS.items():
        column = _COLUMN[tool]
        described = _describe(machine, column)
        values, notes = _fill(title, column, described)
        if policy != "static":
            notes += _bounds(title, column, described, values)
            notes += _differences(title, column, policy, described)
        if device == "cpu" and tool in ("accelerate", "transformers", "megatron"):
            notes.append(f"{title} does not scale the loss on a CPU; the settings are for a GPU.")
        file, text = _render(tool, values, device)
        if policy == "static" and tool != "deepspeed":
            text = f"# With these values the scale stays as it is.\n{text}"
        settings[tool] = Setting(tool, file, text, not notes, notes)
    return settings


def write_settings(settings: Mapping[str, Setting], folder: Path) -> None:
    """Write a file for each tool, and ``settings.md`` with the notes on all of them."""
    lines = [
        "# The recommended settings, tool by tool\n",
        "Exact: the scale moves as the recommended policy moves it. Else notes say what differs.\n",
        "| tool | file | exact |\n| --- | --- | --- |",
    ]
    details = []
    for item in settings.values():
        title = TOOLS[item.tool]
        lines.append(f"| {title} | `{item.file}` | {'yes' if item.exact else 'no'} |")
        if item.notes:
            details += [f"\n## {title}\n", *(f"- {note}" for note in item.notes)]
        write_text(folder / item.file, item.text)
    write_text(folder / "settings.md", "\n".join(lines + details) + "\n")


def _describe(machine: Policy, column: int) -> Described:
    own: Described = {"init_scale": ("", 0)}
    if machine.name not in ("static", "openseq2seq-logmax"):
        own |= {term: (term, value) for term, value in _USUAL.items()}
    for name in machine.parameters():
        term = "interval" if name == "growth_interval" else name
        own[term] = (name, getattr(machine, name))
    if machine.name == "static":
        holding = {term: (term, value) for term, value in _CONSTANT.get(column, {}).items()}
        return own | holding if holding else {"constant": own["init_scale"]}
    if machine.name == "flax":  # grows on the finite step after the interval
        own["interval"] = ("growth_interval + 1", own["interval"][1] + 1)
    if "factor" in own:
        factor = own.pop("factor")[1]
        own |= {"growth_factor": ("factor", factor), "backoff_factor": ("1/factor", 1 / factor)}
    if machine.name == "apex-hysteresis" or own.get("hysteresis", ("", 2))[1] == 1:
        own["consecutive_hysteresis"] = ("consecutive_hysteresis", own["hysteresis"][1] > 1)
    if machine.name == "fairseq":
        own["stop"] = ("stop at min_scale", own.pop("min_scale")[1])
    floor = "threshold" if own.get("threshold", ("", None))[1] is not None else "min_scale"
    if floor in own:
        own["floor"] = own.pop(floor)
    if column == 1:  # the tool decides, see `_bounds`
        own.pop("raise_at_floor", None)
    return {term: item for term, item in own.items() if item[1] not in (None, ())}


def _fill(title: str, column: int, described: Described) -> tuple[dict[str, Any], list[str]]:
    """The values that have a key, and a note for each that has none or does not fit it."""
    values, notes, start = dict[str, Any](), list[str](), _START[column]
    for term, (name, value) in described.items():
        said, key = f"{name} {_show(value)}", _KEYS[term][column] if term in _KEYS else ""
        form = _FORMS[term][column] if term in _FORMS else ""
        written = _write(value, form) if key else None
        if term in ("floor", "stop") and value > start:
            form, written = f"at most {_show(start)}", None
        if written is not None:
            values[key] = written
            start = value if term == "init_scale" else start
        elif key:
            notes.append(f"{title} takes {form} for {key}; {said} is left out.")
        elif term not in _USUAL:
            notes.append(f"{title} cannot express {said}.")
        elif value != _USUAL[term]:
            fixed = f"{term.replace('_', ' ')} is fixed at {_show(_USUAL[term])}"
            notes.append(f"In {title} the {fixed}; {said} cannot be expressed.")
    return values, notes


def _write(value: Any, form: str) -> Any:
    """The value in the form a key takes, None where there is none."""
    if form == _POWER:
        return math.frexp(value)[1] - 1 if math.frexp(value)[0] == 0.5 else None
    if form == _WHOLE:
        return int(value) if value.is_integer() else None
    return value if form != _FLOAT32 or to_fp32(value) == value else None


def _bounds(title: str, column: int, described: Described, values: dict[str, Any]) -> list[str]:
    """Set what must not be left to the tool's defaults, and say how its lower end differs."""
    notes = []
    if column in (1, 2) and "floor" not in described:
        notes.append(f"{title} always has a floor, the policy has none.")
    if column == 1:
        if values.get("initial_scale_power", 0) < 0:
            notes.append(f"{title}'s floor is at least 1, to which an overflow raises the scale.")
        if values.get("hysteresis", 1) > 1:
            notes.append(f"Without ZeRO, {title} ignores the hysteresis and halves at once.")
        notes.append(f"{title} stops at its floor with ZeRO only; raise_at_floor has no key.")
    if column > 1:
        least = min(FP32_SMALLEST_NORMAL, values.get("initial-loss-scale", 1))
        values.setdefault("min-loss-scale", least if column == 2 else 0)
    return notes


def _differences(title: str, column: int, policy: str, described: Described) -> list[str]:
    """How the rules differ whatever the values."""
    notes = []
    if policy in _QUIRKS:
        notes.append(f"Policy {policy} {_QUIRKS[policy]}, {title} does not.")
    if policy in ("flax", "jmp", "megatron") and column == 0:
        for name, value in (described["growth_factor"], described["backoff_factor"]):
            if to_fp32(value) != value:
                notes.append(f"{title} does not apply {name} {_show(value)} in float32.")
    if (policy == "deepspeed") != (column == 1) and "interval" in described:
        when = "later" if column == 1 else "sooner"
        notes.append(f"After the start and each overflow, {title} grows a step {when}.")
    here, there = _PAST_FP32[column], _POLICY_PAST_FP32.get(policy, _PAST_FP32[column])
    if here != there and "max_scale" not in described:
        notes.append(f"A growth past float32's range: {title} {here}, policy {policy} {there}.")
    return notes


def _render(tool: str, values: dict[str, Any], device: str) -> tuple[str, str]:
    """The file's name and its text."""
    if tool == "deepspeed":
        block = {"enabled": True, "loss_scale": 0, **values}
        return "deepspeed.json", json.dumps({"fp16": block}, indent=2) + "\n"
    if tool not in _PYTHON:
        flags = "".join(f"    --{flag} {_show(value)}\n" for flag, value in values.items())
        return f"{tool}.sh", _SHELL.replace("<values>", flags)
    if tool == "transformers":  # all of a GradScaler's state
        default = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
        scale = {"scale": values.pop("init_scale", _START[0])}
        values = scale | default | values | {"_growth_tracker": 0}
    lines = "".join(f"    {key}={value!r},\n" for key, value in values.items())
    return f"{tool}_scaler.py", _PYTHON[tool].replace("<values>", lines).replace("<device>", device)


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(f"{_show(floor)} from step {step}" for step, floor in value)
    return str(int(value)) if value == int(value) and abs(value) < 2**63 else repr(value)
