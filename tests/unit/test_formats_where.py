"""Filters by metadata: what they keep, what they read for it, what is kept of them, and what their errors say."""

from __future__ import annotations

import datetime
import io
import json
import operator
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import loader
from cachefs.errors import ConfigError, EmptyDataset, FormatError, MissingField, StateError
from loader.formats import Parquet, WebDataset
from loader.formats.abc import Damage, Mapped, SampleIndex
from loader.formats.kept import seal
from loader.formats.where import Where, stored_in
from loader.formats.where_index import WhereIndex
from loader.testing import tar_bytes, write_mds

LANGUAGES = ["en", "de", None, "fr"]
ENGLISH = pc.field("lang") == "en"


class Plain(SampleIndex):
    def __init__(self, total: int) -> None:
        self._total = total

    def __len__(self) -> int:
        return self._total

    @property
    def nbytes(self) -> int:
        return 0


def rows(count: int, first: int = 0) -> dict[str, list[Any]]:
    numbers = range(first, first + count)
    return {
        "n": list(numbers),
        "lang": [LANGUAGES[n % 4] for n in numbers],
        "text": [f"text {n}" for n in numbers],
    }


def write_parquet(folder: Path, counts: list[int], group: int = 16) -> None:
    folder.mkdir(exist_ok=True)
    first = 0
    for number, count in enumerate(counts):
        pq.write_table(pa.table(rows(count, first)), folder / f"{number:03d}.parquet", row_group_size=group)
        first += count


def write_json_tars(folder: Path, counts: list[int]) -> None:
    folder.mkdir(exist_ok=True)
    first = 0
    for number, count in enumerate(counts):
        members = []
        for n in range(first, first + count):
            meta = {"n": n, "lang": LANGUAGES[n % 4]}
            members += [(f"{n:06d}.json", json.dumps(meta).encode()), (f"{n:06d}.cls", str(n % 3).encode())]
            members += [(f"{n:06d}.bin", f"{n}".encode())]
        (folder / f"{number:03d}.tar").write_bytes(tar_bytes(members))
        first += count


def is_english(sample: Any) -> bool:
    return bool(sample["json"]["lang"] == "en")


def is_even(sample: Any) -> bool:
    return bool(sample["n"] % 2 == 0)


class Callable:
    def holds(self, sample: Any) -> bool:
        return bool(sample)


def numbers(ds: Any) -> list[int]:
    return [int(sample["json"]["n"] if "json" in sample else sample["n"]) for sample in ds]


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list) else value


ENGLISH_TARS = Where(is_english, fields=["json"])


