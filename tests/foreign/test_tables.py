"""Parquet and Arrow files that pyarrow and Hugging Face's datasets wrote: every value, in every way to read them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

import loader
from cachefs.errors import ConfigError, FormatError
from loader.formats import Arrow, Parquet
from loader.testing import mapped_at

from .table_referee import rows

DATA = Path(__file__).parent / "data"
PARQUET = sorted(f"parquet/{path.name}" for path in (DATA / "parquet").iterdir())
ARROW = sorted(f"arrow/{path.name}" for path in (DATA / "arrow").iterdir() if path.is_file())
FULL = [name for name in (*PARQUET, *ARROW) if "zero_rows" not in name]


def expected(name: str) -> list[dict[str, Any]]:
    path = DATA / "expect" / f"{name.replace('/', '__')}.json"
    samples: list[dict[str, Any]] = json.loads(path.read_text())["samples"]
    return samples


def check(value: Any, wanted: dict[str, Any]) -> None:
    kind = wanted["type"]
    if kind == "null":
        assert value is None
    elif kind == "bytes":
        assert value.dtype == np.uint8 and value.ndim == 1 and value.flags.writeable
        assert (len(value), hashlib.sha256(value.tobytes()).hexdigest()) == (wanted["len"], wanted["sha256"])
    elif kind == "struct":
        assert type(value) is dict and set(value) == set(wanted["fields"])
        for name, field in wanted["fields"].items():
            check(value[name], field)
    elif kind == "list":
        assert len(value) == len(wanted["items"])
        for item, want in zip(value, wanted["items"], strict=True):
            check(item, want)
    elif kind == "float":
        assert value == float(wanted["value"]) or (np.isnan(value) and wanted["value"] == "nan")
    else:
        assert kind in ("int", "bool", "str") and value == wanted["value"]


def check_samples(samples: Any, wanted: list[dict[str, Any]]) -> None:
    for sample, want in zip(samples, wanted, strict=True):
        assert set(sample) == set(want["fields"])
        for name, field in want["fields"].items():
            check(sample[name], field)


@pytest.mark.parametrize("name", [*PARQUET, *ARROW])
def test_every_value(name: str) -> None:
    reader = loader.open_shard(DATA / name)
    assert isinstance(reader.format, Parquet if name in PARQUET else Arrow)
    check_samples(reader, expected(name))


@pytest.mark.parametrize(
    ("name", "workers"),
    [*((name, 0) for name in FULL), ("parquet/uneven_zstd.parquet", 2), ("arrow/stream_zstd.arrows", 2)],
)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_the_same_through_a_data_set(name: str, workers: int) -> None:
    ds = loader.ShardDataset(DATA / name, batch_size=1, shuffle=False)
    loaded = DataLoader(ds, batch_size=1, num_workers=workers, collate_fn=lambda samples: samples[0])
    check_samples(loaded, expected(name))


@pytest.mark.parametrize("name", FULL)
def test_whole_batches_hold_what_samples_do(name: str) -> None:
    ds = loader.ShardDataset(DATA / name, batch_size=3, drop_last=False)
    joined = [loader.collate([*batch]) for batch in batches_of(list(ds), 3)]
    again = loader.ShardDataset(DATA / name, batch_size=3, drop_last=False)
    for batch, want in zip(again.batched(), joined, strict=True):
        assert repr(batch) == repr(want)


def batches_of(samples: list[Any], size: int) -> list[list[Any]]:
    return [samples[at : at + size] for at in range(0, len(samples), size)]


@pytest.mark.parametrize("name", FULL)
def test_pyarrow_reads_the_same(name: str) -> None:
    if name in PARQUET:
        table = pq.read_table(DATA / name)
    else:
        opened = pa.ipc.open_stream if name.startswith("arrow/stream") else pa.ipc.open_file
        table = opened((DATA / name).read_bytes()).read_all()
    assert rows(loader.open_shard(DATA / name), table.schema) == table.to_pylist()


@pytest.mark.parametrize("name", FULL)
def test_columns_hold_what_rows_do(name: str) -> None:
    reader = loader.open_shard(DATA / name)
    shard, n = reader._shard, len(reader)
    for wanted in (
        np.arange(n),
        np.arange(n)[::-1].copy(),
        np.array([n - 1, 0, 0]),
        np.random.default_rng(1).permutation(n),
    ):
        columns = shard.format.columns(shard.source, shard.index, wanted, shard.url)
        for at, i in enumerate(wanted.tolist()):
            for field, value in reader[i].items():
                assert repr(columns[field][at]) == repr(value)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc/self/maps")
@pytest.mark.parametrize("name", ["file.arrow", "stream.arrows"])
def test_uncompressed_batches_are_the_file_s_own_bytes(name: str) -> None:
    path = DATA / "arrow" / name
    raw = path.read_bytes()
    found = 0
    for sample in loader.open_shard(path):
        for value in (sample["blob"], sample["big"], sample["li"]):
            if value is not None and len(value):
                file, offset = mapped_at(value)
                assert Path(file).samefile(path) and raw[offset : offset + value.nbytes] == value.tobytes()
                found += 1
    assert found > 30


@pytest.mark.parametrize("name", ["arrow/file.arrow", "arrow/file_lz4.arrow", "parquet/uneven_none.parquet"])
def test_writing_into_a_sample_is_seen_nowhere_else(name: str, tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes((DATA / name).read_bytes())
    reader, other = loader.open_shard(path), loader.open_shard(path)
    for i in range(len(reader)):
        sample = reader[i]
        for value in (sample["blob"], sample["big"], sample["li"], sample["st"] and sample["st"]["b"]["d"]):
            if isinstance(value, np.ndarray):
                value[...] = 77
        rest = range(i + 1, len(reader))
        for j in list(rest)[:2]:
            assert repr(dict(reader[j])) == repr(dict(other[j]))
    assert path.read_bytes() == (DATA / name).read_bytes()


class TestHuggingFace:
    FOLDER = DATA / "arrow" / "hf_saved"

    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.filterwarnings("ignore:This DataLoader will create")
    def test_a_saved_data_set(self, workers: int) -> None:
        ds = loader.ShardDataset(self.FOLDER, batch_size=1, shuffle=False)
        assert [Path(stat.url).name for stat in ds.manifest.shards] == [
            "data-00000-of-00002.arrow",
            "data-00001-of-00002.arrow",
        ]
        loaded = DataLoader(ds, batch_size=1, num_workers=workers, collate_fn=lambda samples: samples[0])
        check_samples(loaded, expected("arrow/hf_saved"))

    def test_the_order_is_that_of_its_state(self, tmp_path: Path) -> None:
        for file in self.FOLDER.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        state = json.loads((self.FOLDER / "state.json").read_text())
        state["_data_files"].reverse()
        (tmp_path / "state.json").write_text(json.dumps(state))
        ds = loader.ShardDataset(tmp_path, batch_size=1, shuffle=False)
        assert [Path(stat.url).name[:10] for stat in ds.manifest.shards] == ["data-00001", "data-00000"]

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("state.json", "{"),
            ("state.json", '{"_data_files": [{"filename": "gone.arrow"}]}'),
            ("state.json", '{"_data_files": [], "_indices_data_files": [{"filename": "indices.arrow"}]}'),
        ],
    )
    def test_a_damaged_state_is_an_error(self, tmp_path: Path, name: str, text: str) -> None:
        for file in self.FOLDER.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        (tmp_path / name).write_text(text)
        with pytest.raises(FormatError, match=name):
            len(loader.ShardDataset(tmp_path, batch_size=1))

    def test_splits_are_not_mixed(self, tmp_path: Path) -> None:
        (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
        for split in ("train", "test"):
            (tmp_path / split).mkdir()
            for file in self.FOLDER.iterdir():
                (tmp_path / split / file.name).write_bytes(file.read_bytes())
        with pytest.raises(ConfigError, match="train, test"):
            len(loader.ShardDataset(tmp_path, batch_size=1))
        assert len(list(loader.ShardDataset(tmp_path / "test", batch_size=1))) == 17

    @pytest.mark.parametrize("source", ["parquet/hf_image.parquet", "arrow/hf_saved"])
    def test_images_are_found(self, source: str) -> None:
        pytest.importorskip("PIL")
        stored = list(loader.ShardDataset(DATA / source, batch_size=1, shuffle=False))
        for decode in ("pil", "torch"):
            images = loader.ShardDataset(DATA / source, batch_size=1, shuffle=False, decode=decode)
            for sample, raw in zip(images, stored, strict=True):
                if raw["image"] is None:
                    assert sample["image"] is None
                elif decode == "torch":
                    assert sample["image"].dtype == torch.uint8 and sample["image"].shape[0] == 3
                else:
                    assert sample["image"].mode == "RGB"


def test_what_no_tensor_holds_stays_as_it_is(tmp_path: Path) -> None:
    table = pa.table({"at": pa.array([86400, None], pa.timestamp("s")), "text": ["a", None], "n": [1, None]})
    pq.write_table(table, tmp_path / "x.parquet")
    first, second = loader.ShardDataset(tmp_path / "x.parquet", batch_size=1, shuffle=False, decode="torch")
    assert first["at"] == np.datetime64("1970-01-02") and first["text"] == "a" and first["n"] == torch.tensor(1)
    assert list(second.values()) == [None, None, None]


def test_times_go_through_a_data_loader_of_whole_batches(tmp_path: Path) -> None:
    times = pa.array([1, 2, None, 4], pa.timestamp("us"))
    pq.write_table(pa.table({"when": times, "x": [1, 2, 3, 4]}), tmp_path / "t.parquet")
    ds = loader.ShardDataset(tmp_path / "t.parquet", batch_size=4, shuffle=False)
    for workers in (0, 1):
        ds.set_epoch(0)
        [batch] = DataLoader(ds.batched(), batch_size=None, num_workers=workers, collate_fn=loader.collate)
        assert list(batch["when"]) == [np.datetime64(i, "us") if i else None for i in (1, 2, 0, 4)]
        assert batch["x"].tolist() == [1, 2, 3, 4] and ds.state_after(batch)
