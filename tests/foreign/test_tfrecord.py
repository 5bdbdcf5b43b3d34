"""TFRecord files that TensorFlow's own writer (tensorboard's copy of it) made: every record, every feature."""

from __future__ import annotations

import hashlib
import json
import random
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loader
from loader.formats import TFRecord
from loader.formats.example import read_example
from loader.formats.varint import WireError
from loader.testing import mapped_at
from tests.foreign.tfrecord_writer import example

DATA = Path(__file__).parent / "data"
KINDS = ("bytes", "float", "int64")
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


def example_class(protobuf: Any) -> Any:
    """``tf.train.Example`` as TensorFlow's ``example.proto`` and ``feature.proto`` describe it."""
    descriptor_pb2, descriptor_pool, message_factory = protobuf
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")
    field = descriptor_pb2.FieldDescriptorProto

    def message(name: str, *fields: tuple[str, int, int, str]) -> Any:
        out = file.message_type.add(name=name)
        for title, number, kind, of in fields:
            label = field.LABEL_REPEATED if title in ("value*", "feature") else field.LABEL_OPTIONAL
            made = out.field.add(name=title.rstrip("*"), number=number, type=kind, label=label)
            if of:
                made.type_name = of
        return out

    message("BytesList", ("value*", 1, field.TYPE_BYTES, ""))
    message("FloatList", ("value*", 1, field.TYPE_FLOAT, ""))
    message("Int64List", ("value*", 1, field.TYPE_INT64, ""))
    lists = [(f"{kind}_list", n, field.TYPE_MESSAGE, f".t.{kind.capitalize()}List") for n, kind in enumerate(KINDS, 1)]
    feature = message("Feature", *lists)
    feature.oneof_decl.add(name="kind")
    for one in feature.field:
        one.oneof_index = 0
    features = message("Features", ("feature", 1, field.TYPE_MESSAGE, ".t.Features.FeatureEntry"))
    pair = features.nested_type.add(name="FeatureEntry")
    pair.options.map_entry = True
    pair.field.add(name="key", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    pair.field.add(name="value", number=2, type=field.TYPE_MESSAGE, label=field.LABEL_OPTIONAL, type_name=".t.Feature")
    message("Example", ("features", 1, field.TYPE_MESSAGE, ".t.Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))


def test_protobuf_agrees_on_random_and_damaged_messages() -> None:
    names = ("descriptor_pb2", "descriptor_pool", "message_factory", "message", "unknown_fields")
    *protobuf, errors, unknown = (pytest.importorskip(f"google.protobuf.{name}") for name in names)
    made = example_class(protobuf)
    rng = random.Random(11)
    outcomes = {"equal": 0, "both refuse": 0, "refused here only": 0}
    for _ in range(6000):
        payload = bytearray(
            example(
                {
                    rng.choice(["a", "é", "label"]): ("int64", [rng.getrandbits(63) - (1 << 62)] * rng.randrange(4)),
                    "f": ("float", [rng.random()] * rng.randrange(3)),
                    rng.choice(["a", "b"]): ("bytes", [rng.randbytes(3)] * rng.randrange(3)),
                },
                packed=rng.random() < 0.5,
            )
        )
        for _ in range(rng.randrange(4)):
            payload[rng.randrange(len(payload))] = rng.choice([rng.randrange(256), rng.randrange(40)])
        try:
            message = made.FromString(bytes(payload))
        except errors.DecodeError:
            message = None
        try:
            found = read_example(np.frombuffer(payload, np.uint8))
        except WireError:
            outcomes["both refuse" if message is None else "refused here only"] += 1
            continue
        assert message is not None, payload.hex()
        if any(f.field_number == 1 for f in unknown.UnknownFieldSet(message.features)):
            continue  # a map's entry with an unknown field in it: protobuf's C code, alone, takes all of it for unknown
        wanted = {}
        for name, feature in message.features.feature.items():
            if kind := feature.WhichOneof("kind"):
                wanted[name] = (kind, list(getattr(feature, kind).value))
        assert set(found) == set(wanted), payload.hex()
        for name, (kind, values) in wanted.items():
            value = found[name]
            if kind == "bytes_list":
                assert [v.tobytes() for v in value] == values
            else:
                dtype = np.float32 if kind == "float_list" else np.int64
                assert value.dtype == dtype and np.array_equal(value, np.array(values, dtype), equal_nan=True)
        outcomes["equal"] += 1
    assert min(outcomes["equal"], outcomes["both refuse"]) > 500
    assert outcomes["refused here only"] < 200  # groups, and what could be a SequenceExample
