"""What packing does with documents that are long, damaged, masked, ended by a token, or of tokens that do not fit."""

from __future__ import annotations

import json
import re
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import loader
from cachefs.errors import ConfigError, DataError, FormatError, MissingField
from loader import Packing, ShardDataset, formats
from loader.formats.abc import Format, Mapped
from loader.formats.bins import Bins
from loader.formats.documentfield import Found
from loader.formats.documents import KEPT, Places
from tests.fault.damage_cases.megatron import pair

pytestmark = pytest.mark.filterwarnings("ignore::loader.DataWarning")

LENGTH = 8


def jsonl(folder: Path, rows: list[dict[str, Any]], name: str = "d.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows(path: Any, packing: Packing, **options: Any) -> list[Any]:
    return list(ShardDataset(path, **{"batch_size": 1, "shuffle": False, "packing": packing, **options}))


def tokens_of(samples: list[Any], field: str = "tokens") -> list[int]:
    """All that is there; a sample may come twice, in place of one that was skipped."""
    return sorted({t for row in samples for t in row[field].tolist() if t})


class Objects:
    """Objects in memory, and what is kept beside them; ``asked``: the names that were asked for."""

    def __init__(self, data: bytes) -> None:
        self._data = np.frombuffer(bytearray(data), np.uint8)
        self._recalled: dict[tuple[str, str], Any] = {}
        self.attached: dict[str, bytes] = {}
        self.asked: list[str] = []

    def forget(self) -> None:
        """As in another process: only what is kept beside the objects is known."""
        self._recalled.clear()
        self.asked.clear()

    def map(self, url: str, stat: Any = None) -> Mapped:
        return Mapped(self._data)

    def kept(self, url: str, name: str) -> bytes | None:
        self.asked.append(name)
        return self.attached.get(name)

    def keep(self, url: str, name: str, make: Callable[[], bytes]) -> None:
        self.attached.setdefault(name, make())

    def recalled(self, url: str, name: str, make: Callable[[], Any]) -> Any:
        if (url, name) not in self._recalled:
            self._recalled[url, name] = make()
        return self._recalled[url, name]


class TestLongDocuments:
    def counted(self, opened: Any, kind: Any, format: type[Format], patched: pytest.MonkeyPatch) -> list[int]:
        """The samples that reading all bins, one by one, reads of the shard."""
        seen: list[int] = []
        read = format.read

        def reads(self: Any, source: Any, index: Any, i: int, url: str, fields: Any = None) -> Any:
            seen.append(i)
            return read(self, source, index, i, url, fields)

        patched.setattr(format, "read", reads)
        for i in range(len(opened.index)):
            kind.columns(opened.source, opened.index, np.array([i]), "x")
        return seen

    @pytest.mark.parametrize("name", ["jsonl", "parquet"])
    def test_a_document_of_many_rows_is_read_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        docs = [list(range(1, 400)), [1, 2], list(range(1, 300))]
        if name == "jsonl":
            path, inner = jsonl(tmp_path, [{"tokens": doc} for doc in docs]), formats.Jsonl()
        else:
            path, inner = tmp_path / "d.parquet", formats.Parquet()  # type: ignore[assignment]
            pq.write_table(pa.table({"tokens": docs}), path)
        kind = Packing(LENGTH).over(inner)
        objects: Any = Objects(path.read_bytes())
        opened = kind.open(objects, "x", part=0 if name == "parquet" else None)
        assert len(opened.index) > 80
        seen = self.counted(opened, kind, type(inner), monkeypatch)
        assert sorted(seen) in ([0, 1, 2], [0, 1, 1, 2])  # the short one is read whole each time

    def test_what_is_kept_of_them_is_bounded(self) -> None:
        from loader.formats.documents import _Kept

        kept = _Kept()
        for i in range(6):
            kept.keep(i, np.zeros(KEPT // 32, np.int64))
        assert [kept.get(i) is not None for i in range(6)] == [False, False, True, True, True, True]
        kept.keep(9, np.zeros(KEPT, np.int64))
        assert kept.get(9) is not None  # the last one, however large
        assert kept.get(5) is None
        kept.keep(10, np.zeros(2 * KEPT, np.uint8)[1:])
        assert kept.get(10) is None  # a view is made again
        whole = np.zeros(100, np.int64)
        kept.keep(11, whole[:10])
        found = kept.get(11)
        assert found is not None
        assert found.base is None


class TestTheTokenThatEndsDocuments:
    def test_one_that_the_dtype_cannot_hold(self, tmp_path: Path) -> None:
        np.array([5, 6, 0, 7], np.uint16).tofile(tmp_path / "t.bin")
        for eos in (100257, -1):
            with pytest.raises(ConfigError, match=rf"t\.bin.*eos_id={eos}.*uint16"):
                rows(tmp_path / "t.bin", Packing(LENGTH, eos_id=eos), format=formats.TokenFile("uint16"))

    @pytest.mark.filterwarnings("default::loader.DataWarning")
    @pytest.mark.parametrize(
        ("eos", "text"), [(9, "no token is 9"), (None, r"one document of 20 tokens.*eos_id"), (3, "")]
    )
    def test_a_file_without_it_is_told_of(self, tmp_path: Path, eos: int | None, text: str) -> None:
        np.array([5, 6, 3, 7] * 5, np.uint16).tofile(tmp_path / "t.bin")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rows(tmp_path / "t.bin", Packing(LENGTH, eos_id=eos), format=formats.TokenFile("uint16"))
        told = [str(each.message) for each in caught if each.category is loader.DataWarning]
        assert len(told) == bool(text)
        assert all(re.search(text, each) for each in told)

    def test_it_is_told_of_by_what_is_kept_too(self, tmp_path: Path) -> None:
        path = jsonl(tmp_path, [{"tokens": [1, 2]}, {"tokens": [3]}])
        kind = Packing(LENGTH, eos_id=9).over(formats.Jsonl())
        index = kind.open(Objects(path.read_bytes()), "x").index  # type: ignore[arg-type]
        assert "no token is 9" in index.notes[0]
        assert kind.recall(index.to_bytes(), index.inner).notes == index.notes


class TestTokensThatDoNotFit:
    @pytest.mark.parametrize("name", ["jsonl", "parquet"])
    @pytest.mark.parametrize("batched", [True, False])
    def test_64_bits_say_nothing_of_the_vocabulary(self, tmp_path: Path, name: str, batched: bool) -> None:
        docs = [[1, 2, 3], [70000, 5]]
        path = tmp_path / "d.parquet"
        if name == "jsonl":
            path = jsonl(tmp_path, [{"tokens": doc} for doc in docs])
        else:
            pq.write_table(pa.table({"tokens": docs}), path)
        ds = ShardDataset(path, batch_size=1, shuffle=False, packing=Packing(LENGTH, out="int32"))
        [row] = ds.batched() if batched else ds
        tokens = np.asarray(row["tokens"]).ravel()
        assert tokens.dtype == np.int32
        assert tokens.tolist() == [1, 2, 3, 70000, 5, 0, 0, 0]
        with pytest.raises(FormatError, match=r"token 70000, which out='uint16' cannot hold"):
            rows(path, Packing(LENGTH, out="uint16"))

    def test_one_of_them_costs_no_other_document(self, tmp_path: Path) -> None:
        path = jsonl(tmp_path, [{"tokens": [1, 2]}, {"tokens": [1 << 63]}, {"tokens": [3]}])
        assert tokens_of(rows(path, Packing(LENGTH), on_error="skip")) == [1, 2, 3]
        with pytest.raises(FormatError, match=f"token {1 << 63}, which out='int64'"):
            rows(path, Packing(LENGTH))

    @pytest.mark.parametrize("length", [1, LENGTH])
    def test_unsigned_tokens_of_64_bits(self, tmp_path: Path, length: int) -> None:
        large = (1 << 63) + 5
        pq.write_table(pa.table({"tokens": pa.array([[large, 1]], pa.list_(pa.uint64()))}), tmp_path / "d.parquet")
        with pytest.raises(FormatError, match=f"token {large}, which out='int64'"):
            rows(tmp_path / "d.parquet", Packing(length))
        found = rows(tmp_path / "d.parquet", Packing(length, out="uint64", labels=False))
        assert tokens_of(found) == [1, large]


class TestMasks:
    @pytest.mark.parametrize("eos", [None, 7])
    @pytest.mark.parametrize("loss", [[1], None, "x", [[1], [1], [1]], ...])
    def test_a_mask_that_does_not_fit_costs_no_other_document(self, tmp_path: Path, loss: Any, eos: int | None) -> None:
        docs: list[dict[str, Any]] = [{"tokens": [i, 7, i + 1], "loss": [1, 1, 1]} for i in (10, 20, 30)]
        docs[1]["loss"] = loss
        if loss is ...:
            del docs[1]["loss"]
        packing = Packing(LENGTH, mask="loss", eos_id=eos)
        path = jsonl(tmp_path, docs)
        assert tokens_of(rows(path, packing, on_error="skip")) == [7, 10, 11, 30, 31]
        with pytest.raises(DataError, match=r"'loss'"):
            rows(path, packing)

    def test_one_that_is_nowhere_is_an_error_at_once(self, tmp_path: Path) -> None:
        path = jsonl(tmp_path, [{"tokens": [1, 2]}] * 3)
        with pytest.raises(MissingField, match=r"'zzz'.*mask=.*fields present: tokens"):
            len(ShardDataset(path, batch_size=1, packing=Packing(LENGTH, mask="zzz")))

    def test_fractions_are_masks_and_labels_are_none(self, tmp_path: Path) -> None:
        path = jsonl(tmp_path, [{"tokens": [1, 2, 3], "m": [0.0, 1.0, 0.0], "l": [-100, -100, 3]}])
        [row] = rows(path, Packing(LENGTH, mask="m"))
        assert row["labels"].tolist() == [2] + [-100] * 7
        with pytest.raises(FormatError, match="'l' has values below 0"):
            rows(path, Packing(LENGTH, mask="l"))

    def test_the_samples_follow_from_it(self) -> None:
        plain, masked = (Packing(LENGTH, mask=mask).over(formats.Jsonl()) for mask in (None, "m"))
        assert plain.identity() != masked.identity()
        assert plain.kept_as != masked.kept_as


def test_a_field_that_is_nowhere_is_looked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of fields that are there are found for the one error that tells them."""
    path = jsonl(tmp_path, [{"text": "x"}] * 50)
    whole: list[int] = []
    read = formats.Jsonl.read

    def reads(self: Any, source: Any, index: Any, i: int, url: str, fields: Any = None) -> Any:
        if fields is None:
            whole.append(i)
        return read(self, source, index, i, url, fields)

    monkeypatch.setattr(formats.Jsonl, "read", reads)
    with pytest.raises(MissingField, match="fields present: text"):
        len(ShardDataset(path, batch_size=1, packing=Packing(LENGTH)))
    assert len(whole) == 1


@pytest.mark.parametrize("filtered", [False, True])
def test_what_is_kept_of_all_parts_is_read_once(
    tmp_path: Path, filtered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "d.parquet"
    pq.write_table(pa.table({"tokens": [[1, 2, 3]] * 60}), path, row_group_size=3)
    objects: Any = Objects(path.read_bytes())
    inner: Format = formats.Parquet()
    if filtered:
        inner = loader.Where(lambda sample: True, fields=["tokens"], name="all").over(inner)
    kind: Any = Packing(LENGTH).over(inner)
    counts = kind.parts(objects, "x")
    assert counts == [2] * 20
    made = dict(objects.attached)
    objects.forget()

    def never(*args: Any) -> Any:
        raise AssertionError("it is known already")

    for cls in {type(kind), type(inner)} - {formats.Parquet}:
        monkeypatch.setattr(cls, "derive", never)
    assert [len(kind.open(objects, "x", part=part).index) for part in range(20)] == counts
    assert kind.parts(objects, "x") == counts
    assert len(objects.asked) == len(set(objects.asked)) == 1 + filtered
    assert objects.attached == made


def test_lengths_are_kept_for_any_bins() -> None:
    """What is kept beside a shard serves all packings of the same documents."""
    kinds = [Packing(8), Packing(16, method="sequential", pad_id=3), Packing(8, labels=False)]
    names = {packing.over(formats.Jsonl()).kept_as for packing in kinds}
    assert len(names) == 1
    for other in (Packing(8, field="x"), Packing(8, eos_id=1), Packing(8, dtype="int32")):
        assert other.over(formats.Jsonl()).kept_as not in names


def test_documents_that_overlap_are_bounded_by_what_is_there(tmp_path: Path) -> None:
    flat = np.arange(1000, dtype=np.int32)
    for name, data in pair([1000] * 20, list(range(21)), flat, None).items():
        raw = bytearray(data)
        if name.endswith(".idx"):
            at = 9 + 8 + 1 + 8 + 8 + 4 * 20
            raw[at : at + 8 * 20] = bytes(8 * 20)  # all begin at the first token
        (tmp_path / f"0{Path(name).suffix}").write_bytes(bytes(raw))
    with pytest.raises(FormatError, match="overlap: they have 20000 tokens, but there are 1000"):
        len(ShardDataset(tmp_path / "*.bin", batch_size=1, packing=Packing(LENGTH)))


def test_samples_of_several_documents_without_those_that_are_damaged() -> None:
    found = Found(np.array([3, 0, 2, -1, 5, 1], np.int32), np.array([2, 1, 1, 2]))
    assert found.samples().tolist() == [3, 2, -1, 6]
    less = found.without(np.array([True, False, False, True]))
    assert less.lengths.tolist() == [-1, 2, -1, -1]
    assert less.counts is not None
    assert less.counts.tolist() == [1, 1, 1, 1]
    places = Places.of(found)
    assert places.sample is not None
    assert places.base is not None
    assert places.sample.tolist() == [0, 0, 1, 2, 3, 3]
    assert places.base[[0, 1, 2, 4, 5]].tolist() == [0, 3, 0, 0, 5]


@pytest.mark.parametrize("method", ["best_fit", "sequential"])
@pytest.mark.parametrize("length", [3, 16, 70_000])
def test_the_memory_of_bins_is_told_before_they_are_made(method: Any, length: int) -> None:
    rng = np.random.default_rng(length)
    for longest in (2, 40, 5000):
        bins = Bins(rng.integers(-1, longest, 300).astype(np.int32), length, method)
        layout = bins.layout(5)
        assert layout.nbytes <= bins.layout_bytes <= layout.nbytes + 24 * (bins.count + 1)
        assert int(layout.sizes.sum(dtype=np.int64)) == bins.tokens


@pytest.mark.parametrize("method", ["best_fit", "sequential"])
def test_the_memory_that_making_them_takes_is_bounded(method: Any) -> None:
    rng = np.random.default_rng(1)
    bins = Bins(np.clip(rng.lognormal(6, 1.2, 100_000), 1, 1e6).astype(np.int32), 2048, method)
    assert bins.count  # the patterns are found
    tracemalloc.start()
    try:
        layout = bins.layout(5)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert layout.nbytes < peak < 65 * 100_000


def test_what_an_open_shard_takes_is_told(tmp_path: Path) -> None:
    """One document that makes thousands of pieces, and documents behind each other in one sample."""
    np.array([1] * 100_000, np.uint16).tofile(tmp_path / "t.bin")
    objects: Any = Objects((tmp_path / "t.bin").read_bytes())
    for eos in (None, 1):
        opened = Packing(4, eos_id=eos).over(formats.TokenFile("uint16")).open(objects, "x")
        layout = opened.index.bins.layout()
        assert opened.private_bytes >= layout.nbytes
        if eos is not None:
            assert (
                opened.private_bytes
                >= layout.nbytes + Places.of(Found(opened.index.bins.lengths, opened.index.documents)).nbytes
            )
