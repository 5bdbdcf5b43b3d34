"""``python -m bench.shuffle --out bench-out``: how good a shuffle is, in tables and as ``shuffle.png``.

Pure arithmetic from fixed seeds, no data: a minute or two of one core, and the same numbers on every machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from loader.permute import Int64s

from . import shuffle_measures as measures
from . import shuffle_orders as orders
from . import shuffle_skew as skew
from .shuffle_orders import Job

CLASSES = 100
SEED = 1
JOB = Job()

Order = Callable[[Int64s, int], Int64s]
"""(samples of each shard, epoch) -> the order."""


@dataclass(frozen=True)
class Case:
    """One shuffle; ``role`` (ours, peer, limit) gives its colour; ``curve``: it has a line in the pictures."""

    name: str
    role: str
    order: Order
    curve: bool = False


@dataclass(frozen=True)
class Found:
    """What was measured of one shuffle on one data set. Ratios are to what a perfect shuffle has."""

    shards: float
    imbalance: float
    of_rank: float
    start: float
    neighbours: float
    successors: float
    correlation: float
    again: float
    in_use: float


@dataclass(frozen=True)
class Curves:
    """A shuffle's two pictures: shares of neighbours at most so far apart, autocorrelation by lag in batches."""

    distance: measures.Floats
    autocorrelation: measures.Floats


def _ours(lanes: int | None, blocks: int | None) -> Order:
    return lambda counts, epoch: orders.walked(
        orders.our_epoch(counts, epoch, SEED, JOB, lanes=lanes, block_shards=blocks), counts
    )


def _buffer(size: int) -> Order:
    return lambda counts, epoch: orders.buffer(counts, epoch, SEED, JOB, size=size)


def _litdata(window: int | None) -> Order:
    return lambda counts, epoch: orders.litdata(counts, epoch, SEED, JOB, window=window)


def _py1e(block: int) -> Order:
    return lambda counts, epoch: orders.py1e(counts, epoch, SEED, JOB, block=block)


CASES = (
    Case("perfect shuffle", "limit", lambda counts, epoch: orders.perfect(counts, epoch, SEED), True),
    Case("no shuffle", "limit", lambda counts, epoch: orders.unshuffled(counts, epoch, SEED)),
    Case("nearflash, 4 lanes, K=8 (default)", "ours", _ours(None, None), True),
    Case("nearflash, 4 lanes, K=1", "ours", _ours(None, 1)),
    Case("nearflash, 4 lanes, K=4", "ours", _ours(None, 4)),
    Case("nearflash, 16 lanes, K=8", "ours", _ours(16, 8), True),
    Case("nearflash, 64 lanes, K=1", "ours", _ours(64, 1)),
    Case("nearflash, 64 lanes, K=8", "ours", _ours(64, 8), True),
    Case("buffer of 1,000 a worker", "peer", _buffer(1_000), True),
    Case("buffer of 10,000 a worker", "peer", _buffer(10_000), True),
    Case("LitData, windows of 256", "peer", _litdata(256), True),
    Case("LitData, whole chunks", "peer", _litdata(None)),
    Case("py2s, 64 canonical nodes", "peer", lambda c, e: orders.py2s(c, e, SEED, JOB, canonical=64), True),
    Case("py1e, block 32,768", "peer", _py1e(1 << 15)),
    Case("py1e, block 262,144 (default)", "peer", _py1e(1 << 18), True),
)

BINS = np.unique(np.round(np.logspace(0, 6, 121)).astype(np.int64))


