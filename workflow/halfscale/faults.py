"""What ends a training early: errors in the workload's own code, and data that is not finite."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from halfscale.entry import find_entry
from halfscale.own import UnusableWorkload
from halfscale.records import Outcome


class Ended(Exception):
    """The training cannot go on: an outcome, not an error of halfscale."""

    def __init__(self, outcome: Outcome, error: str) -> None:
        super().__init__(error)
        self.outcome = outcome


@contextmanager
def workload_code(doing: str, entry: str | None = None) -> Iterator[None]:
    """Turn what the workload's own code raises into an outcome.

    Args:
        doing: What was being done, for the outcome's text.
        entry: Where a user's own workload is, whose file and line the text then names.

    Raises:
        Ended: Instead of whatever was raised.
    """
    try:
        yield
    except Ended:
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise Ended("out-of-memory", f"{doing}: {str(error) or 'out of memory'}") from error
    except UnusableWorkload as error:
        raise Ended("failed", f"{doing}: {error}") from error
    except SystemExit as error:
        text = f"it called sys.exit({error.code!r}){_locate(error, entry)}; put what only a script "
        raise Ended("failed", f'{doing}: {text}does under: if __name__ == "__main__":') from error
    except Exception as error:
        outcome: Outcome = "failed"
        if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
            outcome = "out-of-memory"
        text = f"{type(error).__name__}: {error}{_locate(error, entry)}"
        raise Ended(outcome, f"{doing}: {text}") from error


def _locate(error: BaseException, entry: str | None) -> str:
    """The innermost line of the user's own code that an error came through."""
    if entry is None or isinstance(error, SyntaxError):  # which names its file and line itself
        return ""
    found = find_entry(entry)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if found.owns(Path(frame.filename)):
            return f" ({Path(frame.filename).name}, line {frame.lineno})"
    return ""


def check_loss(loss: object, step: int) -> torch.Tensor:
    """The loss, if it is such that a backward pass can begin with it.

    Raises:
        Ended: If it cannot.
    """
    if not isinstance(loss, torch.Tensor):
        said = f"a {type(loss).__name__}; return the tensor itself, without .item()"
    elif loss.numel() != 1:
        said = f"the shape {list(loss.shape)}; return one number, such as its .mean()"
    elif not loss.is_floating_point():
        said = f"a tensor of {loss.dtype}; return one of floating point"
    elif not loss.requires_grad:
        said = (
            "a tensor without a gradient; compute it from what the model gives, without .detach() "
            "or torch.no_grad()"
        )
    else:
        return loss
    raise Ended("failed", f"step {step}: loss returned {said}")


def find_non_finite(batch: object) -> str | None:
    """``"NaN"`` or ``"Inf"`` if a tensor in a batch of any nesting holds one, NaN first."""
    found = {_non_finite(tensor) for tensor in tensors_of(batch)}
    return next((kind for kind in ("NaN", "Inf") if kind in found), None)


def _non_finite(tensor: torch.Tensor) -> str | None:
    measurable = tensor.layout == torch.strided and tensor.is_floating_point()
    if not measurable or bool(tensor.isfinite().all()):
        return None
    return "NaN" if bool(tensor.isnan().any()) else "Inf"


def tensors_of(batch: object) -> Iterator[torch.Tensor]:
    """The tensors in a batch: in tuples, lists and mappings, however deep."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping | list | tuple):
        parts: Iterable[object] = batch.values() if isinstance(batch, Mapping) else batch
        for part in parts:
            yield from tensors_of(part)
