"""The picture of shuffle quality: distances, autocorrelation, composition against price, skewed shards."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from .shuffle import Case, Curves, Found, Skewed

STYLE = {
    "perfect shuffle": ("#000000", (0, (1, 1.5))),
    "nearflash, 4 lanes, K=8 (default)": ("#0072B2", "-"),
    "nearflash, 16 lanes, K=8": ("#0072B2", "--"),
    "nearflash, 64 lanes, K=8": ("#0072B2", ":"),
    "buffer of 1,000 a worker": ("#D55E00", "-"),
    "buffer of 10,000 a worker": ("#D55E00", "--"),
    "LitData, windows of 256": ("#CC79A7", "-"),
    "py2s, 64 canonical nodes": ("#009E73", "-"),
    "py1e, block 262,144 (default)": ("#009E73", "--"),
}
LABELS = {
    "nearflash, 4 lanes, K=8 (default)": (-8, -3, "right"),
    "nearflash, 16 lanes, K=8": (-6, -12, "right"),
    "nearflash, 64 lanes, K=1": (-8, -3, "right"),
    "nearflash, 64 lanes, K=8": (8, -3, "left"),
    "LitData, windows of 256": (8, 2, "left"),
    "LitData, whole chunks": (8, -9, "left"),
    "buffer of 10,000 a worker": (4, 8, "center"),
    "py1e, block 262,144 (default)": (-8, -3, "right"),
}
"""Where the names of points stand that lie close together: offsets in points, alignment."""
SIGMAS = ("#56B4E9", "#0072B2", "#333333")


def draw(
    cases: Sequence[Case],
    assessed: Mapping[str, tuple[Found, Curves]],
    spread: Mapping[float, Sequence[Skewed]],
    batch: int,
    path: Path,
) -> None:
    """Write the picture as PNG."""
    style: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10}
    with plt.rc_context(style):
        figure, panels = plt.subplots(2, 2, figsize=(11, 8.4), layout="constrained", facecolor="white")
        lines = [(case.name, assessed[case.name][1]) for case in cases if case.curve]
        _distances(panels[0, 0], lines)
        _autocorrelation(panels[0, 1], lines)
        _price(panels[1, 0], cases, assessed)
        _skew(panels[1, 1], spread)
        for axes in panels.flat:
            axes.grid(color="#E5E5E5", lw=0.6)
            axes.set_axisbelow(True)
        pixels = io.BytesIO()
        figure.savefig(pixels, format="png", dpi=110)
        plt.close(figure)
    # a palette makes the file a third as large
    Image.open(pixels).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)


def _distances(axes: Any, lines: Sequence[tuple[str, Curves]]) -> None:
    from .shuffle import BINS

    for name, curves in lines:
        color, dash = STYLE[name]
        axes.plot(BINS, curves.distance, color=color, ls=dash, lw=1.5, label=name)
    axes.set_xscale("log")
    axes.set(
        title="Where the data set's neighbours land",
        xlabel="positions apart in the epoch, at most",
        ylabel="share of neighbouring samples",
    )
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def _autocorrelation(axes: Any, lines: Sequence[tuple[str, Curves]]) -> None:
    for name, curves in lines:
        color, dash = STYLE[name]
        lag = np.arange(1, len(curves.autocorrelation) + 1)
        edges = np.unique(np.round(np.logspace(0, np.log10(len(lag)), 28)).astype(int))
        bins = list(zip(edges, np.append(edges[1:], len(lag) + 1), strict=True))
        axes.plot(
            [np.sqrt(a * (b - 1)) for a, b in bins],
            [curves.autocorrelation[a - 1 : b - 1].mean() for a, b in bins],
            color=color,
            ls=dash,
            lw=1.5,
        )
    axes.set_xscale("log")
    axes.set(
        title="Autocorrelation of the samples' numbers",
        xlabel="distance in batches (mean over the lags of a batch)",
        ylabel="autocorrelation",
    )


def _price(axes: Any, cases: Sequence[Case], assessed: Mapping[str, tuple[Found, Curves]]) -> None:
    marks = {"ours": ("#0072B2", "o"), "peer": ("#E69F00", "s"), "limit": ("#000000", "D")}
    for case in cases:
        if case.name == "no shuffle":
            continue
        found = assessed[case.name][0]
        color, mark = marks[case.role]
        axes.plot(found.in_use, found.imbalance, mark, color=color, ms=6)
        right, up, align = LABELS.get(case.name, (8, -3, "left"))
        axes.annotate(
            case.name.removeprefix("nearflash, ").removesuffix(" (default)"),
            (found.in_use, found.imbalance),
            xytext=(right, up),
            textcoords="offset points",
            ha=align,
            fontsize=8,
            color=color if case.role == "ours" else "#333333",
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(2.5, 2500)
    axes.set_xticks([4, 16, 64, 256, 1024], ["4", "16", "64", "256", "1,024"])
    axes.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    axes.minorticks_off()
    axes.set(
        title="Composition of batches and its price (blue: nearflash)",
        xlabel="shards in use at once",
        ylabel="class imbalance of a batch (perfect = 1)",
    )


def _skew(axes: Any, spread: Mapping[float, Sequence[Skewed]]) -> None:
    for color, (sigma, rows) in zip(SIGMAS, spread.items(), strict=True):
        ratio = [row.shards / row.lanes for row in rows]
        axes.plot(
            ratio, [row.shares.mean() for row in rows], color=color, lw=1.5, marker="o", ms=3, label=f"σ = {sigma}"
        )
        low, high = (np.array([np.quantile(row.shares, q) for row in rows]) for q in (0.05, 0.95))
        axes.fill_between(ratio, low, high, color=color, alpha=0.12, lw=0)
    axes.axhline(0.1, color="#999999", lw=0.8, ls="--")
    axes.axvline(8, color="#999999", lw=0.8, ls="--")
    axes.set_xscale("log")
    axes.set_xticks([4, 6, 8, 12, 16, 24, 32], ["4", "6", "8", "12", "16", "24", "32"])
    axes.minorticks_off()
    axes.set_ylim(0, 0.6)
    axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1, decimals=0))
    axes.set(
        title="Uneven shards: batches from fewer than half of the lanes",
        xlabel="shards per lane (256 shards, sizes lognormal)",
        ylabel="share of batches (mean, 5 to 95 % of draws)",
    )
    axes.legend(frameon=False, title="spread of sizes")
