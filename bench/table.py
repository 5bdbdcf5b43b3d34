"""A figure as a table on the terminal."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table

from .summary import Summary

STYLE = {"ours": "bold", "limit": "", "peer": "dim"}


def print_summary(console: Console, summary: Summary) -> None:
    """One row per case: the median rate, and as multiples of the baseline's the rate with its spread and the CPU."""
    table = Table(title=summary.title, title_justify="left", title_style="bold", header_style="bold")
    table.add_column("case", no_wrap=True)
    table.add_column(summary.unit, justify="right", no_wrap=True)
    table.add_column(f"× {summary.baseline}", justify="right")
    table.add_column("least–most", justify="right", no_wrap=True, style="dim")
    table.add_column("CPU ×", justify="right", no_wrap=True)
    for row in summary.rows:
        table.add_row(
            row.case,
            number(row.rate.median),
            number(row.ratio.median),
            f"{number(row.ratio.low)}–{number(row.ratio.high)}",
            "–" if row.cpu_ratio is None else number(row.cpu_ratio.median),
            style=STYLE[row.role],
        )
    console.print(table)
    for line in summary.skipped:
        console.print(f"[dim]left out: {line}[/]", highlight=False)
    console.print(f"[dim]medians of {summary.repeats} rounds; CPU: seconds per unit of work[/]\n", highlight=False)


def number(value: float) -> str:
    """Three significant digits, thousands separated, never in scientific notation."""
    rounded = float(f"{value:.3g}")
    if rounded >= 100 or rounded == 0:
        return f"{value:,.0f}"
    return f"{rounded:.{2 - math.floor(math.log10(rounded))}f}"
