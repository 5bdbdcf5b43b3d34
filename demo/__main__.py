"""``python -m demo --out demo-out``: exit code 0 if every check holds, 1 if one does not, 130 after Ctrl-C."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from cachefs.errors import NearflashError

from .checks import Check
from .job import JobFailed
from .plan import PLANS
from .processes import signals_as_exceptions
from .screen import Screen
from .stage import LOOPBACK
from .story import tell


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m demo", description="The main job of nearflash, end to end.")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="where picture, results and logs go")
    parser.add_argument("--size", choices=sorted(PLANS), default="full", help="small takes under a minute")
    args = parser.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 120)
    start = time.monotonic()
    try:
        with signals_as_exceptions():
            checks = tell(args.out.absolute(), PLANS[args.size], Screen(console))
    except (NearflashError, OSError) as e:
        console.print(f"[bold red]demo failed:[/] {escape(str(e))}", highlight=False)
        if isinstance(e, JobFailed):
            console.print(e.output, markup=False, highlight=False)
        return 1
    except KeyboardInterrupt as e:
        console.print(f"stopped by {e or 'Ctrl-C'}; nothing is left running", highlight=False)
        return 130
    code = verdict(console, checks)
    console.print(f"{time.monotonic() - start:.0f} s; see {args.out}/main-job.png", highlight=False)
    return code


def verdict(console: Console, checks: Sequence[Check]) -> int:
    """Name what does not hold; the exit code."""
    failed = [check.name for check in checks if not check.passed]
    for name in failed:
        console.print(f"[bold red]does not hold:[/] {name}", highlight=False)
    console.print(f"{len(failed)} checks failed" if failed else f"all {len(checks)} checks hold", highlight=False)
    return 1 if failed else 0


if __name__ == "__main__":
    os.environ.update(LOOPBACK)
    sys.exit(main())
