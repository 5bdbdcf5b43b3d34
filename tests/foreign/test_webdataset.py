"""WebDataset's own reader is the referee; and what other tools leave beside tars: Energon, wids, img2dataset."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import loader
from cachefs.errors import FormatError, UnknownFormat
from loader import ShardDataset
from loader.formats import WebDataset
from loader.layouts.energon import _yaml_counts
from loader.layouts.wids import WidsShard, read_wids
from loader.testing import tar_bytes

DATA = Path(__file__).parent / "data"
FIXTURES = sorted(path.name for path in (DATA / "wds").glob("*.tar*"))
ENERGON = DATA / "wds" / "energon"
NV = ".nv-meta"


def keys(ds: ShardDataset) -> list[str]:
    return [sample["__key__"] for sample in ds]


def every(source: Any, **options: Any) -> ShardDataset:
    return ShardDataset(source, batch_size=1, shuffle=False, decode="bytes", **options)


def uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a tar that is indexed in order to be counted fail the test."""

    def refuse(*args: Any) -> Any:
        raise AssertionError("counted by reading")

    monkeypatch.setattr("loader.counting.open_mapped", refuse)


@pytest.mark.parametrize("name", FIXTURES)
def test_webdataset_itself_reads_the_same(name: str) -> None:
    wds = pytest.importorskip("webdataset")
    theirs = list(wds.WebDataset(str(DATA / "wds" / name), shardshuffle=False))
    ours = list(loader.open_shard(DATA / "wds" / name))
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        wanted = {k: v for k, v in b.items() if k not in ("__url__", "__local_path__")}
        assert {k: v if isinstance(v, str) else v.tobytes() for k, v in a.items()} == wanted


@pytest.mark.parametrize("workers", [0, 2])
def test_the_shards_of_a_data_set_with_workers(workers: int) -> None:
    from torch.utils.data import DataLoader

    ds = every(DATA / "wds" / "shards")
    wanted = [s["__key__"] for p in sorted((DATA / "wds" / "shards").iterdir()) for s in loader.open_shard(p)]
    got = DataLoader(ds, batch_size=1, num_workers=workers, collate_fn=loader.collate)
    assert [batch["__key__"][0] for batch in got] == wanted


