"""Every format on damaged files: a seeded sample here, ten thousand a format in the slow set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.fault.format_damage import cases

ROOT = Path(__file__).parents[2]
CASES = cases()
NAMES = sorted(CASES)


def survey(name: str, seed: int, count: int) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", "tests.fault.format_damage", name, str(seed), str(count)],
        cwd=ROOT,
        env={**os.environ, "NEARFLASH_CACHE_DIR": "/nonexistent"},  # nothing here needs a daemon
        capture_output=True,
        text=True,
        timeout=60 + count * 2,
    )
    assert done.returncode == 0, f"{name}, seed {seed}: exit {done.returncode}\n{done.stderr[-3000:]}"
    outcome: dict[str, int] = json.loads(done.stdout)
    assert sum(outcome.values()) == count
    return outcome


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
def test_damage_is_told(name: str) -> None:
    survey(name, 1, 120)


@pytest.mark.slow
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("name", NAMES)
def test_damage_is_told_in_ten_thousand_files(name: str) -> None:
    total: Counter[str] = sum((Counter(survey(name, seed, 1000)) for seed in range(2, 12)), Counter())
    told = total["refused"] + total["partly"]
    if CASES[name].checksummed:
        assert total["other"] == 0 and told > total["equal"]
    assert told > 0
