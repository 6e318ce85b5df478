"""The pieces of the page about predictions, as HTML for the notebook's cells to show."""

from __future__ import annotations

from html import escape

import pandas as pd
from IPython.display import HTML

from halfscale.calibration import TOLERANCE, summarise_calibration, within_tolerance
from halfscale.fragments import Page
from halfscale.html import table

_MOST_SHOWN = 30


def calibration_sentence(page: Page) -> HTML:
    """How many runs were predicted well, and the worst of them."""
    summary = summarise_calibration(page.calibration).iloc[-1]
    if not summary["compared"]:
        return HTML("<p>No run could be compared with its prediction.</p>")
    left = summary["runs"] - summary["compared"]
    worst = f" The worst is {summary['worst']}." if summary["worst"] else ""
    text = (
        f"The probes predicted the skipped steps of {summary['within']} of {summary['compared']} "
        f"runs ({summary['share']:.1%}) to within {TOLERANCE}, of {summary['exact']} exactly."
        f"{worst}" + (f" {left} could not be compared." if left else "")
    )
    return HTML(f"<p>{escape(text)}</p>")


def calibration_table(page: Page) -> HTML:
    """How good the predictions are, by workload."""
    summary = summarise_calibration(page.calibration)
    shown = pd.DataFrame(
        {
            "workload": summary["workload"],
            "runs compared": [
                f"{compared} of {runs}"
                for compared, runs in zip(summary["compared"], summary["runs"], strict=True)
            ],
            f"skipped steps within {TOLERANCE}": _counted(summary, "within"),
            "exactly": _counted(summary, "exact"),
            "final scale exactly": _counted(summary, "same scale"),
            "worst": summary["worst"],
        }
    )
    return table(shown)


def _counted(summary: pd.DataFrame, column: str) -> list[str]:
    return [
        f"{count} ({count / compared:.0%})" if compared else ""
        for count, compared in zip(summary[column], summary["compared"], strict=True)
    ]


def calibration_misses(page: Page) -> HTML:
    """The runs that were predicted worse or could not be compared, and what happened there."""
    missed = page.calibration[~within_tolerance(page.calibration)]
    if missed.empty:
        return HTML("<p>No prediction was farther off.</p>")
    order = missed["difference"].abs().sort_values(ascending=False, kind="stable").index
    columns = {
        "workload": "workload",
        "configuration": "configuration",
        "seed": "seed",
        "predicted_skipped_steps": "predicted",
        "skipped_steps": "had",
        "note": "what happened",
    }
    shown = missed.loc[order, list(columns)].rename(columns=columns).head(_MOST_SHOWN)
    for name in ("predicted", "had"):
        shown[name] = ["" if pd.isna(count) else f"{count:g}" for count in shown[name]]
    more = len(missed) - len(shown)
    rest = f"<p>{more} more are in results/tables/calibration.csv.</p>" if more else ""
    return HTML(f"<p>Predicted worse, or not compared:</p>{table(shown).data}{rest}")
