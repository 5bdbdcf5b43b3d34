"""``on_error``: what stops an epoch, what is skipped, and that whatever is skipped is counted and said."""

from __future__ import annotations

import tarfile
import warnings
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import loader
from cachefs.errors import EmptyDataset, FormatError
from loader import DataWarning, ShardDataset
from loader.testing import tar_bytes

GOOD = tar_bytes([("a.txt", b"a"), ("b.txt", b"b")])
TWICE = tar_bytes([("c.txt", b"1"), ("c.txt", b"2"), ("d.txt", b"d")])
CUT = tar_bytes([("e.txt", b"e" * 700), ("f.txt", b"f" * 700)], tarfile.USTAR_FORMAT)[:2000]


def folder(path: Path, *shards: bytes) -> Path:
    for number, raw in enumerate(shards):
        (path / f"{number}.tar").write_bytes(raw)
    return path


def told(source: Any, **options: Any) -> tuple[list[str], list[str], ShardDataset]:
    """Keys, warnings and data set of one epoch."""
    ds = ShardDataset(source, batch_size=1, shuffle=False, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        keys = [sample["__key__"] for sample in ds]
    return keys, [str(w.message) for w in caught if issubclass(w.category, DataWarning)], ds


def test_a_clean_epoch_says_nothing(tmp_path: Path) -> None:
    keys, messages, ds = told(folder(tmp_path, GOOD), on_error="skip")
    assert (keys, messages, ds.skipped, ds.manifest.damaged) == (["a", "b"], [], 0, {})


def test_an_epoch_ends_with_what_it_skipped(tmp_path: Path) -> None:
    keys, messages, ds = told(folder(tmp_path, GOOD, CUT, TWICE), on_error="skip")
    assert keys == ["a", "b", "b", "d"]
    assert (ds.skipped, list(ds.manifest.damaged)) == (1, [1])
    assert "1 damaged shard(s) count as empty, the first:" in messages[0] and "1.tar at byte 1536" in messages[0]
    assert "damaged samples are skipped, the first:" in messages[1] and "repeats a field" in messages[1]
    assert messages[2:] == ["epoch 0: 1 damaged sample(s) were skipped, 1 damaged shard(s) count as empty"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(list(ds)) == 4
    assert str(caught[-1].message).startswith("epoch 1: 1 damaged sample(s)") and ds.skipped == 2


def test_workers_count_into_the_same_figure(tmp_path: Path) -> None:
    ds = ShardDataset(folder(tmp_path, GOOD, TWICE, GOOD, TWICE), batch_size=2, shuffle=False, on_error="skip")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batches = list(DataLoader(ds, batch_size=2, num_workers=2, collate_fn=loader.collate))
    assert [key for batch in batches for key in batch["__key__"]] == ["a", "b", "d", "d", "a", "b", "d", "d"]
    assert ds.skipped == 2


@pytest.mark.parametrize("bad", [CUT, TWICE])
def test_by_default_damage_ends_the_epoch(tmp_path: Path, bad: bytes) -> None:
    with pytest.raises(FormatError, match=r"1\.tar"):
        told(folder(tmp_path, GOOD, bad, GOOD))


class TestEmptyShards:
    """S05: what holds nothing adds nothing; what is no shard is damage."""

    EMPTY = tar_bytes([])

    @pytest.mark.parametrize("place", [0, 1, 2])
    @pytest.mark.parametrize("workers", [0, 2])
    def test_an_empty_tar_anywhere(self, tmp_path: Path, place: int, workers: int) -> None:
        shards = [GOOD, GOOD]
        shards.insert(place, self.EMPTY)
        ds = ShardDataset(folder(tmp_path, *shards), batch_size=1)
        batches = list(DataLoader(ds, batch_size=1, num_workers=workers, collate_fn=loader.collate))
        assert sorted(batch["__key__"][0] for batch in batches) == ["a", "a", "b", "b"]

    @pytest.mark.parametrize("place", [0, 1])
    def test_a_file_of_no_bytes(self, tmp_path: Path, place: int) -> None:
        shards = [GOOD]
        shards.insert(place, b"")
        with pytest.raises(FormatError, match="an empty file"):
            told(folder(tmp_path, *shards))
        keys, messages, ds = told(tmp_path, on_error="skip")
        assert keys == ["a", "b"] and list(ds.manifest.damaged) == [place]
        assert len(messages) == 2

    @pytest.mark.parametrize("shards", [(EMPTY,), (EMPTY, EMPTY), (CUT,), (b"",), (EMPTY, CUT)])
    def test_no_sample_at_all_is_one_error(self, tmp_path: Path, shards: tuple[bytes, ...]) -> None:
        ds = ShardDataset(folder(tmp_path, *shards), batch_size=1, on_error="skip")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises((EmptyDataset, FormatError)) as error:
                list(ds)
        assert str(tmp_path) in str(error.value) and error.value.__context__ is None