class TestWhatIsKept:
    @pytest.mark.parametrize("counts", [[40, 0, 25, 3], [5], [0, 0, 8]])
    def test_of_parquet_by_expression(self, tmp_path: Path, counts: list[int]) -> None:
        write_parquet(tmp_path / "p", counts)
        ds = loader.ShardDataset(tmp_path / "p", batch_size=1, where=ENGLISH)
        wanted = [n for n in range(sum(counts)) if n % 4 == 0]
        assert len(ds) == len(wanted)
        assert sorted(numbers(ds)) == wanted
        assert numbers(loader.ShardDataset(tmp_path / "p", batch_size=1, shuffle=False, where=ENGLISH)) == wanted

    def test_of_parquet_by_function(self, tmp_path: Path) -> None:
        write_parquet(tmp_path / "p", [40, 9])
        assert sorted(numbers(loader.ShardDataset(tmp_path / "p", batch_size=1, where=Where(is_even, ["n"])))) == list(
            range(0, 49, 2)
        )

    def test_of_tars_by_function(self, tmp_path: Path) -> None:
        write_json_tars(tmp_path / "t", [10, 0, 31])
        ds = loader.ShardDataset(tmp_path / "t", batch_size=1, where=ENGLISH_TARS)
        assert sorted(numbers(ds)) == list(range(0, 41, 4))

    def test_of_tars_by_expression(self, tmp_path: Path) -> None:
        write_json_tars(tmp_path / "t", [10, 31])
        for where in (pc.field("cls") == 2, Where(pc.field("cls") == 2, ["cls"])):
            ds = loader.ShardDataset(tmp_path / "t", batch_size=1, where=where)
            assert sorted(numbers(ds)) == list(range(2, 41, 3))

    def test_of_other_formats(self, tmp_path: Path) -> None:
        blobs = write_mds(tmp_path / "m", [9, 5])
        ds = loader.ShardDataset(tmp_path / "m", batch_size=1, where=pc.field("id") >= 6)
        assert sorted(bytes(sample["blob"]) for sample in ds) == sorted(blobs[6:])
        np.savez(tmp_path / "a.npz", x=np.arange(12), y=np.ones((12, 2)))
        ds = loader.ShardDataset(tmp_path / "a.npz", batch_size=1, where=pc.field("x") > 8)
        assert sorted(int(sample["x"]) for sample in ds) == [9, 10, 11]

    def test_by_lists_of_tuples(self, tmp_path: Path) -> None:
        write_parquet(tmp_path / "p", [20, 7])
        ds = loader.ShardDataset(tmp_path / "p", batch_size=1, where=[("n", ">", 20), ("lang", "in", ["en", "fr"])])
        assert sorted(numbers(ds)) == [23, 24]

    def test_of_tars_whose_names_are_lowered(self, tmp_path: Path) -> None:
        members = [(f"{n}.CLS", str(n % 3).encode()) for n in range(9)]
        folder = write_members(tmp_path / "t", members)
        for name in ("cls", "CLS"):
            ds = loader.ShardDataset(folder, batch_size=1, where=pc.field(name) == 2, shuffle=False)
            assert [int(sample["cls"]) for sample in ds] == [2, 2, 2]

    def test_all_and_none(self, tmp_path: Path) -> None:
        write_parquet(tmp_path / "p", [20, 7])
        ds = loader.ShardDataset(tmp_path / "p", batch_size=1, where=pc.field("n") >= 0)
        assert sorted(numbers(ds)) == list(range(27))
        with pytest.raises(EmptyDataset, match=r"n > 100"):
            len(loader.ShardDataset(tmp_path / "p", batch_size=1, where=pc.field("n") > 100))

    def test_nothing_is_decoded_but_what_it_reads(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from loader.formats.parquet_groups import GroupReader

        write_parquet(tmp_path / "p", [40])
        asked: list[Any] = []
        call = GroupReader.__call__

        def noted(self: Any, piece: int, fields: Any, url: str) -> Any:
            asked.append(fields)
            return call(self, piece, fields, url)

        monkeypatch.setattr(GroupReader, "__call__", noted)
        len(loader.ShardDataset(tmp_path / "p", batch_size=1, where=ENGLISH))
        assert asked == [frozenset({"lang"})] * 3
        asked.clear()
        ds = loader.ShardDataset(tmp_path / "p", batch_size=1, where=(pc.field("n") >= 36) & (pc.field("lang") == "en"))
        assert len(ds) == 1
        assert asked == [frozenset({"n", "lang"})]  # in two row groups all n are less, as their statistics say

    def test_a_column_that_a_value_is_called_like_is_not_read(self, tmp_path: Path) -> None:
        noise = np.random.default_rng(0)
        table = {"image": [noise.bytes(4000) for _ in range(48)], "MATCH": [0] * 48, "kind": ["image", "text"] * 24}
        pq.write_table(pa.table(table), tmp_path / "a.parquet", row_group_size=16)
        for expression in (pc.field("kind") == "image", pc.field("kind").isin(["image", "MATCH"])):
            objects = FakeObjects((tmp_path / "a.parquet").read_bytes())
            format: Any = Where(expression).over(Parquet())
            assert list(format.parts(objects, "u")) == [8, 8, 8]
            assert waited_for(objects, tmp_path / "a.parquet") == {"kind"}


class TestThePlan:
    @pytest.mark.parametrize("kind", ["tar", "parquet"])
    def test_ranks_and_workers_share_it(self, tmp_path: Path, kind: str) -> None:
        if kind == "tar":
            write_json_tars(tmp_path / "d", [30, 11, 0, 40])
            make = partial(loader.ShardDataset, tmp_path / "d", where=ENGLISH_TARS, global_batch_size=4, seed=5)
        else:
            write_parquet(tmp_path / "d", [30, 11, 0, 40])
            make = partial(loader.ShardDataset, tmp_path / "d", where=ENGLISH, global_batch_size=4, seed=5)
        wanted = numbers(make())
        assert sorted(wanted) == sorted(set(wanted)) and len(wanted) == 20
        for world in (2, 4):
            parts = [numbers(make(rank=rank, world_size=world)) for rank in range(world)]
            size = 4 // world
            together = [n for at in range(0, len(parts[0]), size) for part in parts for n in part[at : at + size]]
            assert together == wanted
        batches = list(DataLoader(make().batched(_listed), batch_size=None, num_workers=2))
        assert [n for batch in batches for n in numbers(batch)] == wanted
        for k in range(5):
            ds = make()
            ds.load_state_dict(json.loads(json.dumps(make().state_at(k))))
            assert numbers(ds) == wanted[4 * k :]

    def test_batches_are_what_collate_makes(self, tmp_path: Path) -> None:
        write_json_tars(tmp_path / "t", [30, 11])
        write_parquet(tmp_path / "p", [30, 11])
        for folder, where in (("t", ENGLISH_TARS), ("p", ENGLISH)):
            make = partial(loader.ShardDataset, tmp_path / folder, where=where, batch_size=3, ids=True)
            with loader.Loader(make(), threads=2) as fast:
                for batch, wanted in zip(fast, make().batched(loader.collate), strict=True):
                    assert batch.keys() == wanted.keys()
                    for name, value in batch.items():
                        assert plain(value) == plain(wanted[name])

    def test_it_is_counted_while_it_is_read(self, tmp_path: Path) -> None:
        counts = np.random.default_rng(3).integers(0, 9, 70).tolist()
        write_json_tars(tmp_path / "t", counts)
        make = partial(loader.ShardDataset, tmp_path / "t", where=ENGLISH_TARS, batch_size=2, drop_last=False)
        ds = make()
        assert ds.manifest.progressive
        first = numbers(ds)
        assert sorted(first) == list(range(0, sum(counts), 4))
        again = make()
        again.load_state_dict(json.loads(json.dumps(make().state_at(9))))
        assert numbers(again) == first[18:]

    def test_and_keeps_nothing(self, tmp_path: Path) -> None:
        write_json_tars(tmp_path / "t", [1] * 64)
        nothing = Where(lambda sample: False, ["json"], name="nothing")
        with pytest.raises(EmptyDataset, match="named nothing"):
            next(iter(loader.ShardDataset(tmp_path / "t", batch_size=1, where=nothing)))

    @pytest.mark.slow
    def test_spawned_workers(self, tmp_path: Path) -> None:
        write_parquet(tmp_path / "p", [30, 11])
        ds = loader.ShardDataset(tmp_path / "p", where=ENGLISH, batch_size=2)
        wanted = numbers(loader.ShardDataset(tmp_path / "p", where=ENGLISH, batch_size=2))
        workers = DataLoader(ds.batched(), batch_size=None, num_workers=2, multiprocessing_context="spawn")
        assert [n for batch in workers for n in batch["n"].tolist()] == wanted

    def test_states_of_another_filter_are_refused(self, tmp_path: Path) -> None:
        write_parquet(tmp_path / "p", [30])
        make = partial(loader.ShardDataset, tmp_path / "p", batch_size=2)
        state = make(where=ENGLISH).state_at(1)
        make(where=pc.field("lang") == "en").load_state_dict(state)
        for other in (None, pc.field("lang") == "de", Where(ENGLISH, name="v2")):
            with pytest.raises(StateError):
                make(where=other).load_state_dict(state)

    def test_a_saved_manifest_is_bound_to_it(self, tmp_path: Path) -> None:
        write_parquet(tmp_path / "p", [30])
        make = partial(loader.ShardDataset, batch_size=2)
        make(tmp_path / "p", where=ENGLISH).save_manifest(tmp_path / "en.manifest")
        again = make(tmp_path / "en.manifest", where=ENGLISH)
        assert sorted(numbers(again)) == list(range(0, 30, 4))
        for where in (None, pc.field("lang") == "de"):
            with pytest.raises(ConfigError, match=r"en\.manifest.*same where="):
                len(make(tmp_path / "en.manifest", where=where))


def _listed(samples: Any) -> Any:
    return list(samples)


class TestIdentity:
    def test_of_expressions(self) -> None:
        assert Where(ENGLISH) == Where(pc.field("lang") == "en")
        assert hash(Where(ENGLISH)) == hash(Where(pc.field("lang") == "en"))
        assert Where(ENGLISH) != Where(pc.field("lang") == "de")
        long = [f"value {n}" for n in range(100)]
        other = [*long[:50], "another", *long[51:]]
        assert Where(pc.field("a").isin(long)) == Where(pc.field("a").isin(list(long)))
        assert Where(pc.field("a").isin(long)) != Where(pc.field("a").isin(other))

    def test_of_functions(self) -> None:
        assert Where(is_english, ["json"]).identity == f'function {__name__}.is_english of ["json"]'
        assert Where(lambda sample: True, ["a"], name="one") != Where(lambda sample: True, ["a"], name="two")
        assert Where(is_english, ["json"]) != Where(is_english, ["json", "cls"])

    def test_it_travels(self) -> None:
        for where in (Where(ENGLISH), ENGLISH_TARS):
            back = pickle.loads(pickle.dumps(where))
            assert back == where and back.identity == where.identity

    def test_what_has_none(self) -> None:
        limit = 3

        def closed(sample: Any) -> bool:
            return bool(sample["n"] < limit)

        for function in (lambda sample: True, closed, partial(is_even), Callable().holds):
            with pytest.raises(ConfigError, match="name="):
                Where(function, ["n"])
            Where(function, ["n"], name="known")

    @pytest.mark.parametrize(
        ("make", "text"),
        [
            (lambda: Where(is_even), "fields="),
            (lambda: Where(is_even, "n"), "one name"),
            (lambda: Where("n > 3"), "neither"),
            (lambda: Where(pc.field(0) > 3), "number"),
            (lambda: Where(pc.scalar(True)), "no field"),
            (lambda: loader.ShardDataset("x", batch_size=1, where=[("n", "~", 1)]), "is no filter"),
            (lambda: loader.ShardDataset("x", batch_size=1, where=[1]), "is no filter"),
            (lambda: loader.ShardDataset("x", batch_size=1, where=is_even), "fields="),
        ],
    )
    def test_what_is_refused(self, make: Any, text: str) -> None:
        with pytest.raises(ConfigError, match=text):
            make()


def write_members(path: Path, members: list[tuple[str, bytes]]) -> Path:
    path.mkdir()
    (path / "0.tar").write_bytes(tar_bytes(members))
    return path


class TestErrors:
    def test_a_field_that_nothing_has(self, tmp_path: Path) -> None:
        write_parquet(tmp_path / "p", [9])
        write_json_tars(tmp_path / "t", [9])
        for folder, where in (
            ("p", pc.field("language") == "en"),
            ("p", Where(pc.field("language") == "en", ["language"])),
            ("p", Where(pc.field("lang") == pc.field("n2"), ["lang"])),
            ("p", Where(is_even, ["nn"])),
            ("t", pc.field("language") == "en"),
            ("t", Where(is_even, ["n"])),
        ):
            with pytest.raises(MissingField, match=r"00[.].*(fields present|fields that)"):
                len(loader.ShardDataset(tmp_path / folder, batch_size=1, where=where))

    def test_a_field_that_a_shard_lacks_is_skipped(self, tmp_path: Path) -> None:
        write_parquet(tmp_path / "p", [9])
        pq.write_table(pa.table({"n": [100]}), tmp_path / "p" / "001.parquet")
        with pytest.raises(MissingField, match=r"001\.parquet"):
            len(loader.ShardDataset(tmp_path / "p", batch_size=1, where=ENGLISH))
        with pytest.warns(loader.DataWarning, match=r"001\.parquet"):
            ds = loader.ShardDataset(tmp_path / "p", batch_size=1, where=ENGLISH, on_error="skip")
            assert sorted(numbers(ds)) == [0, 4, 8]

    def test_a_function_that_raises(self, tmp_path: Path) -> None:
        write_json_tars(tmp_path / "t", [9])

        def fails(sample: Any) -> bool:
            return bool(sample["json"]["wrong"])

        for on_error in ("raise", "skip"):
            ds = loader.ShardDataset(tmp_path / "t", batch_size=1, where=Where(fails, ["json"], "x"), on_error=on_error)
            with pytest.raises(ConfigError, match=r"000\.tar: the filter x raised KeyError at sample 0: 'wrong'"):
                len(ds)

    def test_an_expression_that_does_not_fit(self, tmp_path: Path) -> None:
        write_parquet(tmp_path / "p", [9])
        write_json_tars(tmp_path / "t", [9])
        for folder, where, text in (
            ("p", pc.field("lang") > 3, "cannot be asked"),
            ("p", pc.field("n"), "gives int64"),
            ("p", pc.divide(pc.field("n"), 0) > 1, "divide by zero"),
            ("t", pc.field("json") == 3, "is a dict"),
            ("t", pc.field("bin") == "x", r"an array|is a ndarray"),
        ):
            with pytest.raises(ConfigError, match=text):
                len(loader.ShardDataset(tmp_path / folder, batch_size=1, where=where))

    def test_damage_keeps_its_place(self, tmp_path: Path) -> None:
        members = []
        for n in range(8):
            text = b"{broken" if n == 3 else json.dumps({"n": n, "lang": LANGUAGES[n % 4]}).encode()
            members += [(f"{n}.bin", str(n).encode())] + ([] if n == 5 else [(f"{n}.json", text)])
        folder = write_members(tmp_path / "t", members)
        make = partial(loader.ShardDataset, folder, batch_size=1, where=ENGLISH_TARS, fields=["bin"], shuffle=False)
        with pytest.warns(loader.DataWarning, match="cannot be told"):
            assert len(make()) == 4  # 0 and 4 are kept, of 3 and 5 nobody knows
        for kind in (iter, lambda ds: iter(ds.batched())):  # samples, and batches field by field
            stream = kind(make())
            assert b"0" in _bin(next(stream))
            with pytest.raises(FormatError, match=r"sample 3 passes.*decoded"):
                next(stream)
        options: dict[str, Any] = {"where": ENGLISH_TARS, "fields": ["bin"], "shuffle": False, "on_error": "skip"}
        ds = loader.ShardDataset(folder, batch_size=4, **options)
        with pytest.warns(loader.DataWarning):
            got = [_bin(sample) for sample in ds]
        assert got == [b"0", b"0", b"4", b"4"] and ds.skipped == 2

    @pytest.mark.parametrize("lacking", [0, 2, 5])
    def test_an_expression_over_samples_that_lack_a_field(self, tmp_path: Path, lacking: int) -> None:
        members = []
        for n in range(6):
            members += [(f"{n}.bin", str(n).encode())] + ([] if n == lacking else [(f"{n}.cls", b"1")])
        folder = write_members(tmp_path / "t", members)
        make = partial(loader.ShardDataset, folder, where=pc.field("cls") == 1, fields=["bin"], shuffle=False)
        with pytest.warns(loader.DataWarning, match="cannot be told"):
            ds = make(batch_size=1)
            assert len(ds) == 6
        samples = iter(ds)
        for _ in range(lacking):
            next(samples)
        with pytest.raises(FormatError, match=rf"sample {lacking} passes.*no field 'cls'"):
            next(samples)

    def test_samples_without_a_field_are_read_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        objects = FakeObjects(tar_bytes([(f"{n}.bin" if n else "0.cls", b"1") for n in range(9)]))
        reads: list[int] = []
        read = WebDataset.read

        def noted(self: Any, source: Any, index: Any, i: int, *rest: Any) -> Any:
            reads.append(i)
            return read(self, source, index, i, *rest)

        monkeypatch.setattr(WebDataset, "read", noted)
        format: Any = Where(pc.field("cls") == 1).over(WebDataset())
        index = format.open(objects, "u").index
        assert sorted(reads) == [0, 1, *range(1, 9)]  # of one sample it is looked up what it has instead
        assert len(index.damages) == 1 and len(index.bad) == 8

    def test_damage_in_parts_is_told_at_once(self, tmp_path: Path) -> None:
        raw = pa.array([b"en", b"\xff", b"de", b"en"]).view(pa.string())
        pq.write_table(pa.table({"lang": raw, "n": [0, 1, 2, 3]}), tmp_path / "a.parquet", row_group_size=2)
        with pytest.warns(loader.DataWarning, match=r"a\.parquet: of 1 sample\(s\) it cannot be told"):
            assert len(loader.ShardDataset(tmp_path / "a.parquet", batch_size=1, where=ENGLISH)) == 3

    def test_damage_in_parts_is_told_of_what_is_kept(self, tmp_path: Path) -> None:
        raw = pa.array([b"en", b"\xff", b"de", b"en"]).view(pa.string())
        pq.write_table(pa.table({"lang": raw}), tmp_path / "a.parquet", row_group_size=2)
        objects = FakeObjects((tmp_path / "a.parquet").read_bytes())
        format: Any = Where(ENGLISH).over(Parquet())
        first, again = format.parts(objects, "u"), format.parts(objects, "u")
        assert first == again == [2, 1]
        assert first.notes == again.notes and "cannot be told" in " ".join(again.notes)

    def test_whole_numbers_without_a_sign(self, tmp_path: Path) -> None:
        pq.write_table(pa.table({"n": pa.array([1, 2**63 + 5], pa.uint64())}), tmp_path / "a.parquet")
        where = pc.field("n") > pa.scalar(2, pa.uint64())
        assert len(loader.ShardDataset(tmp_path / "a.parquet", batch_size=1, where=where)) == 1
        with pytest.raises(ConfigError, match=r"pa\.uint64"):
            len(loader.ShardDataset(tmp_path / "a.parquet", batch_size=1, where=pc.field("n") > -1))

    def test_texts_that_are_no_utf8(self, tmp_path: Path) -> None:
        raw = pa.array([b"en", b"\xff", b"de", b"en"]).view(pa.string())
        pq.write_table(pa.table({"lang": raw, "n": [0, 1, 2, 3]}), tmp_path / "a.parquet")
        ds = loader.ShardDataset(
            tmp_path / "a.parquet", batch_size=3, where=ENGLISH, fields=["n"], shuffle=False, on_error="skip"
        )
        with pytest.warns(loader.DataWarning):
            assert numbers(ds) == [0, 0, 3]


def _bin(sample: Any) -> bytes:
    value = sample["bin"]
    return bytes(value[0] if isinstance(value, list) else np.asarray(value).ravel())


KEPT = st.lists(st.sampled_from(["yes", "no", "bad", "worse"]), max_size=40)


class TestTheIndex:
    @given(KEPT)
    def test_numbers_and_bytes(self, fates: list[str]) -> None:
        kept = np.array([fate == "yes" for fate in fates], dtype=np.bool_)
        damaged = {i: Damage(fate, 7) for i, fate in enumerate(fates) if fate in ("bad", "worse")}
        index = WhereIndex.of(Plain(len(fates)), kept, damaged)
        wanted = [i for i, fate in enumerate(fates) if fate != "no"]
        assert len(index) == len(wanted)
        assert index.stored_rows(np.arange(len(wanted))).tolist() == wanted
        assert [index.stored(i) for i in range(len(wanted))] == wanted
        for i, stored in enumerate(wanted):
            if stored in damaged:
                with pytest.raises(FormatError, match=fates[stored]):
                    index.refuse(np.array([i]), "u")
            else:
                index.refuse(np.array([i]), "u")
        back = WhereIndex.from_bytes(index.to_bytes(), Plain(len(fates)))
        assert back.to_bytes() == index.to_bytes()
        assert back.stored_rows(np.arange(len(wanted))).tolist() == wanted
        found = stored_in(index)
        assert found.index is index.inner
        assert (wanted == list(range(len(fates)))) if found.rows is None else found.rows.tolist() == wanted
        assert sorted(found.damaged) == [k for k, i in enumerate(wanted) if i in damaged]

    @given(KEPT, st.data())
    def test_other_bytes_are_told(self, fates: list[str], data: st.DataObject) -> None:
        index = WhereIndex.of(Plain(len(fates)), np.array([f == "yes" for f in fates], np.bool_), {})
        raw = bytearray(index.to_bytes())
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] ^= 1 << data.draw(st.integers(0, 7))
        for bad in (bytes(raw), index.to_bytes()[:at], b""):
            with pytest.raises(ValueError):
                WhereIndex.from_bytes(bad, Plain(len(fates)))
        with pytest.raises(ValueError, match="samples"):
            WhereIndex.from_bytes(index.to_bytes(), Plain(len(fates) + 1))

    @pytest.mark.parametrize("number", [2**63, 2**64 - 1, -1])
    def test_numbers_that_no_index_has(self, number: int) -> None:
        for bad, why in ((number, 0), (0, number)):
            raw = seal([1, 3, 3, b"", [bad], [why], [["x", 0, None]]])
            with pytest.raises(ValueError, match="not a kept filter"):
                WhereIndex.from_bytes(raw, Plain(3))

    @given(KEPT, st.integers(0, 2))
    def test_filters_of_filters(self, fates: list[str], modulus: int) -> None:
        damaged = {i: Damage(f, 0) for i, f in enumerate(fates) if f == "bad"}
        inner = WhereIndex.of(Plain(len(fates)), np.array([f != "no" for f in fates], np.bool_), damaged)
        keep = np.array([i % (modulus + 1) == 0 for i in range(len(inner))], dtype=np.bool_)
        index, places, bad = stored_in(WhereIndex.of(inner, keep, {}))
        assert isinstance(index, Plain)
        wanted = [i for i, f in enumerate(fates) if f != "no"][:: modulus + 1]
        assert (list(range(len(index))) if places is None else places.tolist()) == wanted
        assert sorted(bad) == [k for k, i in enumerate(wanted) if i in damaged]


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "int": st.integers(-5, 5),
    "large": st.sampled_from([-(2**63), 2**63 - 1, 0]),
    "float": st.sampled_from([-1.5, 0.0, -0.0, 2.0, float("nan"), float("inf")]),
    "text": st.sampled_from(["", "a", "b", "é", "a" * 80, "\U0001f600"]),
    "bytes": st.sampled_from([b"", b"a", b"\xff"]),
    "date": st.dates(datetime.date(1960, 1, 1), datetime.date(1980, 1, 1)),
    "time": st.datetimes(datetime.datetime(1960, 1, 1), datetime.datetime(1980, 1, 1)),
    "truth": st.booleans(),
}
TYPES = {
    "int": pa.int32(), "large": pa.int64(), "float": pa.float64(), "text": pa.string(), "bytes": pa.binary(),
    "date": pa.date32(), "time": pa.timestamp("us"), "truth": pa.bool_(),
}  # fmt: skip
OPERATORS = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]


