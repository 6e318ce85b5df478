"""One workload of the plan: a built-in one by its name, or a user's own by its ``entry``."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from halfscale.config import Number, parse_number, parse_whole, refuse_key
from halfscale.entry import EXAMPLE, Entry, EntryError, Signature, find_entry, read_signature
from halfscale.imported import entry_digest
from halfscale.naming import find_fault, suggest_name
from halfscale.plan import Parameter, WorkloadPlan
from halfscale.policies.checks import LARGEST_COUNT
from halfscale.sources import PACKAGE, PROBING, TRAINING, source_digest


def workload_names() -> list[str]:
    """The built-in workloads: one file each in ``workloads/``."""
    return sorted(
        file.stem for file in (PACKAGE / "workloads").glob("*.py") if file.stem != "__init__"
    )


@cache
def workload_defaults(file: Path) -> dict[str, Parameter]:
    """The parameters of a built-in workload's ``build`` and their defaults.

    Read from the source text, so that checking a configuration imports no torch.

    Raises:
        EntryError: If the file has no function ``build(seed, device, ...)``.
    """
    return dict(read_signature(_built_in(file)).defaults)


def _built_in(file: Path) -> Entry:
    return Entry(f"{file}:build", file, "build", file.parent)


def plan_workload(
    name: str, block: Mapping[str, Any], names: Iterable[str], source: str
) -> WorkloadPlan:
    """Check one workload's block and resolve it: its parameters and the digest of its code.

    Args:
        name: The workload's name.
        block: Its keys and values.
        names: The names of all workloads.
        source: What errors call the configuration.

    Raises:
        ConfigError: With what to write instead, on one line.
    """
    try:
        steps = parse_whole(block.get("steps", 100), 2, LARGEST_COUNT)
    except ValueError as error:
        refuse_key(source, ("workloads", name, "steps"), block["steps"], str(error), 100)
    own = "entry" in block
    entry = _find_own(name, block, names, source) if own else _find_built_in(name, steps, source)
    try:
        signature = read_signature(entry)
    except EntryError as error:
        keys = ("workloads", name, "entry")
        refuse_key(source, keys, block.get("entry"), str(error), error.better)
    parameters = _resolve_parameters(name, block, steps, signature, source)
    if own:
        own_digest = entry_digest(entry)
        return WorkloadPlan(
            steps=steps,
            parameters=parameters,
            source=f"{source_digest(*TRAINING)}+{own_digest}",
            probe_source=f"{source_digest(*PROBING)}+{own_digest}",
            entry=entry.text,
        )
    file = f"workloads/{name}.py"
    return WorkloadPlan(
        steps=steps,
        parameters=parameters,
        source=source_digest(*TRAINING, file),
        probe_source=source_digest(*PROBING, file),
    )


def _find_built_in(name: str, steps: int, source: str) -> Entry:
    known = workload_names()
    if name not in known:
        better = (difflib.get_close_matches(name, known, n=1) or known)[0]
        reason = (
            f"unknown workload; halfscale has {', '.join(known)}, and one of your own has an "
            f"entry: {EXAMPLE}"
        )
        refuse_key(source, ("workloads", name), name, reason, {"steps": steps}, better)
    return _built_in(PACKAGE / "workloads" / f"{name}.py")


def _find_own(name: str, block: Mapping[str, Any], names: Iterable[str], source: str) -> Entry:
    known = workload_names()
    taken = [*known, *(other for other in names if other != name)]
    fault = "is that of a built-in workload" if name in known else find_fault(name, taken)
    if fault:
        better = suggest_name(f"my-{name}" if name in known else name, taken)
        refuse_key(source, ("workloads", name), name, f"the name {fault}", dict(block), better)
    try:
        return find_entry(block["entry"])
    except EntryError as error:
        refuse_key(source, ("workloads", name, "entry"), block["entry"], str(error), error.better)


def _resolve_parameters(
    name: str, block: Mapping[str, Any], steps: int, signature: Signature, source: str
) -> dict[str, Parameter]:
    """The parameters that ``build`` is given, and its ``steps`` if it asks for them."""
    parameters = dict(signature.defaults)
    beside = {key: block[key] for key in ("entry",) if key in block}
    for key, value in block.items():
        if key in ("steps", "entry"):
            continue
        keys = ("workloads", name, key)
        known = dict.fromkeys(["steps", *signature.kinds])
        if key not in known and not signature.open:
            better = (difflib.get_close_matches(key, known, n=1) or ["steps"])[0]
            kind = signature.kinds.get(better)
            example = steps if better == "steps" else parameters.get(better, _SAMPLES[kind])
            reason = f"unknown key; {name} has {', '.join(known)}"
            refuse_key(source, keys, value, reason, example, better, beside)
        try:
            parameters[key] = _like(parameters.get(key), value, signature.kinds.get(key))
        except ValueError as error:
            example = parameters.get(key, _SAMPLES[signature.kinds.get(key)])
            refuse_key(source, keys, value, str(error), example, None, beside)
    if "steps" in signature.kinds:
        parameters["steps"] = steps
    if missing := [key for key in signature.required if key not in parameters]:
        samples = {key: _SAMPLES[signature.kinds[key]] for key in missing}
        reason = f"{', '.join(missing)} must be given, having no default"
        refuse_key(source, ("workloads", name), dict(block), reason, {**block, **samples})
    return parameters


_SAMPLES: Mapping[type | None, Parameter] = {None: 1, bool: True, int: 1, float: 0.1, str: "text"}


def _like(default: Parameter | None, value: object, kind: type | None) -> Parameter:
    """Bring a parameter to the type it has, so that ``1`` and ``1.0`` are one value."""
    if kind in (bool, str):
        if type(value) is not kind:
            shown = "" if default is None else f", like the default {default!r}"
            raise ValueError(f"must be a {kind.__name__}{shown}")
        return value
    if kind is None and isinstance(value, bool | str):
        try:
            return value if isinstance(value, bool) else parse_number(value)
        except ValueError:
            return value
    number: Number = parse_number(value)
    if kind is int:
        if number != int(number):
            raise ValueError("must be a whole number")
        return int(number)
    return float(number) if kind is float else number
