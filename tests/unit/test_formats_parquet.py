"""Parquet: row groups as parts, projection by ranges, checksums, and footers that are checked before they are used."""

from __future__ import annotations

import io
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import loader
from cachefs.errors import FormatError
from loader.formats import Parquet, parquet_footer, parquet_groups, parquet_pages, thrift
from loader.formats import parquet as parquet_format
from loader.formats.abc import Mapped, all_there
from loader.formats.arrow_pieces import Pieces
from loader.formats.parquet_footer import Chunk, read_footer, read_group
from loader.formats.parquet_pages import rows_at_once
from loader.formats.parquet_prefixes import decoded_size
from loader.formats.thrift import Reader
from loader.formats.thrift_skip import usual_struct

TABLE = pa.table({"n": range(10), "t": [f"text {i}" for i in range(10)], "b": [bytes([i]) * 50 for i in range(10)]})


def written(table: Any = TABLE, size: int = 4, **options: Any) -> bytes:
    out = io.BytesIO()
    pq.write_table(table, out, row_group_size=size, **options)
    return out.getvalue()


def whole(data: bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(bytearray(data), np.uint8)


def footer_of(data: bytes) -> bytes:
    return data[-8 - int.from_bytes(data[-8:-4], "little") : -8]


class Arriving:
    """Objects of one shard whose bytes are zeros until they are asked for."""

    def __init__(self, data: bytes) -> None:
        self.there = whole(data)
        self.data = np.zeros_like(self.there)
        self.asked: list[tuple[int, int]] = []

    def map(self, url: str) -> Mapped:
        return Mapped(self.data, self.ready)

    def ready(self, start: int, end: int) -> None:
        self.asked.append((start, end))
        self.data[start:end] = self.there[start:end]

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is not needed")


class TestRanges:
    # random bytes of this size make the file longer than the tail that is read for the footer
    BIG = pa.table(
        {
            "n": range(1000),
            "a.b": np.arange(1000.0),
            "s": [{"x": i, "y": [i]} for i in range(1000)],
            "b": [np.random.default_rng(i).bytes(1000) for i in range(1000)],
        }
    )

    FOOTER = footer_of(written(BIG, 300))
    COLUMNS = 5

    def test_counting_reads_the_footer_alone(self) -> None:
        objects = Arriving(written(self.BIG, 300))
        assert Parquet().parts(objects, "x") == [300, 300, 300, 100]
        assert min(start for start, _ in objects.asked) >= len(objects.data) - (64 << 10)

    @pytest.mark.parametrize("names", [{"n"}, {"a.b", "s"}, {"s"}, {"n", "b"}])
    def test_a_part_waits_for_the_columns_wanted(self, names: set[str]) -> None:
        objects = Arriving(written(self.BIG, 300))
        opened = Parquet().open(objects, "x", part=1)
        del objects.asked[:]
        sample = Parquet().read(opened.source, opened.index, 5, "x", frozenset(names))
        assert set(sample) == names
        for name in names:
            assert repr(sample[name]) == repr(loaded(self.BIG, 305)[name])
        footer = read_footer(objects.there, "x", all_there)
        chunks = [Chunk(*numbers) for numbers in read_group(objects.there, footer, 1, "x").tolist()]
        wanted = [c for c, leaf in zip(chunks, footer.leaves, strict=True) if leaf.column in names]
        assert objects.asked == [footer.place[:2], *((chunk.start, chunk.end) for chunk in wanted)]

    def test_no_column_is_wanted(self) -> None:
        objects = Arriving(written())
        opened = Parquet().open(objects, "x", part=2)
        assert len(opened.index) == 2
        assert Parquet().read(opened.source, opened.index, 1, "x", frozenset(["__key__"])) == {}


def loaded(table: Any, i: int) -> Any:
    data = whole(written(table))
    index = Parquet().index(data, "x")
    return Parquet().read(Parquet().source(data, index), index, i, "x")


class TestParts:
    def test_row_groups_are_shards_of_a_data_set(self, tmp_path: Path) -> None:
        path = tmp_path / "x.parquet"
        path.write_bytes(written())
        ds = loader.ShardDataset(path, batch_size=1, seed=3)
        assert ds.manifest.counts.tolist() == [4, 4, 2]
        assert sorted(int(sample["n"]) for sample in ds) == list(range(10))

    def test_a_part_that_is_none(self) -> None:
        with pytest.raises(FormatError, match="has 3 row groups, not 8"):
            Parquet().open(Arriving(written()), "x", part=7)

    def test_an_index_survives_pickling(self) -> None:
        index = pickle.loads(pickle.dumps(Parquet().index(whole(written()), "x")))
        assert len(index) == 10 and index.counts.tolist() == [4, 4, 2]

    def test_pieces_kept_are_bounded(self) -> None:
        data = whole(written())
        index = Parquet().index(data, "x")
        source = Parquet().source(data, index)
        decoded: list[int] = []
        inner = source._decode

        def counting(piece: int, *rest: Any) -> Any:
            decoded.append(piece)
            return inner(piece, *rest)

        for kept, times in ((1 << 20, 3), (1, 5)):
            del decoded[:]
            pieces = Pieces(index.starts, counting, index.offsets, kept)
            for i in (0, 4, 1, 5, 8):
                assert pieces.read(i, None, "x")["n"] == i
            assert len(decoded) == times

    def test_a_nested_column_whose_name_another_begins_with(self) -> None:
        table = pa.table({"a": [{"b": 1}], "a.b": ["text"], "ab": [2]})
        data = whole(written(table))
        index = Parquet().index(data, "x")
        read = Parquet().read
        for name, value in (("a", {"b": 1}), ("a.b", "text"), ("ab", 2)):
            assert read(Parquet().source(data, index), index, 0, "x", frozenset([name])) == {name: value}


class TestDamage:
    def test_a_page_that_is_changed_fails_its_checksum(self) -> None:
        data = bytearray(written(compression="none", use_dictionary=False, write_page_checksum=True))
        data[data.index(b"text 5")] ^= 1
        index = Parquet().index(whole(data), "x")
        source = Parquet().source(whole(data), index)
        assert Parquet().read(source, index, 0, "x")["t"] == "text 0"
        for i in range(4, 8):
            with pytest.raises(FormatError, match=rf"at byte \d+: column 't' of sample {i}: row group 1"):
                Parquet().read(source, index, i, "x")
        # the other columns of the row group are whole
        assert Parquet().read(source, index, 5, "x", frozenset(["n", "b"]))["n"] == 5
        assert Parquet().read(source, index, 9, "x")["t"] == "text 9"
        with pytest.raises(FormatError, match="row group 1"):
            Parquet().columns(source, index, np.arange(10), "x")

    def test_damaged_groups_are_skipped(self, tmp_path: Path) -> None:
        data = bytearray(written(compression="none", use_dictionary=False, write_page_checksum=True))
        data[data.index(b"text 5")] ^= 1
        path = tmp_path / "x.parquet"
        path.write_bytes(data)
        ds = loader.ShardDataset(path, batch_size=5, shuffle=False, on_error="skip")
        assert [int(sample["n"]) for sample in ds] == [0, 1, 2, 3, 3, 8, 8, 8, 8, 9]

    def test_a_file_that_is_cut(self) -> None:
        data = written()
        for size in range(0, len(data), 7):
            with pytest.raises(FormatError, match=r"^x at byte"):
                Parquet().index(whole(data[:size]), "x")

    def test_a_text_that_is_none_harms_its_own_sample(self) -> None:
        data = bytearray(written(compression="none", use_dictionary=False, write_statistics=False))
        data[data.index(b"text 5")] = 0xFF
        index = Parquet().index(whole(data), "x")
        source = Parquet().source(whole(data), index)
        assert Parquet().read(source, index, 4, "x")["t"] == "text 4"
        with pytest.raises(FormatError, match="column 't' of sample 5"):
            Parquet().read(source, index, 5, "x")

    @pytest.mark.parametrize(
        ("table", "text"),
        [
            (pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]), "two columns are called 'a'"),
        ],
    )
    def test_tables_that_no_sample_can_be_made_of(self, table: Any, text: str) -> None:
        with pytest.raises(FormatError, match=text):
            Parquet().index(whole(written(table)), "x")

    def test_encrypted_files_are_told(self) -> None:
        data = written()
        for magic in (b"PARE",):
            sealed = whole(magic + data[4:-4] + magic)
            assert Parquet.matches(sealed[:4096].tobytes(), sealed)
            with pytest.raises(FormatError, match="encrypted"):
                Parquet().index(sealed, "x")

    def test_columns_in_other_files_are_told(self, tmp_path: Path) -> None:
        collected: list[Any] = []
        pq.write_table(TABLE, tmp_path / "x.parquet", metadata_collector=collected)
        collected[0].set_file_path("x.parquet")
        pq.write_metadata(TABLE.schema, tmp_path / "_metadata", metadata_collector=collected)
        with pytest.raises(FormatError, match="another file"):
            loader.open_shard(tmp_path / "_metadata")

    def test_a_value_repeated_without_end_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A dictionary's one long value again and again: a few kilobytes that decode to gigabytes."""
        monkeypatch.setattr(parquet_groups, "MOST", 64 << 20)
        column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(1 << 16, np.int32)), [b"x" * (1 << 16)])
        data = written(pa.table({"a": column}), 1 << 20, compression="zstd", store_schema=False, write_statistics=False)
        assert len(data) < 10_000
        index = Parquet().index(whole(data), "x")
        before = pa.default_memory_pool().max_memory()
        with pytest.raises(FormatError, match="more than"):
            Parquet().read(Parquet().source(whole(data), index), index, 0, "x")
        assert pa.default_memory_pool().max_memory() < before + (256 << 20)

    @pytest.mark.parametrize(
        ("column", "options"),
        [
            # each text is as the one before
            (pa.array(["x" * 8192] * 8192), {"use_dictionary": False, "column_encoding": {"a": "DELTA_BYTE_ARRAY"}}),
            (pa.array(["x" * 8192] * 8192), {}),
            (pa.nulls(4096, pa.binary(1 << 14)), {}),  # a null takes as much as a value
        ],
    )
    @pytest.mark.parametrize("codec", ["zstd", "none"])
    def test_what_takes_nothing_in_the_file_is_decoded_a_few_rows_at_a_time(
        self, monkeypatch: pytest.MonkeyPatch, column: Any, options: dict[str, Any], codec: str
    ) -> None:
        monkeypatch.setattr(parquet_groups, "MOST", 4 << 20)
        data = whole(written(pa.table({"a": column}), 1 << 20, compression=codec, write_statistics=False, **options))
        assert len(data) < 20_000
        index = Parquet().index(data, "x")
        pool = pa.default_memory_pool()
        most: list[int] = []
        inner = parquet_pages.rows_at_once
        monkeypatch.setattr(parquet_groups, "rows_at_once", lambda *args: most.append(inner(*args)) or most[-1])
        before = pool.bytes_allocated()
        with pytest.raises(FormatError, match="more than"):
            Parquet().read(Parquet().source(data, index), index, 0, "x")
        assert min(most) <= (2 << 20) // 8192
        assert pool.bytes_allocated() < before + (16 << 20)

    def test_a_page_that_declares_more_than_its_bytes_hold(self) -> None:
        """The decoder would take two gigabytes for it."""
        data = bytearray(written(pa.table({"a": [b"x" * 100] * 9}), compression="snappy", use_dictionary=False))
        index = Parquet().index(whole(data), "x")
        start, end = index.chunks[0, 0, :2].tolist()
        page = Reader(bytes(data[start:end])).struct({2: None})[2]
        declared = bytes([2 * page & 127 | 128, 2 * page >> 7])
        at = data.index(declared, start)
        assert at < start + 6
        data[at : at + 2] = b"\xfe\x7f"  # as many bytes as a number of two can say
        with pytest.raises(FormatError, match="declares that it decompresses to 8191"):
            Parquet().read(Parquet().source(whole(data), index), index, 0, "x")

    def test_lists_of_more_values_than_their_pages_are_told(self) -> None:
        index = Parquet().index(whole(written(pa.table({"a": [[1, 2], [3]]}))), "x")
        with pytest.raises(ValueError, match="take more than"):
            rows_at_once(Chunk(*index.chunks[0, 0].tolist()), index.leaves[0], 1, 64)

    def test_a_row_of_one_value_without_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """However few rows are decoded at once: one alone may hold a dictionary's long value again and again."""
        monkeypatch.setattr(parquet_groups, "MOST", 4 << 20)
        ends = pa.array([0, 1 << 13, 1 << 13, (1 << 13) + 2], pa.int32())
        for value, right in (("x" * 8192, False), ("x" * 30, True)):
            texts = pa.DictionaryArray.from_arrays(
                pa.array(np.r_[np.zeros(1 << 13), 1, 1], pa.int32()), [value, "y" * 999]
            )
            lists = pa.ListArray.from_arrays(ends, texts)
            nested = pa.StructArray.from_arrays([pa.array(range(3)), lists], ["n", "l"])
            maps = pa.MapArray.from_arrays(ends, pa.array(np.arange(len(texts))), texts)
            for name, column in {"list": lists, "struct": nested, "map": maps}.items():
                data = whole(written(pa.table({"a": column}), 9, write_statistics=False, store_schema=False))
                index = Parquet().index(data, "x")
                source = Parquet().source(data, index)
                before = pa.default_memory_pool().max_memory()
                if right:
                    assert len(repr(Parquet().read(source, index, 0, "x"))) > 30 << 13, name
                else:
                    with pytest.raises(FormatError, match="more than"):
                        Parquet().read(source, index, 0, "x")
                assert pa.default_memory_pool().max_memory() < before + (8 << 20), name

    @pytest.mark.parametrize("error", [MemoryError, pa.ArrowMemoryError])
    def test_memory_that_runs_out_is_no_damage(self, monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
        data = whole(written())
        index = Parquet().index(data, "x")
        source = Parquet().source(data, index)

        def fails(*_: Any, **__: Any) -> Any:
            raise error("no memory")

        with monkeypatch.context() as patch:
            patch.setattr(pq, "ParquetFile", fails)
            with pytest.raises(MemoryError):
                Parquet().read(source, index, 0, "x")
            with pytest.raises(MemoryError):
                Parquet().read(source, index, 0, "x", frozenset(["n"]))
        assert Parquet().read(source, index, 0, "x")["n"] == 0

    @pytest.mark.parametrize("version", ["1.0", "2.0"])
    @pytest.mark.parametrize("codec", ["none", "snappy", "zstd"])
    def test_strings_in_lists_that_share_beginnings(
        self, monkeypatch: pytest.MonkeyPatch, version: str, codec: str
    ) -> None:
        monkeypatch.setattr(parquet_groups, "MOST", 4 << 20)
        rng = random.Random(3)
        mixed = ["abc"[: rng.randrange(4)] * rng.randrange(90) for _ in range(5000)]
        for values, right in ((["x" * 8192] * 8192, False), (["x" * 200] * 8192, True), (mixed, True)):
            table = pa.table({"a": [values[:7], [], None, values[7:]]})
            options: dict[str, Any] = {"compression": codec, "data_page_version": version, "write_statistics": False}
            options |= {"use_dictionary": False, "column_encoding": {"a.list.element": "DELTA_BYTE_ARRAY"}}
            data = whole(written(table, 9, data_page_size=1000, **options))
            index = Parquet().index(data, "x")
            chunk = Chunk(*index.chunks[0, 0].tolist())
            size = decoded_size(data, chunk, 1 << 60)
            exact = sum(map(len, values))
            raw = int(index.chunks[0, 0, 2])
            assert exact <= size <= exact + raw and decoded_size(data, chunk, 100) > 100
            source = Parquet().source(data, index)
            if right:
                assert [Parquet().read(source, index, i, "x")["a"] for i in range(4)] == table["a"].to_pylist()
            else:
                with pytest.raises(FormatError, match="more than"):
                    Parquet().read(source, index, 0, "x")


class TestThrift:
    @pytest.mark.parametrize(
        "data",
        [
            b"\x18\xff\xff\xff\xff\x0f",  # a string of four gigabytes
            b"\x19\xfc\xff\xff\xff\xff\x0f",  # a list of as many structures
            b"\x1c" * 100,  # structures within structures
            b"\x15" + b"\xff" * 20,  # a number without end
            b"\x1d\x00",  # a type that is none
            b"\x19",
            b"\x49" + b"\x19" * 5000,  # lists within lists
        ],
    )
    def test_what_is_none_is_an_error(self, data: bytes) -> None:
        for wanted in ({}, {1: {1: None}}, {1: None}, {4: {1: None}}, {4: None}):
            with pytest.raises(ValueError, match=r"cut off|items|without end|64 bits|type"):
                Reader(data).struct(wanted)

    def test_the_expression_passes_over_what_walking_does(self) -> None:
        data = TestRanges.FOOTER
        rng = random.Random(1)
        matched = 0
        for _ in range(200):
            buffer = bytearray(data)
            for _ in range(rng.randrange(20)):
                buffer[rng.randrange(len(buffer))] = rng.randrange(256)
            for at in rng.sample(range(len(buffer)), 200):
                found = usual_struct().match(buffer, at)
                if found is not None:
                    matched += 1
                    reader = Reader(bytes(buffer))
                    assert reader._usual is None
                    reader.at = at
                    reader.skip_structs(1)
                    assert reader.at == found.end()
        assert matched > 1000

    def test_the_expression_knows_the_columns_that_are_written(self) -> None:
        """Else the row groups of a large footer are walked value by value: right, but forty times slower."""
        reader = Reader(TestRanges.FOOTER + bytes(40 << 10))
        document = reader.struct({4: {}})
        assert len(document[4]) == 4 and reader.at == len(TestRanges.FOOTER)
        assert (1 << 24) - reader._left < 4 * (TestRanges.COLUMNS + 10) + 200

    def test_what_is_walked_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(thrift, "_MOST_VALUES", 1000)
        with pytest.raises(ValueError, match="more than 1000 values"):
            Reader(b"\x1c" + b"\x13\0" * 2000).struct({})


class TestFooter:
    def test_a_part_that_is_opened_again_reads_no_footer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        objects = Arriving(written())
        index = Parquet().open(objects, "x", part=1).index
        monkeypatch.setattr(parquet_format, "read_footer", None)
        opened = Parquet().open(objects, "x", index=pickle.loads(pickle.dumps(index)), part=1)
        assert [Parquet().read(opened.source, opened.index, i, "x")["n"] for i in range(4)] == [4, 5, 6, 7]

    def test_a_row_group_that_is_described_wrongly_harms_its_own_part(self) -> None:
        data = bytearray(written())
        footer = read_footer(whole(data), "x", all_there)
        start = int(footer.spans[1, 0])
        data[start + 1] = 0x2C  # two columns where the schema has three
        data[start] = 0x59
        objects = Arriving(bytes(data))
        with pytest.raises(FormatError, match="footer"):
            Parquet().open(objects, "x", part=1)

    def test_a_footer_larger_than_any(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(parquet_footer, "_LARGEST", 100)
        with pytest.raises(FormatError, match="more than 100"):
            Parquet().index(whole(written()), "x")

    def test_of_no_column_and_of_no_row(self) -> None:
        assert len(Parquet().index(whole(written(TABLE.slice(0, 0))), "x")) == 0
        index = Parquet().index(whole(written(TABLE.select([]))), "x")
        assert index.names == () and index.offsets.tolist() == [index.place.start] * len(index.counts)
