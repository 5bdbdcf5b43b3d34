"""What the person who started the demo sees while it runs: one line a stage, and a bar that moves with the training."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Advance = Callable[[int, str], None]
"""Tells how far a stage has come, in its units, and a word about it."""


class Screen:
    """Stages on a terminal (with bars) or in a log (plain lines, one per fifth of a stage that has words)."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False)

    @contextlib.contextmanager
    def stage(self, title: str, total: int | None = None) -> Iterator[Advance]:
        """A stage of the story; a line with its duration stays when it ends. Yields a function to move its bar."""
        start = time.monotonic()
        show = self._bar if self.console.is_terminal else self._lines
        with show(title, total) as advance:
            yield advance
        self.say(f"[green]✓[/] {title} [dim]{time.monotonic() - start:.1f} s[/]")

    @contextlib.contextmanager
    def _bar(self, title: str, total: int | None) -> Iterator[Advance]:
        bar = Progress(
            TextColumn("[cyan]…[/] {task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn() if total else TextColumn(""),
            TextColumn("[dim]{task.fields[word]}[/]"),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
        )
        with bar:
            task = bar.add_task(title, total=total, word="")
            yield lambda done, word: bar.update(task, completed=done, word=word)

    @contextlib.contextmanager
    def _lines(self, title: str, total: int | None) -> Iterator[Advance]:
        self.say(f"… {title}")
        said = 0

        def advance(done: int, word: str) -> None:
            nonlocal said
            fifth = done * 5 // total if total else 0
            if fifth > said and word:
                said = fifth
                self.say(f"  {done} of {total}  {word}")

        yield advance
