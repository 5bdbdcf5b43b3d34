"""Random tars read as WebDataset's own reader reads them: keys, fields, order and values."""

from __future__ import annotations

import io
import tarfile
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import loader
from cachefs.errors import FormatError
from loader.testing import tar_bytes

wds = pytest.importorskip("webdataset")

FOLDERS = st.sampled_from(["", "", "a/", "./", "v1.2/", "a/b.c/", ".h/", "__x__/", "é/", "a/__meta__/"])
BASES = st.sampled_from(["0", "1", "1", "clip 3", "__meta__", "", "k" * 90, "ü", "_", "__"])
FIELDS = st.sampled_from([".jpg", ".JPG", ".seg.png", ".json", ".Left.PNG", "", ".", ".x y", ".cls"])
NAMES = st.builds(lambda folder, base, field: folder + base + field, FOLDERS, BASES, FIELDS).filter(
    lambda name: name.strip("/.") != "" and not name.endswith("/")
)
MEMBERS = st.lists(st.tuples(NAMES, st.binary(max_size=1100)), max_size=14)
FORMATS = st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])


def theirs(path: Path) -> list[dict[str, Any]] | None:
    """None where it refuses a repeated field."""
    try:
        return [
            {k: v for k, v in sample.items() if k not in ("__url__", "__local_path__")}
            for sample in wds.WebDataset(str(path), shardshuffle=False, empty_check=False)
        ]
    except ValueError as e:
        assert "duplicate file name" in str(e)
        return None


def ours(path: Path) -> list[dict[str, Any] | None]:
    out: list[dict[str, Any] | None] = []
    with loader.open_shard(path, format="webdataset") as reader:
        for i in range(len(reader)):
            try:
                out.append({k: v if isinstance(v, str) else v.tobytes() for k, v in reader[i].items()})
            except FormatError as e:
                assert "repeats a field" in str(e)
                out.append(None)
    return out


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(MEMBERS, FORMATS)
def test_random_tars(tmp_path: Path, members: list[tuple[str, bytes]], format: int) -> None:
    path = tmp_path / "a.tar"
    try:
        raw = tar_bytes(members, format)
    except ValueError:
        return  # ustar has no room for the name
    path.unlink(missing_ok=True)
    path.write_bytes(raw)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted, found = theirs(path), ours(path)
    if wanted is None:
        assert None in found
    else:
        assert found == wanted


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.dictionaries(st.sampled_from(["jpg", "seg.png", "cls.bin"]), st.binary(max_size=3000), min_size=1),
        max_size=6,
    ),
    st.booleans(),
)
def test_what_webdataset_s_writer_writes(tmp_path: Path, samples: list[dict[str, bytes]], packed: bool) -> None:
    out = io.BytesIO()
    with wds.TarWriter(out, encoder=False, compress="gz" if packed else None) as writer:
        for i, sample in enumerate(samples):
            writer.write({"__key__": f"s/{i:04d}", **sample})
    path = tmp_path / "b.tar"
    path.unlink(missing_ok=True)
    path.write_bytes(out.getvalue())
    found = ours(path)
    assert [s and s.pop("__key__") for s in found] == [f"s/{i:04d}" for i in range(len(samples))]
    assert found == samples
