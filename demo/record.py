"""What a rank did, step by step, written so that a SIGKILL loses nothing that was already trained.

One file a rank, JSON lines: ``{"attempt": pid}`` where a process begins, then one object a step: ``step, epoch, loss,
ids, time``. The loss is a hexadecimal float, so that equal means bit-identical; ``ids`` holds one list of sample ids
per data set; ``time`` is seconds since the epoch.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self


@dataclass(frozen=True)
class Step:
    """One training step of one rank."""

    step: int
    epoch: int
    loss: str
    ids: tuple[tuple[int, ...], ...]
    time: float

    def same_work(self, other: Step) -> bool:
        """Same samples and bit-identical loss in the same place; only the clock may differ."""
        return (self.step, self.epoch, self.loss, self.ids) == (other.step, other.epoch, other.loss, other.ids)


class Recorder:
    """Appends to ``<folder>/rank<rank>.jsonl``: one unbuffered write a step. Owned by one process."""

    def __init__(self, folder: str | Path, rank: int) -> None:
        path = rank_file(Path(folder), rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by close)
        start = json.dumps({"attempt": os.getpid()})
        self._file.write(f"\n{start}\n".encode())  # the first newline ends a line that a kill may have cut

    def step(self, step: int, epoch: int, loss: float, ids: Sequence[Sequence[int]]) -> None:
        """Note one finished step. ``loss`` is the rank's own; ``ids`` has one sequence per data set."""
        line = {"step": step, "epoch": epoch, "loss": float(loss).hex(), "ids": [[int(i) for i in s] for s in ids]}
        self._file.write(json.dumps({**line, "time": time.time()}).encode() + b"\n")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.jsonl"


class StepReader:
    """Follows one rank's file: :meth:`attempts` reads only what was added since the last call."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = rank_file(folder, rank)
        self._offset = 0
        self._attempts: list[list[Step]] = []

    def attempts(self) -> list[list[Step]]:
        """The steps so far, one list per process that wrote them, in the order they were made.

        A line cut by a kill is left out: it has no newline, or the next attempt ended it.
        """
        if self._path.exists():
            with open(self._path, "rb") as f:
                f.seek(self._offset)
                data = f.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offset += len(whole)
            for line in whole.splitlines():
                if line.endswith(b"}"):
                    self._add(json.loads(line))
        return self._attempts

    def _add(self, d: dict[str, Any]) -> None:
        if "attempt" in d:
            self._attempts.append([])
        else:
            ids = tuple(tuple(i) for i in d["ids"])
            self._attempts[-1].append(Step(d["step"], d["epoch"], d["loss"], ids, d["time"]))
