"""JSON Lines: what ends a line, what a line may hold, and whose damage a broken one is."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

import loader
from cachefs.errors import FormatError, UnknownFormat
from loader.formats import Jsonl, jsonl
from loader.formats.jsonl import LineIndex

BOM = b"\xef\xbb\xbf"


def array(raw: bytes) -> Any:
    return np.frombuffer(bytearray(raw), np.uint8)


def rows(raw: bytes, fields: frozenset[str] | None = None) -> list[dict[str, Any]]:
    format = Jsonl()
    data = array(raw)
    index = format.index(data, "u")
    source = format.source(data, index)
    return [dict(format.read(source, index, i, "u", fields)) for i in range(len(index))]


def refused(raw: bytes, i: int) -> FormatError:
    format = Jsonl()
    data = array(raw)
    index = format.index(data, "u")
    with pytest.raises(FormatError) as e:
        format.read(format.source(data, index), index, i, "u")
    assert "\n" not in str(e.value)
    return e.value


# --- lines ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [b"", BOM], ids=["plain", "BOM"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\n\n", b"\r\n \t\r\n", b"\n" * 5000])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("values", [[7], [7, 8], list(range(300))], ids=len)
def test_line_ends_of_any_kind(tmp_path: Path, start: bytes, end: bytes, last: bool, values: list[int]) -> None:
    raw = start + end.join(b'{"n": %d}' % n for n in values) + (end if last else b"")
    path = tmp_path / "x"
    path.write_bytes(raw)
    assert [dict(s) for s in loader.open_shard(path)] == [{"n": n} for n in values]


@pytest.mark.parametrize("length", [100, 4090, 70_000, 1 << 20, 3_000_000])
def test_lines_longer_than_any_block(tmp_path: Path, length: int) -> None:
    values = ["é" * (length // 2), "short", "y" * length, "", "z" * length]
    path = tmp_path / "x"
    path.write_bytes("\n".join(json.dumps({"s": s}, ensure_ascii=False) for s in values).encode())
    assert [s["s"] for s in loader.open_shard(path)] == values


@pytest.mark.parametrize("few", [0, 10, 1 << 40])
@pytest.mark.parametrize("many", [0, 1 << 40])
def test_every_way_to_find_line_ends_finds_the_same(monkeypatch: pytest.MonkeyPatch, few: int, many: int) -> None:
    raw = b"".join(b'{"n": "%s"}\n' % (b"x" * (k * k % 977)) for k in range(3000)) + b"\n \n{}"
    wanted = [line for line in raw.split(b"\n") if line.strip()]
    monkeypatch.setattr(jsonl, "_STEP", 1000)
    monkeypatch.setattr(jsonl, "_FEW", few)
    monkeypatch.setattr(jsonl, "_MANY", many)
    index = Jsonl().index(array(raw), "u")
    ends = index.offsets.tolist()
    assert [raw[a:b].strip() for a, b in itertools.pairwise(ends)] == wanted


def test_only_a_line_feed_ends_a_line() -> None:
    text = "a\u2028b\u2029c\u0085d\x1ce"
    raw = json.dumps({"s": text}, ensure_ascii=False).encode().replace(b"\\u001c", b"\\u001c") + b'\n{"s": 1}'
    assert rows(raw) == [{"s": text}, {"s": 1}]
    assert "line 1 " in str(refused(b'{"a": 1}\r{"a": 2}\n', 0))


@pytest.mark.parametrize("raw", [b"", b"\n", b" \t\r\n\n  ", BOM, BOM + b"\r\n"])
def test_nothing_but_space_has_no_samples(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(raw)
    assert len(loader.open_shard(path, "jsonl")) == 0


def test_members_and_frames_may_end_within_a_line(tmp_path: Path) -> None:
    raw = b'{"n": 1}\n{"n": 2}\n'
    for pack in (gzip.compress, zstandard.compress):
        path = tmp_path / pack.__module__
        path.write_bytes(b"".join(pack(raw[k : k + 5]) for k in range(0, len(raw), 5)))
        assert [s["n"] for s in loader.open_shard(path)] == [1, 2]


def test_only_bytes_that_have_come_are_looked_at() -> None:
    raw = array(b"".join(b'{"n": "%s"}\n' % (b"x" * (k * k * 7 % 90_000)) for k in range(200)))
    filling = np.zeros_like(raw)

    def ready(start: int, end: int) -> None:
        assert 0 <= start < end <= len(raw) and end - start <= 1 << 20
        filling[start:end] = raw[start:end]

    assert Jsonl().index(filling, "u", ready).offsets.tolist() == Jsonl().index(raw, "u").offsets.tolist()


# --- values ---------------------------------------------------------------------------------------------------------


def test_values_are_those_of_python_s_parser() -> None:
    texts = [
        '{"i": 0, "j": -0, "k": 123456789012345678901234567890, "l": -9223372036854775809, "f": 1.0, "g": 1e5}',
        '{"a": NaN, "b": [Infinity, -Infinity], "t": true, "n": null}',
        '{"dup": 1, "x": 2, "dup": {"y": [1, "\\u00e9\\n\\ud83d\\ude00"]}}',
        '{"lone": "\\ud800", "nul": "\\u0000", "slash": "\\/", "": 1}',
        '{"huge": 1e400, "tiny": 1e-400, "precise": 0.1234567890123456789}',
        "{}",
        ' \t{ "spaced" : [ 1 , 2 ] } \t',
    ]
    found = rows("\n".join(texts).encode())
    assert [repr(row) for row in found] == [repr(json.loads(text)) for text in texts]
    assert math.isnan(found[1]["a"])


@pytest.mark.parametrize(
    "line",
    ['{"a": [1, {"b": "\\u00e9"}], "c": 2, "a": 3, "x y": null}', '{"c": NaN, "a": 3, "x y": null, "d": 9}'],
)
def test_fields_are_projected(line: str) -> None:
    assert rows(line.encode(), frozenset(["a", "x y", "__key__", "absent"])) == [{"a": 3, "x y": None}]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b'{"a": ', "is no JSON"),
        (b'{"a": 1} x', "is no JSON: Extra data"),
        (b"{'a': 1}", "is no JSON"),
        (b'{"a": "\xff"}', "is no JSON: 'utf-8' codec"),
        (b'{"a": "\x01"}', "is no JSON: Invalid control character"),
        (b'{"a": 01}', "is no JSON"),
        (b"\x00", "is no JSON"),
        (b"[1, 2]", "is no JSON object but a list"),
        (b"7", "is no JSON object but a int"),
        (b"null", "is no JSON object but a NoneType"),
        (b"NaN", "is no JSON object but a float"),
        (b'{"a": ' + b"[" * 200_000, "is no JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", "is no JSON: Exceeds the limit"),
        (BOM + b"{}", "is no JSON"),
    ],
    ids=range(14),
)
def test_a_broken_line_is_its_own_damage_and_has_a_number(tmp_path: Path, line: bytes, what: str) -> None:
    start = BOM + b'{"n": 1}\r\n\r\n{"n": 2}\r\n\n'
    path = tmp_path / "x"
    path.write_bytes(start + line + b'\n\n{"n": 3}')
    reader = loader.open_shard(path)
    assert len(reader) == 4
    assert [reader[i]["n"] for i in (0, 1, 3)] == [1, 2, 3]
    with pytest.raises(FormatError) as e:
        reader[2]
    assert f"{path} at byte {len(start)}: line 5 {what}" in str(e.value) and "\n" not in str(e.value)
    ds = loader.ShardDataset(path, batch_size=4, shuffle=False, on_error="skip")
    assert [s["n"] for s in ds] == [1, 2, 2, 3] and ds.skipped == 1


def test_line_numbers_far_into_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "_STEP", 64)
    lines = [b'{"n": %d}' % k if k % 3 else b"" for k in range(500)]
    lines[400] = b"broken"
    number = sum(1 for line in lines[:400] if line)
    error = refused(b"\n".join(lines), number)
    assert "line 401 " in str(error) and error.offset == sum(len(line) + 1 for line in lines[:400])


# --- detection ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "taken"),
    [
        (b'{"a": 1}', True),
        (b'\n \r\n{ "a\\"b" : 1', True),  # damaged, which is for its sample to say
        (BOM + b"{}\n", True),
        (b'{"long": "' + b"x" * 9000 + b'"}', True),
        (b"[1, 2]\n", False),
        (b'{\n  "a": 1\n}', False),  # a document over several lines
        (b"{a: 1}", False),
        (b'{"a", 1}', False),
        (b"7\n", False),
        (b" " * 5000 + b"{}", False),
    ],
)
def test_the_first_line_tells(tmp_path: Path, raw: bytes, taken: bool) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(raw)
    if taken:
        assert isinstance(loader.open_shard(path).format, Jsonl)
    else:
        with pytest.raises(UnknownFormat):
            loader.open_shard(path)


def test_the_index_can_be_kept() -> None:
    raw = b'{"n": 1}\n\n{"n": 2}\nx'
    index = Jsonl().index(array(raw), "u")
    kept = index.to_bytes()
    for again in (LineIndex.from_bytes(kept, len(raw)), pickle.loads(pickle.dumps(index))):
        assert again.offsets.tolist() == index.offsets.tolist() == [0, 10, 19, 20]
        assert again.line(memoryview(raw), 19) == 4
    for at in range(len(kept)):
        damaged = bytearray(kept)
        damaged[at] ^= 0x10
        with pytest.raises(ValueError):
            LineIndex.from_bytes(bytes(damaged), len(raw))
    with pytest.raises(ValueError):
        LineIndex.from_bytes(kept, 2 << 20)
    assert LineIndex.from_bytes(Jsonl().index(array(b""), "u").to_bytes(), 0).offsets.tolist() == [0]


def test_memory_is_a_few_bytes_a_line() -> None:
    raw = array(b"{}\n" * 100_000)
    assert Jsonl().index(raw, "u").nbytes < 410_000
    assert Jsonl().index(array(b"\n" * 1_000_000), "u").nbytes < 1000


def test_numbers_that_are_too_large_are_infinite() -> None:
    data = np.frombuffer(bytearray(b'{"a": 1e999, "b": [-1e400]}\n'), np.uint8)
    index = Jsonl().index(data, "x")
    assert Jsonl().read(data, index, 0, "x") == {"a": float("inf"), "b": [float("-inf")]}
