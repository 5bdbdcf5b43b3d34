"""What the project's commands have in common: options, exit codes, errors in one line, text fit for a terminal.

Exit codes: 0 done (also if whoever reads the output stops reading), 1 failed, 2 wrong usage, 130 interrupted.
A command without arguments, where it has others below it, prints its help.
"""

from __future__ import annotations

import dataclasses
import os
import select
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .errors import NearflashError

if TYPE_CHECKING:
    from .config import Origin

F = TypeVar("F", bound=Callable[..., Any])


def run(command: click.Command, program: str, argv: Sequence[str] | None) -> int:
    """Run a command line; returns the exit code. With ``NEARFLASH_DEBUG`` errors keep their traceback."""

    def say(message: Warning | str, *rest: object, **more: object) -> None:
        fail(program, str(message), 0)

    with warnings.catch_warnings():
        warnings.showwarning = say
        return _run(command, program, argv)


def _run(command: click.Command, program: str, argv: Sequence[str] | None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    if not args and isinstance(command, click.Group):
        args = ["--help"]  # what click does then differs with its version
    streams = sys.stdout, sys.stderr
    try:
        code = command.main(args=args, prog_name=program, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.UsageError as e:
        path = e.ctx.command_path if e.ctx is not None else program
        return fail(program, f"{e.format_message()} (try {path} --help)", 2)
    except (KeyboardInterrupt, click.Abort):
        return fail(program, "interrupted", 130)
    except BrokenPipeError:
        return _broken_pipe(program)
    except SystemExit:
        if sys.stdout is streams[0]:  # shell completion is done
            raise
        sys.stdout, sys.stderr = streams  # click's way to end at a broken pipe, with wrappers that swallow the next one
        return _broken_pipe(program)
    except Exception as e:  # the last line of defence of a command: one line, not a traceback
        from .config import debugging

        if debugging():
            raise
        if isinstance(e, (NearflashError, OSError)):
            return fail(program, str(e), 1)
        what = f"failed unexpectedly: {type(e).__name__}: {e}"
        return fail(program, f"{what} (NEARFLASH_DEBUG=1 shows where)", 1)


def _broken_pipe(program: str) -> int:
    """The exit code at a broken pipe: whoever read our output has seen enough; any other pipe is a failure."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    if not poll.poll(0):
        return fail(program, "a connection was cut (broken pipe)", 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at the end
    return 0


def fail(program: str, text: str, code: int) -> int:
    """Say what is wrong, or odd, in one line, and return ``code``."""
    print(f"{program}: {plain(' '.join(text.split()))}", file=sys.stderr)
    return code


def plain(text: str) -> str:
    """Text that comes from a store, without anything that a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in text)


def json_option(command: F) -> F:
    """``as_json``: one JSON value on standard output instead of text."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")(command)


def origin_options(command: F) -> F:
    """Options that say which object store is meant; see :func:`given_origin`."""
    for name, text in (
        ("--endpoint", "Endpoint of the object store [env AWS_ENDPOINT_URL]."),
        ("--region", "Region [env AWS_REGION]."),
        ("--preset", "Kind of object store: aws, aliyun, minio ... [env NEARFLASH_PRESET]."),
    ):
        command = click.option(name, help=text)(command)
    return click.option("--anonymous", is_flag=True, default=None, help="Send no credentials.")(command)


def given_origin(options: Mapping[str, Any]) -> Origin:
    """The origin of the environment, with those of :func:`origin_options` that were given on top."""
    from .config import Origin

    given = {name: value for name, value in options.items() if value is not None}
    return dataclasses.replace(Origin.from_env(), **given)
