"""Compute where the policies differ, and write ``docs/findings.md`` and ``docs/findings.svg``.

python docs/findings.py
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt

from halfscale.policies import POLICIES, Policy, make_policy
from halfscale.simulate import Simulation, parse_pattern, simulate
from halfscale.style import apply_theme, arm_styles

FOLDER = Path(__file__).parent
INTERVAL = 4
MATCHED = {"init_scale": 2.0**16, "growth_interval": INTERVAL, "hysteresis": 2}
MIXED = "FFFFFFFF X FFF X FFF X FFFFFFFF XX FFFFFFFFFF XXX FFFFFFFFFFFF"

HEAD = """# Where the policies differ

Computed by `python docs/findings.py` from halfscale's policies; a test holds this page to them.
Each policy starts at 2^16 with a growth interval of {interval} and, where it has one, a hysteresis
of 2; everything else is its project's default. F is a finite step, X one with an overflow.

| policy | first growth on finite step | four X, each after three F | forty X in a row | 300 F |
| --- | --- | --- | --- | --- |
"""

TAIL = """
What to take from it:

- **N or N + 1.** With an interval of {interval}, most grow on finite step {interval}; flax and
  DeepSpeed on step {late}, because they look at their counter before they raise it. DeepSpeed is
  late only once; flax takes {late} steps every time, which 300 F show.
- **Cumulative or consecutive.** Isolated overflows never use up a hysteresis that a finite step
  restores (apex-hysteresis). Megatron's text says consecutive, but its code restores the hysteresis
  only when the scale grows; DeepSpeed does too unless consecutive_hysteresis is set. Both therefore
  back off although no two overflows follow each other.
- **A rule that its own source defeats.** On an overflow openseq2seq-logmax counts a magnitude of
  2^16. Every version of its source read for this adds 65536 where a logarithm is meant, which holds
  the scale at its floor for thousands of steps; `overflow_log2: 65536` reproduces that.
- **Floors.** PyTorch's rule and those like it have none: forty overflows take 2^16 to 2^-24. Where
  a floor exists, some stay there and keep skipping, fairseq gives up.
- **Ceilings.** Few have one below the largest number of the type the scale is kept in.

![The scale of each policy over one pattern of finite steps and overflows](findings.svg)
"""


def _policy(name: str) -> Policy:
    if POLICIES[name].uses_largest_gradient:
        # Its scale follows the gradients and is bounded; there is nothing to match.
        return make_policy(name)
    known = POLICIES[name].parameters()
    return make_policy(name, **{key: value for key, value in MATCHED.items() if key in known})


def run(name: str, pattern: str) -> Simulation:
    """A policy at the matched settings over a pattern."""
    return simulate(_policy(name), parse_pattern(pattern, largest_gradient=1.0))


def first_growth(name: str) -> str:
    """The finite step on which the scale first rises, counted from 1."""
    scales = [_policy(name).scale, *run(name, "F" * 50).scales]
    for step, (before, after) in enumerate(pairwise(scales), start=1):
        if after > before:
            return str(step)
    return "never"


def shown(scale: float) -> str:
    """A scale as a power of two."""
    if scale == 0 or not math.isfinite(scale):
        return f"{scale:g}"
    return f"2^{math.log2(scale):.4g}"


def last(name: str, pattern: str) -> str:
    """The last scale, and whether the policy gave up."""
    done = run(name, pattern)
    text = shown(done.scales[-1]) if done.scales else "-"
    return f"{text}, gave up" if done.ended else text


def page() -> str:
    """The text of ``findings.md``."""
    rows = [
        f"| `{name}` | {first_growth(name)} | {last(name, 'FFFX' * 4)} | {last(name, 'X' * 40)} "
        f"| {last(name, 'F' * 300)} |"
        for name in POLICIES
    ]
    head = HEAD.format(interval=INTERVAL)
    return head + "\n".join(rows) + "\n" + TAIL.format(interval=INTERVAL, late=INTERVAL + 1)


def draw(path: Path) -> None:
    """Draw the scale of each policy over one mixed pattern, a panel a family of rules."""
    apply_theme()
    families = {
        "one overflow backs off": ["torch", "keras", "jmp", "flax", "apex", "fairseq"],
        "hysteresis of 2": ["apex-hysteresis", "megatron", "deepspeed"],
        "other rules": ["static", "continuous", "metaseq", "rising-floor", "openseq2seq-logmax"],
    }
    pattern = "".join(MIXED.split())
    figure, axes = plt.subplots(3, 1, figsize=(9.5, 9), sharex=True)
    for axis, (title, names) in zip(axes, families.items(), strict=True):
        styles = arm_styles(names)
        for name in names:
            style = styles[name]
            scales = run(name, pattern).scales
            axis.step(
                range(1, len(scales) + 1),
                scales,
                where="post",
                label=name,
                color=style.colour,
                linestyle=(0, style.dashes) if style.dashes else "-",
                linewidth=1.8,
            )
        for step, letter in enumerate(pattern, start=1):
            if letter == "X":
                axis.axvline(step, color="#8a1c1c", alpha=0.15, linewidth=3)
        axis.set_title(title, loc="left", fontweight="bold")
        axis.set_yscale("log", base=2)
        axis.set_ylabel("scale S")
        axis.legend(frameon=False, ncols=1, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes[-1].set_xlabel("step (bars: overflows)")
    figure.savefig(path, format="svg", metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """Write both files."""
    (FOLDER / "findings.md").write_text(page(), encoding="utf-8")
    draw(FOLDER / "findings.svg")


if __name__ == "__main__":
    main()