COMPARED_WITH = {"int": ("int", "float", "large"), "large": ("int", "large"), "float": ("int", "float")}


def literals(kind: str) -> st.SearchStrategy[Any]:
    """Values to compare with: of numbers those of another type as well."""
    return st.sampled_from(COMPARED_WITH.get(kind, (kind,))).flatmap(
        lambda other: VALUES[other].map(lambda value: pa.scalar(value, TYPES[other]))
    )


@settings(max_examples=60)
@given(st.data(), st.sampled_from(sorted(VALUES)))
def test_statistics_leave_out_nothing_that_is_kept(data: st.DataObject, kind: str) -> None:
    """A filter of a Parquet file keeps what Arrow's own filter of the table in memory keeps, whatever is skipped."""
    values = data.draw(st.lists(st.none() | VALUES[kind] if data.draw(st.booleans()) else VALUES[kind], max_size=12))
    table = pa.table({"x": pa.array(values, TYPES[kind]), "at": pa.array(range(len(values)), pa.int64())})
    one, two = (data.draw(st.sampled_from(OPERATORS))(pc.field("x"), data.draw(literals(kind))) for _ in range(2))
    expression = data.draw(st.sampled_from([one, one & two, one | two, ~one, pc.field("x").is_null(), ~(one & two)]))
    out = io.BytesIO()
    pq.write_table(table, out, row_group_size=data.draw(st.integers(1, 5)))
    objects: Any = FakeObjects(out.getvalue())
    format = Where(expression, ["x"]).over(Parquet())
    index: Any = format.open(objects, "u").index
    assert index.stored_rows(np.arange(len(index))).tolist() == table.filter(expression)["at"].to_pylist()


