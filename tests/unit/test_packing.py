"""Packed data sets: every token of every document once an epoch, in samples of one length, whoever reads them."""

from __future__ import annotations

import io
import itertools
import json
import pickle
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

import loader
from cachefs.errors import ConfigError, CountsUnknown, DataError, EmptyDataset, FormatError, MissingField, StateError
from loader import Loader, Packing, ShardDataset, collate, formats, pack_batch
from loader.formats.abc import Mapped, Opened
from loader.formats.packing import Packed
from loader.manifest import LEAST_SHARDS
from loader.testing import litdata_bytes, litdata_index, mds_bytes, tar_bytes
from tests.fault.damage_cases.llmc import llmc
from tests.fault.damage_cases.megatron import pair
from tests.fault.format_damage import mutations

LENGTH = 16
PAD = -7
Docs = list[list[int]]


def documents(shards: int = 3, seed: int = 1) -> list[Docs]:
    """Documents of a data set: no token is there twice. Some are empty, some as long as a sample, some longer."""
    rng = np.random.default_rng(seed)
    following, out = 1, []
    for _ in range(shards):
        sizes = [*rng.integers(1, 14, 12).tolist(), 0, LENGTH, 2 * LENGTH, 41, 17, *rng.integers(1, 40, 4).tolist()]
        docs = []
        for size in rng.permutation(sizes).tolist():
            docs.append(list(range(following, following + size)))
            following += size
        out.append(docs)
    return out


def flat(docs: Docs) -> np.ndarray[Any, Any]:
    return np.array([token for doc in docs for token in doc], np.int32)


def megatron(folder: Path, number: int, docs: Docs) -> None:
    names = pair([len(doc) for doc in docs], list(range(len(docs) + 1)), flat(docs), None)
    for name, data in names.items():
        (folder / f"{number}{Path(name).suffix}").write_bytes(data)


