"""The bench's own arithmetic and order; nothing here measures anything."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bench import peers
from bench.data import kept
from bench.figure import Case, Figure, Timing, stopwatch
from bench.plot import draw
from bench.runner import Measured, measure, rounds
from bench.sizes import QUICK, Sizes
from bench.summary import Spread, summarise
from bench.table import number, print_summary
from cachefs.clock import SystemClock


def never() -> Timing:
    raise AssertionError("not to be run")


def figure(*names: str, baseline: str = "a") -> Figure:
    return Figure("f", "A figure", "MB/s", 1e-6, baseline, tuple(Case(n, "ours", never) for n in names))


@given(count=st.integers(1, 7), repeats=st.integers(0, 12))
def test_each_round_has_every_case_once_and_the_order_rotates(count: int, repeats: int) -> None:
    cases = tuple(Case(str(i), "ours", never) for i in range(count))
    order = list(rounds(cases, repeats))
    assert len(order) == repeats
    assert all(sorted(c.name for c in r) == sorted(c.name for c in cases) for r in order)
    assert [r[0].name for r in order] == [str(i % count) for i in range(repeats)]


def test_warmup_rounds_do_not_count() -> None:
    ran: list[str] = []

    def case(name: str) -> Case:
        def run() -> Timing:
            ran.append(name)
            return Timing(1.0, 1.0, len(ran))

        return Case(name, "ours", run)

    told: list[str] = []
    found = measure(
        Figure("f", "A figure", "x", 1.0, "a", (case("a"), case("b"))), repeats=2, warmup=1, progress=told.append
    )
    assert ran == ["a", "b", "b", "a", "a", "b"]
    assert [t.work for t in found.timings["a"]] == [4, 5]
    assert len(told) == 6 and "warm-up" in told[0] and "round 2 of 2" in told[-1]


def test_ratios_are_made_within_rounds() -> None:
    """The second round is ten times slower for both: the rates spread, the ratio does not."""
    timings = {
        "a": [Timing(1.0, 0.5, 10), Timing(10.0, 5.0, 10), Timing(1.0, 0.5, 10)],
        "b": [Timing(2.0, 2.0, 10), Timing(20.0, 20.0, 10), Timing(2.0, 2.0, 10)],
    }
    summary = summarise(Measured(figure("a", "b"), timings))
    a, b = summary.rows
    assert a.ratio == Spread(1.0, 1.0, 1.0) and b.ratio == Spread(0.5, 0.5, 0.5)
    assert b.cpu_ratio == Spread(4.0, 4.0, 4.0)
    assert (b.rate.low, b.rate.median) == pytest.approx((0.5e-6, 5e-6))
    assert summary.repeats == 3


def test_cpu_below_the_clocks_grain_is_not_divided_by() -> None:
    timings = {"a": [Timing(1.0, 0.0, 10)], "b": [Timing(1.0, 1.0, 10)]}
    assert [r.cpu_ratio for r in summarise(Measured(figure("a", "b"), timings)).rows] == [None, None]


def test_a_figure_without_rounds_or_baseline_is_refused() -> None:
    with pytest.raises(ValueError, match="not measured"):
        summarise(Measured(figure("a"), {"a": []}))
    with pytest.raises(ValueError, match="baseline"):
        figure("a", "b", baseline="c")
    with pytest.raises(ValueError, match="unique"):
        figure("a", "a")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.00123, "0.00123"),
        (0.5, "0.500"),
        (9.996, "10.0"),
        (99.96, "100"),
        (12.34, "12.3"),
        (123456.7, "123,457"),
    ],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_table_and_picture_show_every_case(tmp_path: Path) -> None:
    timings = {n: [Timing(1.0 + i / 10, 0.5, 10 * (i + 1)) for i in range(5)] for n in "ab"}
    summary = summarise(Measured(figure("a", "b"), timings))
    out = io.StringIO()
    print_summary(Console(file=out, width=100), summary)
    assert "A figure" in out.getvalue() and "× a" in out.getvalue() and "medians of 5 rounds" in out.getvalue()
    draw([summary, summary], tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


class Stepping(SystemClock):
    """Each look at the clock is one second later."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now


def test_stopwatch_counts_wall_and_cpu() -> None:
    with stopwatch(clock=Stepping()) as watch:
        pass
    assert watch.timing(5).seconds == 1.0
    assert 0 <= watch.timing(5).cpu < 1.0


def test_data_is_kept_until_sizes_change(tmp_path: Path) -> None:
    made: list[Sizes] = []

    def make(folder: Path, sizes: Sizes) -> None:
        made.append(sizes)
        (folder / str(len(made))).touch()

    other = Sizes(**{**QUICK.__dict__, "batch": 3})
    for sizes in (QUICK, QUICK, other):
        kept(tmp_path / "d", sizes, make)
    assert made == [QUICK, other]
    assert sorted(p.name for p in (tmp_path / "d").iterdir()) == ["2", "made.json"]


def test_a_peer_that_cannot_be_imported_is_left_out_with_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(peers.PYTHON_VARIABLE, raising=False)
    assert peers.python() == sys.executable
    found, skipped = peers.cases([peers.Peer("No tool, 0 workers", "no_such_tool", "job", ())])
    assert found == ()
    assert len(skipped) == 1 and skipped[0].startswith("no_such_tool: not importable")


def test_a_peer_that_fails_names_itself() -> None:
    (case,), skipped = peers.cases([peers.Peer("Broken", "json", "no_such_job", ())])
    assert skipped == ()
    with pytest.raises(peers.PeerFailed, match="Broken ended with code 1: KeyError"):
        case.run()