@pytest.mark.parametrize("compare", OPERATORS)
@pytest.mark.parametrize("negated", [False, True])
def test_statistics_and_a_nan(compare: Any, negated: bool) -> None:
    table = pa.table({"x": [1, 2, 3], "at": [0, 1, 2]})
    out = io.BytesIO()
    pq.write_table(table, out)
    expression = compare(pc.field("x"), float("nan"))
    expression = ~expression if negated else expression
    objects: Any = FakeObjects(out.getvalue())
    index: Any = Where(expression).over(Parquet()).open(objects, "u").index
    assert index.stored_rows(np.arange(len(index))).tolist() == table.filter(expression)["at"].to_pylist()


def test_statistics_of_times_that_are_none_of_pythons() -> None:
    out = io.BytesIO()
    days = pa.array([0, 1, 2**31 - 1, 2], pa.int32()).view(pa.date32())
    pq.write_table(pa.table({"day": days, "n": [0, 1, 2, 3]}), out, row_group_size=2)
    for where, wanted in ((pc.field("n") > 0, [1, 2, 3]), (pc.field("day") > datetime.date(1970, 1, 1), [1, 2, 3])):
        objects: Any = FakeObjects(out.getvalue())
        index: Any = Where(where & pc.field("day").is_valid()).over(Parquet()).open(objects, "u").index
        assert index.stored_rows(np.arange(len(index))).tolist() == wanted


