"""Which configuration should be recommended? One pure function over the table of runs.

The rule, as the report prints it, is `RULE`. Intervals are paired over seeds: every configuration
meets the same initial weights and batch order, so the difference to another one is taken seed by
seed before anything is averaged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pandas as pd
from scipy import stats

from halfscale.plan import PolicyChoice

FAMILY_ERROR = 0.03
MINIMUM_SEEDS = 5
# How likely a difference on every single seed may be among equal configurations.
LARGEST_CHANCE = 0.02
LARGEST_CHANCE_UNREACHED = 0.01
RESAMPLES = 9999

RULE = (
    "A configuration with any outcome other than ok, on any seed of any workload, is rejected.",
    "Per workload the target is the fp32 control's median final loss plus 5 % of its median drop. "
    "Counted are the steps until the smoothed loss reaches it, skipped steps included; a run that "
    "never reaches it enters the comparison with one step more than it had, the least it can need, "
    "and is shown as not having reached.",
    "Each run is divided by the fp32 control of its own seed; workloads are combined by geometric "
    "mean.",
    "The best configuration is the one with the smallest geometric mean over seeds. Another one is "
    "told apart from it if the interval of their paired difference excludes zero: bootstrap "
    "standard error over seeds, Student's t quantile, 3 % shared among all pairs of "
    f"configurations. With fewer than {MINIMUM_SEEDS} seeds nothing is told apart; six to nine "
    "configurations take 6 seeds, ten to eighteen 7, up to 36 take 8. One that reached a "
    "workload's target on no seed where the best reached it on all is told apart too, given seeds "
    "enough that chance would rarely do that. The best and those not told apart from it form the "
    "winning set.",
    "Inside the winning set those that reached their target in the most runs are kept; of these "
    "the fewest skipped steps decide, then the nearest to PyTorch's defaults.",
    "If every configuration is in the winning set there is no measurable difference: keep the "
    "default, or what is nearest to it.",
)

Kind = Literal["winner", "no measurable difference", "single", "no winner"]


@dataclass(frozen=True)
class Interval:
    """A mean with its confidence limits, on the scale of the values given."""

    estimate: float
    low: float
    high: float

    def exp(self) -> Interval:
        """The same on the scale of ratios."""
        return Interval(*(_exp(x) for x in (self.estimate, self.low, self.high)))


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


@dataclass(frozen=True)
class Score:
    """How one configuration did, over all workloads and seeds.

    Attributes:
        ratio: Steps to the target against the fp32 control, geometric mean; 95 % interval.
        against_best: The same against the best configuration; the interval that decides.
        reached: Runs that reached their target.
        runs: Runs in all.
        skipped_steps: Mean number of skipped steps a run.
    """

    ratio: Interval
    against_best: Interval
    reached: int
    runs: int
    skipped_steps: float


@dataclass(frozen=True)
class Verdict:
    """The answer and what it stands on.

    Attributes:
        kind: Whether there is a winner, no measurable difference, one configuration, or none.
        recommended: The configuration to use, or None.
        winning_set: The configurations that cannot be told from the best, best first.
        deciding_step: Which part of the rule chose the recommended one.
        rejected: Reason by configuration.
        scores: By configuration, for those not rejected.
        identical: Groups of configurations whose runs are bit-identical.
        sentence: The answer in one sentence.
    """

    kind: Kind
    recommended: str | None
    deciding_step: str
    sentence: str
    winning_set: list[str] = field(default_factory=list)
    rejected: dict[str, str] = field(default_factory=dict)
    scores: dict[str, Score] = field(default_factory=dict)
    identical: list[list[str]] = field(default_factory=list)


def paired_interval(differences: np.ndarray, error: float = 0.05) -> Interval:
    """The mean of paired differences with its two-sided interval.

    The half-width is a Student t quantile times the bootstrap standard error, corrected for the
    bootstrap's use of 1/n (Hesterberg 2015, "What Teachers Should Know About the Bootstrap"); the
    plain percentile interval is far too short for five seeds.

    Args:
        differences: One finite value a seed, shape (seeds,).
        error: The share of intervals that may miss the truth.
    """
    estimate, seeds = float(differences.mean()), len(differences)
    if seeds < 2:
        return Interval(estimate, -math.inf, math.inf)
    if np.ptp(differences) == 0.0:
        return Interval(estimate, estimate, estimate)
    resampled = stats.bootstrap(
        (differences,),
        np.mean,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    standard_error = float(resampled.standard_error) * math.sqrt(seeds / (seeds - 1))
    half = float(stats.t.ppf(1 - error / 2, seeds - 1)) * standard_error
    return Interval(estimate, estimate - half, estimate + half)


def decide(runs: pd.DataFrame, configurations: Mapping[str, PolicyChoice]) -> Verdict:
    """Apply the rule.

    Args:
        runs: One row a run, controls included: ``workload``, ``configuration``, ``seed``,
            ``outcome``, ``error``, ``steps``, ``steps_to_target`` (inf: not reached),
            ``skipped_steps``, ``curve`` (a digest of the training curve).
        configurations: Parameters by name.
    """
    fp32 = runs[runs["configuration"] == "fp32"]
    rejected = _reject(runs, configurations)
    candidates = [name for name in sorted(configurations) if name not in rejected]
    identical = _identical(runs, candidates)
    if not (fp32["outcome"] == "ok").all():
        bad = fp32[fp32["outcome"] != "ok"].iloc[0]
        reason = f"the fp32 control itself ended as {bad['outcome']} on {bad['workload']}"
        return _no_winner(reason, rejected, identical)
    if not candidates:
        reason = f"all {len(configurations)} configurations were rejected"
        return _no_winner(reason, rejected, identical)
    logs = _log_ratios(runs, candidates)
    by_distance = sorted(candidates, key=lambda name: configurations[name].distance)
    best = min(by_distance, key=lambda name: float(logs[name].mean()))
    scores = _scores(runs, logs, best)
    winning = sorted(
        set(candidates) - _told_apart(runs, best, scores, seeds=len(logs[best])),
        key=lambda name: (scores[name].ratio.estimate, name),
    )
    kind, recommended, step = _choose(winning, configurations, scores)
    return Verdict(
        kind=kind,
        recommended=recommended,
        deciding_step=step,
        sentence=_sentence(kind, recommended, step, winning, configurations)
        + _caveats(scores[recommended], len(logs[best]), seeds_needed(len(candidates))),
        winning_set=winning,
        rejected=rejected,
        scores=scores,
        identical=identical,
    )


def _no_winner(reason: str, rejected: dict[str, str], identical: list[list[str]]) -> Verdict:
    return Verdict(
        kind="no winner",
        recommended=None,
        deciding_step="rejection",
        sentence=f"No winner: {reason}.",
        rejected=rejected,
        identical=identical,
    )


def _reject(runs: pd.DataFrame, names: Mapping[str, object]) -> dict[str, str]:
    rejected, by_name = {}, dict(iter(runs.groupby("configuration")))
    for name in sorted(names):
        mine = by_name[name]
        bad = mine[mine["outcome"] != "ok"]
        if len(bad):
            first = bad.iloc[0]
            text = f": {first['error']}" if isinstance(first["error"], str) else ""
            rejected[name] = (
                f"{first['outcome']} on {first['workload']}, seed {first['seed']}{text} "
                f"({len(bad)} of {len(mine)} runs not ok)"
            )
    return rejected


def least_steps(runs: pd.DataFrame) -> pd.Series:
    """Steps to the target; for a run that never reached it, the least it can need."""
    return np.minimum(runs["steps_to_target"], runs["steps"] + 1)


def _log_ratios(runs: pd.DataFrame, names: list[str]) -> dict[str, pd.Series]:
    """By name and seed: mean over workloads of log(steps to target / the fp32 control's)."""
    table = runs.assign(least=least_steps(runs))
    wide = table.pivot(index=["workload", "seed"], columns="configuration", values="least")
    return {name: np.log(wide[name] / wide["fp32"]).groupby("seed").mean() for name in names}


def _scores(runs: pd.DataFrame, logs: Mapping[str, pd.Series], best: str) -> dict[str, Score]:
    pairs = max(1, _pairs(len(logs)))
    scores, by_name = {}, dict(iter(runs.groupby("configuration")))
    for name, log in logs.items():
        mine = by_name[name]
        scores[name] = Score(
            ratio=paired_interval(log.to_numpy()).exp(),
            against_best=paired_interval((log - logs[best]).to_numpy(), FAMILY_ERROR / pairs).exp(),
            reached=int(np.isfinite(mine["steps_to_target"]).sum()),
            runs=len(mine),
            skipped_steps=float(mine["skipped_steps"].mean()),
        )
    return scores


def _told_apart(runs: pd.DataFrame, best: str, scores: Mapping[str, Score], seeds: int) -> set[str]:
    """The configurations that are worse than the best by more than chance would give."""
    if seeds < seeds_needed(len(scores)):
        return set()
    apart = {name for name, score in scores.items() if score.against_best.low > 1.0}
    comparisons = _pairs(len(scores)) * runs["workload"].nunique()
    if _chance(seeds, comparisons) <= LARGEST_CHANCE_UNREACHED:
        reached = runs.assign(reached=np.isfinite(runs["steps_to_target"])).pivot_table(
            index="workload", columns="configuration", values="reached", aggfunc="mean"
        )
        everywhere = reached[reached[best] == 1.0]
        apart |= {name for name in scores if (everywhere[name] == 0.0).any()}
    return apart


def _pairs(configurations: int) -> int:
    return configurations * (configurations - 1) // 2


def seeds_needed(configurations: int) -> int:
    """How many seeds it takes to tell any of so many configurations apart."""
    seeds = MINIMUM_SEEDS
    while _chance(seeds, _pairs(configurations)) > LARGEST_CHANCE:
        seeds += 1
    return seeds


def _chance(seeds: int, comparisons: int) -> float:
    """Bound on the chance that, of two equal configurations, one has all luck and one none.

    With a chance p of something good on a seed it is p^n (1-p)^n, at most 4^-n, either way round.
    """
    return float(2 * comparisons * 4.0**-seeds)


def _choose(
    winning: list[str],
    configurations: Mapping[str, PolicyChoice],
    scores: Mapping[str, Score],
) -> tuple[Kind, str, str]:
    most = max(scores[name].reached for name in winning)
    left = sorted(
        (name for name in winning if scores[name].reached == most),
        key=lambda name: (configurations[name].distance, name),
    )
    if len(configurations) == 1:
        return "single", winning[0], "nothing to compare"
    if len(winning) == len(configurations):
        return "no measurable difference", left[0], "nearest to PyTorch's defaults"
    if len(winning) == 1:
        step = "steps to the target" if len(scores) > 1 else "rejection of all others"
        return "winner", winning[0], step
    if len(left) == 1:
        return "winner", left[0], "most targets reached"
    fewest = min(scores[name].skipped_steps for name in left)
    left = [name for name in left if scores[name].skipped_steps == fewest]
    step = "fewest skipped steps" if len(left) == 1 else "nearest to PyTorch's defaults"
    return "winner", left[0], step


def _sentence(
    kind: Kind, name: str, step: str, winning: list[str], configurations: Mapping[str, object]
) -> str:
    total = len(configurations)
    if kind == "single":
        return f"Only one configuration was tried: {name} trained on every workload and seed."
    if kind == "no measurable difference":
        return (
            f"No measurable difference between the {total} configurations: keep PyTorch's "
            f"defaults; {name} is the nearest to them."
        )
    if len(winning) == 1:
        return f"Train with {name}: {step} set it apart from the other {total - 1}."
    others = f"{len(winning)} of {total} configurations cannot be told apart"
    verb = "is" if step.startswith("nearest") else "has"
    return f"Train with {name}: {others}, and among them it {verb} the {step}."


def _caveats(score: Score, seeds: int, needed: int) -> str:
    """What the reader of the one sentence must know as well."""
    text = ""
    if score.reached < score.runs:
        text += f" It reached the target in only {score.reached} of {score.runs} runs."
    if seeds < needed:
        text += f" Nothing can be told apart with {seeds} seeds; it takes {needed}."
    return text


def _identical(runs: pd.DataFrame, names: list[str]) -> list[list[str]]:
    """Groups of two or more configurations whose curves agree bit for bit on every run."""
    groups: dict[tuple[str, ...], list[str]] = {}
    by_name = dict(iter(runs.sort_values(["workload", "seed"]).groupby("configuration")))
    for name in names:
        mine = by_name[name]
        groups.setdefault(tuple(mine["curve"]), []).append(name)
    return [group for group in groups.values() if len(group) > 1]
