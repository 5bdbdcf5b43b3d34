"""The end of the demo: the table on the screen, ``results.json``, and the figures for the picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .checks import Check, Evidence, Ranks, epoch_two, resumed_from, same_losses
from .picture import Curves
from .plan import RANKS
from .traffic import between, of_keys

Times = dict[str, float]
"""Seconds per stage."""


def mean_losses(ranks: Ranks) -> list[float]:
    """The mean over ranks of each step that all ranks finished."""
    return [sum(float.fromhex(s.loss) for s in steps) / len(steps) for steps in zip(*ranks, strict=False)]


def shard_bytes(e: Evidence) -> dict[str, list[int]]:
    """Shard bytes that left the origin in epoch 1 and 2, by run."""
    found = {}
    for name, gets, ranks in (("uninterrupted", e.reference_gets, e.reference), ("killed", e.gets, e.second)):
        own, start = of_keys(gets, e.shards), epoch_two(ranks)
        found[name] = [sum(g.size for g in between(own, *span)) for span in ((0, start), (start, float("inf")))]
    return found


def curves(e: Evidence) -> Curves:
    """What the picture draws."""
    origin = shard_bytes(e)
    return Curves(
        reference=mean_losses(e.reference),
        first=mean_losses(e.first),
        second=mean_losses(e.second),
        resumed_from=resumed_from(e.second),
        steps_per_epoch=e.plan.steps_per_epoch,
        bytes_reference=origin["uninterrupted"],
        bytes_killed=origin["killed"],
        shard_bytes=sum(e.shards.values()),
        identical=same_losses(e),
    )


def results(e: Evidence, checks: Sequence[Check], times: Times) -> dict[str, Any]:
    """What ``results.json`` holds: only numbers, names and verdicts; no path, no credential."""
    losses = mean_losses(e.reference)
    return {
        "passed": all(c.passed for c in checks),
        "checks": [{"name": c.name, "passed": c.passed, "found": c.found} for c in checks],
        "plan": e.plan.as_dict(),
        "ranks": RANKS,
        "shards": len(e.shards),
        "shard_bytes": sum(e.shards.values()),
        "origin_shard_bytes_per_epoch": shard_bytes(e),
        "killed_after_step": max((s.step for rank in e.first for s in rank), default=0),
        "resumed_from_step": resumed_from(e.second),
        "loss": {"first": losses[0], "last": losses[-1]} if losses else {},
        "seconds": {name: round(value, 2) for name, value in times.items()},
    }


def write_json(path: Path, found: dict[str, Any]) -> None:
    path.write_text(json.dumps(found, indent=2) + "\n")


def print_table(console: Console, checks: Sequence[Check]) -> None:
    """One row per check: what is claimed, what was found, whether it holds."""
    table = Table(title="The main job", title_justify="left", title_style="bold", header_style="bold")
    table.add_column("must hold")
    table.add_column("found")
    table.add_column("", justify="right")
    for check in checks:
        table.add_row(check.name, check.found, "[green]yes[/]" if check.passed else "[bold red]NO[/]")
    console.print(table)
