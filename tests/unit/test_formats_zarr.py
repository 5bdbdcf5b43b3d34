"""zarr stores: what is absent and what may not be read, what is too large, which arrays belong together."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loader
from cachefs.client import Client, connect
from cachefs.errors import Changed, ConfigError, DataError, Denied, FormatError, NotFound
from cachefs.recall import Recall
from cachefs.shard import ObjectStat
from loader.formats import Zarr, zarr_folder
from loader.formats.abc import Mapped
from loader.opening import ClientObjects

zarr = pytest.importorskip("zarr")
numcodecs = pytest.importorskip("numcodecs")

ROOT = Path(__file__).parents[2]


def write(path: Path, rows: int = 10, *, version: int = 3, **options: Any) -> np.ndarray:
    """A group with the array ``x`` of shape ``(rows, 3)``, four rows a chunk."""
    values = np.arange(rows * 3, dtype="<i4").reshape(rows, 3)
    group = zarr.open_group(path, mode="a", zarr_format=version)
    group.create_array("x", shape=values.shape, dtype="i4", **{"chunks": (4, 3), **options})[...] = values
    return values


def values_of(samples: Any, name: str = "x") -> list[Any]:
    return [sample[name].tolist() for sample in samples]


class FakeObjects:
    """A store in a dict, below ``mem://b/s``; ``fail`` says which error a key raises."""

    def __init__(self, path: Path, *, listable: bool = True) -> None:
        self.files = {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}
        self.fail: dict[str, Exception] = {}
        self.bound_to: tuple[str, int] | None = None
        self.mapped: list[str] = []
        self.recall = Recall()
        self.asked: list[list[str]] = []
        self._listable = listable

    def map(self, url: str, stat: ObjectStat | None = None) -> Mapped:
        key = url.removeprefix("mem://b/s/")
        self.mapped.append(key)
        if key in self.fail:
            raise self.fail[key]
        if key not in self.files:
            raise NotFound("no such key", url=url)
        return Mapped(np.frombuffer(bytearray(self.files[key]), np.uint8))

    def bound(self, url: str) -> tuple[str, int] | None:
        return self.bound_to

    def ask(self, stats: Sequence[ObjectStat]) -> None:
        self.asked.append([stat.url.removeprefix("mem://b/s/") for stat in stats])

    def recalled(self, url: str, name: str, make: Callable[[], Any]) -> Any:
        return make() if self.bound_to is None else self.recall.get((url, name, *self.bound_to), make)

    def read(self, url: str) -> bytes:
        return self.map(url).data.tobytes()

    def stat(self, url: str) -> ObjectStat:
        raise NotFound("no such key", url=url)

    def list(self, folder: str) -> Sequence[ObjectStat]:
        if not self._listable:
            raise Denied("may not be listed", url=folder)
        return [ObjectStat(f"{folder}/{key}", len(data), f"v{len(data)}") for key, data in sorted(self.files.items())]

    def close(self) -> None:
        pass

    def rows(self, format: Zarr | None = None, **options: Any) -> list[Any]:
        format = format or Zarr()
        opened = format.open(self, "mem://b/s", **options)
        return [format.read(opened.source, opened.index, i, "mem://b/s") for i in range(len(opened.index))]


@pytest.mark.parametrize("compressors", [None, "auto"])
@pytest.mark.parametrize("listable", [True, False])
def test_only_what_is_absent_reads_as_the_fill_value(tmp_path: Path, compressors: Any, listable: bool) -> None:
    values = write(tmp_path / "s", compressors=compressors, fill_value=-7)
    zarr.consolidate_metadata(tmp_path / "s")
    objects = FakeObjects(tmp_path / "s", listable=listable)
    assert values_of(objects.rows()) == values.tolist()
    del objects.files["x/c/1/0"]
    values[4:8] = -7
    assert values_of(objects.rows()) == values.tolist()
    objects.files["x/c/1/0"] = b""
    for error in (Denied("no right"), Changed("another version"), OSError("disk")):
        objects.fail["x/c/1/0"] = error
        with pytest.raises(type(error)):
            objects.rows()


