"""What ends a training early: errors in the workload's own code, and data that is not finite."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch.nn.parameter import is_lazy

from halfscale.entry import find_entry
from halfscale.own import UnusableWorkload
from halfscale.records import Outcome

FULL_PRECISION = (torch.float32, torch.float64)


class Ended(Exception):
    """The training cannot go on: an outcome, not an error of halfscale."""

    def __init__(self, outcome: Outcome, error: str) -> None:
        super().__init__(error)
        self.outcome = outcome


class workload_code:
    """A context that turns what the workload's own code raises into an outcome.

    A class, since entering and leaving a generator would cost a small step 1 % of its time.

    Args:
        doing: What is being done, for the outcome's text.
        entry: Where a user's own workload is, whose file and line the text then names.

    Raises:
        Ended: On leaving, instead of whatever was raised.
    """

    def __init__(self, doing: str, entry: str | None = None) -> None:
        self.doing = doing
        self.entry = entry

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        if isinstance(error, Exception | SystemExit) and not isinstance(error, Ended):
            raise self._outcome(error) from error

    def _outcome(self, error: Exception | SystemExit) -> Ended:
        doing = self.doing
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return Ended("out-of-memory", f"{doing}: {str(error) or 'out of memory'}")
        if isinstance(error, UnusableWorkload):
            return Ended("failed", f"{doing}: {error}")
        where = _locate(error, self.entry)
        if isinstance(error, SystemExit):
            text = f"it called sys.exit({error.code!r}){where}; put what only a script does under"
            return Ended("failed", f'{doing}: {text}: if __name__ == "__main__":')
        outcome: Outcome = "failed"
        if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
            outcome = "out-of-memory"
        return Ended(outcome, f"{doing}: {type(error).__name__}: {error}{where}")


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


def usable_gradients(parameters: Iterable[torch.Tensor], *, clipped: bool) -> list[torch.Tensor]:
    """The gradients of parameters, if they are such that they can be unscaled and measured.

    Args:
        parameters: Those that the optimizer trains and that have an element.
        clipped: Whether their norm is to be clipped.

    Raises:
        Ended: If there is none, or one in half precision, or a sparse one that is to be clipped.
    """
    gradients = [gradient for p in parameters if (gradient := p.grad) is not None]
    if not gradients:
        raise Ended("failed", "no parameter that the optimizer trains received a gradient")
    for gradient in gradients:
        if gradient.dtype not in FULL_PRECISION:
            error = f"a parameter is in {gradient.dtype}; keep the parameters in float32"
            raise Ended("failed", error)
    if clipped and any(gradient.is_sparse for gradient in gradients):
        error = "PyTorch cannot clip a sparse gradient; leave out clip_norm or use sparse=False"
        raise Ended("failed", error)
    return gradients


def list_non_finite(model: torch.nn.Module) -> list[str]:
    """Which parameters and buffers hold an Inf or NaN; waits for the device once."""
    kinds = {"parameter": model.named_parameters(), "buffer": model.named_buffers()}
    flags = {
        f"the {kind} {name}": tensor.detach().isfinite().all()
        for kind, named in kinds.items()
        for name, tensor in named
        if not is_lazy(tensor) and tensor.layout is torch.strided
    }
    finite = torch.stack(list(flags.values())).tolist() if flags else []
    return [name for name, good in zip(flags, finite, strict=True) if not good]


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
