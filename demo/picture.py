"""The picture of the main job: both loss curves over each other, and what left the origin in each epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#666666"
PALE = "#A9CFE6"


@dataclass(frozen=True)
class Curves:
    """What is drawn. Losses are means over ranks, one a step; bytes are shard bytes per epoch that left the origin."""

    reference: Sequence[float]
    first: Sequence[float]
    second: Sequence[float]
    resumed_from: int
    steps_per_epoch: int
    bytes_reference: Sequence[int]
    bytes_killed: Sequence[int]
    shard_bytes: int
    identical: bool
    """Whether every loss of the killed run is bit-identical to the uninterrupted one's."""


def draw(curves: Curves, path: Path) -> None:
    """Write the picture as PNG."""
    style: dict[Any, Any] = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 150}
    with plt.rc_context(style):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(11.5, 4.8), width_ratios=(2.4, 1), layout="constrained", facecolor="white"
        )
        _losses(left, curves)
        _origin(right, curves)
        figure.savefig(path)
        plt.close(figure)


def _losses(axes: Any, c: Curves) -> None:
    killed = len(c.first)
    resumed = range(c.resumed_from + 1, c.resumed_from + len(c.second) + 1)
    axes.plot(range(1, len(c.reference) + 1), c.reference, color=PALE, lw=5, label="uninterrupted run")
    axes.plot(range(1, killed + 1), c.first, color=ORANGE, lw=1.3, label=f"first attempt, until step {killed}")
    axes.axvline(killed + 0.5, color=ORANGE, lw=1.3, ls=(0, (4, 2)), label="SIGKILL to the job and the node daemon")
    axes.plot(resumed, c.second, color=BLUE, lw=1.3, label=f"started again, from step {c.resumed_from}")
    axes.axvspan(c.resumed_from + 0.5, killed + 0.5, color=ORANGE, alpha=0.15, lw=0, label="steps done twice")
    axes.axvline(c.steps_per_epoch + 0.5, color=GREY, lw=0.8, ls=":")
    axes.annotate(
        "epoch 2",
        (c.steps_per_epoch + 0.5, axes.get_ylim()[0]),
        xytext=(5, 5),
        textcoords="offset points",
        color=GREY,
        fontsize=9,
    )
    axes.set(xlabel="step", ylabel="loss (nats per byte, mean of both ranks)", xlim=(0, len(c.reference) + 1))
    verdict = "bit-identical to the uninterrupted run" if c.identical else "NOT identical to the uninterrupted run"
    axes.set_title(f"Killed without warning and resumed: {verdict}", loc="left", fontsize=11)
    axes.legend(frameon=False, loc="upper right", fontsize=9)


def _origin(axes: Any, c: Curves) -> None:
    width = 0.38
    most = max(*c.bytes_killed, *c.bytes_reference, c.shard_bytes, 1)
    for offset, sizes, color, label in (
        (-width / 2, c.bytes_killed, BLUE, "killed and resumed"),
        (width / 2, c.bytes_reference, PALE, "uninterrupted"),
    ):
        places = [i + offset for i in range(len(sizes))]
        bars = axes.bar(places, [s / 1e6 for s in sizes], width * 0.94, color=color, label=label)
        axes.bar_label(bars, [f"{s / 1e6:.1f}" if s else "0" for s in sizes], padding=2, fontsize=9)
    axes.axhline(c.shard_bytes / 1e6, color=GREY, lw=0.8, ls=":")
    axes.annotate(
        f"all shards once: {c.shard_bytes / 1e6:.1f} MB",
        (1.55, c.shard_bytes / 1e6),
        xytext=(0, 4),
        textcoords="offset points",
        ha="right",
        color=GREY,
        fontsize=9,
    )
    axes.set_xticks(range(len(c.bytes_killed)), [f"epoch {i + 1}" for i in range(len(c.bytes_killed))])
    axes.set(ylabel="MB", ylim=(0, most / 1e6 * 1.25), xlim=(-0.55, 1.55))
    axes.set_title("Shard bytes that left the origin", loc="left", fontsize=11)
    axes.legend(frameon=False, loc="center right", fontsize=9, handlelength=1)
