"""TFRecord files that TensorFlow's own writer (tensorboard's copy of it) made: every record, every feature."""

from __future__ import annotations

import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loader
from loader.formats import TFRecord
from loader.testing import mapped_at

DATA = Path(__file__).parent / "data"
NAMES = ["raw.tfrecord", "examples.tfrecord", "examples.tfrecord.gz"]


def expected(name: str) -> list[dict[str, Any]]:
    samples: list[dict[str, Any]] = json.loads((DATA / "expect" / f"tfrecord__{name}.json").read_text())["samples"]
    return samples


def check_bytes(value: Any, wanted: dict[str, Any]) -> None:
    assert value.dtype == np.uint8 and value.ndim == 1
    assert (len(value), hashlib.sha256(value.tobytes()).hexdigest()) == (wanted["len"], wanted["sha256"])


def check_records(samples: Any, wanted: list[dict[str, Any]]) -> None:
    for sample, want in zip(samples, wanted, strict=True):
        assert set(sample) == {"record"}
        check_bytes(sample["record"], want["fields"]["record"])


def check_features(samples: Any, wanted: list[dict[str, Any]]) -> None:
    for sample, want in zip(samples, wanted, strict=True):
        features = want["fields"]["example"]["features"]
        assert set(sample) == set(features)
        for name, feature in features.items():
            value, values = sample[name], feature["values"]
            if feature["kind"] == "bytes_list":
                assert isinstance(value, list)
                for one, other in zip(value, values, strict=True):
                    check_bytes(one, other)
            else:
                dtype = {"float_list": np.float32, "int64_list": np.int64}[feature["kind"]]
                assert value.dtype == dtype and value.tolist() == np.array(values, dtype).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_every_record(name: str) -> None:
    reader = loader.open_shard(DATA / "tfrecord" / name)
    assert isinstance(reader.format, TFRecord)
    check_records(reader, expected(name))


@pytest.mark.parametrize("workers", [0, 2])
def test_every_record_through_a_data_set(workers: int) -> None:
    ds = loader.ShardDataset(DATA / "tfrecord" / "raw.tfrecord", batch_size=1, shuffle=False)
    check_records((s for [s] in loader_of(ds, workers)), expected("raw.tfrecord"))


@pytest.mark.parametrize("name", NAMES[1:])
def test_every_feature(name: str) -> None:
    path = DATA / "tfrecord" / name
    check_features(loader.open_shard(path, TFRecord(example=True)), expected(name))
    ds = loader.ShardDataset(path, format=TFRecord(example=True), batch_size=1, shuffle=False)
    check_features(ds, expected(name))


def loader_of(ds: loader.ShardDataset, workers: int) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(ds, batch_size=1, num_workers=workers, collate_fn=list)


def test_the_empty_file_has_no_record() -> None:
    assert expected("empty.tfrecord") == []
    assert len(loader.open_shard(DATA / "tfrecord" / "empty.tfrecord", "tfrecord")) == 0


def test_a_zlib_file_reads_the_same(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(zlib.compress((DATA / "tfrecord" / "raw.tfrecord").read_bytes()))
    check_records(loader.open_shard(path), expected("raw.tfrecord"))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc/self/maps")
def test_payloads_are_the_file_s_own_bytes() -> None:
    path = DATA / "tfrecord" / "raw.tfrecord"
    at = 12
    for sample in loader.open_shard(path):
        value = sample["record"]
        if len(value):
            file, offset = mapped_at(value)
            assert Path(file).samefile(path) and offset == at
        at += len(value) + 16


def test_tensorboard_s_reader_agrees() -> None:
    reader = pytest.importorskip("tensorboard.compat.tensorflow_stub.pywrap_tensorflow")
    path = DATA / "tfrecord" / "examples.tfrecord"
    found = [sample["record"].tobytes() for sample in loader.open_shard(path)]
    other = reader.PyRecordReader_New(str(path))
    for record in found:
        other.GetNext()
        assert other.record() == record