@pytest.mark.parametrize("compressors", [None, "auto"])
def test_a_chunk_that_was_listed_and_is_gone_is_no_fill_value(tmp_path: Path, compressors: Any) -> None:
    write(tmp_path / "s", compressors=compressors)
    objects = FakeObjects(tmp_path / "s")
    objects.fail["x/c/2/0"] = NotFound("gone")
    with pytest.raises(Changed, match="gone now"):
        objects.rows()


def test_a_store_is_bound_as_a_whole(tmp_path: Path) -> None:
    values = write(tmp_path / "s")
    objects = FakeObjects(tmp_path / "s")
    now = zarr_folder.bind("mem://b/s", objects.list("mem://b/s"))
    objects.bound_to = (now.version, now.size)
    assert values_of(objects.rows()) == values.tolist()
    objects.files["x/c/9/0"] = b"added later"
    assert values_of(objects.rows()) == values.tolist(), "as it was listed, in this process"
    objects.recall = Recall()
    with pytest.raises(Changed, match="no longer the one"):
        objects.rows()


def test_a_store_of_many_parts_is_listed_once_for_each_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loader.formats.zarr._PIECE_BYTES", 1)
    write(tmp_path / "s")
    listed: list[str] = []
    inner = Client.list

    def counted(self: Client, url: str, **options: Any) -> Any:
        listed.append(url)
        return inner(self, url, **options)

    monkeypatch.setattr(Client, "list", counted)
    for once in (1, 2):
        dataset = loader.ShardDataset(tmp_path / "s", batch_size=1)
        assert len(dataset.manifest.shards) == 3
        for _ in range(2):
            assert len(list(dataset)) == 10
        assert len(listed) == 2 * once, "to find the store, and to count its rows and read all of its parts"


