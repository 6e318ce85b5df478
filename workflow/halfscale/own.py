"""A user's own workload: load its function, and make a `Workload` of what that returned."""

from __future__ import annotations

import difflib
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

import torch

from halfscale.entry import find_entry
from halfscale.workloads import Workload

REQUIRED = tuple(field.name for field in fields(Workload) if field.default is MISSING)
OPTIONAL = tuple(field.name for field in fields(Workload) if field.default is not MISSING)
WANTED = (
    'return {"model": model, "optimizer": optimizer, "batches": batches, "loss": loss}, '
    f"with {', '.join(OPTIONAL)} as you need"
)


class UnusableWorkload(ValueError):
    """What a user's ``build`` returned cannot be trained; the text says what to change."""


def load_function(entry: str) -> Callable[..., Any]:
    """The function of an entry; the module of a file is run anew.

    The folder of a file goes first on ``sys.path`` and stays there, since a training may import
    late; that is where ``python file.py`` would have it.

    Raises:
        EntryError: If there is no such file.
        Exception: Whatever the user's code raises.
    """
    found = find_entry(entry)
    if found.package:
        module = import_module(entry.rpartition(":")[0])
    else:
        folder = str(found.root.absolute())
        if sys.path[:1] != [folder]:
            sys.path.insert(0, folder)
        # A package of its own, so that the file may also write: from .sibling import ...
        package = ModuleType(f"halfscale_own_{hashlib.sha256(folder.encode()).hexdigest()[:8]}")
        package.__path__ = [folder]
        sys.modules[package.__name__] = package
        name = f"{package.__name__}.{found.file.stem}"
        spec = spec_from_file_location(name, found.file.absolute())
        if spec is None or spec.loader is None:
            raise ImportError(f"{found.file} cannot be loaded as a Python module")
        module = sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(module)
    function: Callable[..., Any] = getattr(module, found.function)
    return function


def as_workload(returned: object, device: str) -> Workload:
    """Make a `Workload` of what a user's ``build`` returned, and check that it can be trained.

    Args:
        returned: A `Workload`, a mapping or named tuple with the names of its fields, or a tuple
            of model, optimizer, batches and loss.
        device: The run's device.

    Raises:
        UnusableWorkload: With what to change.
    """
    if isinstance(returned, Workload):
        given = {field.name: getattr(returned, field.name) for field in fields(Workload)}
    elif isinstance(returned, Mapping):
        given = dict(returned)
    elif isinstance(returned, tuple) and hasattr(returned, "_asdict"):
        given = returned._asdict()
    elif isinstance(returned, tuple) and len(returned) == len(REQUIRED):
        given = dict(zip(REQUIRED, returned, strict=True))
    else:
        raise UnusableWorkload(f"build returned {_describe(returned)}; {WANTED}")
    _check_names(given)
    _check_kinds(given)
    _check_model(given["model"], given["optimizer"], device)
    return Workload(**{**given, "batches": _without_end(given["batches"])})


def _describe(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, tuple):
        kinds = ", ".join(type(item).__name__ for item in value)
        return f"a tuple of {len(value)} ({kinds})"
    return f"{'an' if type(value).__name__[0] in 'aeiouAEIOU' else 'a'} {type(value).__name__}"


def _check_names(given: Mapping[Any, object]) -> None:
    known = (*REQUIRED, *OPTIONAL)
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else WANTED
            raise UnusableWorkload(f"build returned an unknown field {name!r}; {hint}")
    if missing := [name for name in REQUIRED if name not in given]:
        raise UnusableWorkload(f"build returned no {' and no '.join(missing)}; {WANTED}")


def _check_kinds(given: Mapping[str, Any]) -> None:
    scheduler = given.get("scheduler")
    clip_norm, accumulate = given.get("clip_norm"), given.get("accumulate", 1)
    faults = {
        "model": (isinstance(given["model"], torch.nn.Module), "a torch.nn.Module"),
        "optimizer": (
            isinstance(given["optimizer"], torch.optim.Optimizer),
            "a torch.optim.Optimizer",
        ),
        "batches": (
            isinstance(given["batches"], Iterable)
            and not isinstance(given["batches"], str | bytes | Mapping),
            "a list, a DataLoader or a generator of batches",
        ),
        "loss": (callable(given["loss"]), "a function loss(model, batch)"),
        "clip_norm": (
            clip_norm is None or (_is_number(clip_norm) and clip_norm > 0),
            "a number above 0, or None",
        ),
        "accumulate": (type(accumulate) is int and accumulate >= 1, "a whole number above 0"),
        "scheduler": (
            scheduler is None or callable(getattr(scheduler, "step", None)),
            "a torch.optim.lr_scheduler, or None",
        ),
        "evaluate": (
            given.get("evaluate") is None or callable(given["evaluate"]),
            "a function evaluate(model), or None",
        ),
    }
    for name, (fits, wanted) in faults.items():
        if not fits:
            raise UnusableWorkload(f"{name} is {_describe(given.get(name))}; return {wanted}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_model(model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: str) -> None:
    parameters = dict(model.named_parameters())
    if not parameters:
        raise UnusableWorkload(
            "the model has no parameters; return a model that has something to train"
        )
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    if not trained:
        raise UnusableWorkload("no parameter of the model requires a gradient; unfreeze some")
    for name, parameter in parameters.items():
        if parameter.device.type != device:
            raise UnusableWorkload(
                f"the parameter {name} is on {parameter.device.type}, but the run is on {device}; "
                "use the device that build is given: model.to(device)"
            )
    for name, parameter in trained.items():
        if parameter.dtype in (torch.float16, torch.bfloat16):
            raise UnusableWorkload(
                f"the parameter {name} is in half precision ({parameter.dtype}); keep the "
                "parameters in float32, without .half(): autocast lowers what can be lowered"
            )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not held & {id(parameter) for parameter in trained.values()}:
        raise UnusableWorkload(
            "the optimizer holds none of the model's parameters; build it from the model that is "
            "returned: optimizer(model.parameters(), ...)"
        )


def _without_end(batches: Iterable[Any]) -> Iterator[Any]:
    """Go through the batches again and again; what cannot start again ends."""
    while True:
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            return
