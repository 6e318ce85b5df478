"""Every known rule that moves the scale, each as a small state machine in pure Python.

A policy knows nothing of models. A training run drives it, or a recorded trace, or a pattern
typed by hand; nothing here imports torch.
"""

from typing import Any

from halfscale.policies.base import FloorReached, Policy
from halfscale.policies.counting import Apex, Flax, Jmp, Keras
from halfscale.policies.fairseq_family import Fairseq, Metaseq
from halfscale.policies.hysteresis import DeepSpeed, Megatron
from halfscale.policies.logmax import OpenSeq2SeqLogMax
from halfscale.policies.static import Static
from halfscale.policies.torch_family import ApexHysteresis, Continuous, RisingFloor, Torch

__all__ = [
    "POLICIES",
    "Apex",
    "ApexHysteresis",
    "Continuous",
    "DeepSpeed",
    "Fairseq",
    "Flax",
    "FloorReached",
    "Jmp",
    "Keras",
    "Megatron",
    "Metaseq",
    "OpenSeq2SeqLogMax",
    "Policy",
    "RisingFloor",
    "Static",
    "Torch",
    "make_policy",
]

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        Torch,
        Static,
        Apex,
        ApexHysteresis,
        DeepSpeed,
        Megatron,
        Fairseq,
        Keras,
        Jmp,
        Flax,
        OpenSeq2SeqLogMax,
        Continuous,
        Metaseq,
        RisingFloor,
    )
}


def make_policy(name: str, /, **parameters: Any) -> Policy:
    """Build a policy by its name.

    Args:
        name: A key of `POLICIES`.
        **parameters: Those that differ from the policy's defaults.

    Returns:
        The policy, at its initial scale.

    Raises:
        ValueError: If the policy is unknown, has no such parameter, or refuses a value. The
            message lists what there is.
    """
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; known are {', '.join(POLICIES)}")
    known = POLICIES[name].parameters()
    unknown = [parameter for parameter in parameters if parameter not in known]
    if unknown:
        raise ValueError(
            f"policy {name} has no parameter {', '.join(unknown)}; it has {', '.join(known)}"
        )
    return POLICIES[name](**parameters)
