"""The pieces of the report page, as HTML for the notebook's cells to show.

Everything that comes from a run, a name or an error text is escaped here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from IPython.display import HTML

from halfscale.calibration import CALIBRATION_COLUMNS
from halfscale.drawn import describe_drawn
from halfscale.html import MOST_ROWS, fold, long_table, table
from halfscale.magnitudes import TOLERABLE_LOSS
from halfscale.plan import is_found
from halfscale.probe_tables import (
    EXPONENT_COLUMNS,
    PROBE_COLUMNS,
    WINDOW_COLUMNS,
    lost_share_of,
    part_of,
    usable_window,
)
from halfscale.search_fragments import describe_search
from halfscale.settings import TOOLS, express
from halfscale.svg import to_data_uri
from halfscale.tables import CONFIGURATION_COLUMNS, RUN_COLUMNS
from halfscale.wording import name_window

_CAPTIONS = {
    "ranking": "Steps to the target against the fp32 control. Filled: in the winning set; hollow: "
    "told apart from the best; star: recommended.",
    "window": "What a fixed scale would do: gradient elements that fp16 rounds to zero, and steps "
    "that overflow. Shaded: no step overflows and none loses more than "
    f"{TOLERABLE_LOSS:.0%} of its elements. Where there is no such scale, or a narrow choice, the "
    "scale has to move. Counted are elements that vanish themselves; what follows from them later "
    "in the backward pass vanishes as well.",
    "exponents": "Gradients of half-precision tensors by magnitude, before scaling, over fp16's "
    "range; zeros are left out. A scale of 2^k moves them k to the right.",
    "landscape": "Predicted from the probes, without training: what torch's rule would cost in "
    "skipped steps and lost gradient elements, as a share of the steps. Marked are the "
    "configurations that lie in the plane.",
    "calibration": "Predicted against actual skipped steps, a point a run, larger where several "
    "coincide; workloads are set a little apart. Shaded: at most one step off.",
    "loss": "Loss of every arm: median over seeds, band from the lowest to the highest seed.",
    "scale": "The scale over steps; crosses mark overflows, that is skipped steps. Shaded: the "
    "scales at which the step neither overflows nor loses more than "
    f"{TOLERABLE_LOSS:.0%} of its elements, by the probes, median over seeds.",
    "skipped": "Skipped steps a run: the bar is the mean, the dots are seeds.",
    "sweep": "Verification with inputs × 1e4: a larger scale makes an overflow more likely, never "
    "less.",
}

# All seven workloads with five configurations and the controls; a longer table is folded.
MOST_ROWS_IN_SIGHT = 60


class Page:
    """What the report shows, read from the files that the workflow made.

    Args:
        results: The results folder.
        recommendation: ``recommendation.json``.
    """

    def __init__(self, results: str, recommendation: str) -> None:
        self.results = Path(results)
        self.verdict = json.loads(Path(recommendation).read_text(encoding="utf-8"))
        tables = self.results / "tables"
        self.runs = pd.read_csv(tables / "runs.csv")
        self.configurations = pd.read_csv(tables / "configurations.csv")
        self.exponents = pd.read_csv(tables / "exponents.csv")
        self.windows = pd.read_parquet(tables / "windows.parquet")
        self.probes = pd.read_csv(tables / "probes.csv")
        self.calibration = pd.read_csv(tables / "calibration.csv")
        self.orphans = json.loads((tables / "orphans.json").read_text(encoding="utf-8"))
        self.checks = pd.read_csv(self.results / "verification" / "checks.csv")

    def answer(self) -> HTML:
        """The answer in one sentence, the line to paste, the number of runs behind it."""
        verdict, evidence = self.verdict, self.verdict["evidence"]
        outcomes = self.runs["outcome"].value_counts()
        shown = ", ".join(f"{count} {escape(str(name))}" for name, count in outcomes.items())
        line = verdict["constructor"]
        code = f"<pre class='paste'><code>{escape(line)}</code></pre>" if line else ""
        origin = ""
        if verdict["recommended"] and is_found(verdict["recommended"]):
            origin = (
                "<p class='note'>The search found this set; nobody had listed it. It was trained "
                "and judged like the others.</p>"
            )
        passed = int(self.checks["passed"].sum())
        return HTML(
            f"<p class='answer {escape(verdict['kind'].replace(' ', '-'))}'>"
            f"{escape(verdict['sentence'])}</p>{code}{origin}"
            f"<p class='evidence'>{evidence['runs']} runs stand behind this ({shown}): "
            f"{_counted(len(evidence['workloads']), 'workload')} × "
            f"{self.runs['configuration'].nunique()} arms × "
            f"{_counted(len(evidence['seeds']), 'seed')} on {escape(evidence['device'])}. "
            f"The scaler passed {passed} of {len(self.checks)} checks. Evidence "
            f"<code>{evidence['digest'][:12]}</code>.</p>{self._interval_note()}"
        )

    def settings(self) -> HTML:
        """The recommended set in each tool's own words, and what a tool cannot express."""
        verdict = self.verdict
        if not verdict["recommended"]:
            return HTML("<p>There is no recommended set.</p>")
        device = verdict["evidence"]["device"]
        parts = []
        for setting in express(verdict["policy"], verdict["parameters"], device).values():
            notes = "".join(f"<li>{escape(note)}</li>" for note in setting.notes)
            kind = "exact" if setting.exact else "not exact, see the notes"
            parts.append(
                f"<details><summary>{escape(TOOLS[setting.tool])} ({kind})</summary>"
                f"<pre class='paste'><code>{escape(setting.text)}</code></pre><ul>{notes}</ul>"
                "</details>"
            )
        return HTML("".join(parts))

    def _interval_note(self) -> str:
        parameters = self.verdict["parameters"]
        shortest = min(self.verdict["evidence"]["workloads"].values())
        interval = (parameters or {}).get("growth_interval", shortest + 1)
        if interval > shortest:
            return ""
        return (
            f"<p class='note'>growth_interval = {interval} acted within runs "
            f"of {shortest} steps and more; a training of many thousand steps can afford a longer "
            "one (PyTorch's default is 2000).</p>"
        )

    def figure(self, name: str) -> HTML:
        """A figure with its caption and, for readers without pictures, its numbers as text."""
        folder = self.results / "plots"
        picture = to_data_uri((folder / f"{name}.svg").read_text(encoding="utf-8"))
        alternative = (folder / f"{name}.txt").read_text(encoding="utf-8").strip()
        caption = f"{_CAPTIONS[name]} {describe_drawn(self.verdict, name)}".strip()
        return HTML(
            f"<figure><img src='{picture}' alt='{escape(alternative)}'>"
            f"<figcaption>{escape(caption)}</figcaption>"
            f"<details><summary>The numbers as text</summary><p>{escape(alternative)}</p></details>"
            "</figure>"
        )

    def verdict_details(self) -> HTML:
        """Winning set, deciding step, what was rejected and why, what was identical, the rule."""
        verdict = self.verdict
        names = ", ".join(f"<b>{escape(name)}</b>" for name in verdict["winning_set"]) or "empty"
        parts = [
            f"<p>Winning set, best first: {names}. "
            f"Decided by: {escape(verdict['deciding_step'])}.</p>"
        ]
        if verdict["rejected"]:
            parts.append(_rejections(verdict["rejected"]))
        for group in verdict["identical"]:
            knobs = ", ".join(group["inert_knobs"])
            why = f" Knobs that never acted in them: {escape(knobs)}." if knobs else ""
            parts.append(
                f"<p>Bit-identical training: {escape(', '.join(group['configurations']))}: what "
                f"differs between them made no difference to any step.{why}</p>"
            )
        rule = "".join(f"<li>{escape(text)}</li>" for text in verdict["rule"])
        parts.append(f"<details><summary>The rule</summary><ol>{rule}</ol></details>")
        return HTML("".join(parts))

    def scores(self) -> HTML:
        """How each configuration that was not rejected did, best first."""
        scores = self.verdict["scores"]
        rows = [
            {
                "configuration": name,
                "policy": self.verdict["policies"][name],
                "steps against fp32": _with_limits(score["ratio"]),
                "steps against the best": _with_limits(score["against_best"]),
                "reached": f"{score['reached']} of {score['runs']}",
                "skipped steps a run": f"{score['skipped_steps']:g}",
            }
            for name, score in sorted(scores.items(), key=lambda item: item[1]["ratio"]["estimate"])
        ]
        return (
            long_table(pd.DataFrame(rows), "configurations")
            if rows
            else HTML("<p>Every configuration was rejected.</p>")
        )

    def by_policy(self) -> HTML:
        """Where several policies were compared: how each did, its best configuration first."""
        policies: dict[str, list[str]] = {}
        for name, policy in self.verdict["policies"].items():
            policies.setdefault(policy, []).append(name)
        if len(policies) == 1:
            return HTML("")
        rows = [self._policy_row(policy, names) for policy, names in policies.items()]
        frame = pd.DataFrame(rows).sort_values("steps against fp32", na_position="last")
        return HTML(f"<h3>By policy</h3>{table(frame).data}")

    def _policy_row(self, policy: str, names: list[str]) -> dict[str, Any]:
        scores = self.verdict["scores"]
        kept = [name for name in names if name in scores]
        best = min(kept, key=lambda name: scores[name]["ratio"]["estimate"], default=None)
        score = scores[best] if best else None
        inside = sum(name in self.verdict["winning_set"] for name in names)
        return {
            "policy": policy,
            "its best configuration": best or "none: all rejected",
            "steps against fp32": score["ratio"]["estimate"] if score else math.nan,
            "skipped steps a run": score["skipped_steps"] if score else math.nan,
            "in the winning set": f"{inside} of {len(names)}",
            "rejected": len(names) - len(kept),
        }

    def search(self) -> HTML:
        """What the search found, and how it did."""
        return HTML(describe_search(self.results, self.verdict))

    def configuration_table(self) -> HTML:
        """What was measured, a row per workload and arm."""
        shown = self.configurations.copy()
        shown["reached"] = [
            f"{a} of {b}" for a, b in zip(shown["reached"], shown["runs"], strict=True)
        ]
        outcomes = ["diverged", "stuck", "stalled", "out-of-memory", "failed"]
        unused = [name for name in outcomes if not shown[name].any()]
        interval = zip(shown["ratio_to_fp32"], shown["ratio_low"], shown["ratio_high"], strict=True)
        shown["ratio_to_fp32"] = [
            _with_limits({"estimate": a, "low": b, "high": c}) for a, b, c in interval
        ]
        shown["final_scale"] = [_power_of_two(scale) for scale in shown["final_scale"]]
        shown = shown.drop(columns=["control", "runs", "ratio_low", "ratio_high", *unused])
        if len(shown) <= MOST_ROWS_IN_SIGHT:
            return table(shown)
        folded = [
            fold(f"{workload}: {len(rows)} arms", table(rows).data)
            for workload, rows in shown.groupby("workload")
        ]
        return HTML("".join(folded))

    def window_table(self) -> HTML:
        """Which fixed scales the probes leave, at the start, at the end and throughout."""
        rows = []
        for workload, windows in self.windows.groupby("workload"):
            mine = self.exponents[self.exponents["workload"] == workload]
            unscaled = {
                part: lost_share_of(mine[mine["part"] == part], np.zeros(1))[0]
                for part in ("start", "end")
            }
            rows.append(
                {
                    "workload": workload,
                    "usable in the first tenth": _window(part_of(windows, "start")),
                    "usable in the last tenth": _window(part_of(windows, "end")),
                    "usable throughout": _window(windows),
                    "lost at S = 1, first tenth": f"{unscaled['start']:.1%}",
                    "lost at S = 1, last tenth": f"{unscaled['end']:.1%}",
                }
            )
        shown = table(pd.DataFrame(rows)).data if rows else "<p>The probes recorded nothing.</p>"
        bad = self.probes[self.probes["outcome"] != "ok"]
        early = f"<p>Reference runs that ended early:</p>{table(bad).data}" if len(bad) else ""
        return HTML(f"{shown}{early}")

    def failed_runs(self) -> HTML:
        """The runs that did not end ok, with their error texts."""
        bad = self.runs[self.runs["outcome"] != "ok"]
        if bad.empty:
            return HTML(f"<p>All {len(self.runs)} runs ended ok.</p>")
        columns = ["workload", "configuration", "seed", "outcome", "error", "steps_done"]
        return long_table(bad[columns], "runs that did not end ok")

    def verification(self) -> HTML:
        """The checks of the hand-written scaler."""
        checks = self.checks.assign(
            passed=["pass" if passed else "FAIL" for passed in self.checks["passed"]]
        )
        return table(checks.rename(columns={"name": "check", "passed": "result"}))

    def appendix(self) -> HTML:
        """Column meanings, versions, orphans."""
        verdict = self.verdict
        versions = ", ".join(f"{name} {text}" for name, text in verdict["versions"].items())
        arithmetic = "; ".join(verdict["evidence"]["arithmetic"])
        orphans = ""
        if self.orphans:
            items = "".join(f"<li><code>{escape(path)}</code></li>" for path in self.orphans)
            orphans = (
                f"<p>Results on the disk that the configuration no longer asks for, not shown "
                f"above:</p><ul>{items}</ul>"
            )
        return HTML(
            f"<p>{escape(versions)}. Arithmetic: {escape(arithmetic)}.</p>{orphans}"
            "<details><summary>Columns of results/tables/configurations.csv</summary>"
            f"{_definitions(CONFIGURATION_COLUMNS)}</details>"
            "<details><summary>Columns of results/tables/runs.csv</summary>"
            f"{_definitions(RUN_COLUMNS)}</details>"
            "<details><summary>Columns of results/tables/probes.csv</summary>"
            f"{_definitions(PROBE_COLUMNS)}</details>"
            "<details><summary>Columns of results/tables/exponents.csv</summary>"
            f"{_definitions(EXPONENT_COLUMNS)}</details>"
            "<details><summary>Columns of results/tables/windows.parquet</summary>"
            f"{_definitions(WINDOW_COLUMNS)}</details>"
            "<details><summary>Columns of results/tables/calibration.csv</summary>"
            f"{_definitions(CALIBRATION_COLUMNS)}</details>"
        )