@pytest.mark.parametrize("compressors", [None, "auto"])
def test_the_chunks_of_a_part_are_asked_for_at_once(
    tmp_path: Path, compressors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loader.formats.zarr._PIECE_BYTES", 96)
    values = write(tmp_path / "s", 20, compressors=compressors, fill_value=-1)
    objects = FakeObjects(tmp_path / "s")
    del objects.files["x/c/2/0"]
    values[8:12] = -1
    opened = Zarr().open(objects, "mem://b/s", part=1)
    assert objects.asked == [["x/c/3/0"]], "what is absent is not asked for"
    assert values_of(objects.rows(part=1)) == values[8:16].tolist()
    objects.asked.clear()
    Zarr().open(objects, "mem://b/s", part=0)
    assert objects.asked == [["x/c/0/0", "x/c/1/0"]]
    assert len(opened.index) == 8


def test_what_is_recalled_is_bounded() -> None:
    recall = Recall(most=2)
    made: list[int] = []
    for key in (1, 2, 1, 3, 1, 2):
        assert recall.get(key, lambda key=key: made.append(key) or key) == key  # type: ignore[misc]
    assert made == [1, 2, 3, 2]


def test_a_local_store_that_changes_is_noticed(tmp_path: Path) -> None:
    write(tmp_path / "s")
    ds = loader.ShardDataset(tmp_path / "s", batch_size=1)
    assert len(ds) == 10
    chunk = tmp_path / "s" / "x" / "c" / "1" / "0"
    data = chunk.read_bytes()
    chunk.unlink()
    chunk.write_bytes(data + b"\0")
    with pytest.raises(Changed):
        list(ds)


def test_without_the_right_to_list_consolidated_metadata_tells_the_arrays(tmp_path: Path) -> None:
    values = write(tmp_path / "s", version=2)
    objects = FakeObjects(tmp_path / "s", listable=False)
    with pytest.raises(FormatError, match="right to list"):
        objects.rows()
    zarr.consolidate_metadata(tmp_path / "s")
    objects = FakeObjects(tmp_path / "s", listable=False)
    objects.fail["zarr.json"] = Denied("so a store answers for what is missing")
    assert values_of(objects.rows()) == values.tolist()
    document = json.loads(objects.files[".zmetadata"])
    document["metadata"]["../../x/.zarray"] = document["metadata"].pop("x/.zarray")
    objects.files[".zmetadata"] = json.dumps(document).encode()
    with pytest.raises(FormatError, match=r"\.\./x"):
        objects.rows()


def test_parts_are_runs_of_whole_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loader.formats.zarr._PIECE_BYTES", 1)
    values = write(tmp_path / "s", 30, chunks=(2, 3), shards=(6, 3))
    group = zarr.open_group(tmp_path / "s", mode="a")
    group.create_array("y", shape=(30,), chunks=(4,), dtype="i8")[...] = np.arange(30)
    objects = FakeObjects(tmp_path / "s")
    counts = Zarr().parts(objects, "mem://b/s")
    assert counts == [6, 6, 6, 6, 6]
    joined = []
    for part in range(5):
        objects.mapped.clear()
        rows = objects.rows(part=part)
        assert [key for key in objects.mapped if key.startswith("x/c")] == [f"x/c/{part}/0"]
        joined += rows
    assert values_of(joined) == values.tolist() and [s["y"] for s in joined] == list(range(30))
    ds = loader.ShardDataset(tmp_path / "s", batch_size=4, drop_last=False, seed=3)
    assert len(ds.manifest.shards) == 5
    seen = sorted(int(y) for batch in ds.batched() for y in batch["y"])
    assert seen == list(range(30))


def test_small_chunks_are_read_several_at_a_time(tmp_path: Path) -> None:
    write(tmp_path / "s", 50, chunks=(1, 3))
    assert Zarr().parts(FakeObjects(tmp_path / "s"), "mem://b/s") == [50]


def test_fields_that_nobody_asks_for_are_not_fetched(tmp_path: Path) -> None:
    write(tmp_path / "s")
    zarr.open_group(tmp_path / "s", mode="a").create_array("y", shape=(10,), chunks=(10,), dtype="i8")[...] = 1
    objects = FakeObjects(tmp_path / "s")
    opened = Zarr().open(objects, "mem://b/s")
    assert set(Zarr().read(opened.source, opened.index, 0, "", frozenset({"y"}))) == {"y"}
    assert not [key for key in objects.mapped if key.startswith("x/c")]


def test_arrays_of_different_lengths_have_to_be_chosen(tmp_path: Path) -> None:
    values = write(tmp_path / "s")
    group = zarr.open_group(tmp_path / "s", mode="a")
    group.create_array("names", shape=(4,), dtype="U3")[...] = ["a", "b", "cd", "e"]
    group.create_array("scale", shape=(), dtype="f8")[...] = 2.5
    with pytest.raises(FormatError, match=r"names has 4, x has 10.*arrays="):
        loader.open_shard(tmp_path / "s")
    assert values_of(loader.open_shard(tmp_path / "s", Zarr(arrays=("x",)))) == values.tolist()
    assert [s["names"] for s in loader.open_shard(tmp_path / "s", Zarr(arrays=("names",)))] == ["a", "b", "cd", "e"]
    with pytest.raises(FormatError, match=r"no array 'z'.*names, scale, x"):
        loader.open_shard(tmp_path / "s", Zarr(arrays=("z",)))


def test_a_lone_array_and_nested_groups(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "lone", shape=(3,), dtype="i2")[...] = [4, 5, 6]
    assert [dict(s) for s in loader.open_shard(tmp_path / "lone")] == [{"data": 4}, {"data": 5}, {"data": 6}]
    assert [s["data"] for s in loader.open_shard(tmp_path / "lone", Zarr(arrays=("data",)))] == [4, 5, 6]
    group = zarr.open_group(tmp_path / "deep", mode="w")
    group.create_group("a").create_array("b", shape=(2,), dtype="f4")[...] = [1, 2]
    assert [dict(s) for s in loader.open_shard(tmp_path / "deep")] == [{"a/b": 1.0}, {"a/b": 2.0}]


def test_a_store_without_rows_is_empty(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "s", shape=(0, 3), chunks=(1, 3), dtype="i2")
    assert len(loader.open_shard(tmp_path / "s")) == 0
    zarr.open_group(tmp_path / "g", mode="w")
    with pytest.raises(FormatError, match="no array"):
        loader.open_shard(tmp_path / "g")


def test_strings_of_any_length(tmp_path: Path) -> None:
    words = ["", "é" * 300, "three"]
    zarr.create_array(tmp_path / "s", shape=(3,), chunks=(2,), dtype="str")[...] = np.array(words, dtype=object)
    assert [s["data"] for s in loader.open_shard(tmp_path / "s")] == words
    [batch] = loader.ShardDataset(tmp_path / "s", batch_size=3, shuffle=False).batched()
    assert batch["data"] == words


def test_pickles_are_not_read_unasked(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "s", mode="w", zarr_format=2)
    group.create_array("x", shape=(2,), chunks=(2,), dtype="i4")[...] = [1, 2]
    meta = tmp_path / "s" / "x" / ".zarray"
    document = json.loads(meta.read_text())
    document.update(dtype="|O", filters=[{"id": "pickle"}], fill_value=None)
    meta.write_text(json.dumps(document))
    chunk = numcodecs.Pickle().encode(np.array(["a", {"b": 1}], dtype=object))
    compressor = numcodecs.get_codec(document["compressor"]) if document["compressor"] else None
    (tmp_path / "s" / "x" / "0").write_bytes(compressor.encode(chunk) if compressor else chunk)
    with pytest.raises(FormatError, match="allow_pickle"):
        loader.open_shard(tmp_path / "s")


def test_damage_costs_the_rows_of_its_piece_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loader.formats.zarr._PIECE_BYTES", 1)
    values = write(tmp_path / "s", 12, compressors=[zarr.codecs.ZstdCodec(), zarr.codecs.Crc32cCodec()])
    chunk = tmp_path / "s" / "x" / "c" / "1" / "0"
    data = bytearray(chunk.read_bytes())
    data[-6] ^= 1
    chunk.unlink()
    chunk.write_bytes(data)
    reader = loader.open_shard(tmp_path / "s")
    for i in range(12):
        if 4 <= i < 8:
            with pytest.raises(FormatError, match="rows 4 to 8 of 'x'"):
                reader[i]
        else:
            assert reader[i]["x"].tolist() == values[i].tolist()
    with pytest.warns(loader.DataWarning):
        ds = loader.ShardDataset(tmp_path / "s", batch_size=6, shuffle=False, on_error="skip")
        assert len(list(ds)) == 12
        assert ds.skipped == 4


def test_many_chunks_leave_no_descriptor_open(tmp_path: Path) -> None:
    values = write(tmp_path / "s", 400, chunks=(1, 3), compressors=None)
    values = np.concatenate([values])
    script = (
        "import resource, sys, loader\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (120, 120))\n"
        "shard = loader.open_shard(sys.argv[1])\n"
        "assert sum(int(s['x'].sum()) for s in shard) == int(sys.argv[2])\n"
    )
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 120
    total = str(int(values.sum()))
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "s"), total], check=True, cwd=ROOT, timeout=100)


@pytest.mark.parametrize("make", [lambda: Zarr(arrays=()), lambda: Zarr(arrays=("x", "x")), lambda: Zarr(arrays=(1,))])
def test_options_that_make_no_sense(make: Callable[[], Zarr]) -> None:
    with pytest.raises(ConfigError):
        make()


def test_options_survive_a_manifest() -> None:
    format = Zarr(arrays=("a", "b"), allow_pickle=True)
    assert Zarr.from_options(json.loads(json.dumps(format.options()))) == format
    assert hash(format) == hash(Zarr(arrays=("a", "b"), allow_pickle=True))


def test_a_file_in_a_store_is_no_shard(tmp_path: Path) -> None:
    write(tmp_path / "s")
    objects = ClientObjects(connect(), {})
    assert Zarr.beside(objects, str(tmp_path / "s")) == Zarr()
    assert Zarr.beside(objects, str(tmp_path)) is None
    with pytest.raises(DataError):
        loader.open_shard(tmp_path / "s" / "x" / "c" / "0" / "0")
