"""Other tools as cases, each run by the Python it is installed in: their dependencies stay out of our environment.

``NEARFLASH_BENCH_PYTHON`` names that interpreter; without it ours is asked. A tool that it cannot import is left out,
with a word. The tool's own code is in :mod:`.warm`, which runs as a script there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cachefs.errors import NearflashError

from ..figure import Case, Timing

PYTHON_VARIABLE = "NEARFLASH_BENCH_PYTHON"
SCRIPT = Path(__file__).with_name("warm.py")
DEADLINE = 600.0


class PeerFailed(NearflashError):
    """Another tool ended with an error."""


@dataclass(frozen=True)
class Peer:
    """One way to use another tool: what to import, which function of the script, and its arguments."""

    name: str
    module: str
    job: str
    arguments: tuple[str, ...]


def python() -> str:
    """The interpreter that has the peers."""
    return os.environ.get(PYTHON_VARIABLE) or sys.executable


def cases(peers: Sequence[Peer]) -> tuple[tuple[Case, ...], tuple[str, ...]]:
    """Cases for the peers that can be imported, and a line for each that cannot."""
    interpreter = python()
    importable = {m: _has(interpreter, m) for m in sorted({p.module for p in peers})}
    found = tuple(Case(p.name, "peer", partial(_run, interpreter, p)) for p in peers if importable[p.module])
    absent = [m for m, there in importable.items() if not there]
    hint = f"not importable; {PYTHON_VARIABLE}=/path/to/python names an environment that has it"
    return found, tuple(f"{module}: {hint}" for module in absent)


def _has(interpreter: str, module: str) -> bool:
    return (
        subprocess.run([interpreter, "-c", f"import {module}"], capture_output=True, timeout=DEADLINE).returncode == 0
    )


def _run(interpreter: str, peer: Peer) -> Timing:
    """Run the script once and read the timing that it prints as its last line."""
    command = [interpreter, str(SCRIPT), peer.job, *peer.arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        raise PeerFailed(f"{peer.name} ended with code {done.returncode}: {last[0]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return Timing(found["seconds"], found["cpu"], found["work"])