def _rejections(reasons: Mapping[str, str]) -> str:
    """What was rejected and why; the first of a long list are in sight."""
    rows = [f"<li><b>{escape(name)}</b>: {escape(reason)}</li>" for name, reason in reasons.items()]
    lists = [
        f"<ul class='rejected'>{''.join(part)}</ul>"
        for part in (rows[:MOST_ROWS], rows[MOST_ROWS:])
        if part
    ]
    rest = "".join(fold(f"{len(rows) - MOST_ROWS} more", more) for more in lists[1:])
    return f"<p>Rejected:</p>{lists[0]}{rest}"


def _window(windows: pd.DataFrame) -> str:
    return name_window(*usable_window(windows))


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _definitions(columns: Mapping[str, str]) -> str:
    rows = (f"<dt>{escape(key)}</dt><dd>{escape(text)}</dd>" for key, text in columns.items())
    return f"<dl>{''.join(rows)}</dl>"


def _with_limits(interval: Mapping[str, float | None]) -> str:
    low, high = interval["low"], interval["high"]
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return f"{interval['estimate']:.3f} (no interval)"
    return f"{interval['estimate']:.3f} ({low:.3f} to {high:.3f})"


def _power_of_two(scale: float) -> str:
    return "" if math.isnan(scale) else f"2^{math.log2(scale):.4g}" if scale > 0 else f"{scale:g}"