class TestEnergon:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for path in [ENERGON, *ENERGON.rglob("*")]:
            to = tmp_path / "e" / path.relative_to(ENERGON)
            if path.is_dir():
                to.mkdir(parents=True, exist_ok=True)
            else:
                to.write_bytes(path.read_bytes())
        return tmp_path / "e"

    def test_counts_come_from_its_notes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        uncounted(monkeypatch)
        ds = every(ENERGON)
        assert ds.manifest.counts.tolist() == [9, 4, 11]
        assert len(keys(ds)) == 24

    def test_older_notes_are_yaml(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / NV / ".info.json").unlink()
        (folder / NV / ".info.yaml").write_text(
            "energon_version: 5.0\nshard_counts:\n  shard_000.tar: 9\n  shard_001.tar: 4\n  'shard_002.tar': 11\n"
        )
        uncounted(monkeypatch)
        assert every(folder).manifest.counts.tolist() == [9, 4, 11]

    def test_the_yaml_that_is_understood(self) -> None:
        text = "shard_counts:\n  a b/c.tar: 3\n  'it''s.tar': 4\n  ? long\n  : 5\n  d.tar: five\n  e.tar: 6 \n"
        text += "other:\n  f.tar: 1\n"
        assert dict(_yaml_counts(text)) == {"a b/c.tar": 3, "it's.tar": 4, "e.tar": 6}

    @pytest.mark.parametrize(
        "change",
        [
            lambda f: (f / NV / ".info.json").write_text('{"shard_counts": {"shard_000.tar": 9, "shard_001.tar": 4}}'),
            lambda f: (f / NV / ".info.json").write_text('{"shard_counts": {"shard_000.tar": true}}'),
            lambda f: (f / NV / ".info.json").write_text("{"),
            lambda f: (f / NV / ".info.json").write_text("[]"),
            lambda f: (f / "shard_001.tar.idx").write_bytes(bytes(48)),
            lambda f: (f / "shard_001.tar.idx").unlink(),
            lambda f: shutil.copy(f / "shard_000.tar", f / "shard_003.tar"),
        ],
    )
    def test_notes_that_disagree_are_not_believed(self, folder: Path, change: Any) -> None:
        change(folder)
        ds = every(folder)
        assert ds.manifest.counts.tolist()[:3] == [9, 4, 11]
        assert len(keys(ds)) == ds.manifest.total

    def test_a_tar_that_was_replaced_is_told(self, folder: Path) -> None:
        shutil.copy(folder / "shard_000.tar", folder / "shard_001.tar")
        with pytest.raises(FormatError, match=r"shard_001\.tar.*holds 9 samples, .* index says 4.*by a pattern"):
            keys(every(folder))
        assert every(str(folder / "*.tar")).manifest.counts.tolist() == [9, 9, 11]

    def test_another_rule_than_energon_s_is_counted_anew(self, folder: Path) -> None:
        (folder / "shard_001.tar").write_bytes(tar_bytes([(f"a.{i}.x", b"") for i in range(4)]))
        assert every(folder, format=WebDataset(split="last")).manifest.counts.tolist() == [9, 4, 11]
        with pytest.raises(FormatError, match="holds 1 samples"):
            keys(every(folder))

    def test_data_sets_below_a_folder(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        shutil.copytree(folder, folder.parent / "all" / "a")
        shutil.copytree(folder, folder.parent / "all" / "b")
        uncounted(monkeypatch)
        assert every(folder.parent / "all").manifest.counts.tolist() == [9, 4, 11] * 2


class TestWids:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for i in range(3):
            (tmp_path / f"{i}.tar").write_bytes(tar_bytes([(f"{i}-{k}.x", b"v") for k in range(i + 1)]))
        return tmp_path

    def listing(self, folder: Path, *names: str, **more: Any) -> dict[str, Any]:
        rows = [
            {"url": name, "nsamples": int(name[-5]) + 1, "filesize": (folder / name[-5:]).stat().st_size}
            for name in names
        ]
        return {"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": rows, **more}

    @pytest.mark.parametrize("name", ["shardindex.json", "index.json", "mine.json"])
    def test_a_list_is_a_source(self, folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / name).write_text(json.dumps(self.listing(folder, "2.tar", "0.tar")))
        uncounted(monkeypatch)
        assert keys(every(folder / name)) == ["2-0", "2-1", "2-2", "0-0"]
        if name != "mine.json":
            assert keys(every(folder)) == ["2-0", "2-1", "2-2", "0-0"]

    def test_bases_absolute_names_and_lists_in_a_list(self, folder: Path) -> None:
        (folder / "lists").mkdir()
        inner = {"shardlist": self.listing(folder, f"{folder}/1.tar")["shardlist"]}
        listing = self.listing(folder, "./0.tar", base=str(folder), datasets=[inner])
        (folder / "lists" / "l.json").write_text(json.dumps(listing))
        assert keys(every(folder / "lists" / "l.json")) == ["0-0", "1-0", "1-1"]

    def test_other_sizes_than_listed_are_counted_anew(self, folder: Path) -> None:
        (folder / "l.json").write_text(json.dumps(self.listing(folder, "0.tar", "1.tar")))
        (folder / "1.tar").write_bytes(tar_bytes([(f"n{i}.x", bytes(9000)) for i in range(5)]))
        assert every(folder / "l.json").manifest.counts.tolist() == [1, 5]

    @pytest.mark.parametrize("name", ["../0.tar", "a/../../0.tar", "", 7, None, "a\\0.tar", "a\0"])
    def test_names_that_leave_the_folder_are_refused(self, folder: Path, name: Any) -> None:
        rows = [{"url": name, "nsamples": 1}]
        (folder / "l.json").write_text(json.dumps({"wids_version": 1, "shardlist": rows}))
        with pytest.raises(FormatError, match=r"l\.json: the list names"):
            keys(every(folder / "l.json"))

    @pytest.mark.parametrize(
        "name", ["file:///a.tar", "FILE:///a.tar", "File://localhost/a.tar", "a b:///a.tar", "/a.tar"]
    )
    @pytest.mark.parametrize("key", ["url", "base"])
    def test_a_list_from_elsewhere_names_no_local_file(self, name: str, key: str) -> None:
        row = {"url": "a.tar", "nsamples": 1}
        listing = {"shardlist": [{**row, "url": name}]} if key == "url" else {"shardlist": [row], "base": name}
        raw = json.dumps({"wids_version": 1, **listing})
        with pytest.raises(FormatError, match="not a place that it may name"):
            read_wids(raw.encode(), "s3://bucket/lists/l.json")
        other = json.dumps({"wids_version": 1, "shardlist": [{**row, "url": "S3://other/a.tar"}]})
        assert read_wids(other.encode(), "s3://bucket/l.json") == [WidsShard("S3://other/a.tar", 1, None)]

    @pytest.mark.parametrize(
        ("change", "error"),
        [
            ({"wids_version": 2}, UnknownFormat),
            ({"shardlist": [{"url": "0.tar", "nsamples": "1"}]}, FormatError),
            ({"shardlist": [{"url": "0.tar", "nsamples": 1 << 32}]}, FormatError),
            ({"shardlist": {"0.tar": 1}}, FormatError),
            ({"datasets": [{"source_url": "http://x/y.json"}]}, UnknownFormat),
            ({"datasets": 3}, FormatError),
        ],
    )
    def test_damaged_lists(self, folder: Path, change: dict[str, Any], error: type[Exception]) -> None:
        (folder / "l.json").write_text(json.dumps({**self.listing(folder, "0.tar"), **change}))
        with pytest.raises(error, match=r"l\.json"):
            keys(every(folder / "l.json"))


class TestImg2dataset:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for i in range(2):
            (tmp_path / f"{i:05d}.tar").write_bytes(tar_bytes([(f"{i}.jpg", b"j"), (f"{i}.json", b"{}")]))
            (tmp_path / f"{i:05d}.parquet").write_bytes(b"PAR1 a table that describes the tar PAR1")
            (tmp_path / f"{i:05d}_stats.json").write_text('{"successes": 1}')
        (tmp_path / "__len__").write_text("2")
        (tmp_path / "sizes.json").write_text('{"00000.tar": 1}')
        return tmp_path

    def test_its_tables_and_counts_are_no_shards(self, folder: Path) -> None:
        assert keys(every(folder)) == ["0", "1"]
        assert keys(every(folder, format="webdataset")) == ["0", "1"]
        assert keys(every(str(folder / "0*"))) == ["0", "1"]

    def test_tables_without_tars_and_by_their_own_pattern_are(self, folder: Path) -> None:
        from cachefs.client import connect
        from loader.sources import find_shards

        found = find_shards(str(folder / "*.parquet"), connect(), None)
        assert [Path(stat.url).name for stat in found.stats] == ["00000.parquet", "00001.parquet"]
        (folder / "00000.tar").unlink()
        found = find_shards(folder, connect(), None)
        assert [Path(stat.url).name for stat in found.stats] == ["00000.parquet", "00001.tar"]
