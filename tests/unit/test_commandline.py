"""Both commands end alike, whatever goes wrong in them."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import click
import pytest

import cachefs.cli
import ckptstore.cli
from cachefs.commandline import plain, run
from cachefs.errors import NotFound, Unavailable


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (NotFound("no such key", url="s3://b/\x1b[31mk"), 1, "prog: s3://b/?[31mk: no such key"),
        (OSError(28, "No space left on device"), 1, "prog: [Errno 28] No space left on device"),
        (RuntimeError("two\nlines"), 1, "prog: failed unexpectedly: RuntimeError: two lines (NEARFLASH_DEBUG=1"),
        (click.UsageError("no"), 2, "prog: no (try prog --help)"),
        (KeyboardInterrupt(), 130, "prog: interrupted"),
    ],
)
def test_every_error_is_one_printable_line_and_an_exit_code(
    error: BaseException, code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    @click.command()
    def broken() -> None:
        raise error

    assert run(broken, "prog", []) == code
    text = capsys.readouterr().err.removeprefix("\n")  # click ends the terminal's line with ^C in it
    assert text.startswith(says) and text.count("\n") == 1


@pytest.mark.parametrize("error", [Unavailable("no answer"), RuntimeError("a defect")])
def test_a_defect_is_shown_where_it_is_on_request(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def broken() -> None:
        raise error

    for value, shown in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("NEARFLASH_DEBUG", value)
        if shown:
            with pytest.raises(type(error)):
                run(broken, "prog", [])
        else:
            assert run(broken, "prog", []) == 1


@pytest.mark.parametrize(("main", "name"), [(cachefs.cli.main, "cachefs"), (ckptstore.cli.main, "ckptstore")])
def test_both_commands_end_alike(
    main: object, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(main)
    monkeypatch.setenv("NEARFLASH_ANONYMOUS", "\x1b[31mperhaps")
    assert main(["ls", "s3://b/x"]) == 1
    text = capsys.readouterr().err
    assert text.startswith(f"{name}: NEARFLASH_ANONYMOUS=") and "\x1b" not in text and text.count("\n") == 1
    assert main(["ls", "--nonsense", "s3://b/x"]) == 2
    assert f"(try {name} ls --help)" in capsys.readouterr().err
    monkeypatch.setenv("NEARFLASH_DEBUG", "1")
    with pytest.raises(ValueError, match="NEARFLASH_ANONYMOUS"):
        main(["ls", "s3://b/x"])


def test_a_warning_is_one_line_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    @click.command()
    def odd() -> None:
        warnings.warn("two\nlines", stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert run(odd, "prog", []) == 0
    assert capsys.readouterr().err == "prog: two lines\n"


def test_text_for_a_terminal_gives_it_no_orders() -> None:
    assert plain("a\x1b]0;x\x07\nb\u202ec é") == "a?]0;x??b?c é"


@pytest.mark.parametrize("module", ["cachefs", "ckptstore", "loader"])
def test_a_bare_command_prints_its_help(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("Usage: ") and "\nCommands:\n" in done.stdout


@pytest.mark.parametrize("module", ["cachefs", "ckptstore", "loader"])
def test_who_stops_reading_has_seen_enough(module: str) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, "--help"], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_another_broken_pipe_is_a_failure() -> None:
    script = (
        "import sys, click; from cachefs.commandline import run\n"
        "@click.command()\n"
        "def broken(): raise BrokenPipeError(32, 'Broken pipe')\n"
        "sys.exit(run(broken, 'prog', []))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "prog: a connection was cut (broken pipe)\n")
