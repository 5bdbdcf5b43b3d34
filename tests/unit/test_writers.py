"""Writers: which values become what, which are refused, how shards are cut, and that nothing half is ever seen."""

from __future__ import annotations

import datetime
import gzip
import json
import tarfile
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loader
from cachefs.config import Origin
from cachefs.errors import ConfigError, DataError, EmptyDataset
from loader.writers import WRITERS, Placed, WriteOptions, Written, open_output
from loader.writers.mds_columns import choose
from loader.writers.output import STAGE
from loader.writers.parquet_columns import choose as choose_arrow


def placed(samples: list[dict[str, Any]]) -> Iterator[Placed]:
    return (Placed(sample, number, "here") for number, sample in enumerate(samples))


def write(kind: str, folder: Path, samples: list[dict[str, Any]], *, force: bool = False, **options: Any) -> Written:
    writer = WRITERS[kind]
    with open_output(str(folder), own=writer.shards, force=force, origin=Origin()) as output:
        written = writer(output, WriteOptions(**options)).write(placed(samples))
        output.commit()
    return written


def read(folder: Path) -> list[dict[str, Any]]:
    shards = sorted(path for path in folder.iterdir() if path.suffix != ".json")
    return [dict(sample) for path in shards for sample in loader.open_shard(path)]


@pytest.mark.parametrize(
    ("values", "encoding"),
    [
        ([b"x", bytearray(b"y"), np.zeros(3, np.uint8)], "bytes"),
        (["x", np.str_("y")], "str"),
        ([1, -(2**63)], "int"),
        ([1, 2**63], "str_int"),
        ([1.5], "float64"),
        ([np.float64(1.5)], "float64"),
        ([np.float32(1.5)], "float32"),
        ([Decimal("1.50")], "str_decimal"),
        ([np.zeros(3, ">u2"), np.zeros((2, 2), np.uint16)], "ndarray:uint16"),
        ([np.zeros(3, np.uint16), np.zeros(3, np.int8)], "ndarray"),
        ([{"a": 1}, [1], (1,), None, True, np.True_], "json"),
        ([1, 1.5, "x", None], "json"),
    ],
)
def test_mds_encodings_are_chosen_by_the_values(values: list[Any], encoding: str) -> None:
    assert choose(values) == encoding


