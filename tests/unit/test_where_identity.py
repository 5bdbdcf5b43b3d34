"""What tells filters apart: expressions by what they consist of, functions by their names, and by their code."""

from __future__ import annotations

import datetime
import io
import re
from functools import lru_cache, partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.formats import Parquet
from loader.formats.parquet_bounds import bounds_of
from loader.formats.where import Where
from loader.formats.where_expression import parts_of
from loader.formats.where_identity import code_of

F = pc.field
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
NAN = float("nan")


def yes(sample: Any) -> bool:
    return True


class TestExpressions:
    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (F("t") == "a  b", F("t") == "a b"),
            (F("x") == pa.scalar(0.1, pa.float32()), F("x") == 0.1),
            (F("x").isin(["a", 'b", "c']), F("x").isin(["a", "b", "c"])),
            (F("x") == "b", F("x") == F('"b"')),
            (F("x") == pa.scalar(2**62, pa.timestamp("s")), F("x") == pa.scalar(2**62 + 1, pa.timestamp("s"))),
            (F("x") == "b", F("x") == b"b"),
            (F("x", "y") > 1, F("x.y") > 1),
            (F("x").cast(pa.int32()) > 1, F("x").cast(pa.int64()) > 1),
            (F("x").isin(list(range(100))), F("x").isin([*range(50), -1, *range(51, 100)])),
        ],
    )
    def test_that_differ(self, one: Any, other: Any) -> None:
        assert Where(one) != Where(other)
        over: list[Any] = [Where(where).over(Parquet()) for where in (one, other)]
        assert over[0].kept_as != over[1].kept_as
        assert over[0].identity() != over[1].identity()
        assert parts_of(one) == parts_of(pc.Expression.__reduce__(one)[0](*one.__reduce__()[1]))

    @given(st.lists(NAMES, min_size=1, max_size=4), NAMES, st.lists(NAMES, min_size=2, max_size=3))
    def test_fields_are_those_that_it_reads(self, names: list[str], value: str, nested: list[str]) -> None:
        expression = F(*nested) == value
        for name in names:
            expression = (F(name) == value) | F(name).isin([value, *nested]) | expression
        assert set(parts_of(expression).fields) == {nested[0], *names}

    @pytest.mark.parametrize(
        ("expression", "comparable"),
        [
            ((F("x") > 1) & ~F("y").isin([1.0, 2.0]) | F("z").is_null(), True),
            (F("x") > NAN, False),
            (F("x") > pa.scalar(NAN, pa.float32()), False),
            (F("x").isin([1.0, NAN]), False),
            (F("x") > pc.divide(pc.scalar(0.0), pc.scalar(0.0)), False),
            (F("x") > pc.scalar("nan").cast(pa.float64()), False),
        ],
    )
    def test_whether_bounds_say_anything(self, expression: Any, comparable: bool) -> None:
        assert parts_of(expression).comparable == comparable


class TestFunctions:
    def test_fields_and_names_are_told_apart(self) -> None:
        assert Where(yes, ["a", "b"]) != Where(yes, ["a, b"])
        assert Where(yes, ["a", "b"]) == Where(yes, ["b", "a"])
        assert Where(yes, ["a"], "x") != Where(yes, ["a"])
        assert Where(yes, ["a"], "x") != Where(F("a") > 1, ["a"], "x")


def made(source: str) -> Any:
    names: dict[str, Any] = {
        "__name__": "made",
        "partial": partial,
        "lru_cache": lru_cache,
        "re": re,
        "datetime": datetime,
    }
    exec(source, names)
    return names["f"]


class TestCode:
    @pytest.mark.parametrize(
        ("source", "edits"),
        [
            ("def f(s, *, most=3): return s['n'] < most", [("3", "4")]),
            ("most = 3\ndef f(s): return s['n'] < most", [("3", "4"), ("3", "3.0")]),
            ("most = {'a': [3, 4], 'b': {1, 2}}\ndef f(s): return s['n'] in most", [("4", "5"), ("{1, 2}", "{1}")]),
            ("def g(s, most): return s['n'] < most\nf = partial(g, most=3)", [("3", "4"), ("<", ">")]),
            ("def g(most, s): return s['n'] < most\nf = partial(g, 3)", [("3", "4")]),
            ("def g(s): return s['n'] < 3\ndef f(s): return g(s)", [("3", "4")]),
            ("def h(n): return n < 3\ndef f(s): return all(h(n) for n in s['n'])", [("3", "4")]),
            ("@lru_cache\ndef h(n): return n < 3\ndef f(s): return h(s['n'])", [("3", "4")]),
            ("p = re.compile('a+')\ndef f(s): return p.match(s['t'])", [("a+", "b+")]),
            ("day = datetime.date(2020, 1, 2)\ndef f(s): return s['d'] < day", [("2020", "2021")]),
            ("class G:\n  def __init__(s, n): s.n = n\n  def __call__(s, x): return x < s.n\nf = G(3)", [("3", "4")]),
            ("class G:\n  def __init__(s, n): s.n = n\n  def g(s, x): return x < s.n\nf = G(3).g", [("3", "4")]),
            ("def f(s): return min(s['n'], 3) < 2\nf = partial(f)", [("min", "max")]),
            ("g = len\ndef f(s): return g(s['n']) < 2", [("= len", "= sum")]),
            ("def f(s, most=[1, 2]): return s['n'] in most", [("2", "3")]),
        ],
    )
    def test_what_is_edited(self, source: str, edits: list[tuple[str, str]]) -> None:
        assert code_of(made(source)) == code_of(made("\n" + source))
        for old, new in edits:
            assert code_of(made(source)) != code_of(made(source.replace(old, new)))

    def test_what_refers_to_itself(self) -> None:
        source = "around = []\naround.append(around)\ndef f(s): return f(s) or g(s) or around\ndef g(s): return f(s)"
        assert code_of(made(source)) == code_of(made(source))
        assert code_of(made(source)) != code_of(made(source.replace("g(s): return f", "g(s): return not f")))

    def test_what_is_kept_follows_from_it(self) -> None:
        def over(source: str) -> Any:
            return Where(made(source), ["n"], name="same").over(Parquet())

        one = "most = 3\ndef f(s): return s['n'] < most"
        assert over(one).identity() == over(one.replace("3", "4")).identity()
        assert over(one).kept_as != over(one.replace("3", "4")).kept_as


class TestBounds:
    @pytest.mark.parametrize(
        ("kind", "value"),
        [
            (pa.date32(), 2**31 - 1),
            (pa.date32(), -(2**31)),
            (pa.timestamp("us"), 2**62),
            (pa.timestamp("ms"), -(2**60)),
        ],
    )
    def test_times_that_are_none_of_pythons(self, kind: pa.DataType, value: int) -> None:
        out = io.BytesIO()
        pq.write_table(pa.table({"x": pa.array([0, value], kind), "n": [3, 4]}), out)
        bounds = bounds_of(pq.ParquetFile(out).metadata, ["x", "n"])
        assert bounds is not None and parts_of(bounds.says).fields == ("n",)
