"""What the person at the terminal sees: stages, verdicts and exit codes."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from demo.__main__ import main, verdict
from demo.checks import Check
from demo.screen import Screen


def console(*, terminal: bool = False) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=100, force_terminal=terminal), out


def test_one_check_that_does_not_hold_is_named_and_fails_the_demo() -> None:
    screen, out = console()
    assert verdict(screen, [Check("good", True, "1"), Check("losses are equal", False, "2")]) == 1
    assert "does not hold: losses are equal" in out.getvalue()
    assert "1 checks failed" in out.getvalue()
    assert "good" not in out.getvalue()


def test_all_checks_hold() -> None:
    screen, out = console()
    assert verdict(screen, [Check("good", True, "1"), Check("fine", True, "2")]) == 0
    assert "all 2 checks hold" in out.getvalue()


def test_a_folder_that_cannot_be_made_is_one_line_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["--size", "small", "--out", str(tmp_path / "file" / "out")]) == 1
    assert "demo failed:" in capsys.readouterr().out


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_visible_with_and_without_a_terminal(terminal: bool) -> None:
    screen, out = console(terminal=terminal)
    with Screen(screen).stage("training", 10) as advance:
        for done in range(1, 11):
            advance(done, f"loss {done}")
    text = out.getvalue()
    assert "training" in text and "✓" in text
    assert "loss 10" in text
    if not terminal:
        assert [line.split()[0] for line in text.splitlines() if " of 10 " in line] == ["2", "4", "6", "8", "10"]


def test_a_stage_that_fails_is_not_ticked_off() -> None:
    screen, out = console()
    with pytest.raises(ValueError, match="no"), Screen(screen).stage("doomed"):
        raise ValueError("no")
    assert "✓" not in out.getvalue()
