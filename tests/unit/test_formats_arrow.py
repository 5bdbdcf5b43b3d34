"""Arrow files and streams: layouts, dictionaries that change, rare types, damage that is found before it is used."""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import loader
from cachefs.errors import FormatError
from loader.formats import Arrow, arrow_pieces
from loader.formats import arrow as arrow_format
from loader.formats.arrow_messages import Table, is_stream
from loader.testing import mapped_at

NEW = [pa.ipc.new_file, pa.ipc.new_stream]


def written(new: Callable[..., Any], batches: Sequence[Any], schema: Any = None, **options: Any) -> bytes:
    out = io.BytesIO()
    schema = batches[0].schema if schema is None else schema
    with new(out, schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return out.getvalue()


def save(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def opened(data: bytes) -> tuple[Any, Any, Any]:
    whole = np.frombuffer(bytearray(data), np.uint8)
    index = Arrow().index(whole, "x.arrow")
    return whole, index, Arrow().source(whole, index)


def column(data: bytes, name: str = "a") -> list[Any]:
    _, index, source = opened(data)
    return [Arrow().read(source, index, i, "x.arrow")[name] for i in range(len(index))]


def one(array: Any) -> list[Any]:
    return column(written(pa.ipc.new_file, [pa.record_batch({"a": array})]))


BATCHES = [pa.record_batch({"n": pa.array([1, 2]), "b": [b"x", b"yy"]}), pa.record_batch({"n": [3], "b": [b"zzz"]})]


class TestLayouts:
    @pytest.mark.parametrize("new", NEW)
    @pytest.mark.parametrize("name", ["x.arrow", "x.tar", "x"])
    @pytest.mark.parametrize("codec", [None, "lz4", "zstd"])
    def test_are_told_by_the_first_bytes(self, tmp_path: Path, new: Any, name: str, codec: str | None) -> None:
        path = save(tmp_path / name, written(new, BATCHES, compression=codec))
        reader = loader.open_shard(path)
        assert reader.format == Arrow()
        assert [sample["n"] for sample in reader] == [1, 2, 3]
        assert [sample["b"].tobytes() for sample in reader] == [b"x", b"yy", b"zzz"]
        if codec is None:
            file, offset = mapped_at(reader[2]["b"])
            assert Path(file).samefile(path) and path.read_bytes()[offset : offset + 3] == b"zzz"

    @pytest.mark.parametrize("new", NEW)
    def test_no_batch_is_no_sample(self, new: Any) -> None:
        assert column(written(new, [], BATCHES[0].schema)) == []

    def test_streams_from_before_0_15(self) -> None:
        data = written(pa.ipc.new_stream, BATCHES, use_legacy_format=True)
        assert data[:4] != b"\xff\xff\xff\xff" and is_stream(data[:4096])
        assert Arrow.matches(data[:4096], np.frombuffer(data, np.uint8))
        assert column(data, "n") == [1, 2, 3]

    def test_a_missing_end_marker_is_a_note(self) -> None:
        data = written(pa.ipc.new_stream, BATCHES)
        assert data[-8:] == b"\xff\xff\xff\xff\0\0\0\0"
        _, index, _ = opened(data[:-8])
        assert len(index) == 3 and "end marker" in index.notes[0]
        _, index, _ = opened(data)
        assert index.notes == ()

    def test_what_follows_the_end_is_a_note(self) -> None:
        data = written(pa.ipc.new_stream, BATCHES)
        _, index, _ = opened(data + data)
        assert len(index) == 3 and f"{len(data)} bytes" in index.notes[0]

    def test_an_index_survives_pickling(self) -> None:
        whole, index, _ = opened(written(pa.ipc.new_file, BATCHES))
        again = pickle.loads(pickle.dumps(index))
        source = Arrow().source(whole, again)
        assert len(again) == 3 and Arrow().read(source, again, 2, "x")["n"] == 3

    def test_compressed_batches_are_parts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(arrow_format, "PART_BYTES", 400)
        big = [pa.record_batch({"n": pa.array(range(k, k + 3))}) for k in (0, 3, 6, 9, 12)]
        for codec, parts in ((None, [15]), ("zstd", [6, 6, 3])):
            path = save(tmp_path / f"{codec}.arrow", written(pa.ipc.new_stream, big, compression=codec))
            ds = loader.ShardDataset(path, batch_size=1, shuffle=False)
            assert ds.manifest.counts.tolist() == parts
            assert [int(sample["n"]) for sample in ds] == list(range(15))


class TestDictionaries:
    VALUES = (["a"], ["a", "b"], ["a", "b", "c"], ["x"], ["x", "y"], ["a"])

    def batches(self) -> list[Any]:
        return [
            pa.record_batch({"a": pa.DictionaryArray.from_arrays(pa.array([0, None, len(v) - 1], pa.int8()), v)})
            for v in self.VALUES
        ]

    @pytest.mark.parametrize("deltas", [False, True])
    @pytest.mark.parametrize("codec", [None, "lz4"])
    def test_change_between_batches(self, deltas: bool, codec: str | None) -> None:
        data = written(pa.ipc.new_stream, self.batches(), emit_dictionary_deltas=deltas, compression=codec)
        wanted = [value for v in self.VALUES for value in (v[0], None, v[-1])]
        assert column(data) == wanted
        _, index, source = opened(data)
        for seed in range(20):  # batches in any order: what the reader knows grows, and is replaced to and fro
            for i in np.random.default_rng(seed).permutation(len(index)).tolist():
                source = Arrow().source(*opened(data)[:2]) if i == seed else source
                assert Arrow().read(source, index, i, "x")["a"] == wanted[i]

    def test_of_a_file_may_grow(self) -> None:
        data = written(pa.ipc.new_file, self.batches()[:3], emit_dictionary_deltas=True)
        assert column(data) == ["a", None, "a", "a", None, "b", "a", None, "c"]

    def test_of_a_part_are_those_before_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(arrow_format, "PART_BYTES", 1)
        data = written(pa.ipc.new_stream, self.batches(), emit_dictionary_deltas=True, compression="zstd")
        ds = loader.ShardDataset(save(tmp_path / "x.arrow", data), batch_size=1, shuffle=False)
        assert len(ds.manifest.counts) == 6
        assert [sample["a"] for sample in ds] == [value for v in self.VALUES for value in (v[0], None, v[-1])]

    def test_of_bytes_are_not_shared_by_samples(self) -> None:
        cells = one(pa.array([b"xy", b"xy"]).dictionary_encode())
        cells[0][:] = 0
        assert cells[1].tobytes() == b"xy"

    def test_are_projected(self) -> None:
        batch = pa.record_batch({"n": [1, 2], "a": pa.array(["x", "y"]).dictionary_encode()})
        _, index, source = opened(written(pa.ipc.new_stream, [batch], compression="lz4"))
        read = Arrow().read
        assert read(source, index, 1, "x", frozenset(["n"])) == {"n": 2}
        assert read(source, index, 1, "x", frozenset(["a"])) == {"a": "y"}
        assert read(source, index, 1, "x", frozenset(["gone"])) == {}


class TestTypes:
    def test_times(self) -> None:
        assert one(pa.array([86400_000_000_123], pa.timestamp("ns", "Europe/Paris"))) == [
            np.datetime64(86400000000123, "ns")
        ]
        assert one(pa.array([3], pa.date32())) == [np.datetime64("1970-01-04")]
        assert one(pa.array([5, None], pa.time32("s"))) == [np.timedelta64(5, "s"), None]
        assert one(pa.array([7], pa.duration("ms"))) == [np.timedelta64(7, "ms")]

    def test_half_floats_and_fixed_lists(self) -> None:
        assert one(pa.array([np.float16(1.5)], pa.float16()))[0].dtype == np.float16
        cells = one(pa.array([[1, 2], None, [3, None]], pa.list_(pa.int8(), 2)))
        assert cells[0].tolist() == [1, 2] and cells[1] is None and cells[2] == [3, None]

    def test_lists_of_numbers_are_views(self) -> None:
        cells = one(pa.array([[1, 2], [], [3, None]], pa.list_(pa.int32())))
        assert cells[0].dtype == np.int32 and cells[0].tolist() == [1, 2]
        assert cells[1].dtype == np.int32 and len(cells[1]) == 0
        assert cells[2] == [3, None]

    def test_even_lists_are_one_array(self) -> None:
        _, index, source = opened(written(pa.ipc.new_file, [pa.record_batch({"a": [[1, 2], [3, 4], [5, 6]]})]))
        columns = Arrow().columns(source, index, np.array([2, 0]), "x")
        assert columns["a"].tolist() == [[5, 6], [1, 2]]

    def test_tensors_have_their_shape(self) -> None:
        storage = pa.array([range(6), range(6, 12)], pa.list_(pa.int16(), 6))
        plain = pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.int16(), (2, 3)), storage)
        assert one(plain)[1].tolist() == [[6, 7, 8], [9, 10, 11]]
        turned = pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.int16(), (2, 3), permutation=[1, 0]), storage)
        assert one(turned)[0].tolist() == [[0, 3], [1, 4], [2, 5]]  # the physical shape, permuted

    def test_views_runs_and_unions(self) -> None:
        assert one(pa.array(["short", None, "longer than twelve bytes"], pa.string_view()))[2][:6] == "longer"
        assert one(pa.array([b"x" * 20], pa.binary_view()))[0].tobytes() == b"x" * 20
        views = pa.ListViewArray.from_arrays([0, 0, 1], [2, 2, 1], pa.array([7, 8]))
        cells = one(views)
        cells[0][:] = 0
        assert [cell.tolist() for cell in cells] == [[0, 0], [7, 8], [8]]
        runs = pa.RunEndEncodedArray.from_arrays(pa.array([2, 5], pa.int32()), pa.array(["a", "b"]))
        assert one(runs) == ["a", "a", "b", "b", "b"]
        kinds = pa.array([0, 1, 0], pa.int8())
        sparse = pa.UnionArray.from_sparse(kinds, [pa.array([1, 2, 3]), pa.array(["x", "y", "z"])])
        dense = pa.UnionArray.from_dense(kinds, pa.array([0, 0, 1], pa.int32()), [pa.array([1, 3]), pa.array(["y"])])
        assert one(sparse) == one(dense) == [1, "y", 3]

    def test_two_columns_of_one_name_are_an_error(self) -> None:
        batch = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
        with pytest.raises(FormatError, match="'a'"):
            opened(written(pa.ipc.new_stream, [batch]))

    def test_views_of_any_length_and_place(self) -> None:
        texts = ["", "x" * 12, "é" * 7, None, "y" * 13, "z" * 100]
        for kind in (pa.string_view(), pa.binary_view()):
            values = [text if kind == pa.string_view() or text is None else text.encode() for text in texts]
            array = pa.array(values, kind)
            for start in (0, 2, 5):
                found = [v.tobytes() if isinstance(v, np.ndarray) else v for v in one(array.slice(start))]
                assert found == values[start:]

    def test_views_of_one_place_are_not_shared(self) -> None:
        cells = one(views_of(b"x" * 100, 3))
        cells[0][:] = 0
        assert cells[1].tobytes() == b"x" * 100

    def test_views_that_share_a_buffer_take_no_more_than_it(self) -> None:
        data = written(pa.ipc.new_stream, [pa.record_batch({"a": views_of(b"x" * (1 << 20), 4000)})])
        before = pa.default_memory_pool().max_memory()
        _, index, source = opened(data)
        assert len(Arrow().read(source, index, 3999, "x")["a"]) == 1 << 20
        assert pa.default_memory_pool().max_memory() < before + (32 << 20)