@pytest.mark.parametrize(
    "values",
    [[b"x", "x"], [1, b"x"], [np.zeros(2, bool)], [1j], [object()], [np.float32(1), 1], [datetime.date.today()]],
)
def test_mds_refuses_what_it_has_no_place_for(values: list[Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"here: sample \d, field 'x': "):
        write("mds", tmp_path / "out", [{"x": value} for value in values])
    assert not (tmp_path / "out").exists()


def test_a_later_value_that_does_not_fit_names_sample_and_field(tmp_path: Path) -> None:
    start = [{"x": 1, "y": "a"}] * 300
    for late, says in (
        ({"x": None, "y": "a"}, "field 'x': a NoneType in a column of whole numbers"),
        ({"x": 2**63, "y": "a"}, "field 'x': .* does not fit into 64 bits"),
        ({"x": True, "y": "a"}, "field 'x': a bool"),
        ({"x": 1}, "field 'y': the sample lacks it"),
        ({"x": 1, "y": "a", "z": 1}, "field 'z': the first samples have no such field"),
        ({"x": 1, "y": "\ud800"}, "field 'y': .*surrogates"),
    ):
        with pytest.raises(DataError, match=rf"here: sample 300, {says}"):
            write("mds", tmp_path / "out", [*start, late])
    with pytest.raises(DataError, match="sample 300, field 'x'"):
        write("parquet", tmp_path / "out", [*start, {"x": "text", "y": "a"}])
    with pytest.raises(DataError, match="sample 300, field 'z'"):
        write("parquet", tmp_path / "out", [*start, {"x": 1, "y": "a", "z": 1}])


def test_columns_may_be_named(tmp_path: Path) -> None:
    samples = [{"x": 1}] * 300 + [{"x": None}]
    assert write("mds", tmp_path / "a", samples, columns={"x": "json"}).columns == {"x": "json"}
    assert [s["x"] for s in read(tmp_path / "a")] == [1] * 300 + [None]
    write("mds", tmp_path / "b", [{"x": 3}], columns={"x": "uint8"})
    assert read(tmp_path / "b")[0]["x"].dtype == np.uint8
    with pytest.raises(DataError, match="300 does not fit into uint8"):
        write("mds", tmp_path / "c", [{"x": 300}], columns={"x": "uint8"})
    for encoding in ("nonsense", "pkl", "pil"):
        with pytest.raises(ConfigError, match="column 'x'"):
            write("mds", tmp_path / "c", [{"x": 3}], columns={"x": encoding})
    with pytest.raises(ConfigError, match="column 'x'"):
        write("parquet", tmp_path / "c", [{"x": 3}], columns={"x": "nonsense"})


def test_shards_have_the_size_that_is_asked_for(tmp_path: Path) -> None:
    samples = [{"b": bytes([i]) * 1000, "__key__": f"{i:04d}"} for i in range(100)]
    for kind, count in (("mds", 10), ("wds", 15), ("parquet", 8)):
        written = write(kind, tmp_path / kind, samples, shard_size=11_000)
        assert abs(written.shards - count) <= 2, kind
        files = [path for path in (tmp_path / kind).iterdir() if path.suffix != ".json"]
        assert len(files) == written.shards
        assert sum(path.stat().st_size for path in files) == written.bytes
        assert written.samples == 100
    for kind in ("mds", "wds"):
        assert [bytes(sample["b"]) for sample in read(tmp_path / kind)] == [sample["b"] for sample in samples]
        sizes = [path.stat().st_size for path in (tmp_path / kind).iterdir() if path.suffix == f".{kind}"]
        assert all(size <= 11_000 for size in sizes)
    # a sample that is larger than a shard shall be gets one of its own
    assert write("mds", tmp_path / "small", samples[:3], shard_size=10).shards == 3


def test_the_index_says_what_is_there(tmp_path: Path) -> None:
    write("mds", tmp_path, [{"b": bytes(100)}] * 50, shard_size=2000, compression="zstd:5")
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["version"] == 2 and len(index["shards"]) == 4
    for shard in index["shards"]:
        assert (shard["compression"], shard["size_limit"], shard["column_encodings"]) == ("zstd:5", 2000, ["bytes"])
        path = tmp_path / shard["zip_data"]["basename"]
        assert path.stat().st_size == shard["zip_data"]["bytes"]
    assert len(loader.ShardDataset(tmp_path, batch_size=1)) == 50


def test_tars_are_the_same_each_time_and_may_be_packed(tmp_path: Path) -> None:
    samples = [{"__key__": "a/é", "txt": "x", "width": 3}, {"__key__": "a/c", "cls": 5, "x" * 150: b"y"}]
    for name in ("one", "two"):
        write("wds", tmp_path / name, samples)
    assert (tmp_path / "one/shard-000000.tar").read_bytes() == (tmp_path / "two/shard-000000.tar").read_bytes()
    write("wds", tmp_path / "packed", samples, compression="gzip:9")
    raw = (tmp_path / "packed/shard-000000.tar.gz").read_bytes()
    assert gzip.decompress(raw) == (tmp_path / "one/shard-000000.tar").read_bytes()
    with tarfile.open(tmp_path / "one/shard-000000.tar") as tar:
        assert tar.getnames() == ["a/é.txt", "a/é.width.json", "a/c.cls", f"a/c.{'x' * 150}"]
    with pytest.raises(ConfigError, match="levels are 1 to 9"):
        write("wds", tmp_path / "three", samples, compression="gzip:10")


@pytest.mark.parametrize(
    ("sample", "says"),
    [
        ({"__key__": "a.b", "txt": "x"}, "can be no tar member's key"),
        ({"__key__": "", "txt": "x"}, "can be no tar member's key"),
        ({"__key__": 5, "txt": "x"}, "a int can be no tar member's key"),
        ({"__key__": "__meta__/x", "txt": "x"}, "readers pass over"),
        ({"__key__": "__x__", "txt": "x", "__y__": b"x"}, "field '__y__': readers pass over"),
        ({"__key__": "k", "x": {"y": b"z"}}, "no place for bytes"),
        ({"__key__": "k"}, "no other field"),
        ({"__key__": "k", "a/b": b"x"}, "field 'a/b': no tar member's name"),
        ({"__key__": "k", "A": b"x", "a": b"x"}, "two members of one sample"),
        ({"__key__": "k", "x": object()}, "field 'x': JSON has no place"),
        ({"__key__": "k", "x": {1: 2}}, "a key that is a int"),
        ({"__key__": "k", "x": np.array([object()])}, "would be pickled"),
    ],
)
def test_tars_refuse_what_would_be_lost(sample: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=says):
        write("wds", tmp_path / "out", [sample])
    assert not (tmp_path / "out").exists()


def test_an_image_of_a_hugging_face_data_set_becomes_its_file(tmp_path: Path) -> None:
    png = b"\x89PNG\r\n\x1a\n rest"
    samples = [
        {"image": {"bytes": np.frombuffer(png, np.uint8), "path": "a.png"}, "odd": {"n": np.int64(i)}} for i in (1, 2)
    ]
    write("wds", tmp_path / "wds", samples)
    assert [bytes(sample["image.png"]) for sample in read(tmp_path / "wds")] == [png, png]
    assert write("mds", tmp_path / "mds", samples).columns == {"image": "bytes", "odd": "json"}
    assert [(bytes(s["image"]), s["odd"]) for s in read(tmp_path / "mds")] == [(png, {"n": 1}), (png, {"n": 2})]
    with pytest.raises(DataError, match="null in a column of bytes"):
        write("mds", tmp_path / "no", [{"image": samples[0]["image"]}, {"image": None}])
    with pytest.raises(DataError, match="sample 0, field 'image'"):
        write("parquet", tmp_path / "no", [{"image": [np.zeros(2), b"x"]}])


def test_neighbours_with_one_key_would_become_one_sample(tmp_path: Path) -> None:
    samples = [{"__key__": "k", "txt": "a"}, {"__key__": "k", "txt": "b"}]
    with pytest.raises(DataError, match=r"sample 1, .*is the key of the sample before"):
        write("wds", tmp_path / "out", samples)
    write("wds", tmp_path / "out", samples, keys="number")
    assert [sample["__key__"] for sample in read(tmp_path / "out")] == ["000000000", "000000001"]


def test_parquet_types(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    samples = [
        {
            "bytes": np.frombuffer(b"ab", np.uint8),
            "image": {"bytes": b"\xff", "path": "p"},
            "odd": {"a": i} if i % 2 else {"b": i},
            "mixed": [1, "x", None, 2.5][i % 4],
            "number": [1, 2.5][i % 2],
            "maybe": None if i % 2 else "x",
            "array": np.arange(i, dtype=np.float32),
            "matrix": np.arange(4, dtype=">u2").reshape(2, 2),
            "small": np.int8(-3),
            "when": datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC),
            "big": 2**63,
            **({"some": True} if i == 3 else {}),
        }
        for i in range(8)
    ]
    columns = write("parquet", tmp_path, samples, compression="zstd:3").columns
    assert {name: columns[name] for name in ("bytes", "odd", "mixed", "number", "maybe", "array")} == {
        "bytes": "binary",
        "odd": "json",
        "mixed": "json",
        "number": "double",
        "maybe": "string",
        "array": "list<item: float>",
    }
    rows = pq.read_table(tmp_path / "part-00000.parquet").to_pylist()
    for row, sample in zip(rows, samples, strict=True):
        assert row["bytes"] == b"ab" and row["image"] == sample["image"]
        assert json.loads(row["odd"]) == sample["odd"]
        assert row["mixed"] is None if sample["mixed"] is None else json.loads(row["mixed"]) == sample["mixed"]
        assert (row["number"], row["maybe"], row["when"]) == (sample["number"], sample["maybe"], sample["when"])
        assert row["array"] == sample["array"].tolist() and row["matrix"] == [[0, 1], [2, 3]]
        assert (row["small"], row["big"], row["some"]) == (-3, 2**63, sample.get("some"))


def test_parquet_never_changes_a_dict_without_a_word(tmp_path: Path) -> None:
    start = [{"x": {"a": 1}}] * 300
    for late in ({"a": 1, "b": 2}, {}, {"b": 1}):
        with pytest.raises(DataError, match=r"sample 300, field 'x': a column of dicts with the keys \['a'\]"):
            write("parquet", tmp_path / "out", [*start, {"x": late}])
    write("parquet", tmp_path / "out", [*start, {"x": {"b": 1}}], columns={"x": "json"})


def test_a_value_that_mds_cannot_hold_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loader.writers.mds._MOST", 100)
    with pytest.raises(DataError, match=r"sample 0, field 'b': more than 4 GiB"):
        write("mds", tmp_path / "out", [{"a": 1, "b": bytes(101), "c": 2.5}])


def test_no_sample_is_no_data_set(tmp_path: Path) -> None:
    for kind in WRITERS:
        with pytest.raises(EmptyDataset):
            write(kind, tmp_path / "out", [])
    assert not (tmp_path / "out").exists()


def test_nothing_is_seen_before_the_end(tmp_path: Path) -> None:
    out = tmp_path / "out"
    seen: list[list[str]] = []

    def watched() -> Iterator[Placed]:
        for number in range(600):
            seen.append([path.name for path in out.iterdir() if path.name != STAGE])
            yield Placed({"b": bytes(100)}, number, "here")

    with open_output(str(out), own=WRITERS["mds"].shards, force=False, origin=Origin()) as output:
        WRITERS["mds"](output, WriteOptions(shard_size=2000)).write(watched())
        assert not any(seen)
        with pytest.raises(DataError, match="another conversion is writing there"):
            open_output(str(out), own="x", force=True, origin=Origin())
        output.commit()
    assert not (out / STAGE).exists()
    assert len(loader.ShardDataset(out, batch_size=1)) == 600


def test_a_conversion_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    write("wds", tmp_path, [{"txt": "old"}])
    with pytest.raises(DataError):
        write("wds", tmp_path, [{"txt": "new"}, {"txt": object()}], force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["shard-000000.tar"]
    assert bytes(read(tmp_path)[0]["txt"]) == b"old"
    write("wds", tmp_path, [{"txt": "new"}], force=True)
    assert bytes(read(tmp_path)[0]["txt"]) == b"new"


def test_what_a_killed_conversion_left_is_no_data_and_is_cleared(tmp_path: Path) -> None:
    stage = tmp_path / STAGE
    stage.mkdir()
    (stage / "shard-000000.tar").write_bytes(b"half")
    with pytest.raises(EmptyDataset):
        loader.ShardDataset(tmp_path, batch_size=1).manifest  # noqa: B018
    write("wds", tmp_path, [{"txt": "new"}])
    assert [path.name for path in tmp_path.iterdir()] == ["shard-000000.tar"]


def test_what_others_put_there_meanwhile_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with open_output(str(out), own="x", force=False, origin=Origin()) as output:
        output.put("mine", b"1")
        (out / "theirs").write_bytes(b"2")
    assert [path.name for path in out.iterdir()] == ["theirs"]


def test_integers_that_no_arrow_type_holds_are_text() -> None:
    assert not choose_arrow([1, -(1 << 63)]).text and not choose_arrow([1, (1 << 64) - 1]).text
    for values in ([1, -(1 << 63) - 1], [-1, 1 << 63], [1, 1 << 64]):
        assert choose_arrow(values).text
