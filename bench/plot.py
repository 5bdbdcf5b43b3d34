"""All figures of a run in one picture: ratios to each figure's baseline, with their spread."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from .summary import Summary
from .table import number

COLORS = {"ours": "#0072B2", "limit": "#999999", "peer": "#E69F00"}


def draw(summaries: Sequence[Summary], path: Path) -> None:
    """Write the picture as PNG: one panel per figure, one bar per case."""
    heights = [len(s.rows) + 1.2 for s in summaries]
    with plt.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 150}):
        figure, panels = plt.subplots(
            len(summaries),
            1,
            figsize=(10, 0.42 * sum(heights) + 0.6),
            height_ratios=heights,
            squeeze=False,
            layout="constrained",
            facecolor="white",
        )
        for axes, summary in zip(panels[:, 0], summaries, strict=True):
            rows = list(reversed(summary.rows))
            ratios = [row.ratio for row in rows]
            bars = axes.barh(
                [row.case for row in rows],
                [r.median for r in ratios],
                xerr=[[r.median - r.low for r in ratios], [r.high - r.median for r in ratios]],
                color=[COLORS[row.role] for row in rows],
                error_kw={"lw": 1, "capsize": 3, "ecolor": "#333333"},
                height=0.7,
            )
            most = max(r.high for r in ratios)
            for bar, r in zip(bars, ratios, strict=True):
                axes.text(r.high + most * 0.015, bar.get_y() + bar.get_height() / 2, number(r.median), va="center")
            axes.axvline(1, color="#333333", lw=0.8, ls=":")
            axes.set_xlim(0, most * 1.12)
            axes.set_title(f"{summary.title}: × {summary.baseline}", loc="left", fontsize=11)
        figure.savefig(path)
        plt.close(figure)