def views_of(value: bytes, count: int) -> Any:
    """``count`` views of the same bytes."""
    views = np.tile(np.array([len(value), int.from_bytes(value[:4], "little"), 0, 0], np.int32), (count, 1))
    return pa.Array.from_buffers(pa.binary_view(), count, [None, pa.py_buffer(views.tobytes()), pa.py_buffer(value)])


def long_list(child: Any) -> Any:
    return pa.LargeListArray.from_arrays(pa.array([0, len(child)], pa.int64()), child)


MANY = (1 << 20) + 1
OF_NOTHING = {
    "null": pa.nulls(MANY),
    "empty list": pa.Array.from_buffers(pa.list_(pa.int8(), 0), MANY, [None], children=[pa.array([], pa.int8())]),
    "empty bytes": pa.Array.from_buffers(pa.binary(0), MANY, [None, pa.py_buffer(b"")]),
    "empty struct": pa.Array.from_buffers(pa.struct([]), MANY, [None]),
    "struct of nulls": pa.StructArray.from_arrays([pa.nulls(MANY)], ["a"]),
    "a run": pa.RunEndEncodedArray.from_arrays(pa.array([MANY], pa.int32()), pa.array(["a"])),
}


class TestWeight:
    @pytest.mark.parametrize("name", OF_NOTHING)
    def test_items_that_take_no_bytes(self, name: str) -> None:
        data = written(pa.ipc.new_file, [pa.record_batch({"a": long_list(OF_NOTHING[name]), "b": [1]})])
        assert len(data) < 2000
        with pytest.raises(FormatError, match=r"'a' of sample 0: .*take no bytes"):
            column(data)
        _, index, source = opened(data)
        assert Arrow().read(source, index, 0, "x", frozenset(["b"])) == {"b": 1}

    @pytest.mark.parametrize("size", [MANY, (1 << 31) - 1])
    def test_fixed_lists_of_them(self, size: int) -> None:
        plain = pa.FixedSizeListArray.from_arrays(pa.nulls(size), size)
        with pytest.raises(FormatError, match="take no bytes"):
            one(plain)
        inner = pa.FixedSizeListArray.from_arrays(pa.nulls(1024 * 1025), 1024)
        with pytest.raises(FormatError, match="take no bytes"):
            one(pa.FixedSizeListArray.from_arrays(inner, 1025))

    def test_values_shared_by_values_that_are_shared(self) -> None:
        """Each level holds the one below a thousand times."""
        first, count = pa.array(np.zeros(1000, np.int32)), pa.array(np.full(1000, 1000, np.int32))
        numbers = views = pa.array(range(1000))
        for _ in range(4):
            views = pa.ListViewArray.from_arrays(first, count, views)
        texts = pa.array([b"x" * 100_000])
        ends = pa.array([0, 100_000], pa.int32())
        bytes_again = pa.DictionaryArray.from_arrays(pa.array(np.zeros(100_000, np.int8)), texts)
        for array in (views, pa.ListArray.from_arrays(ends, bytes_again), long_list(views_of(b"x" * 100_000, 100_000))):
            with pytest.raises(FormatError, match="one value takes"):
                one(array)
        small = pa.ListViewArray.from_arrays(first[:2], count[:2], numbers)
        assert one(pa.ListViewArray.from_arrays([0, 1, 0], [2, 1, 0], small))[2] == []

    def test_what_shares_values_in_lists_is_read(self) -> None:
        words = pa.array(["a", "bb", None, "a"]).dictionary_encode()
        at = pa.array([0, 1, 3, 4], pa.int32())
        runs = pa.RunEndEncodedArray.from_arrays(pa.array([1, 4], pa.int32()), pa.array(["x", "y"]))
        union = pa.UnionArray.from_dense(pa.array([0, 1], pa.int8()), pa.array([0, 0], pa.int32()), [words, runs])
        assert one(pa.ListArray.from_arrays(at, words)) == [["a"], ["bb", None], ["a"]]
        assert one(pa.ListArray.from_arrays(at, words).slice(1)) == [["bb", None], ["a"]]
        assert one(pa.ListArray.from_arrays(at, runs)) == [["x"], ["y", "y"], ["y"]]
        assert one(pa.FixedSizeListArray.from_arrays(words, 2)) == [["a", "bb"], [None, "a"]]
        assert one(pa.StructArray.from_arrays([words, words], ["p", "q"]))[1] == {"p": "bb", "q": "bb"}
        assert one(union) == ["a", "x"]
        assert one(pa.MapArray.from_arrays(at, pa.array(range(4)), words))[2] == [(3, "a")]
        nested = pa.DictionaryArray.from_arrays(pa.array([1, None, 0]), pa.array([[1], [2, 3]]))
        assert [None if v is None else v.tolist() for v in one(nested)] == [[2, 3], None, [1]]
        empty = pa.DictionaryArray.from_arrays(pa.array([None], pa.int8()), pa.array([], pa.list_(pa.int8())))
        assert one(empty) == [None]

    def test_as_many_as_rows_are_right(self) -> None:
        assert one(pa.array([[None, None], [], None], pa.list_(pa.null()))) == [[None, None], [], None]
        rows = pa.LargeListArray.from_arrays(np.arange(MANY + 1), pa.nulls(MANY))
        _, index, source = opened(written(pa.ipc.new_file, [pa.record_batch({"a": rows})]))
        assert Arrow().read(source, index, MANY - 1, "x") == {"a": [None]}
        runs = pa.RunEndEncodedArray.from_arrays(pa.array([1, 3], pa.int32()), pa.array(["a", "b"]))
        assert one(long_list(runs)) == [["a", "b", "b"]]


