"""Plain files: one sample each, only where it is asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import loader
from cachefs.errors import ConfigError, UnknownFormat
from loader.formats import Files
from loader.testing import mapped_at

NAMES = {
    "cats/0001.JPG": ("cats/0001", "jpg"),
    "cats/v1.2/0002.seg.png": ("v1.2/0002", "seg.png"),
    "dogs/README": ("dogs/README", "data"),
    "dogs/trailing.": ("dogs/trailing", "data"),
}


@pytest.mark.parametrize("name", NAMES)
def test_key_and_field_follow_the_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"bytes of it")
    [sample] = loader.open_shard(path, "files")
    key, field = NAMES[name]
    assert sample["__key__"] == key and set(sample) == {"__key__", field}
    assert sample[field].tobytes() == b"bytes of it"
    if Path("/proc/self/maps").exists():
        assert mapped_at(sample[field]) == (str(path), 0)


def test_hidden_files_and_empty_ones_are_samples_too(tmp_path: Path) -> None:
    (tmp_path / ".hidden").write_bytes(b"")
    [sample] = loader.open_shard(tmp_path / ".hidden", Files(folders=0))
    assert sample["__key__"] == ".hidden" and sample["data"].dtype == np.uint8 and len(sample["data"]) == 0


def test_options() -> None:
    format = Files(split="last", folders=2)
    sample = format.read(np.zeros(3, np.uint8), format.index(np.zeros(3, np.uint8), ""), 0, "s3://b/x/y/z.a.Txt")
    assert sample["__key__"] == "x/y/z.a" and "txt" in sample
    assert format.kind(None, "seg.png") == "png" and format.canonical("TXT") == "txt"
    assert Files.from_options(format.options()) == format
    for options in ({"split": "middle"}, {"folders": -1}, {"folders": True}):
        with pytest.raises(ConfigError):
            Files(**options)  # type: ignore[arg-type]


def test_a_folder_of_files_is_a_data_set(tmp_path: Path) -> None:
    for number in range(6):
        path = tmp_path / ("cats" if number % 2 else "dogs") / f"{number}.bin"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes([number]))
    ds = loader.ShardDataset(tmp_path, format="files", batch_size=2, shuffle=False)
    assert [(s["__key__"], s["bin"].tolist()) for s in ds] == [
        *((f"cats/{n}", [n]) for n in (1, 3, 5)),
        *((f"dogs/{n}", [n]) for n in (0, 2, 4)),
    ]


def test_side_files_are_samples_where_files_are_asked_for(tmp_path: Path) -> None:
    names = ["0.jpg", "0.json", "0.parquet", "0.tar", "notes.txt"]
    for name in [*names, ".hidden"]:
        (tmp_path / name).write_bytes(name.encode())
    for source in (tmp_path, tmp_path / "*"):
        ds = loader.ShardDataset(source, format="files", batch_size=1, shuffle=False, decode="bytes")
        assert [Path(shard.url).name for shard in ds.manifest.shards] == names
        assert [bytes(s[name.partition(".")[2]]).decode() for s, name in zip(ds, names, strict=True)] == names


def test_text_is_decoded_as_in_a_tar(tmp_path: Path) -> None:
    (tmp_path / "a.cls").write_bytes(b"7")
    [sample] = loader.ShardDataset([tmp_path / "a.cls"], format="files", batch_size=1)
    assert sample["cls"] == 7


def test_files_are_never_found_by_themselves(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"bytes")
    with pytest.raises(UnknownFormat):
        loader.open_shard(tmp_path / "a.bin")


def test_a_field_is_found_however_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "a.JPG").write_bytes(b"jpg")
    sample = loader.open_shard(tmp_path / "a.JPG", format="files")[0]
    assert list(sample) == ["__key__", "jpg"]
    assert sample["JPG"].tobytes() == sample["Jpg"].tobytes() == b"jpg" and "JPG" in sample