def megatron_documents(folder: Path, number: int, docs: Docs) -> None:
    """Each document as two sequences."""
    halves = [part for doc in docs for part in (len(doc) // 2, len(doc) - len(doc) // 2)]
    names = pair(halves, list(range(0, 2 * len(docs) + 1, 2)), flat(docs), None)
    for name, data in names.items():
        (folder / f"{number}{Path(name).suffix}").write_bytes(data)


def mds(folder: Path, number: int, docs: Docs) -> None:
    """An array behind another variable column; the shape's numbers are as wide as they have to be."""
    samples = [
        {"text": b"x" * (i % 3), "tokens": bytes([1 << 2, len(doc)]) + np.array(doc, "<i4").tobytes()}
        for i, doc in enumerate(docs)
    ]
    raw = mds_bytes({"text": "str", "tokens": "ndarray:int32"}, samples, [None, None])
    (folder / f"{number}.mds").write_bytes(raw)


def mds_any(folder: Path, number: int, docs: Docs) -> None:
    """Arrays that say their dtype themselves."""
    samples = [
        {"tokens": bytes([33, 1 << 2 | 1]) + len(doc).to_bytes(2, "little") + np.array(doc, "<i4").tobytes()}
        for doc in docs
    ]
    (folder / f"{number}.mds").write_bytes(mds_bytes({"tokens": "ndarray"}, samples, [None]))


def mds_bytes_column(folder: Path, number: int, docs: Docs) -> None:
    samples = [{"tokens": np.array(doc, "<i8").tobytes()} for doc in docs]
    (folder / f"{number}.mds").write_bytes(mds_bytes({"tokens": "bytes"}, samples, [None]))


def litdata(folder: Path, number: int, docs: Docs) -> None:
    """All chunks that were written so far, and their index."""
    name = f"chunk-0-{number}.bin"
    (folder / name).write_bytes(litdata_bytes([[np.array(doc, "<i8").tobytes()] for doc in docs]))
    chunks = {f"chunk-0-{k}.bin": (len(docs), len(flat(docs)) * 8) for k, docs in enumerate(documents()[: number + 1])}
    (folder / "index.json").write_bytes(litdata_index(chunks, {"tokens": "no_header_tensor:17"}))


def jsonl(folder: Path, number: int, docs: Docs) -> None:
    (folder / f"{number}.jsonl").write_text("".join(json.dumps({"tokens": doc, "n": 1}) + "\n" for doc in docs))


def parquet(folder: Path, number: int, docs: Docs) -> None:
    table = pa.table({"n": list(range(len(docs))), "tokens": pa.array(docs, pa.list_(pa.int32()))})
    pq.write_table(table, folder / f"{number}.parquet", row_group_size=9)


def arrow(folder: Path, number: int, docs: Docs) -> None:
    table = pa.table({"tokens": pa.array([doc or None for doc in docs], pa.large_list(pa.uint16()))})
    with pa.ipc.new_file(folder / f"{number}.arrow", table.schema) as out:
        out.write_table(table, max_chunksize=8)


def tar(folder: Path, number: int, docs: Docs) -> None:
    members = []
    for i, doc in enumerate(docs):
        members.append((f"{i:03d}.txt", b"text"))
        members.append((f"{i:03d}.tokens", np.array(doc, "<u4").tobytes()))
    (folder / f"{number}.tar").write_bytes(tar_bytes(members))


def tar_of_arrays(folder: Path, number: int, docs: Docs) -> None:
    members = []
    for i, doc in enumerate(docs):
        out = io.BytesIO()
        np.save(out, np.array(doc, "<i8"))
        members.append((f"{i:03d}.npy", out.getvalue()))
    (folder / f"{number}.tar").write_bytes(tar_bytes(members))


Case = tuple[Callable[[Path, int, Docs], None], str, Any, dict[str, Any]]
CASES: dict[str, Case] = {
    "megatron": (megatron, "*.bin", None, {}),
    "megatron documents": (megatron_documents, "*.bin", formats.Megatron(sample="document"), {}),
    "mds": (mds, "*.mds", None, {}),
    "mds, any dtype": (mds_any, "*.mds", None, {}),
    "mds of bytes": (mds_bytes_column, "*.mds", None, {"dtype": "int64"}),
    "litdata": (litdata, "", None, {}),
    "jsonl": (jsonl, "*.jsonl", None, {}),
    "parquet": (parquet, "*.parquet", None, {}),
    "arrow": (arrow, "*.arrow", None, {}),
    "tar of bytes": (tar, "*.tar", None, {"dtype": "uint32"}),
    "tar of arrays": (tar_of_arrays, "*.tar", None, {"field": "npy"}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = {}
    for name, (write, *_) in CASES.items():
        out[name] = tmp_path_factory.mktemp("packing")
        for number, docs in enumerate(documents()):
            write(out[name], number, docs)
    return out


@pytest.fixture(scope="module")
def folder(folders: dict[str, Path]) -> Path:
    return folders["megatron"]


def packing(**options: Any) -> Packing:
    return Packing(LENGTH, **{"pad_id": PAD, "document_ids": True, **options})


def dataset(folder: Path, pattern: str = "*.bin", **options: Any) -> ShardDataset:
    given = {"batch_size": 5, "drop_last": False, "packing": packing(), "seed": 4, **options}
    return ShardDataset(folder / pattern, **given)


def check(samples: Iterable[Any], shards: Sequence[Docs], field: str = "tokens") -> None:
    """That these are all the documents' tokens, with everything that is said of them."""
    docs = [doc for shard in shards for doc in shard]
    next_of = {a: b for doc in docs for a, b in itertools.pairwise(doc)}
    seen: list[int] = []
    for sample in samples:
        bounds = sample["cu_seqlens"].tolist()
        tokens, labels, numbers = (sample[name].tolist() for name in (field, "labels", "document_ids"))
        assert len(tokens) == LENGTH
        assert (bounds[0], bounds[-1]) == (0, LENGTH)
        assert sample["position_ids"].tolist() == [i for a, b in itertools.pairwise(bounds) for i in range(b - a)]
        for number, (a, b) in enumerate(itertools.pairwise(bounds)):
            assert a < b
            if tokens[a] == PAD:
                assert b == LENGTH
                assert number > 0
                assert set(tokens[a:]) == {PAD}
                assert set(labels[a:]) == {-100}
                assert set(numbers[a:]) == {-1}
                continue
            assert tokens[a:b] == list(range(tokens[a], tokens[a] + b - a))
            assert all(next_of[token] == token + 1 for token in tokens[a : b - 1])
            assert labels[a:b] == [next_of.get(token, -100) for token in tokens[a:b]]
            assert set(numbers[a:b]) == {number}
            seen += tokens[a:b]
    assert sorted(seen) == [token for doc in docs for token in doc]


@pytest.mark.parametrize("method", ["best_fit", "sequential"])
@pytest.mark.parametrize("name", CASES)
def test_every_token_comes_once_an_epoch(folders: dict[str, Path], name: str, method: Any) -> None:
    _, pattern, kind, options = CASES[name]
    ds = dataset(folders[name], pattern, format=kind, packing=packing(method=method, **options))
    field = options.get("field", "tokens")
    single, batches = list(ds), list(ds.batched())
    check(single, documents(), field)
    rows = [{key: batch[key][i] for key in batch} for batch in batches for i in range(len(batch["labels"]))]
    check(rows, documents(), field)
    assert len(ds) == len(single) == len(rows)


@pytest.mark.parametrize("fields", [None, ["tokens"], ["labels", "cu_seqlens"], ["document_ids", "position_ids"]])
@pytest.mark.parametrize("way", ["samples", "batched", "loader", "transform", "skip"])
def test_all_ways_of_reading_give_the_same(folder: Path, way: str, fields: list[str] | None) -> None:
    ds = dataset(folder, fields=fields, ids=True)
    expected = [collate(part) for part in DataLoader(ds, batch_size=5, collate_fn=list)]
    if way in ("transform", "skip"):
        options = {"transform": lambda sample, rng: sample} if way == "transform" else {"on_error": "skip"}
        ds = dataset(folder, fields=fields, ids=True, **options)
    ds.set_epoch(0)
    given = {"loader": Loader(ds, threads=2), "samples": map(collate, DataLoader(ds, batch_size=5, collate_fn=list))}
    found = list(given.get(way, ds.batched()))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys() == {*(fields or other), "__id__"}
        for name in one:
            assert [np.asarray(x).tolist() for x in one[name]] == [np.asarray(x).tolist() for x in other[name]]


def test_values_have_the_types_that_are_promised(folder: Path) -> None:
    sample = next(iter(dataset(folder, packing=packing(out="int32"))))
    kinds = {name: value.dtype.name for name, value in sample.items()}
    wanted = {"tokens": "int32", "labels": "int64", "position_ids": "int32"}
    assert kinds == {**wanted, "document_ids": "int32", "cu_seqlens": "int32"}
    assert set(next(iter(dataset(folder, packing=Packing(LENGTH))))) == {
        "tokens",
        "labels",
        "position_ids",
        "cu_seqlens",
    }
    assert set(next(iter(dataset(folder, packing=Packing(LENGTH, labels=False, position_ids=False))))) == {
        "tokens",
        "cu_seqlens",
    }
    assert isinstance(next(iter(dataset(folder, decode="torch")))["labels"], torch.Tensor)


def test_labels_for_models_that_move_them(folder: Path) -> None:
    for sample in dataset(folder, packing=packing(labels="same")):
        expected = sample["tokens"].copy()
        expected[sample["cu_seqlens"][:-1]] = -100
        expected[sample["document_ids"] < 0] = -100
        assert sample["labels"].tolist() == expected.tolist()


@pytest.mark.parametrize("labels", [True, "same"])
@pytest.mark.parametrize("name", ["jsonl", "parquet", "npz"])
def test_labels_of_what_is_to_be_learned_alone(tmp_path: Path, labels: Any, name: str) -> None:
    """A mask says which tokens those are: here the odd ones."""
    docs = documents(1)[0] if name != "npz" else [list(range(20 * i + 1, 20 * i + 20)) for i in range(5)]
    masks = [[token % 2 == 1 for token in doc] for doc in docs]
    if name == "jsonl":
        rows = [json.dumps({"tokens": doc, "loss": mask}) for doc, mask in zip(docs, masks, strict=True)]
        (tmp_path / "0.jsonl").write_text("\n".join(rows))
    elif name == "parquet":
        pq.write_table(
            pa.table({"tokens": docs, "loss": [[int(x) for x in mask] for mask in masks]}), tmp_path / "0.parquet"
        )
    else:
        np.savez(tmp_path / "0.npz", tokens=np.array(docs), loss=np.array(masks))
    plain, masked = (
        list(dataset(tmp_path, "*", packing=packing(labels=labels, mask=mask), shuffle=False))
        for mask in (None, "loss")
    )
    learned = 0
    for one, other in zip(plain, masked, strict=True):
        assert one["tokens"].tolist() == other["tokens"].tolist()
        assert [x if x % 2 == 1 else -100 for x in one["labels"].tolist()] == other["labels"].tolist()
        learned += int((other["labels"] >= 0).sum())
    assert learned


def test_a_mask_of_another_length_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "0.jsonl").write_text('{"tokens": [1, 2, 3], "loss": [1]}\n')
    with pytest.raises(FormatError, match="'loss' of sample 0 has 1 values for 3 tokens"):
        list(dataset(tmp_path, "*.jsonl", packing=packing(mask="loss")))


def test_masks_of_mds_are_checked_too(tmp_path: Path) -> None:
    for size, raises in ((3, False), (2, True)):
        sample = {
            "tokens": bytes([1 << 2, 3]) + np.array([1, 2, 3], "<i4").tobytes(),
            "loss": bytes([1 << 2, size]) + bytes(size),
        }
        columns = {"tokens": "ndarray:int32", "loss": "ndarray:uint8"}
        (tmp_path / "0.mds").write_bytes(mds_bytes(columns, [sample], [None, None]))
        ds = dataset(tmp_path, "*.mds", packing=packing(mask="loss"))
        if raises:
            with pytest.raises(FormatError, match="'loss' of sample 0 has 2 values for 3 tokens"):
                list(ds)
        else:
            assert [sample["labels"].tolist() for sample in ds] == [[-100] * LENGTH]


@pytest.mark.parametrize("write", [mds, mds_any, mds_bytes_column])
def test_arrays_of_damaged_mds_lie_where_they_are_read(tmp_path: Path, write: Any) -> None:
    """What is found of all samples at once is what each is read as, and nothing where it cannot be read."""
    write(tmp_path, 0, documents(1)[0])
    raw = (tmp_path / "0.mds").read_bytes()
    kind, seen = formats.Mds(), 0
    for _, damaged in mutations(random.Random(1), raw, 400):
        data = np.frombuffer(bytearray(damaged), np.uint8)
        try:
            index = kind.index(data, "x")
            columns = index.columns
        except FormatError:
            continue
        joined = kind.joined(data, index, "tokens", "x") if "tokens" in columns else None
        if joined is None:
            continue
        seen += 1
        for i, (start, length) in enumerate(zip(joined.starts.tolist(), joined.lengths.tolist(), strict=True)):
            try:
                value = kind.read(data, index, i, "x", frozenset({"tokens"}))["tokens"]
            except FormatError:
                assert length == -1
                continue
            assert joined.dtype == value.dtype
            assert length == len(value)
            assert data[start : start + value.nbytes].tobytes() == value.tobytes()
    assert seen > 100


def together(ds: ShardDataset) -> list[tuple[int, ...]]:
    """Which documents share a sample, by their first tokens."""
    return [tuple(sample["tokens"][sample["cu_seqlens"][:-1]].tolist()) for sample in ds]


@pytest.mark.parametrize("method", ["best_fit", "sequential"])
def test_each_shuffled_epoch_packs_anew(folder: Path, method: Any) -> None:
    ds = dataset(folder, packing=packing(method=method))
    first, second = together(ds), together(ds)
    assert len(first) == len(second) == len(ds)
    assert set(first) != set(second)
    ds.set_epoch(0)
    assert together(ds) == first
    assert sorted(together(dataset(folder, packing=packing(method=method), seed=5))) != sorted(first)
    still = dataset(folder, packing=packing(method=method), shuffle=False)
    assert together(still) == together(still)


def test_without_shuffling_documents_lie_in_their_order(folder: Path) -> None:
    ds = dataset(folder, packing=packing(method="sequential"), shuffle=False)
    tokens = [token for sample in ds for token in sample["tokens"].tolist() if token != PAD]
    assert tokens == [token for shard in documents() for doc in shard for token in doc]


@pytest.mark.parametrize("method", ["best_fit", "sequential"])
@pytest.mark.parametrize("seed", range(3))
def test_any_ranks_from_any_position(folder: Path, method: Any, seed: int) -> None:
    """The run is stopped somewhere, and goes on with another number of ranks."""
    rng = np.random.default_rng(seed)
    options = {"batch_size": None, "global_batch_size": 12, "drop_last": True, "packing": packing(method=method)}
    whole = [batch["tokens"].tolist() for batch in dataset(folder, **options).batched()]
    stopped = int(rng.integers(1, len(whole)))
    before, after = (int(rng.choice([1, 2, 3, 4])) for _ in range(2))
    parts = [iter(dataset(folder, rank=r, world_size=before, **options).batched()) for r in range(before)]
    for step in range(stopped):
        batches = [next(part) for part in parts]
        assert [row for batch in batches for row in batch["tokens"].tolist()] == whole[step]
    state = dataset(folder, **options).state_after(batches[0])
    goes_on = [dataset(folder, rank=r, world_size=after, **options) for r in range(after)]
    for ds in goes_on:
        ds.load_state_dict(pickle.loads(pickle.dumps(state)))
    rest = zip(*(ds.batched() for ds in goes_on), strict=True)
    assert [[row for batch in step for row in batch["tokens"].tolist()] for step in rest] == whole[stopped:]


def test_workers_read_the_same(folder: Path) -> None:
    ds = dataset(folder, drop_last=True)
    ours = [pack_batch(batch) for batch in ds.batched()]
    ds.set_epoch(0)
    theirs = list(DataLoader(ds.batched(), batch_size=None, num_workers=2, collate_fn=collate))
    for one, other in zip(ours, map(pack_batch, theirs), strict=True):
        assert one.keys() == other.keys()
        for name in ("tokens", "labels", "cu_seqlens"):
            assert one[name].tolist() == other[name].tolist()


def test_a_batch_becomes_one_run_of_tokens(folder: Path) -> None:
    ds = dataset(folder)
    for batch in ds.batched():
        run = pack_batch(batch)
        rows = len(batch["tokens"])
        assert run["tokens"].shape == run["labels"].shape == (rows * LENGTH,)
        assert run["tokens"].data_ptr() == batch["tokens"].data_ptr()
        bounds = run["cu_seqlens"]
        assert bounds.dtype == torch.int32
        expected = [i * LENGTH + at for i, row in enumerate(batch["cu_seqlens"]) for at in row.tolist()[:-1]]
        assert bounds.tolist() == [*expected, rows * LENGTH]
        assert run["max_seqlen"] == int(bounds.diff().max())
        assert isinstance(run["max_seqlen"], int)
        assert run.stamp == batch.stamp
        assert run["tokens"][bounds[:-1].long()].tolist() == [
            int(row[at]) for row, cuts in zip(batch["tokens"], batch["cu_seqlens"], strict=True) for at in cuts[:-1]
        ]
    with pytest.raises(DataError, match="cu_seqlens"):
        pack_batch({"tokens": torch.zeros(2, 2)})
    with pytest.raises(DataError, match="too many"):
        pack_batch({"cu_seqlens": [np.array([0, 1 << 30])] * 2})


class TestDocumentsOfAFile:
    """Files that are one run of tokens, in which a token ends documents."""

    EOS = 0

    def write(self, folder: Path, docs: Docs, tail: list[int]) -> None:
        tokens = [token for doc in docs for token in [*doc, self.EOS]] + tail
        np.array(tokens, "<u2").tofile(folder / "t.bin")

    @pytest.mark.parametrize("tail", [[], [500, 501]])
    @pytest.mark.parametrize("method", ["best_fit", "sequential"])
    def test_documents_end_with_their_token(self, tmp_path: Path, method: Any, tail: list[int]) -> None:
        docs = [[1, 2, 3], [], [4], list(range(5, 30)), list(range(30, 45))]
        self.write(tmp_path, docs, tail)
        made = packing(method=method, eos_id=self.EOS)
        ds = ShardDataset(
            tmp_path / "t.bin", batch_size=1, format=formats.TokenFile("uint16"), packing=made, shuffle=False
        )
        found = []
        for sample in ds:
            for number in range(int(sample["document_ids"].max()) + 1):
                found.append(sample["tokens"][sample["document_ids"] == number].tolist())
        pieces = [[*doc, self.EOS] for doc in docs] + ([tail] if tail else [])
        assert sorted(t for piece in found for t in piece) == sorted(t for piece in pieces for t in piece)
        if method == "best_fit":
            cut = [piece[at : at + LENGTH] for piece in pieces for at in range(0, len(piece), LENGTH)]
            assert sorted(found) == sorted(cut)

    def test_files_with_a_header(self, tmp_path: Path) -> None:
        (tmp_path / "t.bin").write_bytes(llmc(20240520, 1, np.array([0, 5, 6, 0, 7], np.uint16)))
        ds = ShardDataset(tmp_path / "t.bin", batch_size=1, packing=packing(eos_id=0), shuffle=False)
        [sample] = ds
        assert sample["tokens"][: sample["cu_seqlens"][-2]].tolist() == [5, 6, 0, 0, 7]
        assert sample["cu_seqlens"].tolist() == [0, 3, 4, 5, LENGTH]

    def test_without_the_token_a_file_is_one_document(self, tmp_path: Path) -> None:
        self.write(tmp_path, [], list(range(1, 40)))
        ds = ShardDataset(tmp_path / "t.bin", batch_size=1, format=formats.TokenFile("uint16"), packing=packing())
        check(ds, [[list(range(1, 40))]])


@pytest.mark.filterwarnings("ignore::loader.DataWarning")
class TestDamage:
    def write(self, folder: Path) -> list[Docs]:
        shards = documents(2)
        for number, docs in enumerate(shards):
            jsonl(folder, number, docs)
        lines = (folder / "0.jsonl").read_text().splitlines(keepends=True)
        lines[3] = '{"tokens": [1, 2\n'
        lines[5] = '{"other": 1}\n'
        lines[7] = '{"tokens": ["a"]}\n'
        lines[8] = '{"tokens": null}\n'
        (folder / "0.jsonl").write_text("".join(lines))
        shards[0] = [doc for i, doc in enumerate(shards[0]) if i not in (3, 5, 7, 8)]
        return shards

    def test_a_damaged_document_is_a_sample_of_its_own(self, tmp_path: Path) -> None:
        shards = self.write(tmp_path)
        ds = dataset(tmp_path, "*.jsonl", on_error="skip", batch_size=4, ids=True)
        samples = {sample["__id__"]: sample for sample in ds}
        assert ds.skipped == 3
        bad = 3
        assert len(samples) == len(ds) - bad  # other samples stand in for these, with ids of their own
        good = dataset(tmp_path, "*.jsonl", batch_size=1, shuffle=False, ids=True)
        count = int(good.manifest.counts[0])
        unreadable = range(count - bad, count)
        tokens = [
            token
            for number, sample in samples.items()
            if number not in unreadable
            for token in sample["tokens"].tolist()
            if token != PAD
        ]
        assert sorted(tokens) == [token for docs in shards for doc in docs for token in doc]

    def test_it_raises_what_is_wrong_with_it(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        with loader.open_shard(tmp_path / "0.jsonl", packing().over(formats.Jsonl())) as shard:
            for number, (kind, text) in enumerate(
                [(FormatError, "line 4"), (MissingField, "no field 'tokens'"), (FormatError, "sample 7")]
            ):
                with pytest.raises(kind, match=text):
                    shard[len(shard) - 3 + number]
        with pytest.raises(DataError):
            list(dataset(tmp_path, "*.jsonl"))

    def test_a_shard_without_any_document_that_can_be_read(self, tmp_path: Path) -> None:
        jsonl(tmp_path, 0, [[1, 2]])
        (tmp_path / "1.jsonl").write_text('{"tokens": "text"}\n')
        with pytest.raises(FormatError, match=r"1.jsonl.*'tokens' of sample 0 is no row of integers but str"):
            len(dataset(tmp_path, "*.jsonl"))
        assert len(list(dataset(tmp_path, "*.jsonl", on_error="skip"))) == 1

    def test_a_field_that_is_nowhere_is_an_error_at_once(self, folder: Path) -> None:
        with pytest.raises(MissingField, match=r"'input_ids'.*fields present: tokens"):
            len(dataset(folder, packing=packing(field="input_ids")))

    def test_values_that_are_no_tokens(self, tmp_path: Path) -> None:
        tar(tmp_path, 0, [[1, 2]])
        with pytest.raises(FormatError, match="holds 'txt' data"):
            list(dataset(tmp_path, "*.tar", packing=packing(field="txt", dtype=None)))
        with pytest.raises(FormatError, match="12 bytes, no whole number of int64 tokens"):
            tar(tmp_path, 0, [[1, 2, 3]])
            list(dataset(tmp_path, "*.tar", packing=packing(dtype="int64")))
        mds_bytes_column(tmp_path, 0, [[1, 2]])
        with pytest.raises(FormatError, match="holds bytes: Packing"):
            len(dataset(tmp_path, "*.mds"))
        (tmp_path / "0.jsonl").write_text('{"tokens": [[1], [2]]}\n{"tokens": [0.5]}\n{"tokens": 3}\n')
        with pytest.raises(FormatError, match="is no row of integers"):
            list(dataset(tmp_path, "*.jsonl"))

    def test_tokens_that_do_not_fit(self, folder: Path) -> None:
        with pytest.raises(FormatError, match=r"int32.*out='uint16'"):
            list(dataset(folder, packing=Packing(LENGTH, out="uint16")))


@pytest.mark.parametrize("name", ["parquet", "jsonl", "mds", "megatron"])
@pytest.mark.parametrize("method", ["best_fit", "sequential"])
def test_what_a_filter_keeps_is_packed(folders: dict[str, Path], name: str, method: Any) -> None:
    kept = [[doc for doc in docs if len(doc) % 2] for docs in documents()]
    where = loader.Where(_is_odd, fields=["tokens"])
    ds = dataset(folders[name], CASES[name][1], where=where, packing=packing(method=method))
    check(ds, kept)
    check([{k: v[i] for k, v in batch.items()} for batch in ds.batched() for i in range(len(batch["labels"]))], kept)
    with pytest.raises(StateError):
        dataset(folders[name], CASES[name][1], packing=packing(method=method)).load_state_dict(ds.state_dict())


def _is_odd(sample: Any) -> bool:
    return len(sample["tokens"]) % 2 == 1


def test_shards_without_tokens(tmp_path: Path) -> None:
    shards: list[Docs] = [[[], []], [[1, 2], [3]], []]
    for number, docs in enumerate(shards):
        megatron(tmp_path, number, docs)
    ds = dataset(tmp_path)
    assert ds.manifest.counts.tolist() == [0, 1, 0]
    check(ds, shards)
    (tmp_path / "1.bin").unlink()
    (tmp_path / "1.idx").unlink()
    with pytest.raises(EmptyDataset):
        len(dataset(tmp_path))


def test_a_large_data_set_is_counted_while_it_is_read(tmp_path: Path) -> None:
    shards = documents(LEAST_SHARDS + 2)
    for number, docs in enumerate(shards):
        jsonl(tmp_path, number, docs[:4])
    shards = [docs[:4] for docs in shards]
    ds = dataset(tmp_path, "*.jsonl")
    assert ds.manifest.progressive
    with pytest.raises(CountsUnknown):
        len(ds)
    first = list(ds)
    check(first, shards)
    assert len(ds) == len(first)
    ds.set_epoch(0)
    assert [sample["tokens"].tolist() for sample in ds] == [sample["tokens"].tolist() for sample in first]
    stopped = dataset(tmp_path, "*.jsonl")
    iterator = iter(stopped.batched())
    state = stopped.state_after([next(iterator) for _ in range(3)][-1])
    again = dataset(tmp_path, "*.jsonl")
    again.load_state_dict(state)
    assert [sample["tokens"].tolist() for sample in again] == [sample["tokens"].tolist() for sample in first[15:]]


class TestIdentity:
    def test_states_are_of_one_packing(self, folder: Path) -> None:
        state = dataset(folder).state_dict()
        same = dataset(folder, packing=packing(pad_id=3, labels=False, out="int32"))
        same.load_state_dict(state)
        for other in (packing(method="sequential"), Packing(LENGTH + 1), packing(dtype="int32")):
            with pytest.raises(StateError):
                dataset(folder, packing=other).load_state_dict(state)

    def test_a_saved_manifest_knows_of_it(self, folder: Path, tmp_path: Path) -> None:
        ds = dataset(folder)
        ds.save_manifest(tmp_path / "x.manifest")
        again = ShardDataset(tmp_path / "x.manifest", batch_size=5, drop_last=False, packing=packing(), seed=4)
        assert together(again) == together(dataset(folder))
        with pytest.raises(ConfigError, match="packed"):
            len(ShardDataset(tmp_path / "x.manifest", batch_size=5))


class _Objects:
    """One object in memory, and what is kept beside it."""

    def __init__(self, data: bytes) -> None:
        self._data = np.frombuffer(bytearray(data), np.uint8)
        self.attached: dict[str, bytes] = {}

    def map(self, url: str, stat: Any = None) -> Mapped:
        return Mapped(self._data)

    def kept(self, url: str, name: str) -> bytes | None:
        return self.attached.get(name)

    def keep(self, url: str, name: str, make: Callable[[], bytes]) -> None:
        self.attached.setdefault(name, make())

    def recalled(self, url: str, name: str, make: Callable[[], Any]) -> Any:
        return make()


@pytest.mark.parametrize("eos", [None, 0])
def test_lengths_are_kept_beside_the_shard(eos: int | None, tmp_path: Path) -> None:
    docs = [[1, 2, 0, 3], [], [4] * 40]
    jsonl(tmp_path, 0, docs)
    objects: Any = _Objects((tmp_path / "0.jsonl").read_bytes())
    kind = packing(eos_id=eos).over(formats.Jsonl())

    def tokens(opened: Opened, of: Packed = kind) -> list[list[int]]:
        return [of.read(opened.source, opened.index, i, "x")["tokens"].tolist() for i in range(len(opened.index))]

    first = kind.open(objects, "x")
    [name] = [name for name in objects.attached if name.startswith("view-")]
    kept = objects.attached[name]
    again = kind.recall(kept, first.index.inner)
    assert again.bins.lengths.tolist() == first.index.bins.lengths.tolist()
    assert again.nbytes == first.index.nbytes
    copy = pickle.loads(pickle.dumps(first.index))
    assert tokens(kind.open(objects, "x", index=copy)) == tokens(first)
    assert tokens(kind.open(objects, "x")) == tokens(first)
    for at in range(0, len(kept), 3):
        damaged = bytearray(kept)
        damaged[at] ^= 4
        with pytest.raises(ValueError, match="kept lengths"):
            kind.recall(bytes(damaged), first.index.inner)
    with pytest.raises(ValueError, match="another shard"):
        kind.recall(kept, range(4))
    objects.attached[name] = kept[:-1]
    assert tokens(kind.open(objects, "x")) == tokens(first)  # found anew


def test_lengths_of_all_parts_are_kept_together(tmp_path: Path) -> None:
    parquet(tmp_path, 0, [[1, 2, 3]] * 30)
    objects = _as_objects(tmp_path / "0.parquet")
    kind = packing().over(formats.Parquet())
    counts = kind.parts(objects, "x")
    [(name, kept)] = objects.attached.items()
    assert counts == [len(kind.open(objects, "x", part=part).index) for part in range(4)] == [2, 2, 2, 1]
    other = kind.derive(formats.Parquet().open(objects, "x", part=3), "x")
    objects.attached[name] = msgspec.msgpack.encode([b"", other.to_bytes()])
    assert len(kind.open(objects, "x", part=0).index) == 2  # not there
    assert len(kind.open(objects, "x", part=1).index) == 2  # of another part, which has fewer documents
    objects.attached[name] = kept[:-1]
    assert kind.parts(objects, "x") == counts
    same = kind.recall(other.to_bytes(), range(3))
    longer = replace(same, bins=replace(same.bins, lengths=np.array([16, 16, 16], np.int32)))
    objects.attached[name] = msgspec.msgpack.encode([b"", b"", b"", longer.to_bytes()])
    assert len(kind.open(objects, "x", part=3).index) == 3  # it is what is kept that is taken


def test_a_shard_that_changed_since_it_was_indexed_is_an_error(tmp_path: Path) -> None:
    jsonl(tmp_path, 0, [[1, 2, 3], [4, 5]])
    kind = packing().over(formats.Jsonl())
    before = kind.open(_as_objects(tmp_path / "0.jsonl"), "x")
    jsonl(tmp_path, 0, [[1234, 3], [4, 5]])  # as many bytes
    after = kind.open(_as_objects(tmp_path / "0.jsonl"), "x", index=before.index)
    with pytest.raises(FormatError, match="has 2 tokens, it had 3"):
        kind.read(after.source, after.index, 0, "x")


def _as_objects(path: Path) -> Any:
    return _Objects(path.read_bytes())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"length": 0}, "length=0"),
        ({"length": True}, "length=True"),
        ({"length": 1 << 25}, "from 1 to 16777216"),
        ({"method": "worst_fit"}, "neither 'best_fit' nor"),
        ({"labels": "shifted"}, "labels='shifted'"),
        ({"out": "float32"}, "no integer dtype"),
        ({"dtype": "nothing"}, "no integer dtype"),
        ({"field": "labels"}, "field='labels'"),
        ({"pad_id": -1, "out": "uint16"}, "pad_id=-1"),
        ({"eos_id": "</s>"}, "eos_id='</s>'"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Packing(**{"length": 8, **options})


def test_the_share_of_padding_is_told_before_anything_is_read() -> None:
    lengths = [5, 5, 4, 3]
    assert Packing(8).padding(lengths) == pytest.approx(1 - 17 / 24)
    assert Packing(8, method="sequential").padding(lengths) == pytest.approx(1 - 17 / 24)
    assert Packing(8).padding([8, 4, 4]) == Packing(8).padding([]) == 0


@pytest.mark.parametrize("name", ["mds", "parquet"])
def test_the_share_of_padding_in_a_shard(folders: dict[str, Path], name: str) -> None:
    [path, *_] = sorted(folders[name].glob("0.*"))
    ds = dataset(folders[name], path.name, batch_size=1)
    padding = sum(int((sample["document_ids"] < 0).sum()) for sample in ds)
    assert packing().padding_in(str(path)) == pytest.approx(padding / (len(ds) * LENGTH))


def test_a_function_may_decode_a_field(folder: Path) -> None:
    ds = dataset(folder, decode={"tokens": lambda row: int((row != PAD).sum())})
    assert sum(int(batch["tokens"].sum()) for batch in ds.batched()) == sum(map(len, map(flat, documents())))
    as_tensors = next(iter(dataset(folder, decode="torch").batched()))
    assert as_tensors["labels"].shape == (5, LENGTH)