class TestDamage:
    def test_a_stream_that_is_cut_in_its_last_batch(self, tmp_path: Path) -> None:
        data = written(pa.ipc.new_stream, BATCHES)
        _, index, _ = opened(data)
        last = index.batches[-1]
        for size in (last.at + 2, last.at + 6, last.at + 20, last.body + 1, last.end - 1):
            path = save(tmp_path / f"{size}.arrow", data[:size])
            with pytest.raises(FormatError, match=f"at byte {last.at}: .*cut off"):
                loader.open_shard(path)

    def test_a_file_that_is_cut(self) -> None:
        data = written(pa.ipc.new_file, BATCHES)
        for size in range(len(data)):
            with pytest.raises(FormatError, match=r"x\.arrow"):
                opened(data[:size])

    def test_a_damaged_batch_harms_its_own_samples(self) -> None:
        data = bytearray(written(pa.ipc.new_file, BATCHES, compression="zstd"))
        _, index, _ = opened(bytes(data))
        first = index.batches[0]
        data[first.end - 60 : first.end] = bytes(60)
        _, index, source = opened(bytes(data))
        for _ in range(2):
            with pytest.raises(FormatError, match=f"at byte {first.at}"):
                Arrow().read(source, index, 0, "x")
        assert Arrow().read(source, index, 2, "x")["n"] == 3

    def test_offsets_that_point_elsewhere_are_found_before_they_are_used(self) -> None:
        batch = pa.record_batch({"a": pa.array([b"x" * 5, b"y" * 6])})
        data = bytearray(written(pa.ipc.new_file, [batch]))
        offsets = data.index(struct.pack("<3i", 0, 5, 11))
        data[offsets + 4 : offsets + 8] = struct.pack("<i", 1 << 30)
        with pytest.raises(FormatError, match="column 'a' of sample 0"):
            column(bytes(data))

    def test_a_text_that_is_none_harms_its_own_sample(self) -> None:
        data = bytearray(written(pa.ipc.new_file, [pa.record_batch({"a": ["good", "bad!", "fine"]})]))
        data[data.index(b"bad!")] = 0xFF
        _, index, source = opened(bytes(data))
        assert [Arrow().read(source, index, i, "x")["a"] for i in (0, 2)] == ["good", "fine"]
        with pytest.raises(FormatError, match="column 'a' of sample 1"):
            Arrow().read(source, index, 1, "x")
        with pytest.raises(FormatError, match="column 'a'"):
            Arrow().columns(source, index, np.arange(3), "x")

    def test_declared_sizes_are_checked_first(self) -> None:
        data = bytearray(written(pa.ipc.new_file, [pa.record_batch({"a": range(5000)})], compression="lz4"))
        _, index, _ = opened(bytes(data))
        at = data.index(struct.pack("<q", 40000), index.batches[0].body)
        for declared in (1 << 40, -5):
            data[at : at + 8] = struct.pack("<q", declared)
            with pytest.raises(FormatError, match=f"at byte {at}: .*{declared}"):
                column(bytes(data))

    def test_rows_that_the_bytes_cannot_hold(self) -> None:
        data = written(pa.ipc.new_stream, [pa.record_batch({"a": [1, 2, 3]})])
        _, index, _ = opened(data)
        metadata = index.batches[0].at + 8
        changed = bytearray(data)
        for at in range(metadata, index.batches[0].body, 8):
            if changed[at : at + 8] == struct.pack("<q", 3):
                changed[at : at + 8] = struct.pack("<q", 1 << 60)
        with pytest.raises(FormatError, match="rows"):
            opened(bytes(changed))

    def test_a_footer_that_names_a_batch_twice(self) -> None:
        data = bytearray(written(pa.ipc.new_file, BATCHES))
        _, index, _ = opened(bytes(data))
        a, b = (batch.at for batch in index.batches)
        at = data.rindex(struct.pack("<q", b))
        data[at : at + 8] = struct.pack("<q", a)
        with pytest.raises(FormatError, match="footer"):
            opened(bytes(data))

    def test_a_footer_that_names_messages_within_each_other(self) -> None:
        """A message within the body of another, as a file of many would have that is read for ever."""
        inner = written(pa.ipc.new_stream, BATCHES)
        _, inner_index, _ = opened(inner)
        message = inner[inner_index.batches[1].at : inner_index.batches[1].end]
        batch = pa.record_batch({"n": pa.array([1]), "b": [bytes(8 - len(message) % 8) + message]})
        data = bytearray(written(pa.ipc.new_file, [*BATCHES, batch]))
        _, index, _ = opened(bytes(data))
        nested = data.index(message, index.batches[2].at)
        at = data.rindex(struct.pack("<q", index.batches[1].at))
        data[at : at + 8] = struct.pack("<q", nested)
        with pytest.raises(FormatError, match="within each other"):
            opened(bytes(data))

    def test_only_the_first_of_many_columns_is_looked_at(self) -> None:
        batch = pa.record_batch({f"c{k}": pa.array([k]) for k in range(300)})
        data = written(pa.ipc.new_stream, [batch])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Table, "structs", None)
            _, index, _ = opened(data)
        assert len(index) == 1

    @pytest.mark.parametrize("error", [MemoryError, pa.ArrowMemoryError])
    def test_memory_that_runs_out_is_no_damage(self, monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
        _, index, source = opened(written(pa.ipc.new_file, BATCHES))

        def fails(*_: Any, **__: Any) -> Any:
            raise error("no memory")

        for owner, name in ((pa.ipc, "open_stream"), (arrow_pieces, "cells_of")):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, fails)
                with pytest.raises(MemoryError):
                    Arrow().read(source, index, 0, "x")
        assert Arrow().read(source, index, 0, "x")["n"] == 1

    @pytest.mark.parametrize("data", [b"", b"\0" * 3, b"\xff" * 40, struct.pack("<I", 1 << 31) + bytes(40)])
    def test_flatbuffers_that_point_outside(self, data: bytes) -> None:
        assert not is_stream(data)
        with pytest.raises(ValueError, match="outside"):
            Table.root(memoryview(data))