def data_sets(scale: int) -> dict[str, Int64s]:
    """Three data sets of the same size, by what their shards are like: the samples of each shard."""
    shards, mean = 1024 // scale, 1000
    drawn = skew.lognormal(shards, mean, 1.0, SEED)
    return {
        f"{shards:,} shards of {mean:,} samples": np.full(shards, mean, dtype=np.int64),
        f"{shards:,} shards, sizes lognormal with σ = 1": drawn,
        f"16 shards of {shards // 16 * mean:,} samples": np.full(16, shards // 16 * mean, dtype=np.int64),
    }


def assess(case: Case, counts: Int64s) -> tuple[Found, Curves]:
    """Everything that is measured of one shuffle: two of its epochs are made."""
    first, second = case.order(counts, 0), case.order(counts, 1)
    total, batch = len(first), JOB.batch
    shard = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    label = np.arange(total, dtype=np.int64) * CLASSES // total
    unlike = measures.imbalance(first, label, batch)
    lags = min(512, total // batch // 4)
    related = measures.autocorrelation(first, lags * batch).reshape(lags, batch).mean(axis=1)
    apart = measures.scattered(first)
    middle = measures.even_distance(total)
    found = Found(
        shards=float(measures.distinct(first, shard, batch).mean()),
        imbalance=float(unlike.mean()),
        of_rank=float(measures.imbalance(first, label, batch // JOB.ranks).mean()),
        start=float(unlike[: max(len(unlike) // 100, 1)].mean()),
        neighbours=float(np.median(apart)) / middle,
        successors=float(np.median(measures.gathered(first))) / middle,
        correlation=measures.correlation(first, second),
        again=measures.met_again(first, second, batch),
        in_use=float(measures.in_use(first, shard).mean()),
    )
    return found, Curves(np.searchsorted(np.sort(apart), BINS, side="right") / len(apart), related)


COLUMNS = {
    "shards": ("shards a batch", "{:.0f}"),
    "imbalance": ("class imbalance", "{:.1f}"),
    "of_rank": ("in a rank's part", "{:.1f}"),
    "start": ("in the first 1 %", "{:.1f}"),
    "neighbours": ("neighbours' distance", "{:.3f}"),
    "successors": ("successors' distance", "{:.2f}"),
    "correlation": ("epochs' correlation", "{:+.3f}"),
    "again": ("meet again", "{:.1f}"),
    "in_use": ("shards in use", "{:.0f}"),
}


def table(rows: dict[str, Found]) -> str:
    """The rows as a Markdown table."""
    lines = ["| shuffle | " + " | ".join(title for title, _ in COLUMNS.values()) + " |"]
    lines.append("|---" + "|--:" * len(COLUMNS) + "|")
    for name, found in rows.items():
        values = asdict(found)
        cells = (form.format(values[key]).replace("-0.000", "+0.000") for key, (_, form) in COLUMNS.items())
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


@dataclass(frozen=True)
class Skewed:
    """Shares of narrow batches over many draws of shard sizes."""

    shards: int
    lanes: int
    sigma: float
    shares: measures.Floats
    even: measures.Floats


def skewed(shards: int, ratio: float, sigma: float, draws: int) -> Skewed:
    """Draw lognormal shard sizes ``draws`` times and deal them to shards / ratio lanes."""
    lanes = max(int(shards / ratio), 1)
    sizes = [skew.lognormal(shards, 200, sigma, seed) for seed in range(draws)]
    shares = [skew.narrow(skew.dealt(counts, lanes, seed)) for seed, counts in enumerate(sizes)]
    least = [skew.narrow(skew.evened(counts, lanes)) for counts in sizes]
    return Skewed(shards, lanes, sigma, np.array(shares), np.array(least))


def skew_table(rows: list[Skewed]) -> str:
    """The rows as a Markdown table."""
    lines = ["| shards | lanes | mean | 95 % of draws below | most | draws above 10 % | even deal, mean |"]
    lines.append("|--:" * 7 + "|")
    for row in rows:
        lines.append(
            f"| {row.shards:,} | {row.lanes} | {row.shares.mean():.1%} | {np.quantile(row.shares, 0.95):.1%} "
            f"| {row.shares.max():.1%} | {(row.shares > 0.1).mean():.1%} | {row.even.mean():.1%} |"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Print the tables and draw the picture."""
    parser = argparse.ArgumentParser(prog="python -m bench.shuffle", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="where shuffle.png goes")
    parser.add_argument("--quick", action="store_true", help="a sixteenth of the data: seconds, and other numbers")
    args = parser.parse_args(argv)
    from .shuffle_plot import draw  # here, so that who wants the numbers alone needs no matplotlib

    draws = 10 if args.quick else 200
    assessed: dict[str, dict[str, tuple[Found, Curves]]] = {}
    for name, counts in data_sets(16 if args.quick else 1).items():
        assessed[name] = {case.name: assess(case, counts) for case in CASES}
        print(f"### {name}\n\n{table({case: found for case, (found, _) in assessed[name].items()})}\n", flush=True)
    sizes = (64, 256) if args.quick else (64, 128, 256, 512, 1024, 4096)
    print(f"### Batches from fewer than half of the lanes\n\n{skew_table([skewed(n, 8, 1.0, draws) for n in sizes])}\n")
    ratios = (4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0)
    spread = {sigma: [skewed(256, ratio, sigma, draws // 5) for ratio in ratios] for sigma in (0.5, 1.0, 1.5)}
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "shuffle.png"
    draw(CASES, next(iter(assessed.values())), spread, JOB.batch, path)
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
