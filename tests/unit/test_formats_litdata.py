"""LitData: leaves, trees, nested values, chunks and indexes from outside."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

import loader
from cachefs.errors import ConfigError, FormatError, NotFound, UnknownFormat
from loader.formats import LitData
from loader.formats.litdata_leaves import RefusedLeaf, dtype_of, make_leaf
from loader.formats.litdata_listing import read_litdata_index
from loader.formats.litdata_nested import parse_nested
from loader.formats.litdata_tree import parse_tree
from loader.testing import litdata_bytes, litdata_index


def raw(data: bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(bytearray(data), np.uint8)


def spec(kind: str | None, context: Any = None, *children: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind, "context": context, "children_spec": list(children)}


LEAF = spec(None)
FIELDS = {"n": "int", "s": "str"}
ITEMS = [[struct.pack("<q", i), f"text {i}".encode()] for i in range(3)]


def write(
    folder: Path, fields: dict[str, str], items: list[list[bytes]], name: str = "chunk-0-0.bin", **config: Any
) -> Path:
    chunk = litdata_bytes(items)
    (folder / name).write_bytes(chunk)
    (folder / "index.json").write_bytes(litdata_index({name: (len(items), len(chunk))}, fields, **config))
    return folder / name


class TestLeaves:
    @pytest.mark.parametrize(
        ("serializer", "data", "value"),
        [
            ("int", struct.pack("<q", -5), -5),
            ("float", struct.pack("<d", 0.1), 0.1),
            ("bool", b"\x01", True),
            ("bool", b"\x02", True),
            ("str", "é".encode(), "é"),
            ("text", b"", ""),
            ("json", b'{"a": [1, null]}', {"a": [1, None]}),
        ],
    )
    def test_values(self, serializer: str, data: bytes, value: Any) -> None:
        found = make_leaf(serializer, False).decode(raw(data))
        assert found == value and type(found) is type(value)

    @pytest.mark.parametrize(
        ("serializer", "data", "dtype", "shape"),
        [
            ("numpy", struct.pack("<4I", 9, 2, 2, 1) + bytes(8), "float32", (2, 1)),
            ("tensor", struct.pack(">4I", 17, 2, 2, 1) + bytes(16), "int64", (2, 1)),
            ("tensor", struct.pack(">2I", 19, 0) + b"\x01", "bool", ()),
            ("numpy", struct.pack("<3I", 9, 1, 0), "float32", (0,)),
            ("no_header_numpy:5", bytes(6), "uint16", (3,)),
            ("no_header_tensor:20", bytes(4), "uint16", (2,)),
        ],
    )
    def test_arrays_are_views(self, serializer: str, data: bytes, dtype: str, shape: tuple[int, ...]) -> None:
        buffer = raw(data)
        value = make_leaf(serializer, False).decode(buffer)
        assert (value.dtype, value.shape) == (np.dtype(dtype), shape)
        assert value.size == 0 or (np.shares_memory(value, buffer) and value.flags.writeable)

    @pytest.mark.parametrize(
        ("serializer", "kind"),
        [("jpeg", "jpg"), ("image:png", "png"), ("image", "jpg"), ("pil", "pil"), ("tifffile", "tiff"), ("bytes", "")],
    )
    def test_kinds(self, serializer: str, kind: str) -> None:
        assert make_leaf(serializer, False).kind == kind

    def test_files_are_handed_out_as_stored(self) -> None:
        for serializer in ("video:mp4", "audio:wav", "file:bin", "mesh:ply", "nifti:nii.gz", "pdf", "graph"):
            buffer = raw(b"\x00\x01")
            assert make_leaf(serializer, False).decode(buffer) is buffer

    def test_a_list_of_images(self) -> None:
        found = make_leaf("jpeg_array", False).decode(raw(struct.pack("<3I", 2, 1, 2) + b"abb"))
        assert [view.tobytes() for view in found] == [b"a", b"bb"]

    @pytest.mark.parametrize(
        ("serializer", "data"),
        [
            ("int", b"\x00"),
            ("bool", b""),
            ("float", bytes(9)),
            ("str", b"\xff"),
            ("numpy", b"\x00"),
            ("numpy", struct.pack("<2I", 9, 2**31)),
            ("numpy", struct.pack("<4I", 9, 2, 2**32 - 1, 2**32 - 1)),
            ("numpy", struct.pack("<3I", 14, 1, 1) + bytes(8)),
            ("tensor", struct.pack(">3I", 10, 1, 1) + bytes(2)),
            ("tensor", struct.pack(">3I", 99, 1, 1) + bytes(2)),
            ("numpy", struct.pack("<2I", 9, 33) + bytes(33 * 4)),
            ("no_header_numpy:5", b"abc"),
            ("jpeg_array", struct.pack("<2I", 2, 1)),
            ("jpeg_array", struct.pack("<I", 2**32 - 1)),
            ("jpeg_array", struct.pack("<2I", 1, 9) + b"x"),
            ("json", b""),
            ("json", b"[" * 100_000),
        ],
    )
    def test_bytes_that_are_no_such_value(self, serializer: str, data: bytes) -> None:
        with pytest.raises(ValueError):
            make_leaf(serializer, False).decode(raw(data))

    @pytest.mark.parametrize(
        "serializer", ["pickle", "graph:pickle", "mine", "no_header_numpy:99", "no_header_tensor:x", "no_header_numpy"]
    )
    def test_serializers_that_are_refused(self, serializer: str) -> None:
        with pytest.raises(RefusedLeaf):
            make_leaf(serializer, False).decode(raw(b""))

    def test_dtypes_of_tokens(self) -> None:
        assert dtype_of("no_header_tensor:15") == np.int32
        with pytest.raises(ValueError):
            dtype_of("int")


class TestNested:
    @pytest.mark.parametrize(
        ("data", "value"),
        [
            (b"\x0b", None),
            (b"\x0a\x01", True),
            (b"\x08" + struct.pack("<q", -2), -2),
            (b"\x09" + struct.pack("<d", 0.5), 0.5),
            (b"\x07\x02\0\0\0" + "é".encode(), "é"),
            (b"\x01\x02\0\0\0\x01\0\0\0a\0\0\0\0", ["a", ""]),
            (b"\x02\x01\0\0\0" + struct.pack("<q", 7), [7]),
            (b"\x03\x01\0\0\0" + struct.pack("<d", 7), [7.0]),
            (b"\x04\x02\0\0\0\x01\x00", [True, False]),
            (b"\x05\x01\0\0\0\x01\0\0\0k\x0b", {"k": None}),
            (b"\x06\x02\0\0\0\x01\0\0\0\x01\0\0\0k\x10\x14\x01", [{"k": None}, {"k": True}]),
            (b"\x00\x02\0\0\0{}", {}),
            (b"[1]", [1]),
        ],
    )
    def test_values(self, data: bytes, value: Any) -> None:
        assert parse_nested(data) == value

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"\x0c",
            b"\x08\x00",
            b"\x0b\x00",
            b"\x01\xff\xff\xff\xff",
            b"\x02\xff\xff\xff\x7f",
            b"\x05\xff\xff\xff\x7f",
            b"\x06\xff\xff\xff\x7f\x00\0\0\0",
            b"\x06\x01\0\0\0\x01\0\0\0\x01\0\0\0k\x20",
            b"\x00\x05\0\0\0{",
            b"\x05\x01\0\0\0\0\0\0\0" * 5000,
            b"\x07\x01\0\0\0\xff",
        ],
    )
    def test_bytes_that_are_none(self, data: bytes) -> None:
        with pytest.raises(ValueError):
            parse_nested(data)


class TestTree:
    def test_containers(self) -> None:
        tree = spec(
            "builtins.list",
            "null",
            spec("builtins.tuple", "null", LEAF, LEAF),
            spec("collections.OrderedDict", '["a", 2]', LEAF, LEAF),
            spec("collections.defaultdict", {"dict_context": ["z"], "default_factory_name": "x"}, LEAF),
            spec("collections.namedtuple", "no.such.Type", LEAF),
            spec("collections.deque", "null", LEAF),
        )
        node = parse_tree(json.dumps([1, tree]))
        assert node.leaves == 7
        assert node.build(iter(range(7))) == [(0, 1), {"a": 2, 2: 3}, {"z": 4}, (5,), [6]]
        assert parse_tree(None).build(iter("x")) == "x"

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "[1]",
            "{}",
            json.dumps([2, LEAF]),
            json.dumps([1, 5]),
            json.dumps([1, spec("os.system", "null", LEAF)]),
            json.dumps([1, spec("builtins.dict", '["a"]', LEAF, LEAF)]),
            json.dumps([1, spec("builtins.dict", '["a", "a"]', LEAF, LEAF)]),
            json.dumps([1, spec("builtins.dict", '[["a"]]', LEAF)]),
            json.dumps([1, spec("builtins.dict", "nope", LEAF)]),
            '[1, {"type": "builtins.list", "context": "null", "children_spec": [' * 200,
            json.dumps([1, spec(None, None, LEAF)]),
        ],
    )
    def test_texts_that_are_none(self, text: str) -> None:
        with pytest.raises(ValueError):
            parse_tree(text)

    def test_nesting_is_bounded(self) -> None:
        tree = LEAF
        for _ in range(80):
            tree = spec("builtins.list", "null", tree)
        with pytest.raises(ValueError, match="deep"):
            parse_tree(json.dumps([1, tree]))


class TestChunks:
    def check(self, tmp_path: Path, chunk: bytes, words: str) -> None:
        path = write(tmp_path, FIELDS, ITEMS)
        path.write_bytes(chunk)
        with pytest.raises(FormatError, match=words) as error:
            list(loader.open_shard(path, format="litdata"))
        assert str(path) in str(error.value) and error.value.offset is not None

    def test_a_count_that_does_not_fit(self, tmp_path: Path) -> None:
        self.check(tmp_path, struct.pack("<II", 2**31, 8), "declares 2147483648 items")
        self.check(tmp_path, b"\x01", "too few for a LitData chunk")

    def test_offsets_that_do_not_fit(self, tmp_path: Path) -> None:
        good = litdata_bytes(ITEMS)
        self.check(tmp_path, good[:-1], "cut off or damaged")
        self.check(tmp_path, good[:4] + struct.pack("<I", 3) + good[8:], "cut off or damaged")
        self.check(tmp_path, good[:8] + struct.pack("<I", 3) + good[12:], "lies before")

    def test_sizes_that_do_not_fill_an_item(self, tmp_path: Path) -> None:
        good = litdata_bytes(ITEMS)
        at = struct.unpack_from("<I", good, 4)[0]
        self.check(tmp_path, good[:at] + struct.pack("<I", 2**32 - 1) + good[at + 4 :], "the values of item 0 take")

    def test_a_damaged_item_leaves_the_others_readable(self, tmp_path: Path) -> None:
        items = [*ITEMS, [bytes(8), b"\xff"], *ITEMS]
        path = write(tmp_path, FIELDS, items)
        shard = loader.open_shard(path)
        with pytest.raises(FormatError, match="field 's' of item 3"):
            shard[3]
        assert shard[4] == {"n": 0, "s": "text 0"}
        assert len(list(loader.ShardDataset(tmp_path, batch_size=1, shuffle=False, fields=["n"]))) == 7

    def test_pickles_are_read_only_where_they_are_allowed(self, tmp_path: Path) -> None:
        items = [[bytes(8), pickle.dumps({"any": {1, 2}})]]
        path = write(tmp_path, {"n": "int", "p": "pickle"}, items)
        with pytest.raises(FormatError, match="field 'p' holds pickles, which are refused"):
            loader.open_shard(path)[0]
        assert [dict(s) for s in loader.ShardDataset(tmp_path, batch_size=1, fields=["n"])] == [{"n": 0}]
        ds = loader.ShardDataset(tmp_path, batch_size=1, format=LitData(allow_pickle=True))
        assert [s["p"] for s in ds] == [{"any": {1, 2}}]

    def test_images_are_decoded_by_their_serializer(self, tmp_path: Path) -> None:
        pixels = struct.pack("<3I", 2, 1, 1) + b"L" + b"\x07\x09"
        write(tmp_path, {"image": "pil"}, [[pixels]])
        [sample] = loader.ShardDataset(tmp_path, batch_size=1, decode="torch")
        assert sample["image"].tolist() == [[[7, 9]]]

    def test_a_bomb_in_one_item_is_bounded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("loader.formats.litdata_items._FREE", 1 << 20)
        bomb = zstandard.ZstdCompressor().compress(bytes(8 << 20))
        chunk = struct.pack("<3I", 1, 12, 12 + len(bomb)) + bomb
        path = tmp_path / "chunk-0-0.bin"
        path.write_bytes(chunk)
        index = litdata_index({path.name: (1, len(chunk))}, FIELDS, compression="zstd", compression_level="sample")
        (tmp_path / "index.json").write_bytes(index)
        with pytest.raises(FormatError, match=f"item 0: decompresses to more than {1 << 20} bytes"):
            loader.open_shard(path)[0]

    def test_a_compressed_chunk_of_another_size(self, tmp_path: Path) -> None:
        path = tmp_path / "chunk-0-0.zstd.bin"
        chunk = litdata_bytes(ITEMS)
        path.write_bytes(zstandard.compress(chunk))
        for size in (len(chunk), len(chunk) - 20):  # old writers did not count the head
            (tmp_path / "index.json").write_bytes(litdata_index({path.name: (3, size)}, FIELDS, compression="zstd"))
            assert len(list(loader.ShardDataset(tmp_path, batch_size=1))) == 3
        (tmp_path / "index.json").write_bytes(
            litdata_index({path.name: (3, len(chunk) + 1)}, FIELDS, compression="zstd")
        )
        with pytest.raises(FormatError, match="decompresses to"):
            list(loader.ShardDataset(tmp_path, batch_size=1))

    def test_a_chunk_with_another_count_than_its_index(self, tmp_path: Path) -> None:
        path = write(tmp_path, FIELDS, ITEMS)
        (tmp_path / "index.json").write_bytes(litdata_index({path.name: (4, 100)}, FIELDS))
        with pytest.raises(FormatError, match="holds 3 samples, the data set's index says 4"):
            list(loader.ShardDataset(tmp_path, batch_size=1, shuffle=False))


class TestFormat:
    def test_options_go_and_come_back(self) -> None:
        format = LitData(names=("a", "b"), leaves=("int", "str"), tree="[1]", wrap="batch")
        assert LitData.from_options(json.loads(json.dumps(format.options()))) == format
        assert hash(format) == hash(LitData.from_options(format.options()))

    @pytest.mark.parametrize(
        "options", [{"block": 0}, {"block": True}, {"block": "8"}, {"names": ("a", "a")}, {"names": ()}]
    )
    def test_options_that_make_no_sense(self, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigError):
            LitData(**options)

    def test_bytes_alone_say_that_an_index_is_needed(self) -> None:
        with pytest.raises(ConfigError, match="described by the"):
            LitData().index(raw(bytes(16)), "u")

    def test_the_user_s_options_and_the_index_s_come_together(self) -> None:
        known = LitData(leaves=("no_header_tensor:15",), tokens=True)
        assert LitData(block=4).completed(known) == LitData(block=4, leaves=known.leaves, tokens=True)
        assert LitData(leaves=("int",)).completed(known).leaves == ("int",)


class TestIndex:
    def document(self, **config: Any) -> bytes:
        return litdata_index({"chunk-0-0.bin": (1, 20)}, {"a": "int"}, **config)

    def test_what_it_says(self) -> None:
        [chunk], config = read_litdata_index(self.document(), "u")
        assert (chunk.filename, chunk.chunk_size, config.leaves, config.wrap) == ("chunk-0-0.bin", 1, ("int",), None)
        assert read_litdata_index(self.document(compression="zstd:9"), "u")[1].wrap == "chunk"

    @pytest.mark.parametrize(
        ("config", "words"),
        [
            ({"encryption": {"algorithm": "fernet", "level": "sample"}}, "encrypted with fernet"),
            ({"item_loader": "TemporalArrayLoader"}, "TemporalArrayLoader"),
            ({"item_loader": "Mine"}, "'Mine'"),
            ({"compression": "lz4"}, "compressed with lz4"),
            ({"compression": "zstd", "compression_level": "page"}, "'page'"),
        ],
    )
    def test_what_is_not_read_is_named(self, config: dict[str, Any], words: str) -> None:
        with pytest.raises(UnknownFormat, match=words):
            read_litdata_index(self.document(**config), "u")

    @pytest.mark.parametrize(
        "config",
        [
            {"data_format": None},
            {"data_format": ["int", 3]},
            {"data_format": ["int", "int"]},
            {"data_spec": 5},
            {"data_spec": "x"},
            {"item_loader": "TokensLoader", "data_format": []},
            {"compression": 5},
        ],
    )
    def test_configurations_that_make_no_sense(self, config: dict[str, Any]) -> None:
        with pytest.raises(FormatError, match=r"^u: "):
            read_litdata_index(self.document(**config), "u")

    @pytest.mark.parametrize("name", ["../x.bin", "/etc/x", "a/../../x", "", "a//b", "a\\b"])
    def test_names_that_leave_the_folder_are_refused(self, name: str) -> None:
        with pytest.raises(FormatError, match="not one inside its folder"):
            read_litdata_index(litdata_index({name: (1, 1)}, {"a": "int"}), "u")

    @pytest.mark.parametrize("text", ["nope", "[]", '{"chunks": [], "config": 3}', '{"chunks": [1], "config": {}}'])
    def test_documents_that_are_no_index(self, text: str) -> None:
        with pytest.raises(FormatError):
            read_litdata_index(text.encode(), "u")

    @pytest.mark.parametrize("counts", [(1 << 32, 1), (1 << 63, 1), (1, 1 << 62), (1, 1 << 63)])
    def test_counts_and_sizes_that_cannot_be(self, counts: tuple[int, int]) -> None:
        with pytest.raises(FormatError, match=r"^u: "):
            read_litdata_index(litdata_index({"chunk-0-0.bin": counts}, {"a": "int"}), "u")

    def test_a_chunk_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        write(tmp_path, {"n": "int"}, [[bytes(8)]]).unlink()
        with pytest.raises(NotFound, match=r"chunk-0-0\.bin"):
            len(loader.ShardDataset(tmp_path, batch_size=1))

    def test_folders_below_that_agree_are_one_data_set(self, tmp_path: Path) -> None:
        for number, folder in enumerate(("b", "a")):
            (tmp_path / folder).mkdir()
            write(tmp_path / folder, {"n": "int"}, [[struct.pack("<q", number)]])
        assert [s["n"] for s in loader.ShardDataset(tmp_path, batch_size=1, shuffle=False)] == [1, 0]
        write(tmp_path / "a", {"n": "float"}, [[bytes(8)]])
        with pytest.raises(ConfigError, match="written differently"):
            len(loader.ShardDataset(tmp_path, batch_size=1))

    def test_an_index_of_parquet_files_leaves_the_rest_to_them(self, tmp_path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"n": [1, 2, 3]}), tmp_path / "x.parquet")
        chunks = [{"filename": "x.parquet", "chunk_size": 3, "chunk_bytes": 1}]
        config = {"item_loader": "ParquetLoader", "data_format": ["int"]}
        (tmp_path / "index.json").write_text(json.dumps({"chunks": chunks, "config": config}))
        assert [int(s["n"]) for s in loader.ShardDataset(tmp_path, batch_size=1, shuffle=False)] == [1, 2, 3]
