"""``python -m bench [cold|warm|index] --out bench-out``: print tables, write ``bench.png`` and ``bench.json``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from rich.console import Console

from cachefs.errors import NearflashError

from . import cold, indexing, warm_samples, warm_tables, warm_tokens
from .figure import Figure
from .machine import describe
from .plot import draw
from .runner import measure
from .sizes import FULL, QUICK, Sizes
from .summary import Summary, summarise
from .table import print_summary

PAGES: dict[str, tuple[Callable[[Path, Sizes], AbstractContextManager[Figure]], ...]] = {
    "cold": (cold.figure,),
    "warm": (warm_tokens.figure, warm_samples.figure, warm_tables.parquet, warm_tables.arrow),
    "index": (indexing.figure, indexing.filling),
}


def main(argv: list[str] | None = None) -> int:
    """Run the pages asked for. Exit code 1 with one line on an error of ours, 130 after Ctrl-C."""
    args = _arguments(argv)
    console = Console(stderr=False)
    out: Path = args.out
    scratch = out / "data"
    scratch.mkdir(parents=True, exist_ok=True)
    try:
        summaries = run(args.pages or list(PAGES), scratch, QUICK if args.quick else FULL, args.repeats, console)
    except NearflashError as e:
        console.print(f"bench: {e}", style="red", highlight=False)
        return 1
    except KeyboardInterrupt:
        return 130
    draw(summaries, out / "bench.png")
    found = {"machine": describe(), "quick": args.quick, "figures": [s.as_dict() for s in summaries]}
    (out / "bench.json").write_text(json.dumps(found, indent=2) + "\n")
    console.print(f"written: {out / 'bench.png'}, {out / 'bench.json'}", highlight=False)
    return 0


def run(pages: list[str], scratch: Path, sizes: Sizes, repeats: int, console: Console) -> list[Summary]:
    """Measure every figure of the pages and print its table as soon as it is done."""
    summaries = []
    for page in pages:
        for opened in PAGES[page]:
            with opened(scratch, sizes) as figure, console.status("") as status:
                measured = measure(figure, repeats=repeats, warmup=1, progress=status.update)
            summaries.append(summarise(measured))
            print_summary(console, summaries[-1])
    return summaries


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("pages", nargs="*", metavar="page", help=f"of {', '.join(PAGES)} (default: all)")
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="where results and data go")
    parser.add_argument("--repeats", type=int, default=5, help="rounds that count, at least 5 for a figure to quote")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that everything runs, measures nothing")
    args = parser.parse_args(argv)
    unknown = [page for page in args.pages if page not in PAGES]
    if unknown or args.repeats < 1:
        parser.error(f"no page {unknown[0]!r}" if unknown else "--repeats must be at least 1")
    return args


if __name__ == "__main__":
    os.environ.update(NO_PROXY="127.0.0.1", no_proxy="127.0.0.1")  # the server is on this machine
    sys.exit(main())
