"""Headerless token files: lengths, strides, labels, dtypes; never guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loader
from cachefs.errors import ConfigError, EmptyDataset, FormatError, UnknownFormat
from loader.formats import Tokens
from loader.testing import mapped_at, write_tokens


def rows(path: Path, format: Tokens) -> list[list[int]]:
    return [sample["tokens"].tolist() for sample in loader.open_shard(path, format=format)]


def test_windows_follow_one_another(tmp_path: Path) -> None:
    write_tokens(tmp_path / "t.bin", 11)
    assert rows(tmp_path / "t.bin", Tokens(length=4)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("stride", [1, 3, 4, 7])
@pytest.mark.parametrize("count", [3, 4, 5, 9, 20])
def test_every_window_that_fits_is_there(tmp_path: Path, count: int, stride: int, labels: bool) -> None:
    tokens = write_tokens(tmp_path / "t.bin", count)
    reader = loader.open_shard(tmp_path / "t.bin", format=Tokens(length=4, stride=stride, labels=labels))
    wanted = [k for k in range(0, count, stride) if k + 4 + labels <= count]
    assert [s["tokens"].tolist() for s in reader] == [tokens[k : k + 4].tolist() for k in wanted]
    if labels:
        assert [s["labels"].tolist() for s in reader] == [tokens[k + 1 : k + 5].tolist() for k in wanted]
    else:
        assert all(set(s) == {"tokens"} for s in reader)


def test_tokens_are_views_unless_another_dtype_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    write_tokens(path, 100)
    view = loader.open_shard(path, format=Tokens(length=10))[3]["tokens"]
    assert view.dtype == np.uint16 and mapped_at(view) == (str(path), 60)
    wide = loader.open_shard(path, format=Tokens(length=10, out="int64"))[3]["tokens"]
    assert wide.dtype == np.int64 and wide.tolist() == view.tolist()
    assert mapped_at(wide)[0] == ""


@pytest.mark.parametrize("options", [{"labels": True}, {"labels": True, "stride": 9}, {"stride": 3}, {}])
def test_writing_into_a_sample_changes_no_label_and_no_other_sample(tmp_path: Path, options: dict[str, Any]) -> None:
    """As masking in place does."""
    write_tokens(tmp_path / "t.bin", 90)

    def make() -> loader.ShardDataset:
        return loader.ShardDataset(
            tmp_path, batch_size=4, format=Tokens(length=8, **options), drop_last=False, pad=True
        )

    wanted = [{name: np.array(value).tolist() for name, value in sample.items()} for sample in make()]
    for sample, whole in zip(make(), wanted, strict=True):
        sample["tokens"][:] = 0
        assert all(np.array(sample[name]).tolist() == whole[name] for name in set(sample) - {"tokens"})
        if "labels" in sample:
            sample["labels"][:] = 0
    seen = []
    for sample in make():
        seen.append({name: np.array(value).tolist() for name, value in sample.items()})
        for name in set(sample) & {"tokens", "labels"}:
            sample[name][:] = 0
    assert seen == wanted


@pytest.mark.parametrize(
    "options", [{}, {"labels": True}, {"stride": 5}, {"out": "int64"}, {"labels": True, "out": "int64"}]
)
@pytest.mark.parametrize("shards", [1, 3])
def test_gathered_batches_are_the_samples(tmp_path: Path, options: dict[str, Any], shards: int) -> None:
    for k in range(shards):
        write_tokens(tmp_path / f"{k}.bin", 200 + k)
    format = Tokens(length=8, **options)

    def make(**more: Any) -> loader.ShardDataset:
        return loader.ShardDataset(tmp_path, batch_size=4, format=format, ids=True, **more)

    batches = list(make().batched())
    singles = list(make(transform=lambda sample, rng: sample))
    assert len(batches) * 4 == len(singles) > 0
    for b, batch in enumerate(batches):
        part = singles[4 * b : 4 * b + 4]
        assert batch["__id__"].tolist() == [s["__id__"] for s in part]
        for name in set(batch) - {"__id__"}:
            assert str(batch[name].dtype).removeprefix("torch.") == str(format.delivered)
            assert batch[name].tolist() == [s[name].tolist() for s in part]
    only = next(iter(make(fields=["tokens"]).batched()))
    assert set(only) == {"tokens", "__id__"}


def test_lengths_and_dtypes_are_never_guessed(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    np.random.default_rng(0).integers(1, 60_000, 5000, dtype=np.uint16).tofile(path)
    with pytest.raises(UnknownFormat, match=r'format=formats\.Tokens\(length=2048, dtype="uint16"\)'):
        len(loader.ShardDataset(path, batch_size=1))
    with pytest.raises(ConfigError, match=r"formats\.Tokens\(length="):
        loader.ShardDataset(path, batch_size=1, format="tokens")
    with pytest.raises(TypeError):
        Tokens()  # type: ignore[call-arg]


def test_an_odd_byte_count_names_file_and_length(tmp_path: Path) -> None:
    path = tmp_path / "odd.bin"
    path.write_bytes(bytes(101))
    for use in (
        lambda: loader.open_shard(path, format=Tokens(length=4)),
        lambda: len(loader.ShardDataset(path, batch_size=1, format=Tokens(length=4))),
    ):
        with pytest.raises(FormatError, match=r"odd\.bin: its 101 bytes are no whole number of uint16 tokens"):
            use()


def test_a_file_shorter_than_a_sample_has_none(tmp_path: Path) -> None:
    write_tokens(tmp_path / "0.bin", 3)
    (tmp_path / "1.bin").write_bytes(b"")
    assert len(loader.open_shard(tmp_path / "0.bin", format=Tokens(length=4))) == 0
    assert len(loader.open_shard(tmp_path / "1.bin", format=Tokens(length=4))) == 0
    with pytest.raises(EmptyDataset, match=r"no sample in 2 shard\(s\)"):
        len(loader.ShardDataset(tmp_path, batch_size=1, format=Tokens(length=4)))
    write_tokens(tmp_path / "2.bin", 8)
    assert len(loader.ShardDataset(tmp_path, batch_size=1, format=Tokens(length=4))) == 2


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
def test_large_ids_do_not_wrap(tmp_path: Path, dtype: str) -> None:
    highest = np.iinfo(dtype).max
    np.array([0, highest, 1, highest - 1], dtype).tofile(tmp_path / "t.bin")
    for out in (None, "int64"):
        [sample] = loader.open_shard(tmp_path / "t.bin", format=Tokens(length=4, dtype=dtype, out=out))
        assert sample["tokens"].tolist() == [0, highest, 1, highest - 1]


@pytest.mark.parametrize(
    "options",
    [
        {"length": 0},
        {"length": -1},
        {"length": 2.5},
        {"length": True},
        {"length": 4, "stride": 0},
        {"length": 4, "dtype": "float32"},
        {"length": 4, "dtype": "nonsense"},
        {"length": 4, "dtype": "uint32", "out": "uint16"},
        {"length": 4, "dtype": "uint64", "out": "int64"},
        {"length": 4, "dtype": "int32", "out": "uint32"},
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^Tokens\("):
        Tokens(**options)
