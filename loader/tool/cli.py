"""``python -m loader``. Errors are one line on standard error; ``--json`` prints JSON on standard output.

Exit codes: 0 done, 1 failed or damaged, 2 wrong usage, 130 interrupted. Commands import what they need, so ``--help``
is quick; none needs torch, unless images or tensors are to be decoded.
"""

from __future__ import annotations

from collections.abc import Sequence

import click

from cachefs.commandline import run

from .check import check
from .convert import convert
from .count import count
from .head import head
from .inspect import inspect

PROGRAM = "python -m loader"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return run(cli, PROGRAM, argv)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="nearflash", prog_name=PROGRAM)
def cli() -> None:
    """Look at data sets, check them and convert them: s3://bucket/folder/, a pattern, one shard, local paths."""


for command in (inspect, head, count, check, convert):
    cli.add_command(command)
