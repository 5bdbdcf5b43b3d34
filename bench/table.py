"""A figure as a table on the terminal."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table

from .summary import Spread, Summary

STYLE = {"ours": "bold", "limit": "", "peer": "dim"}


def print_summary(console: Console, summary: Summary) -> None:
    """One row per case: the rate, and rate and CPU as multiples of the baseline's, each with its spread."""
    table = Table(title=summary.title, title_justify="left", title_style="bold", header_style="bold")
    table.add_column("")
    table.add_column(summary.unit, justify="right")
    table.add_column(f"× {summary.baseline}", justify="right")
    table.add_column("CPU per work ×", justify="right")
    for row in summary.rows:
        base = row.case == summary.baseline
        table.add_row(
            row.case,
            spread(row.rate),
            "1" if base else spread(row.ratio),
            "–" if row.cpu_ratio is None else "1" if base else spread(row.cpu_ratio),
            style=STYLE[row.role],
        )
    console.print(table)
    for line in summary.skipped:
        console.print(f"[dim]left out: {line}[/]", highlight=False)
    console.print(f"[dim]medians of {summary.repeats} rounds; least and most in brackets[/]\n", highlight=False)


def spread(value: Spread) -> str:
    """``"1.23 (1.10–1.40)"`` with three significant digits."""
    return f"{number(value.median)} ({number(value.low)}–{number(value.high)})"


def number(value: float) -> str:
    """Three significant digits, thousands separated, never in scientific notation."""
    rounded = float(f"{value:.3g}")
    if rounded >= 100 or rounded == 0:
        return f"{value:,.0f}"
    return f"{rounded:.{2 - math.floor(math.log10(rounded))}f}"