class FakeObjects:
    """One object in memory, and what is kept beside it. ``asked``: the bytes that were waited for."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.beside: dict[str, bytes] = {}
        self.asked: list[tuple[int, int]] = []

    def map(self, url: str, stat: Any = None) -> Mapped:
        return Mapped(
            np.frombuffer(bytearray(self._data), np.uint8), lambda start, end: self.asked.append((start, end))
        )

    def kept(self, url: str, name: str) -> bytes | None:
        return self.beside.get(name)

    def keep(self, url: str, name: str, make: Any) -> None:
        self.beside[name] = make()

    def recalled(self, url: str, name: str, make: Any) -> Any:
        return make()


def waited_for(objects: FakeObjects, path: Path) -> set[str]:
    """The columns of the first row group of a Parquet file that were; of others, which lie in the last of the bytes,
    it cannot be told: the footer is looked for in these."""
    first = pq.ParquetFile(path).metadata.row_group(0)
    starts = {
        column.path_in_schema: column.dictionary_page_offset or column.data_page_offset
        for column in map(first.column, range(first.num_columns))
    }
    return {name for name, start in starts.items() if any(begin <= start < end for begin, end in objects.asked)}


class TestWhatIsKeptBeside:
    def tar(self, folder: Path) -> FakeObjects:
        write_json_tars(folder, [20])
        return FakeObjects((folder / "000.tar").read_bytes())

    def test_it_is_asked_once(self, tmp_path: Path) -> None:
        objects = self.tar(tmp_path / "t")
        calls: list[int] = []

        def counted(sample: Any) -> bool:
            calls.append(sample["json"]["n"])
            return is_english(sample)

        format: Any = Where(counted, ["json"], name="counted").over(WebDataset())
        first = format.open(objects, "u").index
        again = format.open(objects, "u").index
        assert calls == list(range(20))
        assert again.stored_rows(np.arange(len(again))).tolist() == [0, 4, 8, 12, 16]
        assert first.to_bytes() == again.to_bytes()

    @pytest.mark.parametrize("at", [0, 9, -1])
    def test_damage_only_costs_another_look(self, tmp_path: Path, at: int) -> None:
        objects = self.tar(tmp_path / "t")
        format: Any = ENGLISH_TARS.over(WebDataset())
        format.open(objects, "u")
        [name] = [name for name in objects.beside if name.startswith("view-")]
        whole = objects.beside[name]
        broken = bytearray(whole)
        broken[at] ^= 1
        objects.beside[name] = bytes(broken)
        assert len(format.open(objects, "u").index) == 5
        assert objects.beside[name] == whole

    def test_an_edited_function_is_asked_anew(self) -> None:
        def made(source: str) -> Any:
            names: dict[str, Any] = {}
            exec(source, names)
            return names["f"]

        def kept_as(source: str) -> str:
            format: Any = Where(made(source), ["n"]).over(Parquet())
            return str(format.kept_as)

        one = "def f(sample):\n    return sample['n'] < 3\n"
        assert kept_as(one) == kept_as("\n\n" + one)
        assert kept_as(one) != kept_as(one.replace("3", "4"))
        assert kept_as(one) != kept_as(one.replace("<", ">"))
        assert kept_as(one) != kept_as(one.replace("'n'", "'m'"))

    def test_of_parquet_only_the_columns_that_it_reads_are_waited_for(self, tmp_path: Path) -> None:
        path = tmp_path / "a.parquet"
        noise = np.random.default_rng(0)
        table = {**rows(48), "noise": [noise.bytes(4000) for _ in range(48)]}
        pq.write_table(pa.table(table), path, row_group_size=16)
        objects = FakeObjects(path.read_bytes())
        format: Any = Where(ENGLISH).over(Parquet())
        assert list(format.parts(objects, "u")) == [4, 4, 4]
        assert waited_for(objects, path) == {"lang"}
