"""What a source names: folders, patterns, lists, indexes; and which objects beside shards are none."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

import loader
from cachefs.client import connect
from cachefs.errors import ConfigError, Denied, EmptyDataset, FormatError, NotFound, UnknownFormat
from cachefs.shard import ObjectStat
from loader.formats import Mds, Tokens, Zarr
from loader.sources import Found, expand_braces, find_shards, pattern_regex
from loader.testing import tar_bytes, write_mds, write_tars, write_tokens

LMDB = Path(__file__).parents[1] / "foreign" / "data" / "lmdb" / "padded"


class FakeClient:
    """The part of a client that finding shards uses, over a dict of keys; counts what is asked."""

    def __init__(self, objects: dict[str, bytes], *, may_list: bool = True) -> None:
        self.objects = objects
        self.may_list = may_list
        self.asked: list[tuple[str, str]] = []

    def stat(self, url: str) -> ObjectStat:
        self.asked.append(("stat", url))
        if url in self.objects:
            return ObjectStat(url, len(self.objects[url]), f"v-{url}")
        if not self.may_list:
            raise Denied("missing or not allowed", url=url)
        raise NotFound("no such key", url=url)

    def list(self, url: str, *, delimiter: bool = False) -> list[ObjectStat]:
        self.asked.append(("list", url))
        if not self.may_list:
            raise Denied("listing is not allowed", url=url)
        folder = url.rstrip("/") + "/"
        keys = sorted(key for key in self.objects if key.startswith(folder) and not key.endswith("/"))
        if delimiter:
            below = sorted(
                {folder + key[len(folder) :].partition("/")[0] + "/" for key in keys if "/" in key[len(folder) :]}
            )
            own = [key for key in keys if "/" not in key[len(folder) :]]
            return [*(ObjectStat(key, 0, "") for key in below), *self.stats(own)]
        return self.stats(keys)

    def stats(self, keys: list[str]) -> list[ObjectStat]:
        return [ObjectStat(key, len(self.objects[key]), f"v-{key}") for key in keys]

    def read(self, url: str) -> bytes:
        return self.objects[url]


def names(found: Found) -> list[str]:
    return [stat.url.removeprefix("s3://b/") for stat in found.stats]


def find(client: FakeClient, source: object, format: loader.formats.Format | None = None) -> list[str]:
    return names(find_shards(source, client, format))  # type: ignore[arg-type]


S3 = {
    f"s3://b/{key}": value
    for key, value in {
        "d/x-000.tar": b"1",
        "d/x-001.tar": b"1",
        "d/x-002.tar": b"1",
        "d/sub/y.tar": b"1",
        "d/x-000.tar.idx": b"1",
        "d/README.md": b"1",
        "d/.nv-meta/split.yaml": b"1",
        "d/_SUCCESS": b"",
        "d/a_$folder$": b"",
        "d2/z.tar": b"1",
        "br[1].tar": b"1",
        "br1.tar": b"1",
        "a{1,2}.tar": b"1",
        "q?.tar": b"1",
        "pre": b"",
        "pre/x.tar": b"1",
        "dir/": b"",
        "dir/a.tar": b"1",
    }.items()
}


class TestSources:
    def test_a_folder_means_its_shards_and_those_below(self) -> None:
        wanted = ["d/sub/y.tar", "d/x-000.tar", "d/x-001.tar", "d/x-002.tar"]
        assert find(FakeClient(S3), "s3://b/d") == find(FakeClient(S3), "s3://b/d/") == wanted

    def test_a_marker_beside_a_folder_is_no_shard(self) -> None:
        assert find(FakeClient(S3), "s3://b/pre") == ["pre/x.tar"]
        assert find(FakeClient(S3), "s3://b/dir") == ["dir/a.tar"]

    def test_a_name_is_taken_as_it_stands_first(self) -> None:
        for key in ("br[1].tar", "a{1,2}.tar", "q?.tar"):
            assert find(FakeClient(S3), f"s3://b/{key}") == [key]

    @pytest.mark.parametrize(
        ("pattern", "wanted"),
        [
            ("d/x-{000..001}.tar", ["d/x-000.tar", "d/x-001.tar"]),
            ("d/x-{002,000}.tar", ["d/x-002.tar", "d/x-000.tar"]),
            ("{d2,dir}/*.tar", ["d2/z.tar", "dir/a.tar"]),
            ("d/*.tar", ["d/x-000.tar", "d/x-001.tar", "d/x-002.tar"]),
            ("d/**.tar", ["d/sub/y.tar", "d/x-000.tar", "d/x-001.tar", "d/x-002.tar"]),
            ("d/x-00[12].tar", ["d/x-001.tar", "d/x-002.tar"]),
            ("d/x-00[!1].tar", ["d/x-000.tar", "d/x-002.tar"]),
            ("d/x-?0?.tar", ["d/x-000.tar", "d/x-001.tar", "d/x-002.tar"]),
            ("d/*", ["d/x-000.tar", "d/x-001.tar", "d/x-002.tar"]),
            ("d/*.idx", ["d/x-000.tar.idx"]),
        ],
    )
    def test_patterns(self, pattern: str, wanted: list[str]) -> None:
        assert find(FakeClient(S3), f"s3://b/{pattern}") == wanted

    def test_a_pattern_within_one_folder_does_not_list_those_below(self) -> None:
        class Watched(FakeClient):
            def list(self, url: str, *, delimiter: bool = False) -> list[ObjectStat]:
                self.asked.append((f"list {delimiter}", url))
                return super().list(url, delimiter=delimiter)

        for pattern, flat in (("d/x-*.tar", True), ("d*/x-000.tar", False), ("**.tar", False)):
            client = Watched(S3)
            find(client, f"s3://b/{pattern}")
            assert [what for what, _ in client.asked if what.startswith("list ")] == [f"list {flat}"]

    def test_a_list_is_read_without_the_right_to_list(self) -> None:
        client = FakeClient(S3, may_list=False)
        urls = ["s3://b/d/x-001.tar", "s3://b/br[1].tar"]
        assert find(client, urls) == ["d/x-001.tar", "br[1].tar"]
        assert {what for what, _ in client.asked} == {"stat"}

    def test_a_folder_without_the_right_to_list_says_so(self) -> None:
        with pytest.raises(Denied, match="the right to list is needed"):
            find(FakeClient(S3, may_list=False), "s3://b/d")

    def test_without_keys_the_hint_is_about_keys(self) -> None:
        class Keyless(FakeClient):
            def list(self, url: str, *, delimiter: bool = False) -> list[ObjectStat]:
                raise Denied("no credentials found", url=url, hint="set AWS_ACCESS_KEY_ID")

            def stat(self, url: str) -> ObjectStat:
                raise Denied("no credentials found", url=url, hint="set AWS_ACCESS_KEY_ID")

        for source in ("s3://b/d", "s3://b/d/"):
            with pytest.raises(Denied, match=r"no credentials found \(set AWS_ACCESS_KEY_ID\)"):
                find(Keyless(S3), source)

    def test_an_empty_folder_is_called_so(self, tmp_path: Path) -> None:
        with pytest.raises(NotFound, match="the folder is empty"):
            len(loader.ShardDataset(tmp_path, batch_size=1))
        with pytest.raises(NotFound, match="a folder that holds no shard"):
            loader.open_shard(tmp_path)

    def test_a_path_may_begin_at_home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        write_tars(tmp_path / "tars", [3, 4])
        for source in ("~/tars", "~/tars/*.tar", "~/tars/{000,001}.tar", ["~/tars/000.tar", "~/tars/001.tar"]):
            assert len(loader.ShardDataset(source, batch_size=1)) == 7
        assert len(loader.open_shard("~/tars/000.tar")) == 3

    def test_a_slip_in_a_url_is_no_path(self) -> None:
        for source in ("s3:/bucket/x", "s3:bucket/x"):
            with pytest.raises(ConfigError, match=r"write s3://bucket/x, or ./s3:"):
                find(FakeClient(S3), source)

    def test_what_is_not_there_is_named(self) -> None:
        for source in ("s3://b/nope", "s3://b/no-{0..1}.tar", "s3://b/nope/*.tar", ["s3://b/d/x-000.tar", "s3://b/no"]):
            with pytest.raises(NotFound, match=r"s3://b/no"):
                find(FakeClient(S3), source)

    def test_a_folder_of_side_files_alone_is_empty(self) -> None:
        with pytest.raises(EmptyDataset, match="s3://b/only"):
            find(FakeClient({"s3://b/only/README.md": b"1", "s3://b/only/x.json": b"{"}), "s3://b/only")

    def test_an_index_of_another_tool_says_so(self) -> None:
        with pytest.raises(UnknownFormat, match="LitData"):
            find(FakeClient({"s3://b/l/index.json": b'{"chunks": [], "config": {}}'}), "s3://b/l", Mds())

    def test_an_index_that_is_named_says_its_own_shards(self, tmp_path: Path) -> None:
        write_mds(tmp_path / "d", [2, 1])
        write_mds(tmp_path / "d" / "below", [5])
        index = tmp_path / "d" / "index.json"
        assert loader.ShardDataset(index, batch_size=1).manifest.counts.tolist() == [2, 1]
        assert loader.ShardDataset(tmp_path / "d", batch_size=1).manifest.counts.tolist() == [5, 2, 1]

    def test_an_index_that_is_too_large_is_not_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("loader.layouts.abc.MOST_INDEX", 10)
        with pytest.raises(FormatError, match="too many for an index"):
            find(FakeClient({"s3://b/l/index.json": b'{"chunks": [], "config": {}}'}), "s3://b/l")

    @pytest.mark.parametrize("samples", [1 << 32, 1 << 62, 1 << 63, 1 << 70])
    @pytest.mark.parametrize("shards", [1, 4])
    def test_more_samples_than_a_shard_has_numbers_for(self, tmp_path: Path, samples: int, shards: int) -> None:
        write_mds(tmp_path, [1] * shards)
        index = json.loads((tmp_path / "index.json").read_text())
        for shard in index["shards"]:
            shard["samples"] = samples
        (tmp_path / "index.json").write_text(json.dumps(index))
        with pytest.raises(FormatError, match=r"index\.json"):
            len(loader.ShardDataset(tmp_path, batch_size=1))

    def test_more_samples_than_a_shard_has_numbers_for_without_an_index(self, tmp_path: Path) -> None:
        (tmp_path / "x.bin").touch()
        os.truncate(tmp_path / "x.bin", 2 << 32)
        with pytest.raises(FormatError, match="4294967296 samples"):
            len(loader.ShardDataset(tmp_path, batch_size=1, format=Tokens(length=1, dtype="uint16")))

    def test_an_index_is_no_shard_of_a_token_set(self) -> None:
        client = FakeClient({"s3://b/t/index.json": b"{}", "s3://b/t/a.bin": b"1", "s3://b/t/meta.pkl": b"1"})
        assert find(client, "s3://b/t", Tokens(length=4)) == ["t/a.bin"]


class TestBracesAndPatterns:
    @pytest.mark.parametrize("pattern", ["s/*.zarr", "*/[a]*.zarr", "s/**.zarr", "s/{a,b}.zarr"])
    def test_patterns_of_stores_that_are_folders(self, pattern: str) -> None:
        stores = ["s3://b/s/a.zarr"] if "[a]" in pattern else ["s3://b/s/a.zarr", "s3://b/s/b.zarr"]
        objects = {f"s3://b/s/{name}": b"{}" for name in ("a.zarr/zarr.json", "b.zarr/zarr.json", ".h.zarr/zarr.json")}
        objects |= {"s3://b/s/a.zarr/x.zarr/zarr.json": b"{}", "s3://b/s/other/z.tar": b"1"}
        found = find_shards(f"s3://b/{pattern}", FakeClient(objects), None)  # type: ignore[arg-type]
        assert [stat.url for stat in found.stats] == stores
        assert found.format == Zarr()

    def test_patterns_of_lmdb_folders(self, tmp_path: Path) -> None:
        for name in ("a.lmdb", "b.lmdb"):
            (tmp_path / name).mkdir()
            shutil.copy(LMDB / "data.mdb", tmp_path / name / "data.mdb")
        dataset = loader.ShardDataset(f"{tmp_path}/*.lmdb", batch_size=1)
        assert (len(dataset.manifest.shards), dataset.manifest.format.name) == (2, "lmdb")

    @pytest.mark.parametrize(
        ("text", "wanted"),
        [
            ("a", ["a"]),
            ("{1..3}", ["1", "2", "3"]),
            ("x{08..11}y", ["x08y", "x09y", "x10y", "x11y"]),
            ("{3..1}", ["3", "2", "1"]),
            ("{a,b}{1,2}", ["a1", "a2", "b1", "b2"]),
            ("{a..c}", ["a", "b", "c"]),
            ("{}{a}{a..}", ["{}{a}{a..}"]),
            ("{,x}", ["", "x"]),
        ],
    )
    def test_braces(self, text: str, wanted: list[str]) -> None:
        assert list(expand_braces(text)) == wanted

    def test_a_range_that_is_a_mistake(self) -> None:
        with pytest.raises(ConfigError, match="stands for more than"):
            list(expand_braces("x{0..99999999999}"))

    def test_other_characters_mean_themselves(self) -> None:
        import re

        for text in ("a.b", "a+b", "(a)", "a|b", "a\\b", "a^$", "[", "a[b"):
            assert re.fullmatch(pattern_regex(text), text)
            assert not re.fullmatch(pattern_regex(text), text + "x")


class TestLocal:
    def test_paths_urls_and_patterns_name_the_same_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_tars(tmp_path / "d", [1, 2])
        (tmp_path / "d" / "notes.txt").write_text("no shard")
        write_tars(tmp_path / "d" / ".trash", [1])
        monkeypatch.chdir(tmp_path)
        client = connect()
        wanted = [str(tmp_path / "d" / name) for name in ("000.tar", "001.tar")]
        for source in (
            "d",
            Path("d"),
            f"file://{tmp_path}/d",
            "d/*.tar",
            "d/{000,001}.tar",
            wanted,
            [Path("d/000.tar"), "d/001.tar"],
        ):
            assert [stat.url for stat in find_shards(source, client, None).stats] == wanted

    def test_indexes_in_folders_below(self, tmp_path: Path) -> None:
        write_mds(tmp_path / "b", [2])
        write_mds(tmp_path / "a", [1, 1])
        ds = loader.ShardDataset(tmp_path, batch_size=1, shuffle=False)
        assert ds.manifest.counts.tolist() == [1, 1, 2]

    def test_wrong_paths_are_one_line(self, tmp_path: Path) -> None:
        with pytest.raises(NotFound) as error:
            len(loader.ShardDataset(tmp_path / "nope", batch_size=1))
        assert str(tmp_path / "nope") in str(error.value)

    def test_the_digest_names_the_data_and_not_its_place(self, tmp_path: Path) -> None:
        def digest(source: object, **options: object) -> str:
            return loader.ShardDataset(source, batch_size=1, **options).manifest.digest  # type: ignore[arg-type]

        write_tars(tmp_path / "a", [3, 2])
        write_tars(tmp_path / "copy", [3, 2])
        write_tars(tmp_path / "other", [3, 1])
        assert digest(tmp_path / "a") == digest(tmp_path / "copy") != digest(tmp_path / "other")
        assert digest(tmp_path / "a") != digest([tmp_path / "a" / "001.tar", tmp_path / "a" / "000.tar"])
        write_tokens(tmp_path / "t" / "x.bin", 100)
        four = digest(tmp_path / "t", format=Tokens(length=4))
        assert four == digest(tmp_path / "t", format=Tokens(length=4, out="int64"))
        assert four != digest(tmp_path / "t", format=Tokens(length=4, stride=2))

    def test_the_bytes_decide_and_not_the_name(self, tmp_path: Path) -> None:
        (tmp_path / "x.mds").write_bytes(tar_bytes([("a.txt", b"1")]))
        write_mds(tmp_path / "m", [1])
        (tmp_path / "m" / "shard.00000.mds").rename(tmp_path / "y.tar")
        assert loader.open_shard(tmp_path / "x.mds").format.name == "webdataset"
        assert loader.open_shard(tmp_path / "y.tar").format.name == "mds"

    @pytest.mark.parametrize("head", [b"\x89HDF\r\n", b"SQLite format 3\0", b"nothing known", b"\x1f\x8b\x08junk"])
    def test_what_is_not_read_says_what_it_looks_like(self, tmp_path: Path, head: bytes) -> None:
        (tmp_path / "x.tar").write_bytes(head + bytes(range(256)) * 4)
        with pytest.raises(UnknownFormat, match=r"x\.tar: (looks like|no known format|a gzip file)"):
            loader.open_shard(tmp_path / "x.tar")
        with pytest.raises(ConfigError, match="known: webdataset"):
            loader.open_shard(tmp_path / "x.tar", format="hdf5")


class TestMixed:
    def test_a_stray_file_of_another_format_is_told(self, tmp_path: Path) -> None:
        write_tars(tmp_path, [3, 2])
        (tmp_path / "metadata.jsonl").write_text('{"a": 1}\n')
        with pytest.raises(ConfigError, match=r"several formats.*\.tar is webdataset.*metadata\.jsonl is jsonl"):
            len(loader.ShardDataset(tmp_path, batch_size=1))
        assert len(loader.ShardDataset(tmp_path / "*.tar", batch_size=1)) == 5

    def test_a_sound_shard_of_another_format_is_not_called_damaged(self, tmp_path: Path) -> None:
        write_tars(tmp_path, [3])
        with pytest.raises(FormatError, match="its bytes are webdataset, not mds"):
            loader.open_shard(tmp_path / "000.tar", "mds")
        (tmp_path / "001.tar").write_bytes(b'{"a": 1}\n')
        with pytest.raises(FormatError, match=r"001\.tar: its bytes are jsonl, not webdataset"):
            len(loader.ShardDataset(tmp_path, batch_size=1))

    def test_damage_stays_damage(self, tmp_path: Path) -> None:
        write_tars(tmp_path, [3])
        raw = (tmp_path / "000.tar").read_bytes()
        (tmp_path / "000.tar").write_bytes(raw[:530])
        with pytest.raises(FormatError, match="cut off"):
            loader.open_shard(tmp_path / "000.tar", "webdataset")

    def test_names_need_not_be_utf_8(self, tmp_path: Path) -> None:
        name = os.fsdecode(b"bad\xff.tar")
        write_tars(tmp_path / "tars", [3])
        (tmp_path / "tars" / "000.tar").rename(tmp_path / "tars" / name)
        ds = loader.ShardDataset(tmp_path / "tars", batch_size=1)
        assert len(list(ds)) == 3
        ds.save_manifest(tmp_path / "odd.manifest")
        assert len(list(loader.ShardDataset(tmp_path / "odd.manifest", batch_size=1))) == 3
