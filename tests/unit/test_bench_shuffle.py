"""Shuffle quality: the condition on skewed shards, the page's figures, and the command that makes them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from bench import shuffle, shuffle_measures, shuffle_skew
from loader.epochs import Orders

PAGE = Path(__file__).parents[2] / "docs" / "shuffle.md"


@pytest.mark.parametrize("shards", [64, 128, 256, 512, 1024])
def test_skewed_shards_keep_batches_mixed(shards: int) -> None:
    """Lognormal sizes with σ = 1 in shards / 8 lanes: at most 10 % of the batches come from fewer than half of them,
    but for draws in which one shard alone outweighs a lane by a third."""
    lanes = shards // 8
    drawn = [shuffle_skew.lognormal(shards, 200, 1.0, seed) for seed in range(40)]
    shares = np.array([shuffle_skew.narrow(shuffle_skew.dealt(c, lanes, seed)) for seed, c in enumerate(drawn)])
    even = np.array([shuffle_skew.narrow(shuffle_skew.evened(c, lanes)) for c in drawn])
    largest = np.array([c.max() / (c.sum() / lanes) for c in drawn])
    assert (shares[largest <= 4 / 3] <= 0.10).all()
    assert (shares[largest <= 1] <= 0.02).all()
    assert (shares > 0.10).mean() <= 0.05
    assert shares.mean() <= 0.03
    assert (shares - even).max() <= 0.01, "the deal adds little to what whole shards cost by themselves"


@pytest.mark.parametrize("rounds", [1, 4])
def test_the_same_counted_in_batches(rounds: int) -> None:
    for seed in range(5):
        counts = shuffle_skew.lognormal(256, 200, 1.0, seed)
        order = Orders.begin(counts, counts * 1000, batch=32 * rounds, lanes=32, seed=seed, shuffle=True)(0)
        lane = order.lane_of(np.arange(order.total))
        assert shuffle_measures.narrow_share(lane, 32, 32 * rounds) <= 0.10


def test_lanes_that_are_cut_are_never_skewed() -> None:
    counts = shuffle_skew.lognormal(64, 200, 2.0, 0)
    assert shuffle_skew.narrow(shuffle_skew.dealt(counts, 32, 0)) < 0.002


def test_the_page_says_what_is_measured() -> None:
    page = PAGE.read_text()
    name, counts = next(iter(shuffle.data_sets(1).items()))
    case = next(case for case in shuffle.CASES if "default" in case.name)
    row = shuffle.table({case.name: shuffle.assess(case, counts)[0]}).splitlines()[-1]
    section = page[page.index(f"### {name}") :]
    assert row in section
    row = shuffle.skew_table([shuffle.skewed(64, 8, 1.0, 200)]).splitlines()[-1]
    assert row in page


def test_the_picture_of_the_page_is_there_and_small() -> None:
    (name,) = re.findall(r"!\[[^]]*\]\(([^)]+)\)", PAGE.read_text())
    picture = (PAGE.parent / name).read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) < 150_000


@pytest.mark.timeout(300)
def test_the_command_prints_tables_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shuffle.main(["--quick", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("\n### ") + shown.startswith("### ") == 4
    for case in shuffle.CASES:
        assert shown.count(f"| {case.name} |") == 3
    assert (tmp_path / "shuffle.png").read_bytes().startswith(b"\x89PNG")


def test_the_buffer_model_does_what_webdataset_does() -> None:
    """As many samples wait as long in the model as in the tool's own shuffle."""
    filters = pytest.importorskip("webdataset.filters")
    total, size = 40_000, 1_000
    job = shuffle.Job(batch=1, ranks=1, workers=1)
    model = shuffle.orders.buffer(np.array([total], dtype=np.int64), 0, 3, job, size=size)
    real = np.array(list(filters._shuffle(iter(range(total)), bufsize=size, initial=size, seed=3)))
    waited = [np.quantile(np.arange(total) - order, np.linspace(0.05, 0.95, 10)) for order in (model, real)]
    assert waited[0] == pytest.approx(waited[1], abs=0.1 * size)
